"""Which drafts requests get: chains or trees of the shape that gives the most tokens a second, or
none.

What drafts yield is known from those that were accepted (draft_shares.py). What a step costs is
measured, by the number of its requests and the shape that each one's drafts may have: a step
without drafts overlaps with the host's work, and one with drafts needs the newest tokens first.
What was not measured lies between what was, or is in proportion to steps of about as many requests.

Another shape is tried while it may be better than the best one, as far as its trials are unlikely
to cost more than a small share of all tokens. What is not observed is slowly forgotten, so that
every choice is taken back some day if it is wrong.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from moesaic.core.draft_shape import DraftShape
from moesaic.engine.speculate.draft_shares import FORGETTING, DraftShares, Tokens, VerifiedDraft

# The share of the time that trials may lose, and the most that is saved up for them, in steps.
TRIAL_SHARE: Final = 0.004
MOST_SAVED: Final = 12.0
# What another choice must give beyond the present one.
MARGIN: Final = 1.01
# Steps whose milliseconds count fully. Older ones fade.
TIMED: Final = 32
# How far acceptance may be above what was seen, in standard deviations, and milliseconds below
# what is expected of them: before any was measured, and of one step that was.
DEVIATIONS: Final = 1.5
UNMEASURED: Final = 0.08
UNSURE: Final = 0.05
# Requests of a step with trees whose drafts tell how many are accepted.
LOOKED: Final = 16
# A step that takes so many times as long as others waited for something else.
UNUSUAL: Final = 2.0
# Steps of a shape that are enough to know what it costs.
ENOUGH: Final = 3
# Experts that the largest shape reads beyond those of a step without drafts, as a share of all:
# with fewer, how many do not tell what a shape costs.
FEW_READ: Final = 0.05


@dataclass(slots=True)
class MeanTime:
    """Milliseconds of steps: the median of the first ones, then the mean, without a single one
    that takes much longer."""

    ms: float = 0.0
    count: float = 0
    """Of steps, as far as they are not forgotten."""
    _first: list[float] = field(default_factory=list)
    _was_unusual: bool = False

    @property
    def is_known(self) -> bool:
        return len(self._first) == ENOUGH

    def observe(self, ms: float) -> None:
        if self.is_known and ms > UNUSUAL * self.ms and not self._was_unusual:
            self._was_unusual = True
            return
        self._was_unusual = False
        self.count = min(TIMED, self.count + 1)
        if self.is_known:
            self.ms += (ms - self.ms) / self.count
        else:
            self._first.append(ms)
            self.ms = sorted(self._first)[(len(self._first) - 1) // 2]

    def forget(self) -> None:
        """A step has passed with another number of drafts."""
        self.count = max(ENOUGH, self.count * FORGETTING)

    @property
    def least(self) -> float:
        """The milliseconds, as far as they may have been measured too high."""
        return self.ms * (1 - UNSURE / math.sqrt(self.count))


@dataclass(slots=True)
class BatchTimes:
    """Steps of about as many requests, by the places of their shapes."""

    times: dict[int, MeanTime] = field(default_factory=dict)
    best: int | None = None
    """The shape that was chosen last, but for trials."""

    def is_known(self, shape: int) -> bool:
        return shape in self.times and self.times[shape].is_known


@dataclass(frozen=True, slots=True)
class DraftWork:
    """What steps with drafts compute beyond those without: `has_passes`: a draft model runs once
    for each level."""

    has_passes: bool = False
    num_experts: int = 0
    top_k: int = 0

    def share(self, shape: DraftShape, most: DraftShape, requests: float) -> float:
        """The work of a step with this shape, as a share of that with the largest one: the mean of
        its shares of rows, of experts that rows read, and of passes."""
        parts = [shape.drafts / most.drafts]
        if self.has_passes:
            parts.append(shape.steps / most.steps)
        if self.top_k < self.num_experts:
            without, own, largest = (
                self._read(requests * (1 + drafts)) for drafts in (0, shape.drafts, most.drafts)
            )
            if largest - without > FEW_READ:
                parts.append((own - without) / (largest - without))
        return sum(parts) / len(parts)

    def _read(self, rows: float) -> float:
        """The share of experts that a layer reads, if all are equally likely."""
        return 1.0 - (1.0 - self.top_k / self.num_experts) ** rows


class DraftController:
    """Chooses one of the `shapes`, of which the first one has no drafts, and the last one is the
    largest. If not `adaptive`, it stays with that."""

    def __init__(
        self, shapes: Sequence[DraftShape], adaptive: bool, work: DraftWork | None = None
    ) -> None:
        self.shapes, self._adaptive = shapes, adaptive
        self.largest = self.chosen = len(shapes) - 1
        """`chosen`: the place of the shape of the next step that is planned."""
        self._places = {shape: place for place, shape in enumerate(shapes)}
        self._shares, self._work = DraftShares(shapes), work or DraftWork()
        self._work_shares: dict[int, list[float]] = {}
        """The work shares of all shapes, by the kind of batch."""
        self._batches: dict[int, BatchTimes] = {}
        self._turn = 0
        self._saved = 0.0
        """Milliseconds that trials may still lose."""

    @property
    def shape(self) -> DraftShape:
        return self.shapes[self.chosen]

    def observe_chains(self, accepted: Sequence[int], requests: int, shape: DraftShape) -> None:
        """How many of the requests of a step had an accepted draft at each position; `shape`: what
        each might have had."""
        self._shares.observe_chains(accepted, requests, shape)

    def observe_trees(
        self, drafts: Sequence[VerifiedDraft], requests: int, shape: DraftShape
    ) -> None:
        """The same, of a step with trees; of many it looks at some."""
        if self._adaptive:
            every = max(1, -(-requests // LOOKED))
            self._turn = (self._turn + 1) % every
            some, number = drafts[self._turn :: every], requests / every
            self._shares.observe_trees(some, max(len(some), round(number)), shape)

    def observe_step(self, requests: int, ms: float, shape: DraftShape) -> None:
        """A step without prompts; `shape`: as above. Chooses the next one."""
        if not self._adaptive or not requests:
            return
        place, kind = self._places[shape], _kind(requests)
        batch = self._batches.setdefault(kind, BatchTimes())
        batch.times.setdefault(place, MeanTime()).observe(ms)
        for other, time in batch.times.items():
            if other != place and time.is_known:
                time.forget()
        self._shares.forget(shape)
        if place == self.chosen:  # else the last choice is not carried out yet
            self.chosen = self._choose(kind, ms)

    def observe_gap(self, requests: int, ms: float) -> None:
        """A step in which a draft model also computed tokens of earlier ones."""
        batch = self._batches.get(_kind(requests), BatchTimes())
        if batch.is_known(0):
            self._saved -= max(0.0, ms - batch.times[0].ms)

    def _choose(self, kind: int, ms: float) -> int:
        batch, known = self._batches[kind], self._known(kind)
        if self.largest not in known:
            return self.largest
        if not batch.is_known(0):
            return 0
        costs = self._costs(kind, known)
        tokens = self._shares.tokens(self.shapes, DEVIATIONS)
        speeds = [one.expected / ms for one, ms in zip(tokens, costs, strict=True)]
        best = max(range(len(speeds)), key=speeds.__getitem__)
        if batch.best is not None and speeds[best] <= MARGIN * speeds[batch.best]:
            best = batch.best
        batch.best = best

        def lost(place: int) -> float:
            return max(0.0, 1 - speeds[place] / speeds[best]) * costs[place]

        now = self.chosen
        self._saved = min(self._saved + TRIAL_SHARE * ms, MOST_SAVED * costs[best]) - lost(now)
        hopes = _hopes(batch, tokens, costs)
        hopes[now] *= MARGIN  # a trial that goes on is not given up for another one
        others = (place for place in range(len(hopes)) if place != best)
        trial = max(others, key=hopes.__getitem__)
        # That of a shape which was not tried just now takes some steps.
        steps = 1 if trial == now else ENOUGH + 1
        if hopes[trial] > speeds[best] and steps * lost(trial) <= max(0.0, self._saved):
            return trial
        return best

    def _known(self, kind: int) -> dict[int, float]:
        """The milliseconds of steps of these requests by shape, as far as they were measured; the
        others in proportion to steps of up to twice or half as many requests."""
        own = self._batches[kind]
        found = {n: one.ms for n, one in own.times.items() if own.is_known(n)}
        if not found or len(found) == len(self.shapes):
            return found
        for near in (kind - 1, kind + 1, kind - 2, kind + 2):
            if (other := self._batches.get(near)) is None:
                continue
            times = {n: one.ms for n, one in other.times.items() if other.is_known(n)}
            if shared := [found[n] / times[n] for n in found if n in times]:
                ratio = sum(shared) / len(shared)
                found |= {n: ratio * ms for n, ms in times.items() if n not in found}
        return found

    def _costs(self, kind: int, known: Mapping[int, float]) -> list[float]:
        """The milliseconds of all shapes. One that was not measured is between those with less and
        with more work."""
        work = self._work_shares.get(kind)
        if work is None:
            requests, largest = 2 ** (kind / 2), self.shapes[-1]
            work = [self._work.share(shape, largest, requests) for shape in self.shapes]
            self._work_shares[kind] = work
        points = sorted((work[place], ms) for place, ms in known.items())
        return [
            known[place] if place in known else _between(points, share)
            for place, share in enumerate(work)
        ]


def _kind(requests: int) -> int:
    """Numbers of requests that cost alike: half powers of two."""
    return round(2 * math.log2(max(1, requests)))


def _hopes(batch: BatchTimes, tokens: Sequence[Tokens], costs: Sequence[float]) -> list[float]:
    """Tokens a millisecond that each shape may give, by what is known."""
    found = list[float]()
    for place, (one, ms) in enumerate(zip(tokens, costs, strict=True)):
        is_known = batch.is_known(place)
        least = batch.times[place].least if is_known else ms * (1 - UNMEASURED)
        found.append(one.hoped / least)
    return found


def _between(points: Sequence[tuple[float, float]], share: float) -> float:
    """The milliseconds at a share of the work, between the nearest points, which are in order."""
    place = bisect_left(points, (share, 0.0))
    (below, least), (above, most) = points[max(0, place - 1)], points[min(place, len(points) - 1)]
    if above <= below:
        return most
    return least + (most - least) * (share - below) / (above - below)
