"""How many drafts requests get: as many as give the most tokens a second, or none.

What drafts yield is known from those that were accepted, by their position. What a step costs is
measured, by the number of its requests and of drafts that each may have: a step without drafts
overlaps with the host's work, and one with drafts needs the newest tokens first. What is not chosen
is tried again from time to time, as rarely as it is slow, so that a choice can be taken back.

K positions of drafts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

# Steps in which none is tried; and all drafts, which is at least so many steps and requests.
TRIED_PLAIN: Final = 4
TRIED_DRAFTS: Final = 8
TRIED_REQUESTS: Final = 32
# Between two tries are at least as many steps, and so many that a try costs at most this share.
BETWEEN_TRIES: Final = 100
TRY_SHARE: Final = 0.008
# What another choice must give beyond the present one.
MARGIN: Final = 1.02
# Requests and steps whose drafts count fully; steps whose milliseconds do. Older ones fade.
WINDOW: Final = 200
TIMED: Final = 16
# Acceptance of a draft before there were any, which counts as so many requests.
HOPED: Final = 0.7
HOPE: Final = 2
# What was known before a try counts as no more requests.
KNOWN: Final = 16
# Numbers of drafts that are chosen from, and the most.
CHOICES: Final = (0, 1, 2, 3, 4, 6, 8)


@dataclass(slots=True)
class MeanTime:
    """Milliseconds of steps; one that took much longer waited for something else."""

    ms: float = 0.0
    count: int = 0

    def observe(self, ms: float) -> None:
        self.count = min(TIMED, self.count + 1)
        if self.count > 2:
            ms = min(ms, 2 * self.ms)
        self.ms += (ms - self.ms) / self.count


@dataclass(slots=True)
class BatchTimes:
    """Steps of about as many requests, by their drafts, and what is tried next."""

    times: dict[int, MeanTime] = field(default_factory=dict)
    trial: int = 0
    """The drafts that are tried, in the next `left` steps."""
    left: int = 0
    until_try: int = 0
    num_tries: int = 0

    def ms(self, choices: Sequence[int]) -> NDArray[np.float64]:
        """Of steps with each number of drafts; in between where one was not measured."""
        known = sorted(number for number, time in self.times.items() if time.count > 1)
        known = known or sorted(self.times)
        return np.interp(choices, known, [self.times[number].ms for number in known])


class DraftController:
    """`most`: the drafts that a request may have in a step. If not `adaptive`, it has as many."""

    def __init__(self, most: int, adaptive: bool) -> None:
        self.most, self._adaptive = most, adaptive
        self.num_drafts = most
        """Of each request in the next step that is planned."""
        self._choices = sorted({*(number for number in CHOICES if number < most), most})
        self._batches: dict[int, BatchTimes] = {}
        # The share of requests and steps with an accepted draft at each position.
        self._accepted_K = HOPED ** np.arange(1.0, most + 1)
        self._seen_K = np.full(most, float(HOPE))

    def observe_drafts(self, accepted: Sequence[int], requests: int, allowed: int) -> None:
        """How many of the requests of a step had an accepted draft at each position, if each was
        `allowed` so many."""
        if not requests:
            return
        some = min(allowed, self.most)
        seen_K, mean_K = self._seen_K[:some], self._accepted_K[:some]
        np.minimum(seen_K + requests, max(WINDOW, requests), out=seen_K)
        mean_K += requests / seen_K * (np.array(accepted[:some]) / requests - mean_K)

    def observe_step(self, requests: int, ms: float, allowed: int) -> None:
        """A step without prompts; `allowed`: as above. Sets `num_drafts`."""
        if not self._adaptive or not requests:
            return
        batch = self._batches.setdefault(round(2 * math.log2(requests)), BatchTimes())
        batch.times.setdefault(allowed, MeanTime()).observe(ms)
        if allowed == self.num_drafts:  # else the last choice is not carried out yet
            tried = {0: TRIED_PLAIN, self.most: max(TRIED_DRAFTS, TRIED_REQUESTS // requests)}
            self.num_drafts = self._choose(batch, tried)

    def _choose(self, batch: BatchTimes, tried: Mapping[int, int]) -> int:
        """`tried`: in how many steps, by the number of drafts."""
        if batch.left:
            batch.left -= 1
            return batch.trial
        for number, steps in tried.items():
            if number not in batch.times:
                batch.until_try = BETWEEN_TRIES
                return self._try(batch, number, steps)
        ms = batch.ms(self._choices)
        gains = np.concatenate(([1.0], 1 + np.cumsum(self._accepted_K)))[self._choices]
        speeds = gains / ms
        best = int(np.argmax(speeds))
        if self.num_drafts in self._choices:
            now = self._choices.index(self.num_drafts)
            best = best if speeds[best] > MARGIN * speeds[now] else now
        batch.until_try -= 1
        if batch.until_try < 0:
            number = self._another(batch, self._choices[best])
            place = self._choices.index(number)
            lost = tried[number] * ms[place] / ms[best] * (1 - speeds[place] / speeds[best])
            batch.until_try = max(BETWEEN_TRIES, int(lost / TRY_SHARE))
            return self._try(batch, number, tried[number])
        return self._choices[best]

    def _another(self, batch: BatchTimes, chosen: int) -> int:
        """All drafts and none, in turns, unless one of them is chosen."""
        batch.num_tries += 1
        number = self.most if batch.num_tries % 2 else 0
        return number if number != chosen else self.most - number

    def _try(self, batch: BatchTimes, number: int, steps: int) -> int:
        """What is found in a try counts more than what was known before it."""
        batch.trial, batch.left = number, steps - 1
        if number:
            np.minimum(self._seen_K, KNOWN, out=self._seen_K)
        return number
