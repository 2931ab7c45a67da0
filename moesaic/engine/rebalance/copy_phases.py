"""The phases in which experts are copied, and those that change their slots. On a GPU the copies
run beside steps: a phase is called in every step until they have ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from moesaic.balance.flips import flip_groups
from moesaic.balance.moves import SlotMove
from moesaic.core.stats import MoveStats
from moesaic.engine.rebalance.expert_copies import ChunkCopy, CopyBuffers
from moesaic.moe.layer import FusedMoE
from moesaic.moe.placement import Placement


class WritePhase:
    """Fills the outbox with the next part of this rank's stream. Once that is written it is sent to
    other nodes."""

    def __init__(self, copy: ChunkCopy, buffers: CopyBuffers, round: int) -> None:
        self._copy, self._buffers, self._round = copy, buffers, round
        self._used = -1
        self._is_published = False

    def __call__(self, number: int) -> bool:
        buffers = self._buffers
        # A rebalance that was dropped may still be copying and sending.
        if self._used < 0 and buffers.is_done:
            buffers.forget()
            buffers.start(self._write)
        if self._used >= 0 and not self._is_published and buffers.is_done:
            buffers.publish(number, self._used)
            self._is_published = True
        return self._is_published and buffers.is_done

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
    """A layer that changes. `slots`: the expert in each slot of the new placement."""

    layer: FusedMoE
    moves: list[SlotMove]
    slots: tuple[int, ...]


class LayerFlip(NamedTuple):
    """Slots of a layer that take their new experts together."""

    number: int
    """The layer's in its chunk."""
    changed: list[int]
    slots: tuple[int, ...]
    """The expert in each slot afterwards."""


def flips_of(chunk: Sequence[LayerMove], most: int) -> list[list[LayerFlip]]:
    """What flips in each step, with at most `most` slots of a rank: those that a layer must flip
    together may be more. Small experts of several layers flip in one step."""
    steps: list[list[LayerFlip]] = []
    used = most
    for number, one in enumerate(chunk):
        old, layout = one.layer.placement.slots, one.layer.layout
        at = list(old)
        for group in flip_groups(np.array(old), np.array(one.slots), layout.ep_size, most):
            for slot in group:
                at[slot] = one.slots[slot]
            largest = max(Counter(slot // layout.slots_per_rank for slot in group).values())
            if not steps or used + largest > most:
                steps.append([])
                used = 0
            steps[-1].append(LayerFlip(number, group, tuple(at)))
            used += largest
    return steps


@dataclass(frozen=True)
class FlipPhase:
    """Changes the placement of some layers of a chunk, between the same two steps on all ranks. It
    may be repeated."""

    copy: ChunkCopy
    chunk: Sequence[LayerMove]
    flips: Sequence[LayerFlip]
    totals: MoveStats

    def __call__(self, number: int) -> bool:
        nbytes = sum(self.copy.adopt(one.number, one.changed) for one in self.flips)
        for one in self.flips:
            layer = self.chunk[one.number].layer
            layer.update_placement(Placement(layer.config.num_experts, one.slots))
            layer.note_experts()
        self.totals.bytes += nbytes
        return True
