"""Totals over a scheduler's steps, and the log lines about batches."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Final

from moesaic.core.stats import GroupStats
from moesaic.engine.schedule.inflight import InflightStep
from moesaic.engine.schedule.plan import StepResult
from moesaic.engine.schedule.scheduler import Scheduler

logger = logging.getLogger(__name__)

# At least this much time passes between two lines of a kind: small models make thousands of steps a
# second, and a line costs as much as some of them.
LINE_SECONDS: Final = 1.0


class SchedulerMetrics:
    """Totals of one scheduler. `interval`: the least number of decode steps between log lines."""

    def __init__(self, scheduler: Scheduler, interval: int, group: int = 0) -> None:
        self._scheduler = scheduler
        self.counts = GroupStats(group)
        self._log = BatchLog(scheduler, interval)

    def observe(self, step: InflightStep, result: StepResult, seconds: float) -> None:
        counts = self.counts
        generated = sum(len(item.token_ids) for item in result.items)
        counts.generated_tokens += generated
        counts.prompt_tokens += step.prompt_tokens
        counts.cached_tokens += step.cached_tokens
        if step.plan.prefill:
            counts.prefill_steps += 1
            counts.prefill_seconds += seconds
        else:
            counts.decode_steps += 1
            counts.decode_seconds += seconds
        self._log.observe(step, generated, seconds)

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
    def idle_timeout(self) -> float | None:
        """Seconds that an idle rank may sleep before `flush_log` is due; None: no limit."""
        return self._log.idle_timeout(time.monotonic())

    def flush_log(self) -> None:
        self._log.flush(time.monotonic())


class BatchLog:
    """Writes the log's lines about batches: sums over the steps since the last line of a kind."""

    def __init__(self, scheduler: Scheduler, interval: int) -> None:
        self._scheduler, self._interval = scheduler, interval
        self._prefill = BatchSums()
        self._decode = BatchSums()

    def observe(self, step: InflightStep, generated: int, seconds: float) -> None:
        prefill, decode, now = self._prefill, self._decode, time.monotonic()
        # Prompts and decodes share steps: tokens are generated in both.
        decode.tokens += generated
        decode.seconds += seconds
        if step.plan.prefill:
            prefill.steps += 1
            prefill.tokens += step.prompt_tokens
            prefill.seconds += seconds
            prefill.sequences += step.admitted
            prefill.cached += step.cached_tokens
        else:
            decode.steps += 1
        self.flush(now)
        if decode.steps >= self._interval and now - decode.last >= LINE_SECONDS:
            self._log_decode(now)

    def idle_timeout(self, now: float) -> float | None:
        """Every prefill is logged; decodes are logged at intervals."""
        if not self._prefill.steps:
            return None
        return max(0.0, self._prefill.last + LINE_SECONDS - now)

    def flush(self, now: float) -> None:
        if self._prefill.steps and now - self._prefill.last >= LINE_SECONDS:
            self._log_prefill(now)

    def _log_prefill(self, now: float) -> None:
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

    def _log_decode(self, now: float) -> None:
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
    """Sums since the last line, which was written at `last`."""

    last: float = 0.0
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    sequences: int = 0
    cached: int = 0
