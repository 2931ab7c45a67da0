"""/v1/loads and /get_load: how busy each serving group is, with SGLang's names. Its router asks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import moesaic
from moesaic.comm.mesh import share
from moesaic.core.stats import GroupStats
from moesaic.observe.exposition import CONTENT_TYPE
from moesaic.observe.metric_series import hit_ratio, kv_usage
from moesaic.server.context import Context
from moesaic.server.errors import Refusal
from moesaic.server.responses import json_response
from moesaic.server.routes import USER, Route

# Sections that a client may ask for; there are values for the first two only.
SECTIONS: Final = ("core", "queues", "memory", "spec", "lora", "disagg", "all")
FORMATS: Final = ("json", "prometheus")
PREFIX: Final = "sglang_"


class QueueLoad(msgspec.Struct):
    waiting: int
    grammar: int = 0
    paused: int = 0
    retracted: int = 0
    prealloc_ready: int = 0


class GroupLoad(msgspec.Struct):
    """A serving group, with the names of SGLang's LoadSnapshot. Requests in the server's own queue
    are counted as if shared evenly among groups; the first free one will take them."""

    timestamp: float
    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_waiting_uncached_tokens: int
    """Prompt tokens; those that the prefix cache has are known only later."""
    num_used_tokens: int
    num_total_tokens: int
    num_active_tokens: int
    max_total_num_tokens: int
    max_running_requests: int
    token_usage: float
    gen_throughput: float
    cache_hit_rate: float
    utilization: float
    total_prefill_uncached_tokens: int
    total_prefill_busy_us: int
    queues: QueueLoad
    num_prealloc_ready_tokens: int = 0
    decode_moments: None = None

    def chosen(self, sections: Sequence[str]) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(self)
        if not {"queues", "all"}.intersection(sections):
            del found["queues"]
        return found


async def v1_loads(context: Context, request: Request) -> Response:
    query = request.query_params
    sections = [name.strip() for name in (query.get("include") or "all").split(",")]
    if not set(sections) <= set(SECTIONS):
        raise Refusal(400, f"include can have {', '.join(SECTIONS)}, and nothing else", "include")
    if (form := query.get("format") or "json") not in FORMATS:
        raise Refusal(400, f"format must be {' or '.join(FORMATS)}", "format")
    rank = _rank(query.get("dp_rank"))
    loads = [load for load in await group_loads(context) if rank in (None, load.dp_rank)]
    rows = [load.chosen(sections) for load in loads]
    if form == "prometheus":
        return Response(_exposition(rows), headers={"content-type": CONTENT_TYPE})
    mesh = context.engine.mesh
    return json_response(
        {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": moesaic.__version__,
            "accelerator": None if context.args.device == "cpu" else context.args.device,
            "num_accelerators": mesh.world // mesh.num_groups,
            "loads": rows,
        }
    )


async def get_load(context: Context, _: Request) -> Response:
    return json_response(
        [
            {
                "dp_rank": load.dp_rank,
                "num_reqs": load.num_running_reqs + load.num_waiting_reqs,
                "num_waiting_reqs": load.num_waiting_reqs,
                "num_tokens": load.num_total_tokens,
                "num_pending_tokens": load.num_waiting_uncached_tokens,
            }
            for load in await group_loads(context)
        ]
    )


async def group_loads(context: Context) -> list[GroupLoad]:
    poll = context.stats.poll
    await poll.refresh()
    return [_load(context, group) for group in poll.stats.groups]


def _load(context: Context, group: GroupStats) -> GroupLoad:
    engine, poll, groups = context.engine, context.stats.poll, context.engine.mesh.num_groups
    requests, tokens = (len(share(n, group.group, groups)) for n in engine.queued)
    waiting, waiting_tokens = group.waiting + requests, group.waiting_tokens + tokens
    used, most = group.pages_used * group.page_size, engine.max_running // groups
    return GroupLoad(
        timestamp=poll.stats.when,
        dp_rank=group.group,
        num_running_reqs=group.running,
        num_waiting_reqs=waiting,
        num_waiting_uncached_tokens=waiting_tokens,
        num_used_tokens=used,
        num_total_tokens=used + waiting_tokens,
        num_active_tokens=used + waiting_tokens,
        max_total_num_tokens=group.pages_total * group.page_size,
        max_running_requests=most,
        token_usage=kv_usage(group),
        gen_throughput=poll.throughputs.get(group.group, 0.0),
        cache_hit_rate=hit_ratio(group.cached_tokens, group.prompt_tokens + group.cached_tokens),
        utilization=max(group.running / most, kv_usage(group)),
        total_prefill_uncached_tokens=group.prompt_tokens,
        total_prefill_busy_us=round(group.prefill_seconds * 1e6),
        queues=QueueLoad(waiting),
    )


def _rank(text: str | None) -> int | None:
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise Refusal(400, "dp_rank must be the number of a serving group", "dp_rank")
    return int(text)


def _exposition(rows: Sequence[dict[str, Any]]) -> str:
    """SGLang's form of it: a gauge for every number, by dp_rank."""
    lines: dict[str, list[str]] = {}
    for row in rows:
        flat = {name: value for name, value in row.items() if name != "dp_rank"}
        queues = flat.pop("queues", {})
        flat |= {f"queues_{name}": value for name, value in queues.items()}
        for name, value in flat.items():
            if value is not None:
                found = lines.setdefault(f"{PREFIX}{name}", [])
                found.append(f'{PREFIX}{name}{{dp_rank="{row["dp_rank"]}"}} {value!r}\n')
    return "".join(f"# TYPE {name} gauge\n{''.join(found)}" for name, found in lines.items())


QUERY: Final = {
    "dp_rank": "The serving group, by its number; all groups if left out",
    "include": f"Sections, joined by commas: {', '.join(SECTIONS)}; all if left out",
    "format": "json (the default) or prometheus",
}
ROUTES = (
    Route("GET", "/v1/loads", v1_loads, USER, "How busy each serving group is", query=QUERY),
    Route("GET", "/get_load", get_load, USER, "The same in the form that older routers ask for"),
)
