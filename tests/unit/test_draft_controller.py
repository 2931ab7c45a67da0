"""The controller of drafts against costs that are known: it finds the best number of drafts, turns
a wrong draft off, and takes neither back without a reason."""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from moesaic.core.draft_shape import chains
from moesaic.engine.schedule.acceptance import LOOK, Acceptance, AcceptanceAlarm
from moesaic.engine.speculate.controller import DraftController

MOST = 4
MEASURED = Path(__file__).parents[2] / "bench" / "results" / "h200_speculation.json"


@dataclass
class Machine:
    """Milliseconds of steps: `plain` of so many requests without drafts, and with them `row` for
    each row beyond these and `wait` for what no longer overlaps."""

    rate: float
    plain: Callable[[int], float]
    row: float
    wait: float = 0.3
    noise: float = 0.03

    def ms(self, requests: int, rows: int, drafting: bool) -> float:
        return self.plain(requests) + drafting * self.wait + self.row * (rows - requests)

    def tokens(self, drafts: int) -> float:
        return sum(self.rate**n for n in range(drafts + 1))

    def best(self, requests: int) -> float:
        """Tokens of a request a millisecond, with the best fixed number of drafts."""
        found = (
            self.tokens(k) / self.ms(requests, requests * (1 + k), k > 0) for k in range(MOST + 1)
        )
        return max(found)


def run(
    machine: Machine, controller: DraftController, requests: int, steps: int, seed: int = 0
) -> tuple[float, list[int]]:
    """Tokens of a request a millisecond, and the drafts of each step."""
    chance, tokens, spent, chosen = random.Random(seed), 0.0, 0.0, list[int]()
    for _ in range(steps):
        shape, drafts, accepted = controller.shape, controller.shape.drafts, 0
        rows = requests * (1 + drafts)
        counts = [0] * MOST
        for _ in range(requests if drafts else 0):
            number = 0
            while number < drafts and chance.random() < machine.rate:
                counts[number] += 1
                number += 1
            accepted += number
        ms = machine.ms(requests, rows, drafts > 0)
        if drafts:
            controller.observe_chains(counts, requests, shape)
        seen = ms * (1 + machine.noise * chance.gauss(0, 1))
        controller.observe_step(requests, seen, shape)
        chosen.append(drafts)
        spent += ms
        tokens += 1 + accepted / requests
    return tokens / spent, chosen


def memory_bound(requests: int) -> float:
    return 2.4 + 0.08 * requests


@pytest.mark.parametrize("requests", [1, 8, 64])
def test_a_wrong_draft_is_turned_off(requests: int) -> None:
    """After it has been tried, and then tried less and less: 2% are lost in 3,000 steps."""
    machine = Machine(0.0, memory_bound, row=0.1)
    speed, chosen = run(machine, DraftController(chains(MOST), adaptive=True), requests, 3000)
    assert chosen[0] == MOST and sum(map(bool, chosen[60:100])) <= 4
    assert speed > 0.985 / machine.ms(requests, requests, drafting=False)
    assert sum(map(bool, chosen)) < 200


@pytest.mark.parametrize("requests", [1, 8, 64])
@pytest.mark.parametrize(("rate", "row"), [(0.9, 0.1), (0.7, 0.3), (0.5, 0.05), (0.9, 2.0)])
def test_the_best_number_of_drafts_is_found(requests: int, rate: float, row: float) -> None:
    machine = Machine(rate, memory_bound, row)
    controller = DraftController(chains(MOST), adaptive=True)
    run(machine, controller, requests, 200)
    speed, _ = run(machine, controller, requests, 2000, seed=1)
    assert speed > 0.97 * machine.best(requests)


@cache
def measured_ms(drafter: str, requests: int) -> tuple[float, ...]:
    """Milliseconds of an H200's steps by their drafts; in between for other numbers of requests."""
    rows = json.loads(MEASURED.read_text())
    found = {(r["batch"], r["drafts"]): r for r in rows if r["drafter"] == drafter}
    batches = sorted({batch for batch, _ in found})

    def at(drafts: int) -> float:
        taken = [found[batch, drafts or 1] for batch in batches]
        ms = [row["fixed_ms"] if drafts else row["plain_ms"] for row in taken]
        return float(np.interp(math.log2(requests), np.log2(batches), ms))

    return tuple(map(at, range(MOST + 1)))


def replay(
    drafter: str, rate: float, requests: int, seed: int, steps: range
) -> tuple[float, list[int]]:
    """The expected tokens of a request a millisecond in these steps, each of which carries out the
    choice of the step before last, and the drafts of all steps. Some steps take much longer."""
    ms, chance = measured_ms(drafter, requests), np.random.default_rng(seed)
    controller, tokens, spent, chosen = (
        DraftController(chains(MOST), adaptive=True),
        0.0,
        0.0,
        [MOST],
    )
    for step in range(steps.stop):
        drafts, left, counts = chosen[-1], requests, [0] * MOST
        chosen.append(controller.shape.drafts)
        for place in range(drafts):
            left = counts[place] = int(chance.binomial(left, rate))
        if drafts:
            controller.observe_chains(counts, requests, controller.shapes[drafts])
        seen = ms[drafts] * (1 + 0.02 * chance.normal()) * (3 if chance.random() < 0.01 else 1)
        controller.observe_step(requests, seen, controller.shapes[drafts])
        if step in steps:
            tokens += sum(rate**n for n in range(drafts + 1))
            spent += ms[drafts]
    return tokens / spent, chosen


@pytest.mark.parametrize("drafter", ["simulated", "layer"])
@pytest.mark.parametrize("rate", [0.0, 0.5, 0.7, 0.9])
def test_measured_steps(drafter: str, rate: float) -> None:
    """Once 1,000 steps have passed, at most 2% are lost against the best fixed number, trials
    included, and against none at any time behind the first steps."""
    for requests in (1, 8, 128):
        ms = measured_ms(drafter, requests)
        best = max(sum(rate**n for n in range(k + 1)) / took for k, took in enumerate(ms))
        runs = [replay(drafter, rate, requests, seed, range(1000, 1800)) for seed in range(4)]
        speeds = [speed for speed, _ in runs]
        assert sum(speeds) / len(speeds) > 0.98 * best, requests
        assert min(speeds) > 0.98 / ms[0], requests


@pytest.mark.parametrize("drafter", ["simulated", "layer"])
def test_a_wrong_draft_costs_little_from_the_first_step_on(drafter: str) -> None:
    for requests in (1, 8, 128):
        plain = 1 / measured_ms(drafter, requests)[0]
        speed, chosen = replay(drafter, 0.0, requests, 0, range(1000))
        assert speed > 0.98 * plain, requests
        assert sum(map(bool, chosen[60:100])) <= 8, requests


def test_a_draft_that_gets_good_is_turned_on_again() -> None:
    controller, machine = (
        DraftController(chains(MOST), adaptive=True),
        Machine(0.0, memory_bound, 0.1),
    )
    _, chosen = run(machine, controller, 4, 400)
    assert sum(map(bool, chosen[300:])) < 20
    machine.rate = 0.95
    _, chosen = run(machine, controller, 4, 1200)
    assert sum(drafts == MOST for drafts in chosen[-100:]) > 90


def test_each_number_of_requests_has_its_own_choice() -> None:
    machine = Machine(0.6, lambda n: 2.4 if n < 32 else 0.5 * n, 0.4)
    controller = DraftController(chains(MOST), adaptive=True)
    for requests, drafts in ((2, True), (64, False), (2, True)):
        _, chosen = run(machine, controller, requests, 300)
        assert sum((number > 0) is drafts for number in chosen[-50:]) > 40


def test_a_fixed_number_stays() -> None:
    controller, machine = (
        DraftController(chains(MOST), adaptive=False),
        Machine(0.0, memory_bound, 1.0),
    )
    _, chosen = run(machine, controller, 2, 50)
    assert chosen == [MOST] * 50


def test_an_alarm_tells_once_that_acceptance_has_collapsed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    alarm = AcceptanceAlarm()

    def see(accepted: int, times: int = LOOK) -> None:
        for _ in range(times):
            alarm.observe(Acceptance(1, [1, 1, 1, 1], [int(n < accepted) for n in range(4)]))

    see(4)
    see(2)
    assert caplog.text == "" and not alarm.is_on
    with caplog.at_level(logging.WARNING):
        see(1, 2 * LOOK)
    assert caplog.text.count("25% of the tokens were accepted, at best 100%") == 1 and alarm.is_on
    see(3)
    assert not alarm.is_on


def test_a_good_draft_that_gets_wrong_is_turned_off() -> None:
    controller, machine = (
        DraftController(chains(MOST), adaptive=True),
        Machine(0.95, memory_bound, 0.3),
    )
    _, chosen = run(machine, controller, 1, 1500)
    assert sum(chosen[-50:]) > 150
    machine.rate = 0.0
    _, chosen = run(machine, controller, 1, 200)
    assert sum(map(bool, chosen[100:])) < 30


def test_steps_of_about_as_many_requests_tell_what_drafts_cost() -> None:
    """With half as many requests only steps without drafts, and with the most, are timed anew."""
    machine, controller = (
        Machine(0.5, memory_bound, 0.4),
        DraftController(chains(MOST), adaptive=True),
    )
    run(machine, controller, 16, 500)
    _, chosen = run(machine, controller, 12, 12, seed=2)
    assert sum(drafts == MOST for drafts in chosen) <= 3
