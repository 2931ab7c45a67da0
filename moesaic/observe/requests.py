"""Latencies and outcomes of requests, measured in the caller's process."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Final

from moesaic.core.request import Request

# Seconds.
LATENCY_BOUNDS: Final = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
GAP_BOUNDS: Final = (
    *(0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03),
    *(0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0),
)
ENDS: Final = ("stop", "length", "abort", "error")


@dataclass(frozen=True, slots=True)
class Distribution:
    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    """Values up to each bound and above the one before; the last counts those above all."""
    total: float

    @property
    def count(self) -> int:
        return sum(self.counts)

    def since(self, before: Distribution) -> Distribution:
        counts = (now - then for now, then in zip(self.counts, before.counts, strict=True))
        return replace(self, counts=tuple(counts), total=self.total - before.total)

    def quantile(self, share: float) -> float | None:
        """Interpolated inside its bucket, as in Prometheus; None without values."""
        target, seen = share * self.count, 0
        if not self.count:
            return None
        for number, upper in enumerate(self.bounds):
            here = self.counts[number]
            if here and seen + here >= target:
                lower = self.bounds[number - 1] if number else 0.0
                return lower + (upper - lower) * (target - seen) / here
            seen += here
        return self.bounds[-1]


class Histogram:
    """Written by one thread; readers get a copy."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds, self._counts, self._total = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def copy(self) -> Distribution:
        return Distribution(self._bounds, tuple(self._counts), self._total)


@dataclass(frozen=True, slots=True)
class RequestStats:
    """Totals since the engine's start."""

    ended: dict[str, int]
    prompt_tokens: int
    """Includes cached tokens; a prompt counts at its first output token."""
    cached_tokens: int
    generated_tokens: int
    time_to_first_token: Distribution
    inter_token: Distribution
    end_to_end: Distribution
    queue: Distribution
    open: int = 0
    """Requests that have not ended."""
    answering: int = 0
    """Open requests that have a first token."""


class RequestWatch:
    """Records every token, so it is cheap: no locks, and one thread writes the counters."""

    def __init__(self) -> None:
        self._ended = dict.fromkeys(ENDS, 0)
        self._prompt = self._cached = self._generated = self._answering = 0
        self._first, self._queue = Histogram(LATENCY_BOUNDS), Histogram(LATENCY_BOUNDS)
        self._end_to_end = Histogram(LATENCY_BOUNDS)
        self._gap_counts, self._gap_total = [0] * (len(GAP_BOUNDS) + 1), 0.0

    def first_token(self, request: Request, now: float) -> None:
        self._generated += 1
        self._answering += 1
        self._prompt += request.prompt_len
        self._cached += request.cached_tokens
        self._first.add(now - request.created)
        if request.queue_seconds is not None:
            self._queue.add(request.queue_seconds)

    def next_token(self, gap: float) -> None:
        """`gap`: seconds since the previous token."""
        self._generated += 1
        self._gap_counts[bisect_left(GAP_BOUNDS, gap)] += 1
        self._gap_total += gap

    def end(self, request: Request) -> None:
        """Aborted requests have no latency: their client chose when they ended."""
        reason = request.finish_reason
        assert reason is not None and request.finished is not None
        self._ended["error" if reason.failed else reason.type] += 1
        self._answering -= request.first_token is not None
        if reason.type != "abort":
            self._end_to_end.add(request.finished - request.created)

    def stats(self, open: int) -> RequestStats:
        """Callable from any thread."""
        return RequestStats(
            ended=dict(self._ended),
            prompt_tokens=self._prompt,
            cached_tokens=self._cached,
            generated_tokens=self._generated,
            time_to_first_token=self._first.copy(),
            inter_token=Distribution(GAP_BOUNDS, tuple(self._gap_counts), self._gap_total),
            end_to_end=self._end_to_end.copy(),
            queue=self._queue.copy(),
            open=open,
            answering=self._answering,
        )
