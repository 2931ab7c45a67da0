"""How many drafts are accepted, by their position: of chains, and of trees of each depth.

The tokens of a tree are in the order of their likelihood. So its first tokens, those of its first
levels, and its first branch are what a smaller tree, a shallower one and a chain would have been: a
step that verifies a tree tells of all these, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple

from moesaic.core.draft_shape import DraftShape
from moesaic.core.draft_tree import Parents, depths, first_path

# Requests and steps whose drafts count fully. Older ones fade.
WINDOW: Final = 1000
# The acceptance that is assumed before any draft was verified, and the number of requests that the
# assumption weighs as much as. A tree's token is assumed to be accepted HOPED times as often as the
# token before it.
HOPED: Final = 0.7
HOPE: Final = 2.0
# Each step that observes something else multiplies a count by this: half of it is left after 400.
FORGETTING: Final = 0.5 ** (1 / 400)
# Acceptance has changed if that of the newest requests is so many standard deviations from the
# mean.
NEWEST: Final = 24
CHANGED: Final = 4.0


@dataclass(slots=True)
class AcceptedShare:
    """The share of requests and steps whose draft at a position was accepted, in a chain if the one
    before it was: of many, and of the newest ones."""

    mean: float = HOPED
    seen: float = 0.0
    newest: float = HOPED
    new: float = 0.0

    def observe(self, share: float, count: int) -> bool:
        """Whether it is no longer what it was: then only the newest ones count."""
        self.seen = min(self.seen + count, max(WINDOW, count))
        self.new = min(self.new + count, max(NEWEST, count))
        self.mean += count / self.seen * (share - self.mean)
        self.newest += count / self.new * (share - self.newest)
        middle = min(max((self.mean + self.newest) / 2, 0.02), 0.98)
        usual = CHANGED * math.sqrt(middle * (1 - middle) / self.new)
        changed = abs(self.mean - self.newest) > usual and self.seen >= 2 * self.new >= 2 * NEWEST
        if changed:
            self.mean, self.seen = self.newest, self.new
        return changed

    def forget(self) -> None:
        """A step has passed without drafts at the position."""
        self.seen, self.new = self.seen * FORGETTING, 0.0

    def expected(self, before: float = HOPED) -> tuple[float, float]:
        """The mean and its variance; `before`: what counts as the mean as long as little was
        seen."""
        weight = self.seen + HOPE
        mean = (self.seen * self.mean + HOPE * before) / weight
        return mean, mean * (1 - mean) / weight


class VerifiedDraft(NamedTuple):
    """A request's part of a step that has run. `accepted`: the rows, from 1 on."""

    parents: Parents
    accepted: Sequence[int]


class Tokens(NamedTuple):
    """The tokens that a request gets from a step."""

    expected: float
    hoped: float


class _Counts:
    """Counts of a step, for each position: the requests that would have had a draft there, and
    those whose draft was accepted."""

    def __init__(self, positions: int) -> None:
        self.accepted, self._until = [0] * positions, [0] * (positions + 1)

    def see(self, positions: int, requests: int = 1) -> None:
        """These requests would have had a draft at each of the first positions."""
        self._until[min(positions, len(self.accepted))] += requests

    @property
    def seen(self) -> list[int]:
        return list(accumulate(self._until[:0:-1]))[::-1]


class DraftShares:
    """The shares of all shapes: of chains one for each position behind the accepted ones before it,
    of trees of each depth one for each row, whatever the others are."""

    def __init__(self, shapes: Sequence[DraftShape]) -> None:
        longest = max((shape.drafts for shape in shapes if not shape.is_tree), default=0)
        self._chain = [AcceptedShare() for _ in range(longest)]
        self._trees: dict[int, list[AcceptedShare]] = {}
        """By the levels of the trees."""
        for shape in shapes:
            if shape.is_tree:
                known = self._trees.setdefault(shape.steps, [])
                known += [AcceptedShare() for _ in range(len(known), shape.drafts)]

    def observe_chains(self, accepted: Sequence[int], requests: int, shape: DraftShape) -> None:
        """How many of the requests of a step had an accepted draft at each position."""
        reached, changed = requests, False
        for share, number in zip(self._chain[: shape.drafts], accepted, strict=False):
            if not reached:
                break
            changed |= share.observe(number / reached, reached)
            reached = number
        if changed:
            self._doubt_trees(0)

    def observe_trees(
        self, drafts: Sequence[VerifiedDraft], requests: int, shape: DraftShape
    ) -> None:
        """`requests`: of the step; those that are not among the drafts have found none."""
        without = requests - len(drafts)
        changed = _observe(self._chain, self._chain_counts(drafts, without, shape))
        for steps, shares in self._trees.items():
            if steps <= shape.steps:
                counts = _tree_counts(drafts, without, shape, steps, len(shares))
                changed |= _observe(shares, counts)
        if changed:
            self._doubt_trees(shape.steps)

    def _doubt_trees(self, steps: int) -> None:
        """Acceptance has changed: what was seen of trees with more levels may no longer hold."""
        for levels, shares in self._trees.items():
            if levels > steps:
                for share in shares:
                    share.seen = min(share.seen, HOPE)

    def _chain_counts(
        self, drafts: Iterable[VerifiedDraft], without: int, shape: DraftShape
    ) -> _Counts:
        """Of the first branches, as far as they are not cut."""
        counts, most = _Counts(len(self._chain)), len(self._chain)
        counts.see(1, without)
        for parents, accepted in drafts:
            path, number = first_path(parents)[:most], 0
            while number < min(len(path), len(accepted)) and path[number] == accepted[number]:
                counts.accepted[number] += 1
                number += 1
            is_whole = len(parents) < shape.drafts and len(path) < min(shape.steps, most)
            counts.see(min(number + 1, len(path) + is_whole))
        return counts

    def forget(self, shape: DraftShape) -> None:
        """A step has passed with drafts of this shape."""
        for share in self._chain[min(shape.steps, shape.drafts) :]:
            share.forget()
        for steps, shares in self._trees.items():
            is_seen = shape.is_tree and steps <= shape.steps
            for share in shares[shape.drafts if is_seen else 0 :]:
                share.forget()

    def tokens(self, shapes: Iterable[DraftShape], deviations: float = 0.0) -> list[Tokens]:
        """Of a step with each shape; hoped: with acceptance so many deviations above the mean."""
        chain = self._chain_tokens(deviations)
        trees = {steps: self._tree_tokens(steps, deviations) for steps in self._trees}
        return [(trees[shape.steps] if shape.is_tree else chain)[shape.drafts] for shape in shapes]

    def _chain_tokens(self, deviations: float) -> list[Tokens]:
        """By the number of drafts."""
        share = most = expected = hoped = 1.0
        found = [Tokens(expected, hoped)]
        for position in self._chain:
            mean, variance = position.expected()
            share *= mean
            most *= min(1.0, mean + deviations * math.sqrt(variance))
            expected, hoped = expected + share, hoped + most
            found.append(Tokens(expected, hoped))
        return found

    def _tree_tokens(self, steps: int, deviations: float) -> list[Tokens]:
        """The same; no two rows of a level are accepted together."""
        before = self._chain[0].expected()[0] if self._chain else HOPED
        total = variance = 0.0
        found = [Tokens(1.0, 1.0)]
        for row in self._trees[steps]:
            mean, more = row.expected(before)
            before = HOPED * mean
            total, variance = total + mean, variance + more
            hoped = min(steps, total + deviations * math.sqrt(variance))
            found.append(Tokens(1 + total, 1 + hoped))
        return found


def _tree_counts(
    drafts: Iterable[VerifiedDraft], without: int, shape: DraftShape, steps: int, most: int
) -> _Counts:
    """Of the first levels. A tree that is smaller than it might be has no more rows."""
    counts = _Counts(most)
    counts.see(shape.drafts, without)
    for parents, accepted in drafts:
        level_of = depths(parents)
        rows = [row for row, level in enumerate(level_of) if 0 < level <= steps]
        for row in accepted[:steps]:
            if (place := rows.index(row)) < most:
                counts.accepted[place] += 1
        is_whole = len(parents) < shape.drafts
        counts.see(shape.drafts if is_whole else len(rows))
    return counts


def _observe(shares: Sequence[AcceptedShare], counts: _Counts) -> bool:
    """Whether any of them has changed."""
    pairs = zip(shares, counts.seen, counts.accepted, strict=True)
    changed = [share.observe(accepted / seen, seen) for share, seen, accepted in pairs if seen]
    return any(changed)
