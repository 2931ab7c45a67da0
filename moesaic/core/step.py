"""What all ranks know of the step that they are in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """`prefill`: whether any rank prefills in it. `lane`: which of the two micro-batches that may
    be under way at once. `counts`: tokens of each attention group, empty where there is but one.
    `rows`: the most tokens that any rank has, the same number on all of them (0: not settled,
    as each rank finds out for itself); kernels that write to other ranks lay rows out by it.
    `num_tokens_1`: how many rows are tokens (int32, where the step is computed); the rows behind
    them fill up a fixed shape, and take no experts. Without it all are. `own_tokens_1`: the same of
    this rank's part of the rows, where the ranks of an attention group take a part each to the
    experts."""

    prefill: bool = True
    lane: int = 0
    counts: tuple[int, ...] = ()
    rows: int = 0
    num_tokens_1: Tensor | None = field(default=None, compare=False)
    own_tokens_1: Tensor | None = field(default=None, compare=False)


PREFILL = Step(prefill=True)
DECODE = Step(prefill=False)
