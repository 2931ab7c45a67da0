"""The cost model of schedules, and the choice by measured steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from moesaic.core.overlap import Overlap, schedules_of
from moesaic.engine.runner.overlap_calibration import Calibration, StepKind, sizes_of
from moesaic.overlap.cost import ChosenOverlap, OverlapChoice, StepCosts, between, predict
from moesaic.overlap.policy import StepShape

OFF, SBO, TBO = Overlap.OFF, Overlap.SBO, Overlap.TBO
HALF = StepCosts(4, 1.2, 0.5)
WHOLE = StepCosts(8, 2.0, 1.0, shared=0.3)


def test_the_example_of_the_prediction() -> None:
    assert predict(WHOLE, HALF) == pytest.approx({OFF: 3.0, SBO: 2.7, TBO: 2.4})


def test_halves_that_communicate_longer_than_they_compute() -> None:
    """The transfers of one half are longer than the other computes: they share the link."""
    slow = predict(StepCosts(8, 2.0, 5.0, shared=0.3), StepCosts(4, 1.2, 2.6))
    assert slow == pytest.approx({OFF: 7.0, SBO: 6.7, TBO: 4.8})
    # All of it is latency: a half takes as long as the whole.
    assert predict(StepCosts(8, 2.0, 5.0), StepCosts(4, 1.0, 5.0))[TBO] == 6.0
    # All of it is bytes.
    assert predict(StepCosts(8, 2.0, 8.0), StepCosts(4, 1.0, 4.0))[TBO] == 8.0


def test_shared_experts_hide_no_more_than_the_transfers_take() -> None:
    assert predict(StepCosts(8, 2.0, 0.1, shared=0.9), None) == pytest.approx({OFF: 2.1, SBO: 2.0})
    # The second half is short.
    assert predict(StepCosts(8, 2.0, 1.0, shared=0.9), None)[SBO] == pytest.approx(3 - 0.5 - 0.3)
    assert predict(StepCosts(1, 1.0, 0.0), None) == {OFF: 1.0, SBO: 1.0}


def test_costs_between_two_sizes() -> None:
    known = [StepCosts(4, 1.0, 2.0, 0.5), StepCosts(8, 3.0, 4.0, 0.7)]
    assert between(known, 6) == StepCosts(6, 2.0, 3.0, pytest.approx(0.6))
    assert between(known, 8) is known[1]
    assert between(known, 3) is between(known, 9) is between([], 1) is None


def choice(tokens: int, prefill: bool = False, **measured: float) -> OverlapChoice:
    rounds = {Overlap[name.upper()]: [seconds] * 3 for name, seconds in measured.items()}
    return OverlapChoice(prefill, StepCosts(tokens, rounds[OFF][0] - 1.0, 1.0), HALF, rounds)


@pytest.mark.parametrize(
    ("measured", "chosen"),
    [
        ({"off": 3.0, "sbo": 2.8, "tbo": 2.5}, TBO),
        ({"off": 3.0, "sbo": 2.8, "tbo": 2.9}, SBO),
        ({"off": 3.0, "sbo": 2.98, "tbo": 3.5}, OFF),  # less than a hundredth
        ({"off": 3.0, "sbo": 3.2}, OFF),
    ],
)
def test_the_choice(measured: dict[str, float], chosen: Overlap) -> None:
    found = choice(8, **measured)
    assert found.chosen == chosen
    assert found.facts()["chosen"] == chosen.name.lower()


@pytest.mark.parametrize(
    ("sbo", "chosen"),
    [
        ([2.0, 9.0, 2.1, 2.0, 2.2], SBO),  # one round was disturbed
        ([2.0, 3.1, 2.1, 3.1, 2.2], OFF),  # the median would be faster
    ],
)
def test_a_choice_must_be_faster_in_all_rounds_but_one(sbo: list[float], chosen: Overlap) -> None:
    found = OverlapChoice(False, StepCosts(8, 2.0, 1.0), None, {OFF: [3.0] * 5, SBO: sbo})
    assert found.measured[SBO] < 0.99 * found.measured[OFF]
    assert found.chosen == chosen
    said = found.why.endswith("nothing hidden, as sbo was slower in 2 of 5 rounds")
    assert said == (chosen == OFF)


def test_what_a_schedule_hides() -> None:
    found = choice(8, off=3.0, sbo=2.75, tbo=2.5)
    assert found.hidden_ratio(OFF) == 0.0
    assert found.hidden_ratio(SBO) == pytest.approx(0.25)
    # Two halves compute 2.4 and communicate 1.0.
    assert found.hidden_ratio(TBO) == pytest.approx(0.9)
    assert found.reread == pytest.approx(0.4)
    assert choice(8, off=3.0, sbo=1.5).hidden_ratio(SBO) == 1.0
    assert choice(8, off=3.0, sbo=4.0).hidden_ratio(SBO) == 0.0
    assert "tbo: ms: off 3000.000 (3000.000 predicted)" in found.why
    assert "two halves compute 400.000 longer; hides 90%" in found.why


def shape(*counts: int, prefill: bool = False, splits: bool = True) -> StepShape:
    half = tuple(count // 2 for count in counts) if splits else ()
    return StepShape(counts, half, prefill)


def test_steps_get_what_their_size_chose() -> None:
    policy = ChosenOverlap(
        [
            choice(4, off=3.0, sbo=2.0),
            choice(1, off=3.0),
            choice(8, off=3.0, tbo=2.0),
            choice(16, off=3.0, tbo=2.0),
        ]
    )
    assert policy.choose(shape(4, 0)) == SBO
    assert policy.choose(shape(3, 2)) == OFF, "1 and 4 chose differently"
    assert policy.choose(shape(6)) == OFF
    assert policy.choose(shape(8)) == policy.choose(shape(9)) == TBO
    assert policy.choose(shape(1, 100)) == TBO, "larger ones as the largest"
    assert policy.choose(shape(8, splits=False)) == OFF
    assert policy.choose(shape(8, prefill=True)) == OFF, "no step with prompts was measured"
    assert policy.choose(shape(1)) == OFF
    chosen = [policy.choices(False, range(*ends)) for ends in ((1, 4), (3, 5), (5, 8), (9, 200))]
    assert chosen == [{OFF}, {OFF, SBO}, {OFF}, {OFF, TBO}], "graphs that service may need"
    assert policy.choices(False, range(5, 9)) == {OFF, TBO}
    assert policy.choices(True, range(1, 100)) == {OFF}


def test_models_without_shared_experts_have_no_single_batch_overlap() -> None:
    assert schedules_of("auto") == (OFF, SBO, TBO)
    assert schedules_of("auto", has_shared=False) == schedules_of("tbo") == (OFF, TBO)
    assert schedules_of("sbo") == (SBO,)
    assert schedules_of("sbo", has_shared=False) == schedules_of(None) == (OFF,)


def test_sizes_that_are_measured() -> None:
    assert sizes_of(20, 40) == [
        (False, 1), (False, 2), (False, 4), (False, 8), (False, 16), (True, 16),
        (False, 20), (True, 32), (True, 40),
    ]  # fmt: skip
    assert sizes_of(4, 8) == [(False, 1), (False, 2), (False, 4)]
    # With drafts.
    assert sizes_of(3, 8, 9) == [(False, size) for size in (1, 2, 3, 4, 8, 9)]
    assert sizes_of(3, 8, 3) == [(False, size) for size in (1, 2, 3)]


@pytest.mark.parametrize(("number", "windows"), [(0, ["one"]), (1, ["one"]), (0, [])])
def test_ranks_begin_and_end_together_what_they_time_alone(
    number: int, windows: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is done earlier would send rows into what another one is computing with. Nodes of
    one rank each have no windows, and wait for each other in NCCL's kernels."""
    events = list[str]()

    class Trial:
        @contextmanager
        def alone(self) -> Iterator[None]:
            events.append("alone")
            yield
            events.append("together")

    def timed(kind: StepKind, schedule: Overlap) -> tuple[float, float]:
        events.append(f"step {schedule}")
        return 0.5 if "alone" in events[-2:] else 2.0, 0.0

    one = Calibration.__new__(Calibration)
    watchdog = SimpleNamespace(windows=windows, has_nccl=not windows)
    for name, value in {
        "_runner": SimpleNamespace(watchdog=watchdog),
        "_trial": Trial(),
        "_timed": timed,
        "_slowest": lambda seconds: events.append("met"),
    }.items():
        monkeypatch.setattr(one, name, value, raising=False)
    found = one._round(StepKind(True, 8, 4), [Overlap.OFF, Overlap.TBO], number)
    assert found == [2.0, 2.0, 0.5]
    assert events[2:] == ["met", "alone", f"step {Overlap.OFF}", "together", "met"]
