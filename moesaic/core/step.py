"""What all ranks know of the step that they are in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moesaic.core.overlap import Overlap

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """`prefill`: whether any rank prefills. `lane`: which of two micro-batches in flight.
    `counts`: tokens of each attention group, empty if there is one. `rows`: the most tokens of any
    rank, by which kernels lay out rows for other ranks; 0 if each rank finds it out.
    `num_tokens_1`: how many rows are tokens (int32, on the step's device), None if all are; the
    others pad a fixed shape and take no experts. `own_tokens_1`: the same for the rows that this
    rank takes to the experts. `routed`: each MoE layer appends the slots of those rows; None if no
    request asks for them. `overlap`: the schedule that the layers run."""

    prefill: bool = True
    lane: int = 0
    counts: tuple[int, ...] = ()
    rows: int = 0
    num_tokens_1: Tensor | None = field(default=None, compare=False)
    own_tokens_1: Tensor | None = field(default=None, compare=False)
    routed: list[Tensor] | None = field(default=None, compare=False)
    overlap: Overlap = Overlap.OFF


PREFILL = Step(prefill=True)
DECODE = Step(prefill=False)
