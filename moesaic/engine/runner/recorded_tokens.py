"""The tokens of recorded forward passes and the slots that their routers chose, in a ring.

N tokens of the ring · R rows of a step · M MoE layers of this rank · K chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from moesaic.moe.pass_totals import SideStream

# Ids of slots and -1 take two bytes; a token's id and its position take four each.
SLOT_BYTES, INPUT_BYTES = 2, 8


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The rows of a step: the first `count` are tokens, others pad a fixed shape. `slots`: by
    layer, of the rows that this rank takes to the experts."""

    ids_R: Tensor
    positions_R: Tensor
    slots: Sequence[Tensor]
    count: int


class TokenSpan(msgspec.Struct, array_like=True):
    """Tokens that a pass has put into the ring, from `first` on, and how many more it had."""

    first: int = 0
    count: int = 0
    dropped: int = 0


class RecordedTokens(msgspec.Struct, array_like=True):
    """Tokens from `first` on: int32 ids and positions [n], int16 slots [n, M, K]."""

    first: int
    next: int
    ids: bytes = b""
    positions: bytes = b""
    slots: bytes = b""


class TokenRing:
    """The last `capacity` tokens."""

    def __init__(self, capacity: int, layers: int, top_k: int, device: torch.device) -> None:
        self._inputs_N2 = torch.zeros(capacity, 2, dtype=torch.int32, device=device)
        self._slots_NMK = torch.zeros(capacity, layers, top_k, dtype=torch.int16, device=device)
        self._stream, self.capacity, self.end = SideStream(device), capacity, 0

    @property
    def nbytes(self) -> int:
        return self._inputs_N2.nbytes + self._slots_NMK.nbytes

    @property
    def first(self) -> int:
        """The oldest token that the ring still has."""
        return max(0, self.end - self.capacity)

    def write(self, tokens: StepTokens, first: int, count: int) -> TokenSpan:
        """Keeps `count` tokens of a step, of which row `first` is the first, or as many of them as
        the whole ring has room for."""
        kept = min(count, self.capacity)
        rows = slice(first, first + kept)
        inputs_N2 = torch.stack((tokens.ids_R[rows], tokens.positions_R[rows]), 1)
        slots_NMK = torch.stack([slots_RK[:kept] for slots_RK in tokens.slots], 1)
        span = TokenSpan(self.end, kept, count - kept)
        place = self.end % self.capacity
        front = min(kept, self.capacity - place)
        for ring, new in ((self._inputs_N2, inputs_N2), (self._slots_NMK, slots_NMK)):
            ring[place : place + front].copy_(new[:front])
            if front < kept:
                ring[: kept - front].copy_(new[front:])
        self.end += kept
        return span

    def read(self, first: int, end: int, most: int) -> RecordedTokens:
        """Some of the tokens in front of `end`, from the oldest that is left: at most `most`."""
        first = min(max(first, self.first), end)
        place = first % self.capacity
        count = min(end - first, most, self.capacity - place)
        rings = (self._inputs_N2, self._slots_NMK)
        inputs_n2, slots_nMK = self._stream.to_host([ring[place : place + count] for ring in rings])
        ids, positions = (column.contiguous().numpy().tobytes() for column in inputs_n2.unbind(1))
        return RecordedTokens(first, first + count, ids, positions, slots_nMK.numpy().tobytes())
