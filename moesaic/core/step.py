"""What all ranks know of the step that they are in."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """`prefill`: whether any rank prefills in it. `lane`: which of the two micro-batches that may
    be under way at once. `counts`: tokens of each attention group, empty where there is but one."""

    prefill: bool = True
    lane: int = 0
    counts: tuple[int, ...] = ()


PREFILL = Step(prefill=True)
DECODE = Step(prefill=False)
