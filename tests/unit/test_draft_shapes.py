"""The controller chooses among no drafts, chains and trees: against costs and acceptance that are
known, where the best shape can be worked out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

from moesaic.core.draft_shape import NO_DRAFTS, DraftShape, chains, draft_shapes
from moesaic.core.draft_tree import depths, path_to
from moesaic.core.speculation import Speculation
from moesaic.engine.speculate.controller import DraftController, DraftWork
from moesaic.engine.speculate.draft_branches import Branches
from moesaic.engine.speculate.draft_shares import DraftShares, VerifiedDraft

TREES = Speculation("NEXTN", 3, 15, topk=4, breadth=4)


def test_the_shapes_of_flags() -> None:
    assert draft_shapes(Speculation("NEXTN", 3, 4), False) == chains(3)
    assert chains(3) == [NO_DRAFTS, (1, 1, 1), (1, 2, 2), (1, 3, 3)]
    assert [shape.drafts for shape in chains(11)] == [0, 1, 2, 3, 4, 6, 8, 11]
    assert [shape for shape in draft_shapes(TREES, True) if shape.is_tree] == [
        *((4, 1, 2), (4, 1, 4), (4, 2, 4), (4, 3, 4), (4, 2, 7), (4, 3, 7), (4, 2, 14)),
        (4, 3, 14),
    ]
    assert draft_shapes(TREES, True)[-1] == (4, 3, 14)
    assert draft_shapes(TREES, False) == chains(3)
    ngram = Speculation("NGRAM", 11, 12, breadth=10)
    assert draft_shapes(ngram, True)[-1] == (10, 11, 11)
    assert {shape for shape in draft_shapes(ngram, True) if not shape.is_tree} == {*chains(11)}
    narrow = Speculation("NEXTN", 5, 4, topk=2, breadth=2)
    assert draft_shapes(narrow, True)[-1] == (2, 5, 3)


@pytest.mark.parametrize("count", [1, 3, 14])
def test_what_is_cut_is_a_tree_of_the_same_tokens(count: int) -> None:
    chance = random.Random(count)
    for _ in range(30):
        parents = [chance.randrange(row) for row in range(1, count + 1)]
        drafts = [100 + row for row in range(1, count + 1)]
        paths = {drafts[row - 1]: tokens(drafts, parents, row) for row in range(1, count + 1)}
        for shape in draft_shapes(TREES, True):
            found, behind = shape.cut(drafts, [*parents, 7])  # some are left of a longer draft
            assert len(found) <= shape.drafts and found == sorted(found)
            levels = depths(behind or [*range(len(found))])
            assert max(levels) <= shape.steps
            if shape.is_tree:
                rows = [tokens(found, behind, row) for row in range(1, len(found) + 1)]
                assert rows == [paths[token] for token in found]
                kept = [t for t in drafts if len(paths[t]) <= shape.steps]
                assert found == kept[: shape.drafts]
            elif found:
                assert not behind and paths[found[-1]] == found
    assert chains(4)[-1].cut([1, 2, 3, 4, 5], []) == ([1, 2, 3, 4], [])


def tokens(drafts: Sequence[int], parents: Sequence[int], row: int) -> list[int]:
    return [drafts[n - 1] for n in path_to(parents, row)]


@dataclass
class Machine:
    """A target that goes on with the n-th likeliest token of the draft model with the n-th
    probability, whatever came before; and milliseconds of a step."""

    likely: tuple[float, ...]
    row: float
    level: float
    plain: float = 2.4
    wait: float = 0.3

    def ms(self, shape: DraftShape, requests: int) -> float:
        rows = self.row * requests * shape.drafts
        return self.plain + bool(shape.drafts) * self.wait + rows + self.level * shape.steps

    def speed(self, shape: DraftShape, requests: int) -> float:
        """Tokens of a request a millisecond."""
        choices, parents = self.tree(shape)
        reached = [1.0]
        for choice, parent in zip(choices, parents, strict=True):
            reached.append(reached[parent] * self.likely[choice])
        return sum(reached) / self.ms(shape, requests)

    def tree(self, shape: DraftShape) -> tuple[list[int], list[int]]:
        """Which of the likeliest tokens each draft is, and its parent."""
        return grown(self.likely, shape)

    def accepted(self, shape: DraftShape, chance: random.Random) -> list[int]:
        choices, parents = self.tree(shape)
        path, last = list[int](), 0
        while last is not None:
            (choice,) = chance.choices(range(len(self.likely) + 1), (*self.likely, self.missed))
            found = (
                row
                for row, parent in enumerate(parents, 1)
                if parent == last and choices[row - 1] == choice
            )
            if (row := next(found, None)) is None:
                break
            path.append(row)
            last = row
        return path

    @property
    def missed(self) -> float:
        return max(0.0, 1 - sum(self.likely))


@cache
def grown(likely: tuple[float, ...], shape: DraftShape) -> tuple[list[int], list[int]]:
    branches, count = Branches(1, shape.branches), 1
    for _ in range(shape.steps):
        ids = np.tile(np.arange(shape.branches), (count, 1))
        more = np.log(np.maximum(likely[: shape.branches], 1e-9))
        branches.grow(ids, np.tile(more, (count, 1)))
        count = shape.branches
    return branches.best(shape.drafts)[0]


def run(
    machine: Machine, controller: DraftController, requests: int, steps: int, seed: int = 0
) -> tuple[float, list[DraftShape]]:
    """Tokens of a request a millisecond, and the shapes of the steps."""
    chance, spent, chosen, expected = random.Random(seed), 0.0, list[DraftShape](), 0.0
    for _ in range(steps):
        shape = controller.shape
        ms = machine.ms(shape, requests)
        if shape.drafts:
            paths = [machine.accepted(shape, chance) for _ in range(requests)]
            if shape.is_tree:
                parents = machine.tree(shape)[1]
                seen = [VerifiedDraft(parents, path) for path in paths]
                controller.observe_trees(seen, requests, shape)
            else:
                counts = [sum(n < len(path) for path in paths) for n in range(shape.drafts)]
                controller.observe_chains(counts, requests, shape)
        controller.observe_step(requests, ms * (1 + 0.02 * chance.gauss(0, 1)), shape)
        expected += machine.speed(shape, requests) * ms
        spent += ms
        chosen.append(shape)
    return expected / spent, chosen


def controller_of(speculation: Speculation = TREES) -> DraftController:
    shapes = draft_shapes(speculation, True)
    return DraftController(shapes, True, DraftWork(speculation.makes.on_ranks))


WRONG = (0.0, 0.0, 0.0, 0.0)
CERTAIN = (0.95, 0.02, 0.01, 0.0)
SECOND = (0.45, 0.3, 0.15, 0.05)
MOSTLY_FIRST = (0.7, 0.15, 0.05, 0.02)


@pytest.mark.parametrize("requests", [1, 16])
@pytest.mark.parametrize(
    ("likely", "row", "level", "kind"),
    [
        (WRONG, 0.02, 0.1, "none"),
        (CERTAIN, 0.05, 0.1, "chain"),
        (SECOND, 0.002, 0.1, "tree"),
        (MOSTLY_FIRST, 0.002, 0.1, "tree"),
        (SECOND, 0.5, 2.0, "none"),
    ],
)
def test_the_best_shape_is_found(
    likely: tuple[float, ...], row: float, level: float, kind: str, requests: int
) -> None:
    machine, controller = Machine(likely, row, level), controller_of()
    speeds = {shape: machine.speed(shape, requests) for shape in controller.shapes}
    best = max(speeds, key=speeds.__getitem__)
    assert kind == ("tree" if best.is_tree else "chain" if best.drafts else "none")
    run(machine, controller, requests, 300)
    speed, chosen = run(machine, controller, requests, 600, seed=1)
    assert speed > 0.97 * speeds[best] and speed > 0.985 / machine.plain
    assert sum(machine.speed(shape, requests) > 0.97 * speeds[best] for shape in chosen) > 550


def test_drafts_that_change_change_the_shape() -> None:
    """Right tokens, then wrong ones, then such whose second choice is often right."""
    machine, controller = Machine(CERTAIN, 0.005, 0.1), controller_of()
    for likely, steps, least in ((CERTAIN, 500, 0.95), (WRONG, 200, 0.9), (SECOND, 1200, 0.95)):
        machine.likely = likely
        _, chosen = run(machine, controller, 4, steps)
        speeds = {shape: machine.speed(shape, 4) for shape in controller.shapes}
        best = max(speeds, key=speeds.__getitem__)
        assert bool(best.drafts) == (likely != WRONG) and best.is_tree >= (likely == SECOND)
        near = [speeds[shape] > 0.95 * speeds[best] for shape in chosen[-100:]]
        assert sum(near) >= 100 * least, (likely, best)


def test_a_tree_tells_of_chains_and_of_smaller_trees() -> None:
    """What steps with the largest tree say of all shapes is what these would have given."""
    shapes, largest = draft_shapes(TREES, True), draft_shapes(TREES, True)[-1]
    machine, chance, shares = Machine(SECOND, 0, 0), random.Random(1), DraftShares(shapes)
    for _ in range(300):
        parents = machine.tree(largest)[1]
        drafts = [VerifiedDraft(parents, machine.accepted(largest, chance)) for _ in range(8)]
        shares.observe_trees(drafts, 8, largest)
    found = expected(shares, shapes)
    want = [machine.speed(shape, 1) * machine.ms(shape, 1) for shape in shapes]
    seen = [shape for shape in shapes if not shape.drafts or is_part(machine, shape, largest)]
    assert len(seen) >= 10 and {shape.is_tree for shape in seen} == {True, False}
    for shape, one, other in zip(shapes, found, want, strict=True):
        if shape in seen:
            assert one == pytest.approx(other, rel=0.06), shape


def expected(shares: DraftShares, shapes: Sequence[DraftShape]) -> list[float]:
    return [one.expected for one in shares.tokens(shapes)]


def is_part(machine: Machine, shape: DraftShape, largest: DraftShape) -> bool:
    """Whether the tree has all tokens of the shape's."""
    cut, _ = shape.cut(*machine.tree(largest))
    return len(cut) == shape.drafts


def test_rows_of_trees_have_shares_of_their_own() -> None:
    """Of three branches one is accepted: the last one most often. Every fourth request has none."""
    shape, chance = DraftShape(3, 1, 3), random.Random(1)
    shares, places = DraftShares([NO_DRAFTS, DraftShape(1, 1, 1), shape]), (0.1, 0.0, 0.6)
    for _ in range(2000):
        place = chance.choices((1, 2, 3, 0), weights=(*places, 0.3))[0]
        draft = VerifiedDraft([0, 0, 0], [place] if place else [])
        shares.observe_trees([draft], 1, shape)
    rows = [DraftShape(3, 1, n) for n in range(4)]
    assert expected(shares, rows) == pytest.approx([1.0, 1.1, 1.1, 1.7], abs=0.06)
    for _ in range(2000):
        place = chance.choices((1, 2, 3, 0), weights=(*places, 0.3))[0]
        draft = VerifiedDraft([0, 0, 0], [place] if place else [])
        shares.observe_trees([draft] if chance.random() < 0.75 else [], 1, shape)
    assert expected(shares, rows)[-1] == pytest.approx(1 + 0.75 * 0.7, abs=0.06)


def test_work_lies_between_none_and_the_largest() -> None:
    shapes = draft_shapes(TREES, True)
    for work in (DraftWork(), DraftWork(True), DraftWork(True, 128, 8)):
        for requests in (1, 8, 256):
            found = {shape: work.share(shape, shapes[-1], requests) for shape in shapes}
            assert found[NO_DRAFTS] == 0 and found[shapes[-1]] == pytest.approx(1)
            for one in shapes:
                for other in shapes:
                    assert found[one] <= found[other] or not one.is_within(other)
    # 8 of 128 experts a token: 1 - (15/16)^n are read of n tokens.
    read = [1 - (15 / 16) ** n for n in (1, 4, 15)]
    assert DraftWork(False, 128, 8).share(DraftShape(1, 3, 3), shapes[-1], 1) == pytest.approx(
        (3 / 14 + (read[1] - read[0]) / (read[2] - read[0])) / 2
    )
