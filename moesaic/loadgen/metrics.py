"""Metrics of a run, from the outcomes of its requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from moesaic.loadgen.outcome import Outcome
from moesaic.loadgen.traffic import Run

# Above this share of a core the client itself is the bottleneck.
CLIENT_BOUND: Final = 0.8
LIMITS: Final = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class LatencySummary:
    """A distribution in milliseconds; all None if nothing was measured."""

    mean: float | None = None
    median: float | None = None
    std: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None

    @classmethod
    def of(cls, seconds: Sequence[float]) -> LatencySummary:
        if not seconds:
            return cls()
        values = np.asarray(seconds) * 1000
        p90, p95, p99 = (float(value) for value in np.percentile(values, (90, 95, 99)))
        mean, median, std = float(values.mean()), float(np.median(values)), float(values.std())
        return cls(mean, median, std, p90, p95, p99, float(values.max()))


@dataclass(frozen=True)
class RunMetrics:
    """Metrics of the successful requests; throughputs are per second."""

    completed: int
    failed: int
    duration: float
    total_input: int
    total_output: int
    retokenized: int | None
    request_throughput: float
    input_throughput: float
    output_throughput: float
    peak_output: float
    peak_concurrency: int
    concurrency: float
    client_cpu: float
    e2e: LatencySummary
    ttft: LatencySummary
    tpot: LatencySummary
    itl: LatencySummary
    good: int | None
    errors: dict[str, int]

    @property
    def total_throughput(self) -> float:
        return self.input_throughput + self.output_throughput

    @property
    def goodput(self) -> float | None:
        return None if self.good is None else self.good / self.duration

    @property
    def client_bound(self) -> bool:
        return self.client_cpu > CLIENT_BOUND


def parse_goodput(words: Sequence[str] | None) -> dict[str, float]:
    """Limits in milliseconds by name, from ttft:200 tpot:50 e2el:2000."""
    limits: dict[str, float] = {}
    for word in words or ():
        name, _, value = word.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = -1
        if name not in LIMITS or not limits[name] > 0:
            raise ValueError(
                f"--goodput is {word!r}: give NAME:MILLISECONDS, with a name of {', '.join(LIMITS)}"
            )
    return limits


def measure(
    run: Run, limits: dict[str, float], count_tokens: Callable[[str], int] | None
) -> RunMetrics:
    """Compute the metrics; `count_tokens` retokenizes answers if there is a tokenizer."""
    good = [outcome for outcome in run.outcomes if not outcome.error]
    total_input = sum(input_tokens(outcome) for outcome in good)
    total_output = sum(outcome.output_tokens or 0 for outcome in good)
    within = sum(meets_limits(outcome, limits) for outcome in good) if limits else None
    return RunMetrics(
        completed=len(good),
        failed=len(run.outcomes) - len(good),
        duration=run.duration,
        total_input=total_input,
        total_output=total_output,
        retokenized=sum(count_tokens(o.text) for o in good) if count_tokens else None,
        request_throughput=len(good) / run.duration,
        input_throughput=total_input / run.duration,
        output_throughput=total_output / run.duration,
        peak_output=_peak_output(good, run),
        peak_concurrency=_peak_concurrency(run.outcomes),
        concurrency=sum(outcome.latency for outcome in good) / run.duration,
        client_cpu=run.client_cpu,
        e2e=LatencySummary.of([outcome.latency for outcome in good]),
        ttft=LatencySummary.of(_known([outcome.ttft for outcome in good])),
        tpot=LatencySummary.of(_known([outcome.tpot for outcome in good])),
        itl=LatencySummary.of([gap for outcome in good for gap in outcome.itls()]),
        good=within,
        errors=dict(Counter(outcome.error for outcome in run.outcomes if outcome.error)),
    )


def input_tokens(outcome: Outcome) -> int:
    """The prompt's tokens by the server's count, or else the requested length."""
    counted = outcome.prompt_tokens
    return outcome.prompt.tokens if counted is None else counted


def meets_limits(outcome: Outcome, limits: dict[str, float]) -> bool:
    """Whether a request is within its limits; an unmeasured value never is."""
    found: dict[str, float | None] = {
        "ttft": outcome.ttft,
        "tpot": outcome.tpot if (outcome.output_tokens or 0) > 1 else 0.0,
        "e2el": outcome.latency,
    }
    values = [(found[name], limit) for name, limit in limits.items()]
    return all(value is not None and value * 1000 <= limit for value, limit in values)


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _peak_output(outcomes: Sequence[Outcome], run: Run) -> float:
    """Most tokens within a second; for a shorter run, its rate."""
    width = min(1.0, run.duration)
    pairs = sorted(
        (time, tokens)
        for outcome in outcomes
        for time, tokens in zip(outcome.arrivals, outcome.tokens_by_arrival(), strict=True)
    )
    if not pairs:
        return 0.0
    times = np.asarray([time for time, _ in pairs])
    so_far = np.cumsum([0] + [tokens for _, tokens in pairs])
    until = np.searchsorted(times, times + width, side="left")
    return float((so_far[until] - so_far[:-1]).max() / width)


def _peak_concurrency(outcomes: Sequence[Outcome]) -> int:
    changes = [(outcome.started, 1) for outcome in outcomes]
    changes += [(outcome.ended, -1) for outcome in outcomes]
    changes.sort()
    return int(max(np.cumsum([change for _, change in changes]), default=0))


def as_json(figures: RunMetrics) -> dict[str, Any]:
    """With the names of SGLang's file; unmeasured values are null."""
    spreads = {
        f"{part}_{name}_ms": value
        for name, spread in (
            ("e2e_latency", figures.e2e),
            ("ttft", figures.ttft),
            ("tpot", figures.tpot),
            ("itl", figures.itl),
        )
        for part, value in asdict(spread).items()
    }
    return {
        "duration": figures.duration,
        "completed": figures.completed,
        "failed": figures.failed,
        "errors_by_message": figures.errors,
        "total_input_tokens": figures.total_input,
        "total_input_text_tokens": figures.total_input,
        "total_input_vision_tokens": 0,
        "total_output_tokens": figures.total_output,
        "total_output_tokens_retokenized": figures.retokenized,
        "request_throughput": figures.request_throughput,
        "input_throughput": figures.input_throughput,
        "output_throughput": figures.output_throughput,
        "total_throughput": figures.total_throughput,
        "max_output_tokens_per_s": figures.peak_output,
        "max_concurrent_requests": figures.peak_concurrency,
        "concurrency": figures.concurrency,
        **spreads,
        "request_goodput": figures.goodput,
        "client_cpu": figures.client_cpu,
        "accept_length": None,
    }
