"""Requests whose newest token the device knows, and how the tokens of each are sampled."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from moesaic.engine.sampling.sampler import SampleRow
from moesaic.engine.schedule.plan import PlanItem


class SamplingPath(Enum):
    """How the tokens of a request are sampled: all rows are sampled greedily on the device, and for
    some a token is drawn instead, on the device or by the host."""

    GREEDY = "greedy"
    DRAW = "draw"
    HOST = "host"

    @classmethod
    def of(cls, row: SampleRow) -> SamplingPath:
        """The host is needed for more than a token, and for scores that only it knows to make."""
        params = row.params
        adjusted = params.penalised or params.logit_bias or params.min_new_tokens
        if row.return_logprob or adjusted or params.grammar is not None:
            return cls.HOST
        return cls.GREEDY if params.greedy else cls.DRAW


class FutureToken(NamedTuple):
    number: int
    way: SamplingPath


class FutureTokens:
    """Small numbers for requests whose newest token the device knows. Only steps under way refer to
    them, so that the seats of two steps are enough: the one unused for longest is given anew. The
    last seat is nobody's: padding goes there, and rows that do not sample."""

    def __init__(self, count: int) -> None:
        self.nobody = FutureToken(count, SamplingPath.GREEDY)
        self._seats: OrderedDict[int, FutureToken] = OrderedDict()
        self._free = list(range(count))

    def take(self, item: PlanItem) -> FutureToken:
        """Where the token comes from that an item does not know, and where the sampled one goes."""
        seat = self._seats.get(item.request_no)
        if seat is None:
            if item.token_ids[0] < 0:
                raise ValueError(
                    f"request {item.request_no} waits for a token that no step under way samples"
                )
            if item.sample is None:
                return self.nobody
            number = self._free.pop() if self._free else self._seats.popitem(last=False)[1].number
            seat = self._seats[item.request_no] = FutureToken(number, SamplingPath.of(item.sample))
        self._seats.move_to_end(item.request_no)
        return seat

    def free(self, keys: Iterable[int]) -> None:
        self._free += [self._seats.pop(key).number for key in keys if key in self._seats]

    def clear(self) -> None:
        self.free(list(self._seats))
