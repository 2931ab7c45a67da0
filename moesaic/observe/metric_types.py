"""What a metric is, and the snapshot that its values are read from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from moesaic.core.stats import EngineStats
from moesaic.observe.expert_load import LayerLoad, PassBalance
from moesaic.observe.requests import Distribution, RequestStats

PREFIX: Final = "moesaic_"
SGLANG_PREFIX: Final = "sglang:"
# Our label for schedulers, for which SGLang has the ranks of its leader.
GROUP: Final = "group"
# Seconds of event loop lag.
LAG_BOUNDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


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
    model_name: str = ""
    """As the API shows it."""
    leaders: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """By group: SGLang's labels for the rank that leads it."""
    overlap: Sequence[Mapping[str, Any]] = ()
    """What --overlap auto has measured and chosen (OverlapChoice.facts)."""


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
    throughputs: Mapping[int, float] = field(default_factory=dict)
    """By group: tokens generated per second, between the last two readings."""
    balance: PassBalance | None = None
    """The balancedness of recent passes, if --expert-balancedness-report-mode asks for it."""


Labels = tuple[str, ...]
Sample = tuple[Labels, float | Distribution]


class MetricSource(Enum):
    """The part of the system that counts a metric; the value is its title in the docs."""

    REQUESTS = "Requests, counted in the caller's process"
    SCHEDULERS = "Schedulers"
    RANKS = "Ranks"
    SERVER = "HTTP server"


@dataclass(frozen=True, slots=True)
class Series:
    """Reads the samples of a metric from a snapshot."""

    source: MetricSource
    read: Callable[[Snapshot], Iterable[Sample]]
    labels: Labels = ()
    hidden: Labels = ()
    """Labels over which the dashboard aggregates."""
    buckets: tuple[float, ...] = ()


class MetricKind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class SglangName:
    """SGLang's name for a metric. Several metrics may share one, as parts of it."""

    name: str
    only: str = ""
    """The one value of a label whose samples it has; all samples if empty."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that it has always."""

    @property
    def full_name(self) -> str:
        return SGLANG_PREFIX + self.name


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    help: str
    series: Series
    kind: MetricKind
    sglang: tuple[SglangName, ...] = ()

    @property
    def full_name(self) -> str:
        return PREFIX + self.name
