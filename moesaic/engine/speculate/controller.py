"""How many drafts requests get: as many as give the most tokens a second, or none.

What drafts yield is known from those that were accepted, by their position. What a step costs is
measured, by the number of its requests and of drafts that each may have: a step without drafts
overlaps with the host's work, and one with drafts needs the newest tokens first. What was not
measured lies between what was, or is in proportion to steps of about as many requests.

Another number is tried while it may be better than the best one, as far as its trials are unlikely
to cost more than a small share of all tokens. What is not observed is slowly forgotten, so that
every choice is taken back some day if it is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

# The share of the time that trials may lose, and the most that is saved up for them, in steps.
TRIAL_SHARE: Final = 0.004
MOST_SAVED: Final = 12.0
# What another choice must give beyond the present one.
MARGIN: Final = 1.01
# Requests and steps whose drafts count fully; steps whose milliseconds do. Older ones fade.
WINDOW: Final = 1000
TIMED: Final = 32
# Acceptance of a draft before there were any, which counts as so many requests.
HOPED: Final = 0.7
HOPE: Final = 2.0
# What is left of what was seen, of drafts at a position and of steps with a number of drafts,
# behind each step with others: half after 400.
FORGETTING: Final = 0.5 ** (1 / 400)
# So many newest requests tell that acceptance has changed, beyond so many standard deviations.
NEWEST: Final = 24
CHANGED: Final = 4.0
# How far acceptance may be above what was seen, in standard deviations, and milliseconds below
# what is expected of them: before any was measured, and of one step that was.
DEVIATIONS: Final = 1.5
UNMEASURED: Final = 0.08
UNSURE: Final = 0.05
# A step that takes so many times as long as others waited for something else.
UNUSUAL: Final = 2.0
# Steps of a number that are enough to know what it costs.
ENOUGH: Final = 3
# Numbers of drafts that are chosen from, and the most.
CHOICES: Final = (0, 1, 2, 3, 4, 6, 8)


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
class AcceptedShare:
    """The share of requests and steps whose draft at a position was accepted, in a chain if the one
    before it was: of many, and of the newest ones."""

    mean: float = HOPED
    seen: float = 0.0
    newest: float = HOPED
    new: float = 0.0

    def observe(self, share: float, count: int) -> None:
        self.seen = min(self.seen + count, max(WINDOW, count))
        self.new = min(self.new + count, max(NEWEST, count))
        self.mean += count / self.seen * (share - self.mean)
        self.newest += count / self.new * (share - self.newest)
        middle = min(max((self.mean + self.newest) / 2, 0.02), 0.98)
        usual = CHANGED * math.sqrt(middle * (1 - middle) / self.new)
        if abs(self.mean - self.newest) > usual and self.seen >= 2 * self.new >= 2 * NEWEST:
            self.mean, self.seen = self.newest, self.new

    def forget(self) -> None:
        """A step has passed without drafts at the position."""
        self.seen, self.new = self.seen * FORGETTING, 0.0

    def hoped(self, deviations: float) -> float:
        """So much above the mean."""
        weight = self.seen + HOPE
        mean = (self.seen * self.mean + HOPE * HOPED) / weight
        return min(1.0, mean + deviations * math.sqrt(mean * (1 - mean) / weight))


@dataclass(slots=True)
class BatchTimes:
    """Steps of about as many requests, by their drafts."""

    times: dict[int, MeanTime] = field(default_factory=dict)
    best: int | None = None
    """The number that was chosen last, but for trials."""

    def is_known(self, number: int) -> bool:
        return number in self.times and self.times[number].is_known


class DraftController:
    """`most`: the drafts that a request may have in a step. If not `adaptive`, it has as many.
    `trees`: a draft need not be behind the one before it: their positions are numbers of rows, and
    each has a share of its own."""

    def __init__(self, most: int, adaptive: bool, trees: bool = False) -> None:
        self.most, self._adaptive, self._trees = most, adaptive, trees
        self.num_drafts = most
        """Of each request in the next step that is planned."""
        self._choices = sorted({*(number for number in CHOICES if number < most), most})
        self._batches: dict[int, BatchTimes] = {}
        self._shares = [AcceptedShare() for _ in range(most)]
        """By position."""
        self._saved = 0.0
        """Milliseconds that trials may still lose."""

    def observe_drafts(self, accepted: Sequence[int], requests: int, allowed: int) -> None:
        """How many of the requests of a step had an accepted draft at each position, if each was
        `allowed` so many."""
        reached = requests
        for share, number in zip(self._shares[:allowed], accepted, strict=False):
            if not reached:
                break
            share.observe(number / reached, reached)
            reached = requests if self._trees else number

    def observe_step(self, requests: int, ms: float, allowed: int) -> None:
        """A step without prompts; `allowed`: as above. Sets `num_drafts`."""
        if not self._adaptive or not requests:
            return
        kind = _kind(requests)
        batch = self._batches.setdefault(kind, BatchTimes())
        batch.times.setdefault(allowed, MeanTime()).observe(ms)
        for number, time in batch.times.items():
            if number != allowed and time.is_known:
                time.forget()
        for share in self._shares[allowed:]:
            share.forget()
        if allowed == self.num_drafts:  # else the last choice is not carried out yet
            self.num_drafts = self._choose(kind, ms)

    def observe_gap(self, requests: int, ms: float) -> None:
        """A step in which a draft model also computed tokens of earlier ones."""
        batch = self._batches.get(_kind(requests), BatchTimes())
        if batch.is_known(0):
            self._saved -= max(0.0, ms - batch.times[0].ms)

    def _choose(self, kind: int, ms: float) -> int:
        batch, known = self._batches[kind], self._known(kind)
        if self.most not in known:
            return self.most
        if not batch.is_known(0):
            return 0
        costs = {number: _between(known, number) for number in self._choices}
        gains = self._gains()
        speeds = {number: gains[number] / costs[number] for number in self._choices}
        best = max(speeds, key=speeds.__getitem__)
        if batch.best is not None and speeds[best] <= MARGIN * speeds[batch.best]:
            best = batch.best
        batch.best = best

        def lost(number: int) -> float:
            return max(0.0, 1 - speeds[number] / speeds[best]) * costs[number]

        now = self.num_drafts
        self._saved = min(self._saved + TRIAL_SHARE * ms, MOST_SAVED * costs[best]) - lost(now)
        hopes = self._hopes(batch, costs)
        hopes[now] *= MARGIN  # a trial that goes on is not given up for another one
        trial = max((number for number in hopes if number != best), key=hopes.__getitem__)
        # That of a number which was not tried just now takes some steps.
        steps = 1 if trial == now else ENOUGH + 1
        if hopes[trial] > speeds[best] and steps * lost(trial) <= max(0.0, self._saved):
            return trial
        return best

    def _gains(self, deviations: float = 0.0) -> list[float]:
        """The tokens of a step with each number of drafts, so much above the mean."""
        share, gains = 1.0, [1.0]
        for position in self._shares:
            share = position.hoped(deviations) * (1.0 if self._trees else share)
            gains.append(gains[-1] + share)
        return gains

    def _hopes(self, batch: BatchTimes, costs: Mapping[int, float]) -> dict[int, float]:
        """Tokens a millisecond that each number may give, by what is known."""
        gains, found = self._gains(DEVIATIONS), dict[int, float]()
        for number, ms in costs.items():
            is_known = batch.is_known(number)
            least = batch.times[number].least if is_known else ms * (1 - UNMEASURED)
            found[number] = gains[number] / least
        return found

    def _known(self, kind: int) -> dict[int, float]:
        """The milliseconds of steps of these requests by drafts, as far as they were measured; the
        others in proportion to steps of up to twice or half as many requests."""
        own = self._batches[kind]
        found = {n: one.ms for n, one in own.times.items() if own.is_known(n)}
        if not found or len(found) == len(self._choices):
            return found
        for near in (kind - 1, kind + 1, kind - 2, kind + 2):
            if (other := self._batches.get(near)) is None:
                continue
            times = {n: one.ms for n, one in other.times.items() if other.is_known(n)}
            if shared := [found[n] / times[n] for n in found if n in times]:
                ratio = sum(shared) / len(shared)
                found |= {n: ratio * ms for n, ms in times.items() if n not in found}
        return found


def _kind(requests: int) -> int:
    """Numbers of requests that cost alike: half powers of two."""
    return round(2 * math.log2(max(1, requests)))


def _between(known: Mapping[int, float], number: int) -> float:
    """The milliseconds of a number that lies between others."""
    if number in known:
        return known[number]
    below = max(n for n in known if n < number)
    above = min(n for n in known if n > number)
    return known[below] + (known[above] - known[below]) * (number - below) / (above - below)
