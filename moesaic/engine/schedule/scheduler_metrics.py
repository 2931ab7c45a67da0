"""Totals over a scheduler's steps, and the log lines about batches."""

from __future__ import annotations

import logging
import time
from typing import Final, NamedTuple

from msgspec.structs import replace

from moesaic.core.stats import GroupStats
from moesaic.engine.schedule.acceptance import Acceptance, AcceptanceAlarm
from moesaic.engine.schedule.inflight import InflightStep
from moesaic.engine.schedule.plan import StepResult
from moesaic.engine.schedule.scheduler import Scheduler
from moesaic.overlap.cost import name as schedule_name

logger = logging.getLogger(__name__)

# At least this much time passes between two lines of a kind: small models make thousands of steps a
# second, and a line costs as much as some of them.
LINE_SECONDS: Final = 1.0


class Totals(NamedTuple):
    """The totals when a line was written, in seconds of the monotonic clock."""

    when: float
    counts: GroupStats
    admitted: int


class SchedulerMetrics:
    """Totals of one scheduler. A log line has what was added to them since the last one of its
    kind. `interval`: the least number of decode steps between lines."""

    def __init__(
        self, scheduler: Scheduler, interval: int, group: int = 0, most_drafts: int = 0
    ) -> None:
        self._scheduler, self._interval = scheduler, interval
        self.counts = GroupStats(group)
        self.counts.drafted_tokens = [0] * most_drafts
        self.counts.accepted_tokens = [0] * most_drafts
        self.acceptance = Acceptance()
        """Of the last step."""
        self._alarm = AcceptanceAlarm()
        self._prefill_line = self._decode_line = Totals(0.0, GroupStats(group), 0)

    def observe(self, step: InflightStep, result: StepResult, seconds: float) -> None:
        counts = self.counts
        counts.generated_tokens += len(result.token_ids) - len(result.broken)
        counts.generated_tokens += sum(len(item.token_ids) for item in result.items)
        if counts.drafted_tokens:
            self._count_drafts(step, result)
        counts.cached_tokens = self._scheduler.num_cached_tokens
        if step.plan.prefill:
            counts.prompt_tokens += step.prompt_tokens
            counts.prefill_steps += 1
            counts.prefill_seconds += seconds
        else:
            counts.decode_steps += 1
            counts.decode_seconds += seconds
        schedules = counts.prefill_schedules if step.plan.prefill else counts.decode_schedules
        schedule = schedule_name(step.agreement.overlap)
        schedules[schedule] = schedules.get(schedule, 0) + 1
        self.flush_log()
        before = self._decode_line
        is_due = counts.decode_steps - before.counts.decode_steps >= self._interval
        if is_due and time.monotonic() - before.when >= LINE_SECONDS:
            self._log_decode(before.counts)

    def _count_drafts(self, step: InflightStep, result: StepResult) -> None:
        counts, seen = self.counts, Acceptance.of(step, result, len(self.counts.drafted_tokens))
        self.acceptance = seen
        if not seen.verified:
            return
        counts.verified += seen.verified
        for total, new in (
            (counts.drafted_tokens, seen.drafted),
            (counts.accepted_tokens, seen.accepted),
        ):
            for position, number in enumerate(new):
                total[position] += number
        self._alarm.observe(seen)

    def stats(self) -> GroupStats:
        scheduler, kv, counts = self._scheduler, self._scheduler.kv, self.counts
        counts.running = len(scheduler.running)
        counts.waiting = len(scheduler.waiting) + len(scheduler.arriving)
        counts.waiting_tokens = scheduler.waiting.prompt_tokens
        counts.pages_used, counts.pages_total = kv.num_used, kv.allocator.num_pages
        counts.page_size = kv.page_size
        counts.retractions = scheduler.num_retractions
        return counts

    @property
    def idle_timeout(self) -> float | None:
        """Seconds that an idle rank may sleep before `flush_log` is due; None: no limit."""
        if self.counts.prefill_steps == self._prefill_line.counts.prefill_steps:
            return None
        return max(0.0, self._prefill_line.when + LINE_SECONDS - time.monotonic())

    def flush_log(self) -> None:
        """Every prefill is logged; decodes are logged at intervals."""
        if self.idle_timeout == 0.0:
            self._log_prefill(self._prefill_line)

    def _log_prefill(self, before: Totals) -> None:
        scheduler, counts = self._scheduler, self.counts
        tokens = counts.prompt_tokens - before.counts.prompt_tokens
        seconds = counts.prefill_seconds - before.counts.prefill_seconds
        logger.info(
            "Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: %d, token usage: %.2f, "
            "#running-req: %d, #queue-req: %d, input throughput (token/s): %.2f",
            scheduler.num_admitted - before.admitted,
            tokens,
            counts.cached_tokens - before.counts.cached_tokens,
            self._usage,
            len(scheduler.running),
            len(scheduler.waiting),
            tokens / max(seconds, 1e-9),
        )
        self._prefill_line = self._totals()

    def _log_decode(self, before: GroupStats) -> None:
        """Prompts and decodes share steps: tokens are generated in both."""
        scheduler, counts = self._scheduler, self.counts
        seconds = counts.decode_seconds + counts.prefill_seconds
        seconds -= before.decode_seconds + before.prefill_seconds
        logger.info(
            "Decode batch, #running-req: %d, #token: %d, token usage: %.2f, %s"
            "gen throughput (token/s): %.2f, #queue-req: %d",
            len(scheduler.running),
            scheduler.kv.num_used * scheduler.kv.page_size,
            self._usage,
            _shown_acceptance(counts, before),
            (counts.generated_tokens - before.generated_tokens) / max(seconds, 1e-9),
            len(scheduler.waiting),
        )
        self._decode_line = self._totals()

    def _totals(self) -> Totals:
        counts = self.counts
        lists = (list(counts.drafted_tokens), list(counts.accepted_tokens))
        copied = replace(counts, drafted_tokens=lists[0], accepted_tokens=lists[1])
        return Totals(time.monotonic(), copied, self._scheduler.num_admitted)

    @property
    def _usage(self) -> float:
        kv = self._scheduler.kv
        return kv.num_used / max(1, kv.allocator.num_pages)


def _shown_acceptance(counts: GroupStats, before: GroupStats) -> str:
    """Tokens that a verified draft gave, with the one that the step samples itself, and the share
    of its tokens that were accepted; empty if nothing was verified."""
    verified = counts.verified - before.verified
    if not verified:
        return ""
    drafted = sum(counts.drafted_tokens) - sum(before.drafted_tokens)
    accepted = sum(counts.accepted_tokens) - sum(before.accepted_tokens)
    length, rate = 1 + accepted / verified, accepted / drafted
    return f"accept len: {length:.2f}, accept rate: {rate:.2f}, "
