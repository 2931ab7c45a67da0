"""How many drafts requests get: as many as give the most tokens a second, or none.

What drafts yield is known from those that were accepted, by their position. What a step costs is
measured, by the number of its requests and of drafts that each may have: a step without drafts
overlaps with the host's work, and one with drafts needs the newest tokens first. What is not chosen
is tried again from time to time, as rarely as it is slow, so that a choice can be taken back.

K positions of drafts · N numbers of drafts that are chosen from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

# Steps of a try; where more drafts are tried than are chosen, at least so many steps and requests.
TRIED: Final = 4
TRIED_MORE: Final = 8
TRIED_REQUESTS: Final = 32
# Tries of one number cost at most this share of the tokens, and are at least so many steps apart.
TRY_SHARE: Final = 0.004
BETWEEN_TRIES: Final = 100
# Steps after which a number is tried that was never measured, next to the chosen one.
UNTIL_FIRST: Final = 16
# What another choice must give beyond the present one.
MARGIN: Final = 1.01
# Requests and steps whose drafts count fully; steps whose milliseconds do. Older ones fade.
WINDOW: Final = 200
TIMED: Final = 32
# Acceptance of a draft before there were any, which counts as so many requests.
HOPED: Final = 0.7
HOPE: Final = 2
# What was known of drafts that are tried anew counts as no more requests.
KNOWN: Final = 16
# Numbers of drafts that are chosen from, and the most.
CHOICES: Final = (0, 1, 2, 3, 4, 6, 8)

Floats = NDArray[np.float64]


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
    due: dict[int, int] = field(default_factory=dict)
    """In how many steps each number is tried again."""

    def is_known(self, number: int) -> bool:
        return number in self.times and self.times[number].count > 1

    def ms(self, choices: Sequence[int]) -> Floats:
        """Of steps with each number of drafts; in between where one was not measured."""
        known = sorted(filter(self.is_known, self.times))
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
            self.num_drafts = self._choose(batch, requests)

    def _choose(self, batch: BatchTimes, requests: int) -> int:
        if batch.left:
            batch.left -= 1
            return batch.trial
        for number, steps in ((0, TRIED), (self.most, _steps_of_more(requests))):
            if not batch.is_known(number):
                return self._try(batch, number, steps)
        ms_N = batch.ms(self._choices)
        gains_N = np.concatenate(([1.0], 1 + np.cumsum(self._accepted_K)))[self._choices]
        speeds_N = gains_N / ms_N
        best = int(np.argmax(speeds_N))
        if self.num_drafts in self._choices:
            now = self._choices.index(self.num_drafts)
            best = best if speeds_N[best] > MARGIN * speeds_N[now] else now
        for place in self._others(best):
            number, more = self._choices[place], place > best
            is_known, steps = batch.is_known(number), _steps_of_more(requests) if more else TRIED
            worse = max(0.0, 1 - speeds_N[place] / speeds_N[best])
            lost = (steps + 1) * worse * ms_N[place] / ms_N[best]
            wait = max(BETWEEN_TRIES, int(lost / TRY_SHARE))
            batch.due[number] = batch.due.get(number, wait if is_known else UNTIL_FIRST) - 1
            if batch.due[number] >= 0:
                continue
            batch.due[number] = wait
            if not is_known:  # its acceptance is known well enough
                return self._try(batch, number, TRIED)
            behind_K = self._seen_K[self._choices[best] :]
            np.minimum(behind_K, KNOWN, out=behind_K)
            return self._try(batch, number, steps)
        return self._choices[best]

    def _others(self, best: int) -> Iterator[int]:
        """Places of what is tried beside the best one: its neighbours, none, and all drafts."""
        last = len(self._choices) - 1
        yield from {max(0, best - 1), min(last, best + 1), 0, last} - {best}

    def _try(self, batch: BatchTimes, number: int, steps: int) -> int:
        batch.trial, batch.left = number, steps - 1
        return number


def _steps_of_more(requests: int) -> int:
    return max(TRIED_MORE, TRIED_REQUESTS // requests)
