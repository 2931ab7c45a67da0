"""The phases in which experts are copied, and the one that changes their slots. On a GPU the copies
run beside steps: a phase is called in every step until they have ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moesaic.balance.moves import SlotMove
from moesaic.core.stats import MoveStats
from moesaic.engine.rebalance.expert_copies import ChunkCopy, CopyBuffers
from moesaic.moe.layer import FusedMoE
from moesaic.moe.placement import Placement


class WritePhase:
    """Fills the outbox with the next part of this rank's stream."""

    def __init__(self, copy: ChunkCopy, buffers: CopyBuffers, round: int) -> None:
        self._copy, self._buffers, self._round = copy, buffers, round
        self._used = -1

    def __call__(self, number: int) -> bool:
        if self._used < 0:
            self._buffers.start(self._write)
            self._buffers.publish(number, self._used)
        return self._buffers.is_done

    def _write(self) -> None:
        self._used = self._copy.write(self._round)


class ReadPhase:
    """Stages what the outboxes of the other ranks hold, about an outbox's bytes in a step."""

    def __init__(self, copy: ChunkCopy, buffers: CopyBuffers, round: int) -> None:
        self._copy, self._buffers, self._round = copy, buffers, round
        self._pieces = copy.pieces(round)
        self._num_staged = 0
        self._may_read = False

    def __call__(self, number: int) -> bool:
        if not self._may_read:
            self._buffers.await_published(number - 1)
            self._may_read = True
        if self._num_staged < len(self._pieces) and self._buffers.is_done:
            self._buffers.start(self._stage)
        if self._num_staged < len(self._pieces) or not self._buffers.is_done:
            return False
        self._buffers.check()
        return True

    def _stage(self) -> None:
        room = self._buffers.sizes.outbox
        while room > 0 and self._num_staged < len(self._pieces):
            piece = self._pieces[self._num_staged]
            self._copy.stage(piece, self._round)
            self._num_staged += 1
            room -= piece.end - piece.begin


class LayerMove(NamedTuple):
    layer: FusedMoE
    moves: list[SlotMove]
    slots: tuple[int, ...]
    """The new placement."""


@dataclass(frozen=True)
class FlipPhase:
    """Changes the placement of a chunk of layers, between the same two steps on all ranks. It may
    be repeated."""

    copy: ChunkCopy
    chunk: Sequence[LayerMove]
    totals: MoveStats

    def __call__(self, number: int) -> bool:
        self.copy.adopt()
        for one in self.chunk:
            one.layer.update_placement(Placement(one.layer.config.num_experts, one.slots))
        self.totals.bytes += self.copy.nbytes
        return True
