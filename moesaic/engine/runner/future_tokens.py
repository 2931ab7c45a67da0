"""Tokens that in-flight steps sample: they stay on the device until the host reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moesaic.engine.sampling.gpu_sampler import DrawTable
from moesaic.engine.sampling.sampler import SampleRow
from moesaic.engine.schedule.plan import FUTURE_TOKEN, PlanItem, StepPlan

Ints = npt.NDArray[np.int64]
# No request has this number.
NOBODY = -1


class SamplingPath(IntEnum):
    """How a request's tokens are sampled. The device samples every row greedily; a random row's
    token is then replaced by a drawn one, also one whose logits are adjusted first, and a
    host-sampled row's by the host's."""

    GREEDY = 0
    DRAW = 1
    ADJUSTED = 2
    HOST = 3

    @classmethod
    def of(cls, row: SampleRow) -> SamplingPath:
        """Logprobs and grammars need the host."""
        params = row.params
        if row.return_logprob or params.grammar is not None:
            return cls.HOST
        if params.adjusts:
            return cls.ADJUSTED
        return cls.GREEDY if params.greedy else cls.DRAW


DRAWN: Final = (SamplingPath.DRAW, SamplingPath.ADJUSTED)


@dataclass(frozen=True, slots=True)
class TokenSlots:
    """The slot of each sequence of a step, and the SamplingPath of its rows."""

    numbers: Ints
    paths: Ints

    def choose(self, paths: Sequence[SamplingPath], sequences: Ints) -> Ints:
        """Which of these sequences take one of the paths."""
        wanted = np.zeros(len(SamplingPath), bool)
        wanted[list(paths)] = True
        return np.flatnonzero(wanted[self.paths[sequences]])


class FutureTokens:
    """The newest token of each running request on the device, in the slot that has the number of
    its row in the page table. The last slot is for padding, and for rows whose token no step
    continues from. Steps run in order, so a row's next request overwrites a token after its last
    use. T tokens · R rows · S slots."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.padding = count
        self._tokens_S = torch.zeros(count + 1, dtype=torch.int64, device=device)
        self._owners = np.full(count + 1, NOBODY, np.int64)
        self._paths = np.full(count + 1, SamplingPath.GREEDY, np.int64)
        self.draws = DrawTable(count)

    def slots_for(self, plan: StepPlan) -> TokenSlots:
        """The slots that FUTURE_TOKENs of the plan are read from and its sampled tokens written
        to. How many drafts are accepted is only known on the host, so no step may continue from the
        tokens of an item with drafts while it is in flight."""
        begin, numbers = len(plan.decodes), plan.rows.copy()
        drafted = [n for n, item in enumerate(plan.items, begin) if item.num_drafts]
        self._owners[numbers[drafted]] = NOBODY
        for n in np.flatnonzero(self._owners[numbers] != plan.request_nos).tolist():
            if n < begin:
                number = plan.request_nos[n]
                raise ValueError(f"request {number} decodes, but no earlier step samples it")
            self._take(plan.items[n - begin])
        paths = self._paths[numbers]
        self._owners[numbers[drafted]] = NOBODY
        numbers[drafted] = self.padding
        return TokenSlots(numbers, paths)

    def _take(self, item: PlanItem) -> None:
        """Gives the slot to a request, if it samples its first token."""
        if item.token_ids[0] == FUTURE_TOKEN:
            raise ValueError(
                f"request {item.request_no} continues from a token that no in-flight step "
                "samples without drafts"
            )
        self._owners[item.row], self._paths[item.row] = NOBODY, SamplingPath.GREEDY
        if item.sample is not None:
            self._owners[item.row] = item.request_no
            path = self._paths[item.row] = SamplingPath.of(item.sample)
            if path in DRAWN:
                self.draws.set(item.row, item.sample)

    def owner(self, slot: int) -> int:
        """The request whose token the slot has."""
        return int(self._owners[slot])

    def resolve(self, ids_T: Tensor, slots_T: Tensor) -> Tensor:
        """Token ids with each FUTURE_TOKEN replaced by the token in its slot."""
        return torch.where(ids_T < 0, self._tokens_S[slots_T], ids_T)

    def read(self, slots_R: Tensor) -> Tensor:
        return self._tokens_S[slots_R]

    def store(self, slots_R: Tensor, tokens_R: Tensor) -> None:
        self._tokens_S.index_copy_(0, slots_R, tokens_R)

    def clear(self) -> None:
        self._owners[:] = NOBODY
