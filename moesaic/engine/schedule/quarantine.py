"""Which request breaks a step: those of a step that failed are tried again, fewer at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moesaic.core.request import Request


class Planned(NamedTuple):
    """An item of a step under way: the request's tokens up to `stop`, and whether the step samples
    the next one. The rest is how the request was before, so that the step can be taken back."""

    request: Request
    stop: int
    samples: bool
    first: int
    num_scored: int
    retractions: int

    @classmethod
    def begin(cls, request: Request, length: int) -> Planned:
        """What the step will have done is counted as done: steps are carried out in order."""
        first = request.num_computed
        stop = first + length
        samples = stop == len(request.token_ids) + request.pending
        planned = cls(request, stop, samples, first, request.num_scored, request.retractions)
        if request.return_logprob:
            scored = min(stop, request.prompt_len - 1) - request.logprob_start
            request.num_scored = max(request.num_scored, scored)
        request.num_computed = stop
        request.pending += samples
        return planned

    def undo(self) -> None:
        """As if it had not begun; later steps of the request have been taken back before. Pages
        stay, unless the request has lost them meanwhile."""
        request = self.request
        request.pending -= self.samples
        request.num_scored = self.num_scored
        if request.retractions == self.retractions:
            request.num_computed = self.first


@dataclass(frozen=True, slots=True)
class InflightPlan:
    """A step that was planned and whose results have not come. `clear`: pages that it zeroes;
    `ended`: requests that it lets the runner forget."""

    items: list[Planned]
    clear: list[int]
    ended: list[int]


class Quarantine:
    """Sets of requests, each of which is to be tried in a step without anybody else.

    A set that gets through a step is cleared. One that fails is cut in two, until a set of one
    fails: that request is the guilty one. So n suspects cost at most 2 n - 1 steps, and one guilty
    request among them about 2 log2 n.
    """

    def __init__(self) -> None:
        self._sets: list[list[Request]] = []

    def __len__(self) -> int:
        """Sets that are still to be tried."""
        return len(self._sets)

    def accuse(self, suspects: Sequence[Request], *, alone: bool) -> Request | None:
        """These took part in a step that failed; the guilty one, if that is clear now. `alone`:
        nobody else took part, of other groups neither."""
        if alone and len(suspects) == 1:
            return suspects[0]
        if alone and suspects:
            self._sets += reversed(_cut(suspects))
        elif suspects:
            self._sets.append(list(suspects))
        return None

    def take(self) -> list[Request]:
        """The set that is to be tried next."""
        return self._sets.pop()

    def put_back(self, suspects: list[Request]) -> None:
        """Those of the set tried last for which the step had no room."""
        if suspects:
            self._sets.append(suspects)

    def clear(self) -> None:
        self._sets.clear()


def _cut(suspects: Sequence[Request]) -> tuple[list[Request], list[Request]]:
    """In two: who has been decoding for a while is less likely to blame than who came just now."""
    by_age = sorted(suspects, key=lambda request: request.arrival)
    decoding = [request for request in by_age if request.is_decoding]
    if 0 < len(decoding) < len(by_age):
        return decoding, [request for request in by_age if not request.is_decoding]
    half = len(by_age) // 2
    return by_age[:half], by_age[half:]
