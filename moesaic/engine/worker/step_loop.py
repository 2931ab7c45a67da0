"""The step loop: plan, begin, and complete the oldest in-flight step.

The engine in the caller's process and every rank of a service run this loop. They differ in the
`Stage`, which settles with other ranks what the step is, and in the `StepGroup`, which plans for a
serving group where this rank leads one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from moesaic.engine.rebalance.rebalancer import IDLE_SECONDS
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.engine.runner.step_time import SlowStepDetector
from moesaic.engine.schedule.inflight import InflightStep
from moesaic.engine.schedule.plan import StepResult
from moesaic.engine.schedule.step_budget import StepCost
from moesaic.engine.worker.rank_stats import RankStatsReporter
from moesaic.engine.worker.stage import Stage
from moesaic.engine.worker.step_pace import StepPace
from moesaic.observe.spans import SpanKind


class StepGroup(Protocol):
    """The serving group that this rank plans for."""

    @property
    def step_cost(self) -> StepCost: ...

    def plan(self, parts: int) -> InflightStep: ...

    def apply(self, step: InflightStep, result: StepResult, seconds: float) -> None: ...


class StepLoop:
    def __init__(
        self, runner: ModelRunner, stage: Stage, group: StepGroup | None, stats: RankStatsReporter
    ) -> None:
        self.runner, self.stage, self.group, self.stats = runner, stage, group, stats
        self.inflight: deque[InflightStep] = deque()
        """Planned steps whose results have not been applied, oldest first."""
        self.on_slow: Callable[[InflightStep, float, float], None] | None = None
        """Called with a slow step, its seconds and the usual ones."""
        self.in_trial = False
        """Whether the current step looks for a request that breaks it."""
        self.is_settled = True
        """Whether requests and `inflight` agree: not while a step is planned or applied. An error
        in between cannot be rolled back."""
        self.last_completed = 0
        self._completed_at = 0
        self._device_free_at = 0
        """When the device ended the step that was completed last; 0 if that is not known."""
        self._detector = SlowStepDetector()
        self._pace = StepPace()

    @property
    def depth(self) -> int:
        """Steps that may be in flight at once. A draft model may run when its step is completed,
        with the rows and pages of then; that the groups agree on no drafts holds for later ones."""
        makes_drafts = any(step.agreement.draft_steps for step in self.inflight)
        waits = makes_drafts or self.stage.awaits_tokens
        if self.in_trial or (self.runner.overlaps and waits):
            return 1
        return 2 if self.runner.overlaps else self.stage.pipeline_depth

    @property
    def slack(self) -> float:
        """Seconds for which it need not be called: what comes in meanwhile has part in the step
        that it plans."""
        if self.group is None or not self.runner.overlaps or len(self.inflight) != 1:
            return 0.0
        step = self.inflight[-1]
        try:
            if step.handle is None or step.handle.is_done:
                step.ended_at = time.monotonic_ns() if step.is_watched else 0
                return 0.0
        except RuntimeError:  # the device has failed, as waiting for the step will tell
            return 0.0
        step.is_watched = True
        return self._pace.slack()

    def step(self) -> bool:
        """Begins a step and completes the oldest if enough are in flight; False without work."""
        spans, self.in_trial = self.runner.spans, self.stage.is_trial
        spans.begin_step(self.stage.number + 1)
        start = time.monotonic_ns()
        self.is_settled = False
        step = self._plan()
        step.started_at = start
        self.inflight.append(step)  # before anything else can fail: a rollback must find it
        self.is_settled = True
        planned = time.monotonic_ns()
        x_TH = self.stage.agree(step)
        has_work = bool(step.agreement.counts)
        self._rebalance(has_work)
        if has_work:
            spans.add(SpanKind.PLAN, step.started_at, tokens=step.plan.num_tokens)
            before = self.inflight[-2].handle if len(self.inflight) > 1 else None
            agreed = time.monotonic_ns()
            if before is None or before.is_done:  # the device has nothing else to do
                step.begun_at = agreed
            handle = self.runner.begin(step.plan, step.agreement, x_TH)
            host = planned - start + time.monotonic_ns() - agreed - self.runner.waited_ns
            self._pace.launched(host / 1e9, (agreed - planned) / 1e9)
            step.handle = self.stage.hand_on(step, handle)
        else:
            self.inflight.pop()
        if self.inflight and (not has_work or len(self.inflight) >= self.depth):
            self.complete_oldest()
            while len(self.inflight) >= self.depth:  # it may have become less
                self.complete_oldest()
            self._expect_end()
            return True
        self._expect_end()
        if has_work:
            return True
        goes_on = self.stage.is_trial or self.stage.holds_prompts or self._moves_experts
        return self.stage.pass_on(goes_on)

    def _expect_end(self) -> None:
        """Tells when the step that the device computes now will end."""
        if self.group is not None and len(self.inflight) == 1:
            step, cost = self.inflight[0], self.group.step_cost
            ms = cost.predict(step.agreement.work) - 2 * cost.deviation
            begun = step.begun_at or self._device_free_at or time.monotonic_ns()
            self._pace.computes_until(begun / 1e9 + ms / 1000)

    @property
    def _moves_experts(self) -> bool:
        return self.runner.rebalancer is not None and self.runner.rebalancer.is_busy

    def _rebalance(self, has_work: bool) -> None:
        """Between two steps, the same ones on all ranks, experts may change their slots."""
        if self.runner.rebalancer is not None and self.stage.reports:
            self.runner.rebalancer.advance(self.stage.reports)
            if not has_work and self._moves_experts:
                time.sleep(IDLE_SECONDS)

    def _plan(self) -> InflightStep:
        if self.group is None or not self.stage.may_plan():
            return InflightStep()
        return self.group.plan(self.stage.pipeline_depth)

    def complete_oldest(self) -> None:
        step = self.inflight[0]
        assert step.handle is not None, "the step has not started"
        # The end of a step that is done already is known only if `slack` saw it.
        is_timed = bool(step.ended_at) or not self.runner.overlaps or not step.handle.is_done
        result = step.handle.wait()
        begun = step.begun_at or self._device_free_at
        self._device_free_at = (step.ended_at or time.monotonic_ns()) if is_timed else 0
        if self.group is not None:
            _check_counts(step, result)
            if begun and is_timed:
                ms = (self._device_free_at - begun) / 1e6
                self.group.step_cost.observe(step.agreement.work, ms)
        self.is_settled = False
        self.inflight.popleft()
        spans, tokens = self.runner.spans, step.plan.num_tokens
        # Steps that are in flight at once share the time.
        start = max(step.started_at, self._completed_at)
        spans.begin_step(step.number)
        if self.group is not None and step.has_requests:
            self.group.apply(step, result, (time.monotonic_ns() - start) / 1e9)
        self.is_settled = True
        self._completed_at = time.monotonic_ns()
        spans.add(SpanKind.STEP, start, tokens=tokens, end=self._completed_at)
        spans.begin_step(self.stage.number)
        self.last_completed = step.number
        self._observe(step, (self._completed_at - start) / 1e9)

    def _observe(self, step: InflightStep, seconds: float) -> None:
        self.stats.count_step(seconds)
        if self.runner.rebalancer is not None:
            self.runner.rebalancer.count_step(seconds)
        if self.on_slow is None or not step.has_requests:
            return
        agreement = step.agreement
        usual = self._detector.observe(agreement.prefill, sum(agreement.counts), seconds)
        if usual is not None:
            self.on_slow(step, seconds, usual)


def _check_counts(step: InflightStep, result: StepResult) -> None:
    found = len(result.token_ids), len(result.items)
    wanted = len(step.decoding.requests), len(step.items)
    if found != wanted:
        raise ValueError(
            f"{found[0]} tokens for {wanted[0]} requests that decode, {found[1]} results for "
            f"{wanted[1]} others"
        )
