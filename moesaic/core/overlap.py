"""How the layers of a step overlap communication with computation."""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class Overlap(IntEnum):
    """The schedule of a step. All ranks run the same, as its StepAgreement says."""

    OFF = 0
    """One batch communicates and computes in turn."""
    SBO = 1
    """One batch computes its shared experts while tokens travel."""
    TBO = 2
    """Two micro-batches: one computes while the other communicates."""


SCHEDULES: Final = {
    "off": (Overlap.OFF,),
    "sbo": (Overlap.SBO,),
    "tbo": (Overlap.OFF, Overlap.TBO),
    "auto": (Overlap.OFF, Overlap.SBO, Overlap.TBO),
}


EXPLAINED: Final = {
    "sbo": "shared experts are computed while tokens travel",
    "tbo": "steps are cut into two micro-batches where both get tokens",
}


def schedules_of(overlap: str | None, has_shared: bool = True) -> tuple[Overlap, ...]:
    """The schedules that steps may have, by --overlap; unset means off. `has_shared`: whether the
    model has shared experts, without which one batch has nothing to overlap."""
    asked = SCHEDULES[overlap or "off"]
    found = tuple(one for one in asked if has_shared or one != Overlap.SBO)
    return found or (Overlap.OFF,)
