"""The page at /, and the one endpoint that feeds it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from moesaic.server.context import Context
from moesaic.server.errors import Refusal
from moesaic.server.responses import json_response
from moesaic.server.routes import Handler, Route, RouteAccess

FOLDER: Final = Path(__file__).with_name("page")
KINDS: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS: Final = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


async def data(context: Context, request: Request) -> Response:
    """All that the page shows; of the history only what is newer than `since`."""
    since = _since(request.query_params.get("since", "0"))
    figures, engine = context.figures, context.engine
    await figures.poll.refresh()
    stats, requests = figures.poll.stats, engine.request_stats()
    return json_response(
        {
            "info": figures.info,
            "trouble": context.trouble,
            "when": stats.when,
            "age": figures.poll.age,
            "history": [sample for sample in figures.history.samples if sample.when > since],
            "requests": {
                "open": requests.open,
                "answering": requests.answering,
                "ended": requests.ended,
                "prompt_tokens": requests.prompt_tokens,
                "cached_tokens": requests.cached_tokens,
                "generated_tokens": requests.generated_tokens,
            },
            "groups": [msgspec.structs.asdict(group) for group in stats.groups],
            "ranks": list(_ranks(context)),
            "experts": {
                "number": stats.num_experts,
                "layers": figures.poll.experts,
            },
            "loop_lag_max": figures.lag.max,
        }
    )


def _since(text: str) -> float:
    try:
        since = float(text)
    except ValueError:
        since = math.nan
    if math.isnan(since):
        raise Refusal(400, "since must be a number: seconds since the epoch", param="since")
    return since


def _ranks(context: Context) -> Iterator[dict[str, Any]]:
    for rank in context.figures.poll.stats.ranks:
        yield {
            "rank": rank.rank,
            "place": rank.place,
            "state": rank.state,
            "state_age": rank.state_age,
            "pid": rank.pid,
            "steps": rank.steps,
            "compute_seconds": rank.compute_seconds,
            "wait_seconds": rank.wait_seconds,
            "traffic": {
                name: msgspec.structs.asdict(traffic) for name, traffic in rank.traffic.items()
            },
        }


def _file(path: Path) -> Handler:
    async def send(_: Context, __: Request) -> Response:
        return Response(path.read_bytes(), headers={**HEADERS, "content-type": KINDS[path.suffix]})

    return send


def _files() -> Iterator[Route]:
    yield Route("GET", "/", _file(FOLDER / "index.html"), RouteAccess.OPEN, "The server's own page")
    for path in sorted(FOLDER.iterdir()):
        if path.suffix in KINDS:
            yield Route(
                "GET", f"/page/{path.name}", _file(path), RouteAccess.OPEN, "A file of the page"
            )


ROUTES = (
    *_files(),
    Route("GET", "/dashboard/data", data, RouteAccess.USER, "What the page shows"),
)
