"""This rank's weights: loaded, or found in memory that outlives ranks (--weight-cache-mode)."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Final

import msgspec
import torch

import moesaic
from moesaic.comm.windows.lasting_memory import LastingMemory
from moesaic.config import ServerArgs
from moesaic.engine.elastic.weight_arena import (
    ArenaLayout,
    ArenaMemory,
    Damage,
    WeightArena,
    copy_expert,
    fingerprint,
)
from moesaic.engine.runner.weight_source import WeightSource
from moesaic.models.blocks import CausalLM
from moesaic.models.config import RawConfig
from moesaic.moe.layer import FusedMoE

logger = logging.getLogger(__name__)

NAME: Final = "weights"
MIB: Final = 1 << 20


class WeightFacts(msgspec.Struct):
    """What /server_info tells of a rank's weights, in bytes."""

    lasting_bytes: int = 0
    """In memory that outlives the rank."""
    mapped_bytes: int = 0
    """Those found there at the start; the others were loaded."""
    checked_seconds: float = 0.0
    """What the checksums took, to make or to compare."""


@dataclass(frozen=True, slots=True)
class SlotOf:
    """A slot of this rank and the expert that it is to hold. `layer`: the number of a layer among
    those with experts."""

    layer: int
    slot: int
    expert: int


class RankWeights:
    """Fills the model when it is made. `held`: the experts that were found in the slots of each
    layer, where they may be others than the first placement has."""

    def __init__(
        self, model: CausalLM, source: WeightSource, memory: LastingMemory | None, raw: RawConfig
    ) -> None:
        self._model, self._source, self._memory = model, source, memory
        self._layout = ArenaLayout(model)
        self.facts = WeightFacts()
        self.held: list[tuple[int, ...]] | None = None
        arena = None if memory is None else self._arena(memory, source.args, raw)
        if arena is None:
            source.fill(model)
        elif arena.found:
            self._map(arena)
        else:
            self._load(arena)

    def _arena(self, memory: LastingMemory, args: ServerArgs, raw: RawConfig) -> WeightArena | None:
        facts = {
            "versions": [moesaic.__version__, torch.__version__],
            "flags": asdict(args),
            "config": raw.data,
        }
        mark = fingerprint(self._layout, facts)
        try:
            own = memory.own(NAME, self._layout.length)
        except ValueError as error:
            logger.warning("weights: those in memory are of another layout: %s", error)
            return None
        arena = WeightArena(own, self._layout, mark)
        if arena.differs:
            logger.warning(
                "weights: those in memory are of another model, layout, flags or versions, or not "
                "whole: they are loaded anew from %s",
                self._source.name,
            )
        self.facts.lasting_bytes = self._layout.nbytes
        return arena

    def _load(self, arena: WeightArena) -> None:
        self._source.fill(self._model)
        began = time.monotonic()
        arena.seal()
        self.facts.checked_seconds = time.monotonic() - began
        logger.info(
            "weights: %.1f MiB in memory that outlives ranks (checksums: %.3f s)",
            self._layout.nbytes / MIB,
            self.facts.checked_seconds,
        )

    def _map(self, arena: WeightArena) -> None:
        began = time.monotonic()
        damage = arena.damage()
        self.facts.checked_seconds = time.monotonic() - began
        if damage.tensors:
            logger.warning(
                "weights: %s in memory differ from their checksums: all are loaded anew from %s",
                ", ".join(damage.tensors[:5]),
                self._source.name,
            )
            arena.reset()
            self._load(arena)
            return
        reloaded = self._repair(damage)
        self.facts.mapped_bytes = self._layout.nbytes - reloaded
        self.held = arena.experts
        logger.info(
            "weights: %.1f MiB mapped from memory, compared with their checksums in %.3f s",
            self.facts.mapped_bytes / MIB,
            self.facts.checked_seconds,
        )

    def _repair(self, damage: Damage) -> int:
        """Reads the experts of damaged slots, as the first placement has them; returns the
        bytes."""
        if not damage.slots:
            return 0
        logger.warning(
            "weights: %d slots of experts in memory are not whole: they are read from %s",
            len(damage.slots),
            self._source.name,
        )
        for _ in self._read(damage.slots):
            pass
        return sum(one.nbytes for layer, slot in damage.slots for one in layer.store.tensors(slot))

    def adopt(self, wanted: Sequence[SlotOf], lost: Sequence[int]) -> Iterator[bool]:
        """Fills slots, whose experts the placements name already: from the memory of lost ranks,
        or from the checkpoint. Yields for each read tensor or expert whether it was in memory."""
        layers = self._layout.layers
        for one in wanted:
            layers[one.layer].store.forget(one.slot)
        memories = self._lost_memories(lost) if wanted else []
        rest = []
        for one in wanted:
            if any(copy_expert(found, one.layer, one.expert, one.slot) for found in memories):
                yield True
            else:
                rest.append((layers[one.layer], one.slot))
        for _ in self._read(rest):
            yield False

    def _lost_memories(self, lost: Sequence[int]) -> list[ArenaMemory]:
        if self._memory is None or not self.facts.lasting_bytes:
            return []
        found = (self._memory.of(NAME, rank) for rank in lost)
        return [
            ArenaMemory(memory, self._layout)
            for memory in found
            if memory is not None and len(memory) >= self._layout.sums_start
        ]

    def _read(self, slots: Sequence[tuple[FusedMoE, int]]) -> Iterator[None]:
        for layer, slot in slots:
            layer.store.forget(slot)
            layer.store.input_scales_e2[slot] = 0
        tensors = [tensor for layer, slot in slots for tensor in layer.store.tensors(slot)]
        if tensors:
            yield from self._source.fill_some(self._model, tensors)
        for layer, _ in slots:
            layer.note_experts()
