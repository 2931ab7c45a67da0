"""Groups that hold new prompts back for each other."""

import pytest

from moesaic.engine.schedule.kv_manager import KVManager
from moesaic.engine.schedule.prefill_delay import NewPrompts, PrefillDelayer
from moesaic.engine.schedule.scheduler import Scheduler, SchedulerConfig
from moesaic.engine.schedule.step_budget import StepWork, heaviest
from tests.unit.step_costs import carry_out
from tests.unit.test_kv_cache import make_request

DECODES, PROMPTS = StepWork(4, 0, 400, 0), StepWork(4, 300, 400, 45000)


@pytest.mark.parametrize(
    ("told", "works", "holds"),
    [
        ((0, 0), (DECODES, DECODES), True),
        ((1, 0), (DECODES, DECODES), True),
        ((1, 1), (DECODES, DECODES), False),
        ((2, 0), (DECODES, DECODES), False),
        ((1, 0), (DECODES, PROMPTS), False),
        ((0, 0), (DECODES, PROMPTS), False),
        ((1, 0), (StepWork(), StepWork()), False),
    ],
)
def test_when_prompts_are_held_back(told, works, holds):
    delayer = PrefillDelayer(max_passes=3)
    delayer.settle(told, works)
    assert delayer.holds is holds


def test_the_delay_is_bounded_in_passes():
    delayer, held = PrefillDelayer(max_passes=3), []
    for _ in range(8):
        held.append(delayer.hold_back(True, 0.5))
        prefills = not held[-1]
        delayer.settle([delayer.told, 0], [PROMPTS if prefills else DECODES, DECODES])
    # The step after a prompt begins prompts at once.
    assert held == [True, True, True, False, False, False, False, False]


def test_the_delay_is_bounded_in_time_and_by_usage():
    assert PrefillDelayer(9).hold_back(False, 0.5) is False
    for delayer, told in (
        (PrefillDelayer(9), NewPrompts.HELD_BACK),
        (PrefillDelayer(9, max_ms=1e9), NewPrompts.HELD_BACK),
        (PrefillDelayer(9, max_ms=0.0), NewPrompts.DUE),
        (PrefillDelayer(9, low_usage=0.4), NewPrompts.HELD_BACK),
        (PrefillDelayer(9, low_usage=0.6), NewPrompts.DUE),
    ):
        assert delayer.hold_back(True, 0.5) and delayer.told is told
        delayer.settle([delayer.told, 0], [DECODES, DECODES])
        assert delayer.told is NewPrompts.NONE
        assert delayer.holds is (told is NewPrompts.HELD_BACK)


class Group:
    def __init__(self, delayer: PrefillDelayer | None) -> None:
        kv = KVManager(512, 4, True, lambda pages: None)
        config = SchedulerConfig(max_running=8, chunk_tokens=64, delayer=delayer)
        self.scheduler = Scheduler(config, kv)

    def step(self) -> StepWork:
        return carry_out(self.scheduler)


def steps(passes: int, second_at: int) -> list[tuple[int, ...]]:
    """The prompt tokens of two groups in each step: both decode, group 0 gets a prompt at step 2,
    group 1 at `second_at`."""
    delayers = [PrefillDelayer(passes) if passes else None for _ in range(2)]
    groups, found = [Group(delayer) for delayer in delayers], []
    for number, group in enumerate(groups):
        group.scheduler.add(make_request([number] * 8, 50, number))
    for step in range(7):
        if step == 2:
            groups[0].scheduler.add(make_request(list(range(100, 120)), 50, 10))
        if step == second_at:
            groups[1].scheduler.add(make_request(list(range(200, 230)), 50, 11))
        works = [group.step() for group in groups]
        told = [delayer.told for delayer in delayers if delayer]
        for group, delayer in zip(groups, delayers, strict=True):
            group.scheduler.step_budget.others = heaviest(works)
            if delayer:
                delayer.settle(told, works)
        found.append(tuple(work.prompt_tokens for work in works))
    return found


def test_two_groups_begin_in_the_same_step():
    none = (0, 0)
    assert steps(0, 4) == [(8, 8), none, (20, 0), none, (0, 30), none, none]
    assert steps(9, 4) == [(8, 8), none, none, none, none, (20, 30), none]
    # After two steps the first one goes alone, and the other right behind it.
    assert steps(2, 5) == [(8, 8), none, none, none, (20, 0), (0, 30), none]
