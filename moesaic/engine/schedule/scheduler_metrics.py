"""What a scheduler's steps come to: totals, and the lines of the log about batches."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import Final

from moesaic.core.stats import GroupStats
from moesaic.engine.schedule.plan import StepResult
from moesaic.engine.schedule.scheduler import Scheduler

logger = logging.getLogger(__name__)

# Between two lines of a kind, whatever happens meanwhile: small models make thousands of steps a
# second, and a line costs as much as some of them.
LINE_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class StepTotals:
    """A step under way. `tokens`: of prompts, in it."""

    when: float
    prefill: bool
    tokens: int
    sequences: int
    cached: int


class SchedulerMetrics:
    """Of one scheduler. `interval`: decode steps between two lines about them, at least."""

    def __init__(self, scheduler: Scheduler, interval: int, group: int = 0) -> None:
        self._scheduler = scheduler
        self.counts = GroupStats(group)
        self._under_way: deque[StepTotals] = deque()
        self._ended = 0.0
        self._told = BatchLog(scheduler, interval)

    def begin(self, prompt_tokens: int) -> None:
        """A step was planned. What it found in the cache is known to the scheduler."""
        admitted, cached = self._scheduler.take_admitted()
        begun = StepTotals(time.monotonic(), prompt_tokens > 0, prompt_tokens, admitted, cached)
        self._under_way.append(begun)

    def end(self, result: StepResult) -> None:
        """The oldest step under way is done. Steps under way at once share the time."""
        begun, now, counts = self._under_way.popleft(), time.monotonic(), self.counts
        seconds = now - max(begun.when, self._ended)
        self._ended = now
        generated = sum(len(item.token_ids) for item in result.items)
        counts.generated_tokens += generated
        counts.prompt_tokens += begun.tokens
        counts.cached_tokens += begun.cached
        if begun.prefill:
            counts.prefill_steps += 1
            counts.prefill_seconds += seconds
        else:
            counts.decode_steps += 1
            counts.decode_seconds += seconds
        self._told.take(begun, generated, seconds, now)

    def forget(self) -> None:
        """Nothing is under way any more."""
        self._under_way.clear()

    def stats(self) -> GroupStats:
        scheduler, counts = self._scheduler, self.counts
        counts.running, counts.waiting = len(scheduler.running), len(scheduler.waiting)
        counts.pages_used, counts.pages_total = (
            scheduler.kv.num_used,
            scheduler.kv.allocator.num_pages,
        )
        counts.retractions = scheduler.num_retractions
        return counts

    @property
    def patience(self) -> float | None:
        """How long whoever has nothing to do may sleep before `flush` is due; None: for ever."""
        return self._told.patience(time.monotonic())

    def flush(self) -> None:
        """Says what was left to say."""
        self._told.flush(time.monotonic())


class BatchLog:
    """The log's lines: sums over the steps since the last line of the kind."""

    def __init__(self, scheduler: Scheduler, interval: int) -> None:
        self._scheduler, self._interval = scheduler, interval
        self._prefill = BatchSums()
        self._decode = BatchSums()

    def take(self, begun: StepTotals, generated: int, seconds: float, now: float) -> None:
        prefill, decode = self._prefill, self._decode
        # Prompts and decodes share steps: tokens are generated in both.
        decode.tokens += generated
        decode.seconds += seconds
        if begun.prefill:
            prefill.steps += 1
            prefill.tokens += begun.tokens
            prefill.seconds += seconds
            prefill.sequences += begun.sequences
            prefill.cached += begun.cached
        else:
            decode.steps += 1
        if prefill.steps and now - prefill.last >= LINE_SECONDS:
            self._say_prefill(now)
        if decode.steps >= self._interval and now - decode.last >= LINE_SECONDS:
            self._say_decode(now)

    def patience(self, now: float) -> float | None:
        """Prompts must not go unsaid; decodes are said every so often."""
        if not self._prefill.steps:
            return None
        return max(0.0, self._prefill.last + LINE_SECONDS - now)

    def flush(self, now: float) -> None:
        if self._prefill.steps and now - self._prefill.last >= LINE_SECONDS:
            self._say_prefill(now)

    def _say_prefill(self, now: float) -> None:
        sums, scheduler = self._prefill, self._scheduler
        logger.info(
            "Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: %d, token usage: %.2f, "
            "#running-req: %d, #queue-req: %d, input throughput (token/s): %.2f",
            sums.sequences,
            sums.tokens,
            sums.cached,
            self._usage,
            len(scheduler.running),
            len(scheduler.waiting),
            sums.tokens / max(sums.seconds, 1e-9),
        )
        self._prefill = BatchSums(last=now)

    def _say_decode(self, now: float) -> None:
        sums, scheduler = self._decode, self._scheduler
        logger.info(
            "Decode batch, #running-req: %d, #token: %d, token usage: %.2f, "
            "gen throughput (token/s): %.2f, #queue-req: %d",
            len(scheduler.running),
            scheduler.kv.num_used * scheduler.kv.page_size,
            self._usage,
            sums.tokens / max(sums.seconds, 1e-9),
            len(scheduler.waiting),
        )
        self._decode = BatchSums(last=now)

    @property
    def _usage(self) -> float:
        kv = self._scheduler.kv
        return kv.num_used / max(1, kv.allocator.num_pages)


@dataclass(slots=True)
class BatchSums:
    """Since the last line, which was written then."""

    last: float = 0.0
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    sequences: int = 0
    cached: int = 0
