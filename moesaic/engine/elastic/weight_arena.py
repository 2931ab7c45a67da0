"""A rank's weights in memory that outlives its process.

The parameters of the model are views of this memory, in the layout and quantisation that runners
read. A rank that is started again checks and maps what its predecessor has left, and reads nothing
from the checkpoint. Ranks that go on without it copy its experts from there.

The memory has a head (state, fingerprints), a record of each slot (moe/slot_records.py), the
experts' tensors, the checksums of all other tensors, and these. Ranks with as many slots have
records and experts in the same places.

L layers with experts · C slots of a rank · N other tensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from moesaic.comm.windows.shared_memory import round_up
from moesaic.moe.layer import FusedMoE
from moesaic.moe.slot_records import SlotRecords, Words, checksum

PAGE: Final = 4096
ALIGN: Final = 64
WORD: Final = 8
# Words of the head: the state, then two fingerprints of four words each.
STATE, WHOLE, EXPERTS = slice(0, 1), slice(1, 5), slice(5, 9)
FILLING, COMPLETE = 1, 2
RECORD_WORDS: Final = 2


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor, and where it is in the memory."""

    name: str
    tensor: Tensor
    start: int

    @property
    def facts(self) -> list[Any]:
        return [self.name, list(self.tensor.shape), str(self.tensor.dtype), self.start]

    def view(self, memory: Tensor) -> Tensor:
        part = memory[self.start : self.start + self.tensor.nbytes]
        return part.view(self.tensor.dtype).view(self.tensor.shape)


class ArenaLayout:
    """Where the tensors of a module are: those of experts first, layer by layer."""

    def __init__(self, module: nn.Module) -> None:
        self.layers = [part for part in module.modules() if isinstance(part, FusedMoE)]
        slots = self.layers[0].store.num_slots if self.layers else 0
        self.shape = (len(self.layers), slots, RECORD_WORDS)
        self._end = PAGE + round_up(prod(self.shape) * WORD, PAGE)
        self.experts = [
            [self._place(f"experts {n}.{i}", one) for i, one in enumerate(layer.store.stacked)]
            for n, layer in enumerate(self.layers)
        ]
        placed = {id(piece.tensor) for pieces in self.experts for piece in pieces}
        found = {n: one for n, one in module.named_parameters() if id(one) not in placed}
        self.sums_start = round_up(self._end, PAGE)
        self._end = self.sums_start + round_up(len(found) * WORD, PAGE)
        self.others = [self._place(name, one) for name, one in found.items()]
        self.length = round_up(self._end, PAGE)

    def _place(self, name: str, tensor: Tensor) -> TensorPlace:
        start = round_up(self._end, ALIGN)
        self._end = start + tensor.nbytes
        return TensorPlace(name, tensor, start)

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(piece.tensor.nbytes for piece in self.pieces)

    @property
    def pieces(self) -> Iterator[TensorPlace]:
        for pieces in self.experts:
            yield from pieces
        yield from self.others

    @cached_property
    def experts_digest(self) -> Words:
        return _digest([piece.facts for pieces in self.experts for piece in pieces])


class ArenaMemory:
    """The memory of one rank, this one or another."""

    def __init__(self, memory: Tensor, layout: ArenaLayout) -> None:
        self.memory, self.layout = memory, layout
        self.head = self._words(0, EXPERTS.stop)
        records = self._words(PAGE, prod(layout.shape)).reshape(layout.shape)
        self.records = [SlotRecords(table_C2) for table_C2 in records]

    def _words(self, start: int, count: int) -> Words:
        found: Words = self.memory[start : start + count * WORD].numpy().view(np.uint64)
        return found

    @property
    def is_complete(self) -> bool:
        return bool(self.head[STATE] == COMPLETE)

    def sums(self) -> Words:
        return self._words(self.layout.sums_start, len(self.layout.others))

    def slot(self, layer: int, slot: int) -> list[Tensor]:
        """Flat byte views of a slot's tensors, as `ExpertStore.read` gives."""
        parts = []
        for piece in self.layout.experts[layer]:
            size = piece.tensor.nbytes // len(piece.tensor)
            start = piece.start + slot * size
            parts.append(self.memory[start : start + size])
        return parts


@dataclass(frozen=True, slots=True)
class Damage:
    """What an arena holds wrongly. `slots`: layers and their local slots whose expert is unknown,
    or whose bytes are not those that were noted."""

    tensors: Sequence[str]
    slots: Sequence[tuple[FusedMoE, int]]


class WeightArena(ArenaMemory):
    """This rank's. `found`: what its predecessor has left can be used."""

    def __init__(self, memory: Tensor, layout: ArenaLayout, fingerprint: Words) -> None:
        super().__init__(memory, layout)
        self.found = self.is_complete and bool((self.head[WHOLE] == fingerprint).all())
        self.differs = bool(self.head[STATE]) and not self.found
        """There is something else, or something half done."""
        if not self.found:  # before the fingerprint, as this process may end in between
            self.head[STATE] = FILLING
        self.head[WHOLE], self.head[EXPERTS] = fingerprint, layout.experts_digest
        self._use()
        if not self.found:
            self.reset()

    def reset(self) -> None:
        """Call it before all weights are loaded."""
        self.head[STATE] = FILLING
        for layer in self.layout.layers:
            layer.store.input_scales_e2.zero_()  # of which loading keeps the largest

    def _use(self) -> None:
        """Makes this memory that of the model."""
        for number, layer in enumerate(self.layout.layers):
            views = [piece.view(self.memory) for piece in self.layout.experts[number]]
            layer.store.use_memory(views)
            layer.store.records = self.records[number]
        for piece in self.layout.others:
            piece.tensor.data = piece.view(self.memory)

    def seal(self) -> None:
        """Call it when all weights are loaded."""
        for records, layer in zip(self.records, self.layout.layers, strict=True):
            for slot in range(layer.store.num_slots):
                records.forget(slot)
        with _threads() as threads:
            self.sums()[:] = list(threads.map(self._sum, self.layout.others))
            list(threads.map(FusedMoE.note_experts, self.layout.layers))
        self.head[STATE] = COMPLETE

    def damage(self) -> Damage:
        """Compares all tensors with their checksums."""
        layers = self.layout.layers
        slots = [(layer, slot) for layer in layers for slot in range(layer.store.num_slots)]
        with _threads() as threads:
            sums = list(threads.map(self._sum, self.layout.others))
            intact = list(threads.map(lambda one: one[0].store.is_intact(one[1]), slots))
        pairs = zip(self.layout.others, sums, self.sums().tolist(), strict=True)
        return Damage(
            [piece.name for piece, found, noted in pairs if found != noted],
            [one for one, is_intact in zip(slots, intact, strict=True) if not is_intact],
        )

    def _sum(self, piece: TensorPlace) -> int:
        return checksum([piece.view(self.memory)])

    @property
    def experts(self) -> list[tuple[int, ...]]:
        """The expert in each slot of each layer."""
        count = self.layout.shape[1]
        return [tuple(map(records.expert, range(count))) for records in self.records]


def copy_expert(lost: ArenaMemory, layer: int, expert: int, slot: int) -> bool:
    """Copies an expert from the memory of a lost rank into a slot of this rank, and notes it.
    Returns False if it is not there, or not whole."""
    records, store = lost.records[layer], lost.layout.layers[layer].store
    if not lost.is_complete or (lost.head[EXPERTS] != lost.layout.experts_digest).any():
        return False
    if (source := records.find(expert)) is None:
        return False
    noted = records.checksum(source)
    store.write(slot, lost.slot(layer, source))
    # The rank may have started again, and write its slots.
    if records.expert(source) != expert or checksum(store.tensors(slot)) != noted:
        return False
    store.note(slot, expert)
    return True


def fingerprint(layout: ArenaLayout, facts: Mapping[str, Any]) -> Words:
    """Of the memory's contents: `facts` of the model and the program, and each tensor's place."""
    placements = [layer.placement.slots for layer in layout.layers]
    return _digest([facts, placements, [piece.facts for piece in layout.pieces]])


def _digest(facts: Any) -> Words:
    text = json.dumps(facts, default=str, sort_keys=True)
    return np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint64)


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(torch.get_num_threads(), "checksums")
