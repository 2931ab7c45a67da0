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
    "tbo": (Overlap.OFF, Overlap.TBO),
}


def schedules_of(overlap: str | None) -> tuple[Overlap, ...]:
    """The schedules that steps may have, by --overlap; unset means off."""
    return SCHEDULES[overlap or "off"]
