"""Which schedule a step has: a decision that every rank makes alike, from what all ranks know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from moesaic.core.overlap import Overlap


@dataclass(frozen=True, slots=True)
class StepShape:
    """What all ranks know of a step. `counts`: tokens of each attention group. `first_half`: those
    of its first micro-batch; empty if some group cannot split its batch."""

    counts: tuple[int, ...]
    first_half: tuple[int, ...]
    prefill: bool

    @property
    def halves(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens of each group in the two micro-batches."""
        rest = (n - half for n, half in zip(self.counts, self.first_half, strict=True))
        return self.first_half, tuple(rest)

    @property
    def can_split(self) -> bool:
        """Whether both micro-batches have tokens on some rank."""
        return bool(self.first_half) and all(map(any, self.halves))


class OverlapPolicy(Protocol):
    def choose(self, shape: StepShape) -> Overlap:
        """The same on all ranks of a stage."""

    def choices(self, prefill: bool, tokens: range) -> set[Overlap]:
        """The schedules that steps of so many tokens on the rank with the most may have."""


class NoOverlap:
    def choose(self, shape: StepShape) -> Overlap:
        return Overlap.OFF

    def choices(self, prefill: bool, tokens: range) -> set[Overlap]:
        return {Overlap.OFF}


class TwoBatches:
    """Splits every step that can be split."""

    def choose(self, shape: StepShape) -> Overlap:
        return Overlap.TBO if shape.can_split else Overlap.OFF

    def choices(self, prefill: bool, tokens: range) -> set[Overlap]:
        return {Overlap.OFF, Overlap.TBO}


class SingleBatch:
    """Hides transfers behind shared experts in every step."""

    def choose(self, shape: StepShape) -> Overlap:
        return Overlap.SBO

    def choices(self, prefill: bool, tokens: range) -> set[Overlap]:
        return {Overlap.SBO}


POLICIES: Final[dict[str, Callable[[], OverlapPolicy]]] = {
    "off": NoOverlap,
    "sbo": SingleBatch,
    "tbo": TwoBatches,
}
"""By the value of --overlap; `auto` has one of its own once it has measured (overlap/cost.py)."""


def policy_of(overlap: str | None, schedules: Sequence[Overlap]) -> OverlapPolicy:
    """That of a start. `schedules`: what the model can have of what was asked for."""
    return POLICIES.get(overlap or "off", NoOverlap)() if any(schedules) else NoOverlap()
