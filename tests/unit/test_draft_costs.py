"""What drafts cost and give where steps overlap: the real planner, controller and step loop over a
device of made-up times, which are those of an H200."""

from __future__ import annotations

import random
from typing import Any

import pytest

from moesaic.engine.speculate.ngram import Breadth, NgramDrafter
from moesaic.engine.speculate.ngram_index import NgramIndex
from tests.timed_device import VOCABULARY, Clock, Rate, Service, Text

NGRAM = {"speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": 1}
FIXED = {"disable_speculative_adaptive": True}
BATCHES = [1, pytest.param(8, marks=pytest.mark.slow), 32]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("time.monotonic", lambda: made.ms / 1e3)
    monkeypatch.setattr("time.monotonic_ns", lambda: round(made.ms * 1e6))
    return made


def free(number: int, position: int) -> int:
    """No three tokens come twice."""
    return (number * 7919 + position * 104_729 + position * position * 31) % VOCABULARY


def loops(number: int, position: int) -> int:
    return (number * 977 + position % 64) % VOCABULARY


def words() -> Text:
    """Half of the tokens follow from the two before, the others are mostly frequent ones: matches
    of three tokens are common, and their continuation is mostly wrong."""
    texts: dict[int, tuple[list[int], random.Random]] = {}

    def text(number: int, position: int) -> int:
        tokens, chance = texts.setdefault(number, ([number] * 3, random.Random(number)))
        while len(tokens) <= position:
            rare = min(2002, int(chance.paretovariate(0.8)))
            follows = (tokens[-1] * 31 + tokens[-2] * 17 + 5) % 2003
            tokens.append(follows if chance.random() < 0.55 else rare)
        return tokens[position]

    return text


def speed(service: Service, batch: int, settle: float = 1000, ms: float = 3000) -> float:
    service.open(batch)
    service.run(settle)
    return service.run(ms)


def ngram(clock: Clock, text: Text, **flags: Any) -> Service:
    given = NGRAM | flags
    breadth = Breadth(1, given["speculative_ngram_max_bfs_breadth"])
    drafter = NgramDrafter(NgramIndex(10**7, 18), 11, breadth=breadth)
    return Service(clock, text, drafter, **given)


@pytest.mark.parametrize("batch", BATCHES)
def test_text_without_repetitions_costs_nothing(clock: Clock, batch: int) -> None:
    """Steps overlap although drafts are allowed, as none is in sight."""
    plain = speed(Service(clock, free), batch)
    for flags in ({}, FIXED):
        assert speed(ngram(clock, free, **flags), batch) > 0.998 * plain


@pytest.mark.parametrize("batch", BATCHES)
def test_repetitions_that_are_mostly_wrong_are_turned_off(clock: Clock, batch: int) -> None:
    plain = speed(Service(clock, words()), batch)
    assert speed(ngram(clock, words(), **FIXED), batch) < 0.95 * plain
    assert speed(ngram(clock, words()), batch) > 0.98 * plain


def test_trees_that_are_mostly_wrong_are_turned_off(clock: Clock) -> None:
    plain = speed(Service(clock, words()), 1)
    trees = {"speculative_ngram_max_bfs_breadth": 10}
    assert speed(ngram(clock, words(), **trees, **FIXED), 1) < 0.9 * plain
    assert speed(ngram(clock, words(), **trees), 1) > 0.98 * plain


@pytest.mark.parametrize(
    ("batch", "times"), [(1, 2.9), pytest.param(8, 4.8, marks=pytest.mark.slow), (32, 5.9)]
)
def test_repetitive_text(clock: Clock, batch: int, times: float) -> None:
    plain = speed(Service(clock, loops), batch)
    fixed = speed(ngram(clock, loops, **FIXED), batch)
    assert fixed > times * plain
    assert speed(ngram(clock, loops), batch) > 0.97 * fixed


def guessed(clock: Clock, rate: float, drafts: int, **flags: Any) -> Service:
    drafter = Rate(free, rate, drafts, random.Random(1))
    return Service(clock, free, drafter, speculative_num_draft_tokens=drafts + 1, **NGRAM, **flags)


@pytest.mark.parametrize(
    ("rate", "batch"),
    [
        (0.5, 1),
        (0.9, 8),
        *(
            pytest.param(*point, marks=pytest.mark.slow)
            for point in ((0.0, 1), (0.0, 32), (0.9, 1), (0.5, 8), (0.5, 32))
        ),
    ],
)
def test_the_controller_against_every_fixed_number(clock: Clock, rate: float, batch: int) -> None:
    plain = speed(Service(clock, free), batch)
    fixed = [speed(guessed(clock, rate, number, **FIXED), batch) for number in (1, 2, 3, 4)]
    found = speed(guessed(clock, rate, 4), batch, ms=10_000)
    assert found > 0.985 * plain and found > 0.975 * max(fixed)


@pytest.mark.parametrize(
    ("batch", "rates", "least"),
    [
        (1, (0.0, 0.0, 0.0, 0.0), 0.98),
        (1, (0.95, 0.02, 0.01, 0.0), 1.6),
        (64, (0.45, 0.3, 0.15, 0.05), 1.3),
    ],
)
def test_the_shape_of_a_draft_models_trees(
    clock: Clock, batch: int, rates: tuple[float, ...], least: float
) -> None:
    """With flags of a tree the controller chooses that, a smaller one, a chain or nothing: what is
    best of those with fixed flags, or better."""
    flags = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "x"}
    flags["speculative_num_steps"] = 3
    tree = {"speculative_eagle_topk": 4, "speculative_num_draft_tokens": 15}

    def found(**more: Any) -> float:
        service = Service(clock, free, steps=3, rates=rates, draft_ms=0.3, **flags, **more)
        return speed(service, batch, settle=1500, ms=1000)

    plain = speed(Service(clock, free), batch, ms=1000)
    best = max(plain, found(**FIXED), found(**tree, **FIXED))
    assert found(**tree) > max(0.98 * best, least * plain)


@pytest.mark.parametrize("batch", [1, 64])
def test_a_wrong_draft_model_is_turned_off(clock: Clock, batch: int) -> None:
    """Then requests that only decode are columns, as without one, and steps overlap."""
    plain = speed(Service(clock, free), batch)
    flags = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "x"}
    service = Service(clock, free, steps=3, rate=0.0, draft_ms=0.3, **flags)
    assert speed(service, batch, settle=1500) > 0.985 * plain
    assert service.planner.drafts.wanted == 0 and len(service.loop.inflight[0].plan.decodes)
    service = Service(clock, free, steps=3, rate=0.95, draft_ms=0.3, **flags)
    assert speed(service, batch) > 1.4 * plain
