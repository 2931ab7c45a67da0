"""How many drafts requests get: as many as give the most tokens a second, or none.

What a step yields is known from the drafts that were accepted, by their position. What it costs is
fitted to the steps that ran: by the power of two that their requests reach, with and without drafts
apart, as a step without drafts overlaps with the host's work and one with drafts needs the newest
tokens first. Both are tried again from time to time, so that a choice can be taken back.

K positions of drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from moesaic.engine.schedule.step_budget import LinearFit, StepWork

# Steps of each kind that run before a choice is made for a number of requests.
TRIED_DRAFTS: Final = 8
TRIED_PLAIN: Final = 4
# What is not chosen is tried again after this many steps, and after twice as many each time that
# the choice stays.
FIRST_RETRY: Final = 128
LAST_RETRY: Final = 2048
# What another choice must give beyond the present one.
MARGIN: Final = 1.02
# How fast acceptance is forgotten, by step.
FORGETTING: Final = 0.05
# Acceptance of drafts before there were any.
HOPED: Final = 0.7


def _fit() -> LinearFit:
    return LinearFit((1.0, 64.0, 65536.0), (8.0, 2.0, 3.0))


@dataclass(slots=True)
class BatchTimes:
    """Steps of about as many requests: their milliseconds, and how many are still to be tried."""

    plain: LinearFit = field(default_factory=_fit)
    drafted: LinearFit = field(default_factory=_fit)
    plain_to_try: int = TRIED_PLAIN
    drafts_to_try: int = TRIED_DRAFTS
    retry_in: int = FIRST_RETRY
    next_retry: int = 2 * FIRST_RETRY


class DraftController:
    """`most`: the drafts that a request may have in a step. If not `adaptive`, it has as many."""

    def __init__(self, most: int, adaptive: bool) -> None:
        self.most, self._adaptive = most, adaptive
        self.num_drafts = most
        """Of each request in the next step that is planned."""
        self._times: dict[int, BatchTimes] = {}
        # Of a request and step: the share with a draft at each position, and with an accepted one.
        self._drafted_K = np.ones(most)
        self._accepted_K = HOPED ** np.arange(1.0, most + 1)

    def observe_drafts(
        self, drafted: Sequence[int], accepted: Sequence[int], requests: int
    ) -> None:
        """How many of the requests of a step had a draft at each position, and an accepted one."""
        _learn(self._drafted_K, drafted[: self.most], requests)
        _learn(self._accepted_K, accepted[: self.most], requests)

    def observe_step(self, requests: int, work: StepWork, ms: float, drafting: bool) -> None:
        """A step without prompts, planned for drafts or not. Sets `num_drafts`."""
        if not self._adaptive or not requests:
            return
        times = self._times.setdefault(requests.bit_length(), BatchTimes())
        rows, held = work.decode_tokens, work.held
        fit = times.drafted if drafting else times.plain
        fit.observe((1, rows, held), ms)
        if drafting == (self.num_drafts > 0):  # else the last choice is not carried out yet
            self.num_drafts = self._choose(times, requests, held / rows)

    def _choose(self, times: BatchTimes, requests: int, held: float) -> int:
        """`held`: tokens that a row attends to."""
        if times.drafts_to_try:
            times.drafts_to_try -= 1
            return self.most
        if times.plain_to_try:
            times.plain_to_try -= 1
            return 0
        speeds = self._speeds(times, requests, held)
        best = int(np.argmax(speeds))
        if speeds[best] < MARGIN * speeds[self.num_drafts]:
            best = self.num_drafts
        self._schedule_retry(times, best)
        return best

    def _speeds(self, times: BatchTimes, requests: int, held: float) -> NDArray[np.float64]:
        """Tokens of a request a millisecond, by the number of its drafts."""
        tokens = 1 + np.concatenate(([0.0], np.cumsum(self._accepted_K)))
        rows = requests * (1 + np.concatenate(([0.0], np.cumsum(self._drafted_K))))
        once, row, attended = times.drafted.coefficients
        ms = once + rows * (row + attended * held)
        ms[0] = times.plain.predict((1, requests, requests * held))
        return tokens / np.maximum(ms, 1e-3)

    def _schedule_retry(self, times: BatchTimes, best: int) -> None:
        times.retry_in -= 1
        if times.retry_in <= 0:
            times.drafts_to_try = TRIED_DRAFTS if best < self.most else 0
            times.plain_to_try = TRIED_PLAIN if best else 0
            times.retry_in, times.next_retry = (
                times.next_retry,
                min(LAST_RETRY, 2 * times.next_retry),
            )


def _learn(mean_K: NDArray[np.float64], counts: Sequence[int], requests: int) -> None:
    mean_K += FORGETTING * (np.array(counts) / max(1, requests) - mean_K)
