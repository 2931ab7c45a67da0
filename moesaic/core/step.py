"""What all ranks know of the step that they are in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """`prefill`: whether any rank prefills in it. `lane`: which of the two micro-batches that may
    be under way at once. `counts`: tokens of each attention group, empty where there is but one.
    `num_tokens`: int32 [1] on the device where only that knows: rows from there on are padding, and
    no expert gets them."""

    prefill: bool = True
    lane: int = 0
    counts: tuple[int, ...] = ()
    num_tokens: Tensor | None = None


PREFILL = Step(prefill=True)
DECODE = Step(prefill=False)
