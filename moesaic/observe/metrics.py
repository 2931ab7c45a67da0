"""The table of all metrics: the source of /metrics, docs/metrics.md and the Grafana dashboard."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Final

from moesaic.core.stats import EngineStats, GroupStats, RankStats
from moesaic.observe.expert_load import LayerLoad
from moesaic.observe.requests import GAP_BOUNDS, LATENCY_BOUNDS, Distribution, RequestStats

PREFIX: Final = "moesaic_"
# Seconds of event loop lag.
LAG_BOUNDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
INFO_LABELS: Final = ("version", "model", "mesh", "a2a_backend", "mode", "runner_backend")


@dataclass(frozen=True, slots=True)
class ServerStats:
    """Statistics of the HTTP process."""

    http: dict[tuple[str, int], int]
    """Responses by route and status."""
    loop_lag: Distribution
    loop_lag_max: float
    startup: dict[str, float]
    info: dict[str, str]
    """The configuration that was resolved at start."""
    queued: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    engine: EngineStats
    experts: Sequence[LayerLoad]
    engine_age: float
    """Age of `engine` in seconds."""
    requests: RequestStats
    server: ServerStats
    batch: float = 0.0
    """Recent mean of tokens generated per step."""


Labels = tuple[str, ...]
Sample = tuple[Labels, float | Distribution]


class Source(Enum):
    """The part of the system that counts a metric; the value is its title in the docs."""

    REQUESTS = "Requests, counted in the caller's process"
    SCHEDULERS = "Schedulers"
    RANKS = "Ranks"
    SERVER = "HTTP server"


@dataclass(frozen=True, slots=True)
class Series:
    """Reads the samples of a metric from a snapshot."""

    source: Source
    read: Callable[[Snapshot], Iterable[Sample]]
    labels: Labels = ()
    by: Labels = ()
    """Labels that the dashboard shows; it aggregates over the others."""
    buckets: tuple[float, ...] = ()


class MetricKind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    panel: str
    """Title of the dashboard panel that shows the metric."""
    help: str
    series: Series
    kind: MetricKind
    expr: str = ""
    """PromQL for the panel; by default the rate, the value or the quantiles."""

    @property
    def full_name(self) -> str:
        return PREFIX + self.name


def _requests(
    value: Callable[[RequestStats], float | Distribution], buckets: tuple[float, ...] = ()
) -> Series:
    return Series(Source.REQUESTS, lambda s: [((), value(s.requests))], buckets=buckets)


def _groups(value: Callable[[GroupStats], float], by: Labels = ()) -> Series:
    def read(snapshot: Snapshot) -> Iterator[Sample]:
        for group in snapshot.engine.groups:
            yield (str(group.group),), value(group)

    return Series(Source.SCHEDULERS, read, ("group",), by)


def _phases(prefill: str, decode: str) -> Series:
    def read(snapshot: Snapshot) -> Iterator[Sample]:
        for group in snapshot.engine.groups:
            for phase, name in (("prefill", prefill), ("decode", decode)):
                yield (str(group.group), phase), getattr(group, name)

    return Series(Source.SCHEDULERS, read, ("group", "phase"), ("phase",))


def _ranks(value: Callable[[RankStats], float]) -> Series:
    def read(snapshot: Snapshot) -> Iterator[Sample]:
        for rank in snapshot.engine.ranks:
            yield (str(rank.rank),), value(rank)

    return Series(Source.RANKS, read, ("rank",), ("rank",))


def _traffic(quantity: str) -> Series:
    def read(snapshot: Snapshot) -> Iterator[Sample]:
        for rank in snapshot.engine.ranks:
            for backend, traffic in rank.traffic.items():
                for direction in ("dispatch", "combine"):
                    amount = getattr(traffic, f"{direction}_{quantity}")
                    yield (str(rank.rank), backend, direction), amount

    labels = ("rank", "backend", "direction")
    return Series(Source.RANKS, read, labels, labels[1:])


def _server(value: Callable[[Snapshot], float]) -> Series:
    return Series(Source.SERVER, lambda s: [((), value(s))])


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


def _hit_ratio(requests: RequestStats) -> float:
    return requests.cached_tokens / requests.prompt_tokens if requests.prompt_tokens else 0.0


def _usage(group: GroupStats) -> float:
    return group.pages_used / group.pages_total if group.pages_total else 0.0


def _refused(snapshot: Snapshot) -> float:
    return sum(n for (_, status), n in snapshot.server.http.items() if status == 429)


def _http(snapshot: Snapshot) -> Iterator[Sample]:
    for (route, status), number in sorted(snapshot.server.http.items()):
        yield (route, str(status)), number


_counter = partial(Metric, kind=MetricKind.COUNTER)
_gauge = partial(Metric, kind=MetricKind.GAUGE)
_histogram = partial(Metric, kind=MetricKind.HISTOGRAM)

METRICS: Final[tuple[Metric, ...]] = (
    _counter(
        "requests_total",
        "Requests ended",
        "Requests that ended, by reason: stop, length, abort (by the client) or error.",
        Series(
            Source.REQUESTS,
            lambda s: [((reason,), number) for reason, number in s.requests.ended.items()],
            labels=("finish_reason",),
            by=("finish_reason",),
        ),
    ),
    _gauge(
        "requests_open",
        "Queue",
        "Requests that have not ended.",
        _requests(lambda r: r.open),
        expr="sum({name})",
    ),
    _counter(
        "prompt_tokens_total",
        "Throughput",
        "Prompt tokens, including cached ones; counted at the first output token.",
        _requests(lambda r: r.prompt_tokens),
    ),
    _counter(
        "cached_tokens_total",
        "Throughput",
        "Prompt tokens found in the prefix cache.",
        _requests(lambda r: r.cached_tokens),
    ),
    _counter(
        "generation_tokens_total",
        "Throughput",
        "Tokens sent to clients.",
        _requests(lambda r: r.generated_tokens),
    ),
    _histogram(
        "time_to_first_token_seconds",
        "Time to first token",
        "Time from a request's arrival to its first token.",
        _requests(lambda r: r.time_to_first_token, LATENCY_BOUNDS),
    ),
    _histogram(
        "inter_token_latency_seconds",
        "Inter-token latency",
        "Time between two tokens of an answer.",
        _requests(lambda r: r.inter_token, GAP_BOUNDS),
    ),
    _histogram(
        "e2e_request_latency_seconds",
        "End-to-end latency",
        "Time from arrival to the last token, for requests that were not aborted.",
        _requests(lambda r: r.end_to_end, LATENCY_BOUNDS),
    ),
    _histogram(
        "queue_time_seconds",
        "Queue time",
        "Time from a request's arrival to its first step.",
        _requests(lambda r: r.queue, LATENCY_BOUNDS),
    ),
    _gauge(
        "cache_hit_ratio",
        "KV cache",
        "Share of prompt tokens found in the prefix cache since the start.",
        _requests(_hit_ratio),
    ),
    _gauge(
        "requests_running",
        "Queue",
        "Requests in the batch.",
        _groups(lambda g: g.running),
        expr="sum({name})",
    ),
    _gauge(
        "requests_waiting",
        "Queue",
        "Requests in the scheduler's queue.",
        _groups(lambda g: g.waiting),
        expr="sum({name})",
    ),
    _gauge(
        "kv_cache_usage_ratio",
        "KV cache",
        "Share of the KV cache's pages that running requests hold.",
        _groups(_usage, by=("group",)),
    ),
    _counter(
        "preemptions_total",
        "Errors",
        "Requests that lost their pages to others; they resume from the tokens already emitted.",
        _groups(lambda g: g.retractions),
    ),
    _gauge(
        "decode_batch_size",
        "Batch",
        "Mean of tokens generated per step between the last two readings.",
        Series(Source.SCHEDULERS, lambda s: [((), s.batch)]),
    ),
    _counter(
        "computed_tokens_total",
        "Computed tokens",
        "Tokens computed in steps: prompt tokens (prefill) and output tokens (decode).",
        _phases("prompt_tokens", "generated_tokens"),
    ),
    _counter(
        "steps_total",
        "Steps",
        "Forward steps; a step with any prompt tokens is a prefill.",
        _phases("prefill_steps", "decode_steps"),
    ),
    _counter(
        "forward_seconds_total",
        "Time in steps",
        "Seconds spent in steps.",
        _phases("prefill_seconds", "decode_seconds"),
    ),
    _counter(
        "failed_steps_total",
        "Errors",
        "Steps that raised an error; their requests ended.",
        _groups(lambda g: g.failed_steps),
    ),
    _counter(
        "rank_steps_total",
        "Step time by rank",
        "Steps that a rank took part in.",
        _ranks(lambda r: r.steps),
        expr="rate(moesaic_rank_step_seconds_total[$__rate_interval])"
        " / rate({name}[$__rate_interval])",
    ),
    _counter(
        "rank_step_seconds_total",
        "Busy by rank",
        "Seconds that a rank spent in steps: compute and wait together.",
        _ranks(lambda r: r.compute_seconds + r.wait_seconds),
    ),
    _counter(
        "rank_compute_seconds_total",
        "Ranks: compute and wait",
        "Seconds that a rank spent computing.",
        _ranks(lambda r: r.compute_seconds),
    ),
    _counter(
        "rank_wait_seconds_total",
        "Ranks: compute and wait",
        "Seconds that a rank waited for others; the rank that waits least is the slowest.",
        _ranks(lambda r: r.wait_seconds),
    ),
    _counter(
        "rank_runner_seconds_total",
        "Experts' share of computing",
        "Seconds of a rank's computing that its experts took.",
        _ranks(lambda r: r.runner_seconds),
        expr="rate({name}[$__rate_interval])"
        " / rate(moesaic_rank_compute_seconds_total[$__rate_interval])",
    ),
    _gauge(
        "rank_state",
        "State of ranks",
        "1 for the current state of a rank.",
        Series(Source.RANKS, _states, ("rank", "place", "state"), by=("rank", "state")),
    ),
    _gauge(
        "rank_state_seconds",
        "Time in state",
        "Seconds that a rank has been in its current state.",
        _ranks(lambda r: r.state_age),
    ),
    _counter(
        "a2a_bytes_total",
        "All-to-all bytes",
        "Bytes that a rank's dispatcher moved to other ranks' experts and back.",
        _traffic("bytes"),
    ),
    _counter(
        "a2a_rows_total",
        "All-to-all rows",
        "Rows that a rank's dispatcher moved.",
        _traffic("rows"),
    ),
    _counter(
        "a2a_seconds_total",
        "All-to-all time",
        "Seconds that a rank was blocked in dispatch or combine.",
        _traffic("seconds"),
    ),
    _counter(
        "expert_tokens_total",
        "Balancedness, now",
        "Tokens that the experts of a rank computed.",
        Series(Source.RANKS, _expert_tokens, ("layer", "rank"), by=("layer",)),
        expr="avg by (layer) (rate({name}[$__rate_interval]))"
        " / max by (layer) (rate({name}[$__rate_interval]))",
    ),
    _gauge(
        "ep_balancedness",
        "Balancedness, since the start",
        "Tokens of a layer's experts since the start: mean over ranks / maximum over ranks.",
        Series(Source.RANKS, _balancedness, ("layer",), by=("layer",)),
    ),
    _gauge(
        "requests_queued",
        "Queue",
        "Requests in the server's queue, before the engine.",
        _server(lambda s: s.server.queued),
    ),
    _counter(
        "http_requests_total",
        "HTTP responses",
        "Responses by route (other: no known route) and status.",
        Series(Source.SERVER, _http, ("route", "status"), by=("route", "status")),
    ),
    _counter(
        "http_refused_total",
        "Errors",
        "Responses with status 429: the queue was full.",
        _server(_refused),
    ),
    _histogram(
        "event_loop_lag_seconds",
        "Event loop lag",
        "Lag of the event loop, measured every 20 ms.",
        Series(Source.SERVER, lambda s: [((), s.server.loop_lag)], buckets=LAG_BOUNDS),
    ),
    _gauge(
        "event_loop_lag_max_seconds",
        "Event loop lag",
        "Largest lag of the event loop in the last minute.",
        _server(lambda s: s.server.loop_lag_max),
    ),
    _gauge(
        "startup_seconds",
        "Startup",
        "Seconds that the start took, by stage: tokenizer, model (weights and ranks).",
        Series(
            Source.SERVER,
            lambda s: [((stage,), seconds) for stage, seconds in s.server.startup.items()],
            labels=("stage",),
            by=("stage",),
        ),
    ),
    _gauge(
        "stats_age_seconds",
        "Age of values",
        "Age of the values of schedulers and ranks; they are read at most once a second.",
        _server(lambda s: s.engine_age),
    ),
    _gauge(
        "info",
        "Server",
        "Always 1; the labels hold the configuration that was resolved at start.",
        Series(
            Source.SERVER,
            lambda s: [(tuple(s.server.info[label] for label in INFO_LABELS), 1)],
            labels=INFO_LABELS,
            by=INFO_LABELS,
        ),
    ),
)
