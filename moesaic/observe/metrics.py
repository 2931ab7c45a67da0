"""Every metric there is: one table, from which /metrics, docs/metrics.md and the Grafana dashboard
are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Final

from moesaic.core.stats import EngineStats, GroupStats, RankStats, TrafficStats
from moesaic.observe.expert_load import LayerLoad
from moesaic.observe.requests import GAP_BOUNDS, LATENCY_BOUNDS, Distribution, RequestStats

PREFIX: Final = "moesaic_"
# Seconds that an event loop may be late.
LAG_BOUNDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


@dataclass(frozen=True, slots=True)
class ServerStats:
    """Of the HTTP process. `http`: responses by route and status. `info`: what was resolved at
    start."""

    http: dict[tuple[str, int], int]
    loop_lag: Distribution
    loop_lag_max: float
    startup: dict[str, float]
    info: dict[str, str]
    queued: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that metrics are read from. `engine` is as old as `engine_age` seconds; `batch`: tokens
    that a step has generated of late."""

    engine: EngineStats
    experts: Sequence[LayerLoad]
    engine_age: float
    requests: RequestStats
    server: ServerStats
    batch: float = 0.0


Labels = tuple[str, ...]
Sample = tuple[Labels, float | Distribution]
Read = Callable[[Snapshot], Iterable[Sample]]


class MetricKind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """`panel`: the title of the dashboard's panel that shows it, `by` which of its labels. `expr`:
    what is shown, where that is not the rate, the value or the quantiles."""

    name: str
    kind: MetricKind
    help: str
    read: Read
    panel: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    by: tuple[str, ...] = ()
    expr: str = ""
    source: str = field(default="", kw_only=True)
    """Who counts it, for the docs."""

    @property
    def full_name(self) -> str:
        return PREFIX + self.name


def _one(value: Callable[[Snapshot], float | Distribution]) -> Read:
    return lambda snapshot: [((), value(snapshot))]


def _groups(value: Callable[[GroupStats], float]) -> Read:
    return lambda snapshot: [((str(g.group),), value(g)) for g in snapshot.engine.groups]


def _phases(prefill: str, decode: str) -> Read:
    def read(snapshot: Snapshot) -> Iterator[Sample]:
        for group in snapshot.engine.groups:
            for phase, name in (("prefill", prefill), ("decode", decode)):
                yield (str(group.group), phase), getattr(group, name)

    return read


def _ranks(value: Callable[[RankStats], float]) -> Read:
    return lambda snapshot: [((str(r.rank),), value(r)) for r in snapshot.engine.ranks]


def _traffic(what: str) -> Read:
    def read(snapshot: Snapshot) -> Iterator[Sample]:
        for rank in snapshot.engine.ranks:
            for backend, traffic in rank.traffic.items():
                for direction in ("dispatch", "combine"):
                    yield (str(rank.rank), backend, direction), _amount(traffic, direction, what)

    return read


def _amount(traffic: TrafficStats, direction: str, what: str) -> float:
    amount: float = getattr(traffic, f"{direction}_{what}")
    return amount


def _states(snapshot: Snapshot) -> Iterator[Sample]:
    for rank in snapshot.engine.ranks:
        yield (str(rank.rank), rank.place, rank.state), 1


def _expert_tokens(snapshot: Snapshot) -> Iterator[Sample]:
    for load in snapshot.experts:
        for rank, tokens in load.ranks.items():
            yield (str(load.layer), str(rank)), tokens


def _balancedness(snapshot: Snapshot) -> Iterator[Sample]:
    for load in snapshot.experts:
        if load.balancedness is not None:
            yield (str(load.layer),), load.balancedness


def _hit_ratio(snapshot: Snapshot) -> float:
    requests = snapshot.requests
    return requests.cached_tokens / requests.prompt_tokens if requests.prompt_tokens else 0.0


def _usage(group: GroupStats) -> float:
    return group.pages_used / group.pages_total if group.pages_total else 0.0


def _refused(snapshot: Snapshot) -> float:
    return sum(n for (_, status), n in snapshot.server.http.items() if status == 429)


def _http(snapshot: Snapshot) -> Iterator[Sample]:
    for (route, status), number in sorted(snapshot.server.http.items()):
        yield (route, str(status)), number


INFO_LABELS: Final = ("version", "model", "mesh", "a2a_backend", "mode", "runner_backend")

_counter = partial(Metric, kind=MetricKind.COUNTER)
_gauge = partial(Metric, kind=MetricKind.GAUGE)
_latency = partial(Metric, kind=MetricKind.HISTOGRAM, panel="Latency", buckets=LATENCY_BOUNDS)
# Who counts.
_CALLER, _GROUP, _RANK, _SERVER = "requests", "schedulers", "ranks", "HTTP server"

METRICS: Final[tuple[Metric, ...]] = (
    _counter(
        "requests_total",
        help="Requests that ended, by why: stop, length, abort (by the client) or error.",
        labels=("finish_reason",),
        read=lambda s: [((reason,), number) for reason, number in s.requests.ended.items()],
        panel="Requests ended",
        by=("finish_reason",),
        source=_CALLER,
    ),
    _gauge(
        "requests_open",
        help="Requests that have not ended yet.",
        read=_one(lambda s: s.requests.open),
        panel="Queue",
        expr="sum({name})",
        source=_CALLER,
    ),
    _gauge(
        "requests_running",
        help="Requests in the batch.",
        labels=("group",),
        read=_groups(lambda g: g.running),
        panel="Queue",
        expr="sum({name})",
        source=_GROUP,
    ),
    _gauge(
        "requests_waiting",
        help="Requests that wait for a place in the batch.",
        labels=("group",),
        read=_groups(lambda g: g.waiting),
        panel="Queue",
        expr="sum({name})",
        source=_GROUP,
    ),
    _gauge(
        "requests_queued",
        help="Requests that wait in front of the engine, until it is their client's turn.",
        read=_one(lambda s: s.server.queued),
        panel="Queue",
        source=_SERVER,
    ),
    _counter(
        "prompt_tokens_total",
        help="Tokens of prompts whose first answer token has come, with those found in the cache.",
        read=_one(lambda s: s.requests.prompt_tokens),
        panel="Throughput",
        source=_CALLER,
    ),
    _counter(
        "cached_tokens_total",
        help="Prompt tokens that were found in the prefix cache.",
        read=_one(lambda s: s.requests.cached_tokens),
        panel="Throughput",
        source=_CALLER,
    ),
    _counter(
        "generation_tokens_total",
        help="Tokens that clients were given.",
        read=_one(lambda s: s.requests.generated_tokens),
        panel="Throughput",
        source=_CALLER,
    ),
    _latency(
        "time_to_first_token_seconds",
        help="From a request's arrival to its first token.",
        read=_one(lambda s: s.requests.time_to_first_token),
        panel="Time to first token",
        source=_CALLER,
    ),
    _latency(
        "inter_token_latency_seconds",
        help="Between two tokens of an answer.",
        read=_one(lambda s: s.requests.inter_token),
        buckets=GAP_BOUNDS,
        panel="Inter-token latency",
        source=_CALLER,
    ),
    _latency(
        "e2e_request_latency_seconds",
        help="From arrival to the last token, of requests that were answered.",
        read=_one(lambda s: s.requests.end_to_end),
        panel="End-to-end latency",
        source=_CALLER,
    ),
    _latency(
        "queue_time_seconds",
        help="From a request's arrival to its first step.",
        read=_one(lambda s: s.requests.queue),
        panel="Queue time",
        source=_CALLER,
    ),
    _gauge(
        "cache_hit_ratio",
        help="Share of prompt tokens that were found in the prefix cache, since the start.",
        read=_one(_hit_ratio),
        panel="KV cache",
        source=_CALLER,
    ),
    _gauge(
        "kv_cache_usage_ratio",
        help="Share of the KV cache's pages that running requests hold.",
        labels=("group",),
        read=_groups(_usage),
        panel="KV cache",
        by=("group",),
        source=_GROUP,
    ),
    _counter(
        "preemptions_total",
        help="Requests that lost their pages to others and start again from what they emitted.",
        labels=("group",),
        read=_groups(lambda g: g.retractions),
        panel="Errors",
        source=_GROUP,
    ),
    _gauge(
        "decode_batch_size",
        help="Tokens generated by a step, on average between the last two readings.",
        read=_one(lambda s: s.batch),
        panel="Batch",
        source=_GROUP,
    ),
    _counter(
        "computed_tokens_total",
        help="Tokens that steps computed: prompts (prefill) and answers (decode).",
        labels=("group", "phase"),
        read=_phases("prompt_tokens", "generated_tokens"),
        panel="Computed tokens",
        by=("phase",),
        source=_GROUP,
    ),
    _counter(
        "steps_total",
        help="Steps of the model; one with any prompt tokens in it is a prefill.",
        labels=("group", "phase"),
        read=_phases("prefill_steps", "decode_steps"),
        panel="Steps",
        by=("phase",),
        source=_GROUP,
    ),
    _counter(
        "forward_seconds_total",
        help="Seconds spent in steps.",
        labels=("group", "phase"),
        read=_phases("prefill_seconds", "decode_seconds"),
        panel="Time in steps",
        by=("phase",),
        source=_GROUP,
    ),
    _counter(
        "failed_steps_total",
        help="Steps that raised an error, which ended their requests.",
        labels=("group",),
        read=_groups(lambda g: g.failed_steps),
        panel="Errors",
        source=_GROUP,
    ),
    _counter(
        "rank_steps_total",
        help="Steps that a rank took part in.",
        labels=("rank",),
        read=_ranks(lambda r: r.steps),
        panel="Step time by rank",
        expr="rate(moesaic_rank_step_seconds_total[$__rate_interval])"
        " / rate({name}[$__rate_interval])",
        by=("rank",),
        source=_RANK,
    ),
    _counter(
        "rank_step_seconds_total",
        help="Seconds of a rank in steps: computing and waiting for others.",
        labels=("rank",),
        read=_ranks(lambda r: r.compute_seconds + r.wait_seconds),
        panel="Busy by rank",
        by=("rank",),
        source=_RANK,
    ),
    _counter(
        "rank_compute_seconds_total",
        help="Seconds in which a rank computed.",
        labels=("rank",),
        read=_ranks(lambda r: r.compute_seconds),
        panel="Ranks: compute and wait",
        by=("rank",),
        source=_RANK,
    ),
    _counter(
        "rank_wait_seconds_total",
        help="Seconds in which a rank waited for others: the one that waits least is the slowest.",
        labels=("rank",),
        read=_ranks(lambda r: r.wait_seconds),
        panel="Ranks: compute and wait",
        by=("rank",),
        source=_RANK,
    ),
    _counter(
        "rank_runner_seconds_total",
        help="Seconds of a rank's computing that its experts took.",
        labels=("rank",),
        read=_ranks(lambda r: r.runner_seconds),
        panel="Experts' share of computing",
        expr="rate({name}[$__rate_interval])"
        " / rate(moesaic_rank_compute_seconds_total[$__rate_interval])",
        by=("rank",),
        source=_RANK,
    ),
    _gauge(
        "rank_state",
        help="1 for what a rank is doing now.",
        labels=("rank", "place", "state"),
        read=_states,
        panel="State of ranks",
        by=("rank", "state"),
        source=_RANK,
    ),
    _gauge(
        "rank_state_seconds",
        help="For how long a rank has been doing that.",
        labels=("rank",),
        read=_ranks(lambda r: r.state_age),
        panel="Time in state",
        by=("rank",),
        source=_RANK,
    ),
    _counter(
        "a2a_bytes_total",
        help="Bytes that a rank's dispatcher moved to other ranks' experts and back.",
        labels=("rank", "backend", "direction"),
        read=_traffic("bytes"),
        panel="All-to-all bytes",
        by=("backend", "direction"),
        source=_RANK,
    ),
    _counter(
        "a2a_rows_total",
        help="Rows that a rank's dispatcher moved.",
        labels=("rank", "backend", "direction"),
        read=_traffic("rows"),
        panel="All-to-all rows",
        by=("backend", "direction"),
        source=_RANK,
    ),
    _counter(
        "a2a_seconds_total",
        help="Seconds in which a rank could do nothing but dispatch or combine.",
        labels=("rank", "backend", "direction"),
        read=_traffic("seconds"),
        panel="All-to-all time",
        by=("backend", "direction"),
        source=_RANK,
    ),
    _counter(
        "expert_tokens_total",
        help="Tokens that the experts of a rank computed.",
        labels=("layer", "rank"),
        read=_expert_tokens,
        panel="Balancedness, now",
        expr="avg by (layer) (rate({name}[$__rate_interval]))"
        " / max by (layer) (rate({name}[$__rate_interval]))",
        by=("layer",),
        source=_RANK,
    ),
    _gauge(
        "ep_balancedness",
        help="Tokens of a layer's experts, mean over ranks / max over ranks, since the start.",
        labels=("layer",),
        read=_balancedness,
        panel="Balancedness, since the start",
        by=("layer",),
        source=_RANK,
    ),
    _counter(
        "http_requests_total",
        help="Responses by route (other: none of ours) and status.",
        labels=("route", "status"),
        read=_http,
        panel="HTTP responses",
        by=("route", "status"),
        source=_SERVER,
    ),
    _counter(
        "http_refused_total",
        help="Responses with status 429: the queue was full.",
        read=_one(_refused),
        panel="Errors",
        source=_SERVER,
    ),
    _latency(
        "event_loop_lag_seconds",
        help="How late the event loop was, measured every 20 ms.",
        read=_one(lambda s: s.server.loop_lag),
        buckets=LAG_BOUNDS,
        panel="Event loop lag",
        source=_SERVER,
    ),
    _gauge(
        "event_loop_lag_max_seconds",
        help="The latest that the event loop was in the last minute.",
        read=_one(lambda s: s.server.loop_lag_max),
        panel="Event loop lag",
        source=_SERVER,
    ),
    _gauge(
        "startup_seconds",
        help="What the start took, by stage: tokenizer, model (weights and ranks).",
        labels=("stage",),
        read=lambda s: [((stage,), seconds) for stage, seconds in s.server.startup.items()],
        panel="Startup",
        by=("stage",),
        source=_SERVER,
    ),
    _gauge(
        "stats_age_seconds",
        help="How old the values of schedulers and ranks are; they are read once a second at most.",
        read=_one(lambda s: s.engine_age),
        panel="Age of values",
        source=_SERVER,
    ),
    _gauge(
        "info",
        help="Always 1; what was resolved at start is in its labels.",
        labels=INFO_LABELS,
        read=lambda s: [(tuple(s.server.info[label] for label in INFO_LABELS), 1)],
        panel="Server",
        by=INFO_LABELS,
        source=_SERVER,
    ),
)
