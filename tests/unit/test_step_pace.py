"""When the next step is planned while the device computes one."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from moesaic.engine.schedule.inflight import InflightStep
from moesaic.engine.worker.step_loop import StepLoop
from moesaic.engine.worker.step_pace import MARGIN_SECONDS, POLL_SECONDS, StepPace


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
