"""The tensors of one layer's experts on this rank, by slot.

e local slots · H hidden · I intermediate (of this rank) · J = 2 * I.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from zlib import crc32

import torch
from torch import Tensor

from moesaic.layers.module import parameter
from moesaic.moe.placement import EMPTY
from moesaic.moe.quant.payload import PAYLOAD_FORMATS
from moesaic.moe.quant.weights import ExpertMatrix, WeightFormat
from moesaic.moe.runner.base import ExpertWeights
from moesaic.moe.slot_records import SlotRecords, checksum

INWARD, OUTWARD = 0, 1


@dataclass(frozen=True, slots=True)
class ExpertShape:
    slots: int
    hidden: int
    inner: int
    dtype: torch.dtype
    inward_bias: bool = False
    outward_bias: bool = False


class ExpertStore:
    """Owns weights, scales, biases and input scales of the local slots. A slot reads and writes as
    flat byte views, which is what moves when a placement changes."""

    def __init__(self, format: WeightFormat, shape: ExpertShape) -> None:
        slots, hidden, inner, dtype = shape.slots, shape.hidden, shape.inner, shape.dtype
        b13 = parameter(slots, 2 * inner, dtype=dtype) if shape.inward_bias else None
        b2 = parameter(slots, hidden, dtype=dtype) if shape.outward_bias else None
        self.weights = ExpertWeights(
            ExpertMatrix(format, slots, 2, inner, hidden, dtype),
            ExpertMatrix(format, slots, 1, hidden, inner, dtype),
            b13,
            b2,
        )
        self.num_slots = slots
        activation = format.activation
        self.has_input_scales = (
            activation is not None and PAYLOAD_FORMATS[activation].has_global_scale
        )
        self.input_scales_e2 = torch.zeros(slots, 2, dtype=torch.float64)
        self.records: SlotRecords | None = None
        """What the slots hold, if they are in memory that outlives the rank."""

    @property
    def stacked(self) -> list[Tensor]:
        """The tensors of all slots, in a fixed order."""
        weights = self.weights
        stacked = [*weights.w13_eJH.planes.values(), *weights.w2_eHI.planes.values()]
        stacked += [bias for bias in (weights.b13_eJ, weights.b2_eH) if bias is not None]
        if self.has_input_scales:
            stacked.append(self.input_scales_e2)
        return stacked

    def tensors(self, slot: int) -> list[Tensor]:
        """The slot's part of every tensor."""
        return [tensor[slot] for tensor in self.stacked]

    def use_memory(self, stacked: Sequence[Tensor]) -> None:
        """Makes these the tensors of all slots, of the shapes and types of `stacked`; their bytes
        are not copied."""
        for old, new in zip(self.stacked, stacked, strict=True):
            assert (old.shape, old.dtype) == (new.shape, new.dtype)
            old.data = new
        self.weights.w13_eJH.view_plain()
        self.weights.w2_eHI.view_plain()

    def read(self, slot: int) -> list[Tensor]:
        """Flat byte views of the slot's tensors."""
        return [tensor.detach().reshape(-1).view(torch.uint8) for tensor in self.tensors(slot)]

    def write(self, slot: int, parts: Sequence[Tensor]) -> None:
        """Copies what `read` gives, of this store or of one with the same shape."""
        views = self.read(slot)
        sizes, given = [len(view) for view in views], [part.numel() for part in parts]
        if sizes != given:
            raise ValueError(f"slot {slot} holds tensors of {sizes} bytes, but {given} are given")
        self.forget(slot)
        for view, part in zip(views, parts, strict=True):
            view.copy_(part)

    def forget(self, slot: int) -> None:
        """Notes that the slot is about to be written."""
        if self.records is not None:
            self.records.forget(slot)

    def note(self, slot: int, expert: int) -> None:
        """Notes that the slot now holds this expert."""
        if self.records is not None:
            self.records.note(slot, expert, checksum(self.tensors(slot)))

    def is_intact(self, slot: int) -> bool:
        """Whether the slot holds the bytes that were noted."""
        records = self.records
        assert records is not None
        known = records.expert(slot) != EMPTY
        return known and records.checksum(slot) == checksum(self.tensors(slot))

    def checksum(self, slot: int) -> int:
        """CRC-32 of the slot's bytes; waits for the device."""
        value = 0
        for view in self.read(slot):
            value = crc32(view.cpu().numpy().data, value)
        return value

    def note_input_scale(self, scale: float, slot: int, product: int) -> None:
        """Keeps the largest scale that an expert's products were calibrated with."""
        known = self.input_scales_e2[slot, product]
        known.fill_(max(float(known), scale))

    @property
    def largest_input_scales(self) -> list[float]:
        """For the first and the last product; 0 where no expert has one."""
        largest: list[float] = self.input_scales_e2.amax(0).tolist()
        return largest

    def set_input_scales(self, inward: float, outward: float) -> None:
        self.weights = replace(self.weights, input_scale=inward, inner_scale=outward)
