"""The page at / and the endpoints that feed it, and /metrics."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from moesaic.comm.mesh import Mesh
from moesaic.core.sampling import SamplingParams
from moesaic.core.stats import RankStats
from moesaic.observe.exposition import CONTENT_TYPE, exposition
from moesaic.server.context import Context
from moesaic.server.errors import Refusal
from moesaic.server.example_prompts import ExamplePrompts
from moesaic.server.openai.setup import OpenAISetup
from moesaic.server.responses import json_response
from moesaic.server.routes import OPEN, USER, Handler, Route

FOLDER: Final = Path(__file__).with_name("page")
KINDS: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
REQUEST_FIELDS: Final = tuple(
    "open answering ended prompt_tokens cached_tokens generated_tokens".split()
)
RANK_FIELDS: Final = tuple(
    "rank place state state_age pid steps compute_seconds wait_seconds".split()
)
HEADERS: Final = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


async def metrics(context: Context, _: Request) -> Response:
    snapshot = await context.stats.snapshot()
    both = context.args.metric_names == "sglang"
    text = await asyncio.to_thread(exposition, snapshot, both)  # slow with many ranks
    return Response(text, headers={"content-type": CONTENT_TYPE})


async def data(context: Context, request: Request) -> Response:
    """The data of the page, with the samples of the history after `since`."""
    since = _since(request.query_params.get("since", "0"))
    live, requests = context.stats, context.engine.request_stats()
    await live.poll.refresh()
    stats = live.poll.stats
    return json_response(
        {
            "info": live.info,
            "trouble": context.unavailable_reason,
            "when": stats.when,
            "age": live.poll.age,
            "history": [sample for sample in live.history.samples if sample.when > since],
            "requests": {name: getattr(requests, name) for name in REQUEST_FIELDS},
            "groups": [msgspec.structs.asdict(group) for group in stats.groups],
            "ranks": [_rank(rank) for rank in stats.ranks],
            "membership": msgspec.to_builtins(stats.membership),
            "losses": msgspec.to_builtins(stats.losses),
            "experts": {"number": stats.num_experts, "layers": live.poll.experts},
            "routing": context.engine.routing_info(stats),
            "loop_lag_max": live.lag.max,
        }
    )


async def chat(context: Context, _: Request) -> Response:
    """What the page's chat and its path of a token need once."""
    setup, mesh = context.shared(OpenAISetup), context.engine.mesh
    temperature = setup.defaults.get("temperature", SamplingParams().temperature)
    return json_response(
        {
            "model": setup.model,
            "temperature": temperature,
            "context_length": context.engine.context_length,
            "examples": await asyncio.to_thread(context.shared(ExamplePrompts).draw),
            "mesh": [_place(mesh, rank) for rank in range(mesh.world)],
        }
    )


def _place(mesh: Mesh, rank: int) -> dict[str, int]:
    place = mesh.place(rank)
    group = mesh.group_of(place)
    return {"rank": rank, "replica": place.replica, "group": group, "ep": place.ep_rank}


def _since(text: str) -> float:
    try:
        since = float(text)
    except ValueError:
        since = math.nan
    if math.isnan(since):
        raise Refusal(400, "since must be a number: seconds since the epoch", param="since")
    return since


def _rank(rank: RankStats) -> dict[str, Any]:
    traffic = {name: msgspec.structs.asdict(moved) for name, moved in rank.traffic.items()}
    return {**{name: getattr(rank, name) for name in RANK_FIELDS}, "traffic": traffic}


def _file(path: Path) -> Handler:
    async def send(_: Context, __: Request) -> Response:
        return Response(path.read_bytes(), headers={**HEADERS, "content-type": KINDS[path.suffix]})

    return send


def _files() -> Iterator[Route]:
    yield Route("GET", "/", _file(FOLDER / "index.html"), OPEN, "The server's own page")
    for path in sorted(FOLDER.iterdir()):
        if path.suffix in KINDS:
            yield Route("GET", f"/page/{path.name}", _file(path), OPEN, "A file of the page")


ROUTES = (
    Route("GET", "/metrics", metrics, OPEN, "Metrics for Prometheus"),
    *_files(),
    Route("GET", "/dashboard/data", data, USER, "The data of the page"),
    Route("GET", "/dashboard/chat", chat, USER, "The data of the page's chat"),
)
