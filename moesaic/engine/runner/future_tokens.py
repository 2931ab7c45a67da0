"""Tokens that in-flight steps sample: they stay on the device until the host reads them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from moesaic.engine.sampling.sampler import SampleRow
from moesaic.engine.schedule.plan import PlanItem


class SamplingPath(Enum):
    """How a request's tokens are sampled. The device samples every row greedily; a random row's
    token is then replaced by a drawn one, also one whose logits are adjusted first, and a
    host-sampled row's by the host's."""

    GREEDY = "greedy"
    DRAW = "draw"
    ADJUSTED = "adjusted"
    HOST = "host"

    @classmethod
    def of(cls, row: SampleRow) -> SamplingPath:
        """Logprobs and grammars need the host."""
        params = row.params
        if row.return_logprob or params.grammar is not None:
            return cls.HOST
        if params.adjusts:
            return cls.ADJUSTED
        return cls.GREEDY if params.greedy else cls.DRAW


class FutureTokenSlot(NamedTuple):
    number: int
    path: SamplingPath


class FutureTokens:
    """The newest token of each request, in a slot on the device. Only in-flight steps refer to
    slots, so those of two steps suffice: the least recently used slot is reused. The last slot is
    for padding, and for rows whose token no step continues from. T tokens · R rows · S slots."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.padding = FutureTokenSlot(count, SamplingPath.GREEDY)
        self._tokens_S = torch.zeros(count + 1, dtype=torch.int64, device=device)
        self._slots: OrderedDict[int, FutureTokenSlot] = OrderedDict()
        self._free = list(range(count))

    def slot_for(self, item: PlanItem) -> FutureTokenSlot:
        """The slot that a FUTURE_TOKEN of the item is read from and its sampled token written to.
        How many drafts are accepted is only known on the host, so no step may continue from the
        tokens of an item with drafts while it is in flight."""
        if item.num_drafts:
            self.free([item.request_no])
        slot = self._slots.get(item.request_no)
        if slot is None:
            if item.token_ids[0] < 0:
                raise ValueError(
                    f"request {item.request_no} continues from a token that no in-flight step "
                    "samples without drafts"
                )
            if item.sample is None:
                return self.padding
            path = SamplingPath.of(item.sample)
            if item.num_drafts:
                return FutureTokenSlot(self.padding.number, path)
            number = self._free.pop() if self._free else self._slots.popitem(last=False)[1].number
            slot = self._slots[item.request_no] = FutureTokenSlot(number, path)
        self._slots.move_to_end(item.request_no)
        return slot

    def resolve(self, ids_T: Tensor, slots_T: Tensor) -> Tensor:
        """Token ids with each FUTURE_TOKEN replaced by the token in its slot."""
        return torch.where(ids_T < 0, self._tokens_S[slots_T], ids_T)

    def read(self, slots_R: Tensor) -> Tensor:
        return self._tokens_S[slots_R]

    def store(self, slots_R: Tensor, tokens_R: Tensor) -> None:
        self._tokens_S.index_copy_(0, slots_R, tokens_R)

    def free(self, keys: Iterable[int]) -> None:
        self._free += [self._slots.pop(key).number for key in keys if key in self._slots]

    def clear(self) -> None:
        self.free(list(self._slots))
