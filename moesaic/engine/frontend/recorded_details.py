"""What was read of a rank's recorded passes: counts, and the tokens with their experts as fields
of SGLang's records.

N tokens that were read · T tokens of a pass · M MoE layers of a rank · L layers of the model ·
K chosen.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from moesaic.balance.recording import RankPasses
from moesaic.comm.mesh import RankPlace
from moesaic.engine.runner.expert_recorder import RecordedPass, RecordedRows, RecorderState
from moesaic.engine.runner.recorded_tokens import RecordedTokens, TokenSpan

Int32s = npt.NDArray[np.int32]


class ForwardMode(IntEnum):
    """SGLang's numbers."""

    EXTEND = 1
    DECODE = 2
    MIXED = 3
    IDLE = 4

    @classmethod
    def of(cls, lengths: Sequence[int], prefill: bool) -> ForwardMode:
        """`lengths`: the new tokens of each sequence. A chunk of one token counts as a decode."""
        if not lengths:
            return cls.IDLE
        if not prefill:
            return cls.DECODE
        return cls.MIXED if min(lengths) == 1 < max(lengths) else cls.EXTEND


@dataclass(slots=True)
class RankRead:
    """The passes of one rank. n passes · e local slots."""

    rank: int
    replica: int
    state: RecorderState
    passes: list[RecordedPass]
    versions_nM: Int32s
    counts_nMe: Int32s
    details: list[dict[str, Any]] = field(default_factory=list)
    """More fields of each pass's record."""

    @classmethod
    def of(cls, place: RankPlace, state: RecorderState, pieces: Sequence[RecordedRows]) -> RankRead:
        passes = [one for rows in pieces for one in rows.passes]
        shape = (len(passes), len(state.layers))
        versions = np.frombuffer(b"".join(rows.versions for rows in pieces), np.int32)
        counts = np.frombuffer(b"".join(rows.counts for rows in pieces), np.int32)
        counts_nMe = counts.reshape(*shape, state.num_local)
        return cls(place.rank, place.replica, state, passes, versions.reshape(shape), counts_nMe)

    @property
    def numbers(self) -> list[int]:
        return [one.number for one in self.passes]

    @property
    def slots(self) -> dict[tuple[int, int], list[int]]:
        """The experts of all slots, by MoE layer and version of its placement."""
        return {(found.layer, found.version): found.slots for found in self.state.placements}

    def end(self, last: int) -> int:
        """The index behind the passes up to number `last`."""
        indices = [one.index for one in self.passes if one.number <= last]
        return 1 + max(indices, default=self.state.told - 1)

    def lost(self, last: int) -> int:
        """How many passes up to number `last` were overwritten before they were read."""
        read = sum(one.number <= last for one in self.passes)
        return self.end(last) - self.state.told - read

    def only(self, numbers: Collection[int]) -> RankRead:
        """These passes alone."""
        rows = [n for n, one in enumerate(self.passes) if one.number in numbers]
        if len(rows) == len(self.passes):
            return self  # as almost always; counts may be large
        return replace(
            self,
            passes=[self.passes[n] for n in rows],
            versions_nM=self.versions_nM[rows],
            counts_nMe=self.counts_nMe[rows],
        )

    def rank_passes(self) -> RankPasses:
        state = self.state
        return RankPasses(
            rank=self.rank,
            replica=self.replica,
            layers=state.layers,
            counts=state.counts,
            first_slot=state.first_slot,
            slots=self.slots,
            numbers=self.numbers,
            versions_nM=self.versions_nM,
            counts_nMe=self.counts_nMe,
            details=self.details,
        )


class TokenBuffer:
    """The tokens that a rank has kept, put together from its replies."""

    def __init__(self, passes: Sequence[RecordedPass], state: RecorderState) -> None:
        spans = [one.tokens for one in passes if one.tokens is not None and one.tokens.count]
        self.first = min((span.first for span in spans), default=0)
        self.end = max((span.first + span.count for span in spans), default=self.first)
        size = self.end - self.first
        self._ids_N, self._positions_N = np.zeros(size, np.int32), np.zeros(size, np.int32)
        self._slots_NMK = np.zeros((size, len(state.layers), state.top_k), np.int16)
        self._has_N = np.zeros(size, bool)

    def add(self, found: RecordedTokens) -> None:
        place = slice(found.first - self.first, found.next - self.first)
        self._ids_N[place] = np.frombuffer(found.ids, np.int32)
        self._positions_N[place] = np.frombuffer(found.positions, np.int32)
        slots_nMK = np.frombuffer(found.slots, np.int16)
        self._slots_NMK[place] = slots_nMK.reshape(-1, *self._slots_NMK.shape[1:])
        self._has_N[place] = True

    def place(self, span: TokenSpan) -> slice:
        """Where a pass's tokens are; empty if newer tokens have overwritten some of them."""
        first = span.first - self.first
        found = slice(first, first + span.count)
        return found if self._has_N[found].all() else slice(0, 0)

    def fields(self, span: TokenSpan, experts_LTK: npt.NDArray[np.int16]) -> dict[str, Any]:
        place = self.place(span)
        return {
            "input_ids": self._ids_N[place],
            "positions": self._positions_N[place],
            "topk_ids_of_layer": experts_LTK,
            "tokens_dropped": span.dropped + span.count - (place.stop - place.start),
        }

    def slots(self, span: TokenSpan) -> npt.NDArray[np.int16]:
        return self._slots_NMK[self.place(span)]


def token_details(read: RankRead, tokens: TokenBuffer, num_layers: int) -> list[dict[str, Any]]:
    """The fields of mode `per_token` for each pass. Experts are logical ones; those of layers that
    the rank does not have are -1."""
    state, slots, details = read.state, read.slots, []
    for one, versions in zip(read.passes, read.versions_nM.tolist(), strict=True):
        span = one.tokens or TokenSpan(tokens.first)
        chosen = tokens.slots(span)
        experts_LTK = np.full((num_layers, len(chosen), state.top_k), -1, np.int16)
        for index, layer in enumerate(state.layers):
            experts_LTK[layer] = _experts(chosen[:, index], slots[index, versions[index]])
        mode = ForwardMode.of(one.lengths, one.prefill)
        has_prompts = mode in (ForwardMode.EXTEND, ForwardMode.MIXED)
        more = {
            "forward_mode": int(mode),
            "extend_seq_lens": one.lengths if has_prompts else None,
        }
        details.append({**tokens.fields(span, experts_LTK), **more})
    return details


def _experts(slots_TK: npt.NDArray[np.int16], slots: Sequence[int]) -> npt.NDArray[np.int16]:
    """The logical experts of slots; -1 stays -1."""
    return np.array([*slots, -1], np.int16)[slots_TK]
