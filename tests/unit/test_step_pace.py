"""When the next step is planned while the device computes one."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from moesaic.engine.schedule.inflight import InflightStep
from moesaic.engine.schedule.plan import StepAgreement, StepResult
from moesaic.engine.schedule.step_budget import StepCost, StepWork
from moesaic.engine.worker.stage import Stage
from moesaic.engine.worker.step_loop import StepLoop
from moesaic.engine.worker.step_pace import MARGIN_SECONDS, POLL_SECONDS, StepPace
from moesaic.observe.spans import Spans


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr("moesaic.engine.worker.step_pace.time.monotonic", lambda: now.seconds)
    return now


def waited(pace: StepPace, clock: SimpleNamespace) -> float:
    """Seconds until it is time to plan."""
    begin = clock.seconds
    while slack := pace.slack():
        assert 0 < slack <= POLL_SECONDS
        clock.seconds += slack
    return float(clock.seconds - begin)


def test_a_plan_is_done_just_before_the_device_is(clock: SimpleNamespace) -> None:
    pace = StepPace()
    assert pace.slack() == 0
    pace.launched(0.003)
    pace.computes_until(clock.seconds + 0.020)
    assert waited(pace, clock) == pytest.approx(0.020 - 0.003 - MARGIN_SECONDS, abs=POLL_SECONDS)
    clock.seconds += 1.0
    assert pace.slack() == 0


def test_the_longest_of_the_last_plans_counts(clock: SimpleNamespace) -> None:
    pace = StepPace()
    pace.launched(0.010)
    pace.launched(0.002)
    assert 0.009 < pace.lead < 0.010
    for _ in range(100):
        pace.launched(0.002)
    assert pace.lead == pytest.approx(0.002, rel=0.05)


def loop_with(handles: list[Any], overlaps: bool = True, group: object = object()) -> StepLoop:
    loop = StepLoop.__new__(StepLoop)
    loop.inflight = deque(InflightStep(handle=handle) for handle in handles)
    loop.runner, loop.group = SimpleNamespace(overlaps=overlaps), group  # type: ignore[assignment]
    loop._pace = StepPace()
    loop._pace.computes_until(float("inf"))
    return loop


def test_only_a_step_that_the_device_computes_alone_is_waited_for() -> None:
    computing, done = SimpleNamespace(is_done=False), SimpleNamespace(is_done=True)
    assert loop_with([computing]).slack == POLL_SECONDS
    for handles in ([], [done], [None], [computing, computing]):
        assert loop_with(handles).slack == 0
    assert loop_with([computing], overlaps=False).slack == 0
    assert loop_with([computing], group=None).slack == 0


class Device:
    """Computes steps one after the other, by a clock that only moves when the host works or waits.
    Launching a step takes `launch` milliseconds of the host."""

    overlaps = True
    rebalancer = None
    waited_ns = 0

    def __init__(self, clock: "Clock", launch: float) -> None:
        self.clock, self.launch, self.free_at = clock, launch, 0.0
        self.spans = Spans()
        self.idle_ms = 0.0

    def begin(self, plan: Any, agreement: StepAgreement, x_TH: object) -> "Handle":
        begin = self.clock.ms
        self.clock.ms += self.launch
        self.idle_ms += max(0.0, begin - self.free_at) if self.free_at else 0.0
        took = 10.0 + 0.01 * agreement.work.prompt_tokens
        self.free_at = max(self.free_at, begin) + took
        return Handle(self.clock, self.free_at)


class Handle:
    hidden_TH = None

    def __init__(self, clock: "Clock", end: float) -> None:
        self.clock, self.end = clock, end

    @property
    def is_done(self) -> bool:
        return self.clock.ms >= self.end

    def wait(self) -> StepResult:
        self.clock.ms = max(self.clock.ms, self.end)
        return StepResult([])


class Clock:
    ms = 1000.0


class Group:
    """Plans steps of some tokens of prompts, in turn; planning takes a millisecond."""

    def __init__(self, clock: Clock, lengths: list[int]) -> None:
        self.clock, self.lengths, self.step_cost = clock, deque(lengths), StepCost()
        self.planned_at: list[float] = []

    def plan(self, parts: int) -> InflightStep:
        self.planned_at.append(self.clock.ms)
        self.clock.ms += 1.0
        self.lengths.rotate(-1)
        return InflightStep()

    def apply(self, *_: object) -> None:
        """The plans have no requests."""


class LoopStage(Stage):
    """Every step has work, of the group's next length."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def agree(self, step: InflightStep) -> None:
        self.number += 1
        length = self.group.lengths[0]
        work = StepWork(8, length, 8000, length * length // 2, length)
        step.agreement = StepAgreement(self.number, (8 + length,), (), length > 0, work)


class DraftingStage(LoopStage):
    """Every third step makes drafts, behind which none are wanted."""

    def agree(self, step: InflightStep) -> None:
        super().agree(step)
        step.agreement.draft_steps = self.number % 3 == 0


def test_a_step_that_makes_drafts_is_completed_before_the_next_one() -> None:
    clock = Clock()
    group, stats = Group(clock, [0]), SimpleNamespace(count_step=lambda seconds: None)
    stage = DraftingStage(group)
    loop = StepLoop(Device(clock, 1.0), stage, group, stats)  # type: ignore[arg-type]
    for _ in range(12):
        loop.step()
        numbers = [step.number for step in loop.inflight]
        assert numbers == ([] if stage.number % 3 == 0 else [stage.number])


def run_loop(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], launch: float, steps: int
) -> tuple[StepLoop, Device, Group]:
    clock = Clock()
    monkeypatch.setattr("time.monotonic", lambda: clock.ms / 1e3)
    monkeypatch.setattr("time.monotonic_ns", lambda: round(clock.ms * 1e6))
    device, group = Device(clock, launch), Group(clock, lengths)
    stats = SimpleNamespace(count_step=lambda seconds: None)
    loop = StepLoop(device, LoopStage(group), group, stats)  # type: ignore[arg-type]
    for _ in range(steps):
        while slack := loop.slack:
            clock.ms += 1e3 * slack
        loop.step()
    return loop, device, group


@pytest.mark.parametrize("lengths", [[0], [0, 0, 1000], [600, 1000, 300]], ids=str)
def test_steps_are_planned_late_and_the_device_never_waits(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, device, group = run_loop(monkeypatch, lengths, launch=2.0, steps=600)
    begun = device.idle_ms
    for length in set(lengths):
        work = StepWork(8, length, 8000, length * length // 2, length)
        took = group.step_cost.predict(work)
        assert took == pytest.approx(10 + 0.01 * length, rel=0.1)
    assert begun < 40, "the device waited while the costs were learned, and then no more"
    # The last plan began less than a third of a step before the device was free for it.
    early = loop.inflight[0].handle.end - group.planned_at[-1]  # type: ignore[union-attr]
    assert early < 10 + 0.01 * lengths[0] + 10 / 3 + 3


def test_launches_that_take_longer_than_steps_are_not_counted_as_these(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device ends a step while the host launches the next one, so its end is not measured."""
    _, _, group = run_loop(monkeypatch, [0, 1000], launch=30.0, steps=300)
    work = StepWork(8, 1000, 8000, 500_000, 1000)
    assert group.step_cost.predict(work) > 15
    assert group.step_cost.predict(StepWork(8, 0, 8000, 0)) < 20
