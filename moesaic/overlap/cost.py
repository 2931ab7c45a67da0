"""What a schedule of a step costs, and which one to choose.

A step of one batch takes its compute and its communication, one behind the other. Single-batch
overlap hides each half of the shared experts behind one of the two transfers of a layer. Two
micro-batches hide each other's transfers, but experts are read twice, and small products are less
efficient: two halves compute longer than the whole.

    one batch            K(B) + C(B)
    single batch         K(B) + C(B) - min(2/3 S(B), C(B)/2) - min(1/3 S(B), C(B)/2)
    two micro-batches    max(K(B/2) + max(K(B/2), C(B/2)), 2 (C(B) - C(B/2)))

B tokens of a rank · K compute · C communication · S shared experts, of which the first two of three
products run behind the dispatch. Two halves share a rank's link, which is busy with their bytes as
long as with those of the whole: twice what the second half adds to the communication of the first.

The model says what to expect and why; steps are measured, and the measured times decide
(engine/runner/overlap_calibration.py).
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from moesaic.core.overlap import Overlap
from moesaic.overlap.policy import StepShape

# A schedule must be faster than one batch by this part, which is about what measurements vary.
LEAST_GAIN: Final = 0.01
MOST_LOST: Final = 1


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of a step of one batch, with as many tokens on every rank."""

    tokens: int
    compute: float
    communication: float
    shared: float = 0.0
    """Of `compute`, what the shared experts take."""

    @property
    def seconds(self) -> float:
        return self.compute + self.communication


def predict(whole: StepCosts, half: StepCosts | None) -> dict[Overlap, float]:
    """Seconds of each schedule. `half`: of half as many tokens; None if the step cannot be split.

    A step of 3 ms, 1 ms of it communication and 0.3 ms shared experts, whose halves take 1.2 ms and
    communicate 0.5 ms: one batch 3, single batch 2.7, two micro-batches 2.4 ms. Over a slower link,
    5 ms of which 4.8 ms are bytes, and 2.6 ms for a half: 7, 6.7 and 4.8 ms.
    """
    transfer, shared = whole.communication / 2, whole.shared
    hidden = min(2 * shared / 3, transfer) + min(shared / 3, transfer)
    found = {Overlap.OFF: whole.seconds, Overlap.SBO: whole.seconds - hidden}
    if half is not None:
        sending = 2 * (whole.communication - half.communication)
        chain = half.compute + max(half.compute, half.communication)
        found[Overlap.TBO] = max(chain, sending)
    return found


def between(costs: Sequence[StepCosts], tokens: int) -> StepCosts | None:
    """The costs of so many tokens, by straight lines between those that are known, in order; None
    outside of them."""
    place = bisect_left([one.tokens for one in costs], tokens)
    if place < len(costs) and costs[place].tokens == tokens:
        return costs[place]
    if not 0 < place < len(costs):
        return None
    low, high = costs[place - 1], costs[place]
    part = (tokens - low.tokens) / (high.tokens - low.tokens)

    def mixed(a: float, b: float) -> float:
        return a + part * (b - a)

    return StepCosts(
        tokens,
        mixed(low.compute, high.compute),
        mixed(low.communication, high.communication),
        mixed(low.shared, high.shared),
    )


@dataclass(frozen=True, slots=True)
class OverlapChoice:
    """The schedule of steps with about `tokens` tokens on the rank that has most."""

    prefill: bool
    costs: StepCosts
    half: StepCosts | None
    rounds: Mapping[Overlap, Sequence[float]]
    """Seconds of a step, of each schedule that it can have, in each round of measurements."""

    @property
    def tokens(self) -> int:
        return self.costs.tokens

    @property
    def measured(self) -> dict[Overlap, float]:
        """The median of the rounds."""
        return {schedule: statistics.median(times) for schedule, times in self.rounds.items()}

    @property
    def predicted(self) -> dict[Overlap, float]:
        return predict(self.costs, self.half)

    @property
    def chosen(self) -> Overlap:
        """The fastest, unless one batch is about as fast, or was faster in several rounds."""
        best = self._fastest
        return best if self._lost(best) <= MOST_LOST else Overlap.OFF

    @property
    def _fastest(self) -> Overlap:
        measured = self.measured
        best = min(measured, key=lambda schedule: measured[schedule])
        gains = measured[best] < (1 - LEAST_GAIN) * measured[Overlap.OFF]
        return best if gains else Overlap.OFF

    def _lost(self, schedule: Overlap) -> int:
        """The rounds in which one batch was as fast or faster."""
        pairs = zip(self.rounds[schedule], self.rounds[Overlap.OFF], strict=True)
        return 0 if schedule == Overlap.OFF else sum(seconds >= off for seconds, off in pairs)

    def hidden_ratio(self, schedule: Overlap) -> float:
        """The part of the communication that the schedule hides: 0 to 1."""
        compute, communication = self.costs.compute, self.costs.communication
        if schedule == Overlap.TBO:
            if self.half is None:
                return 0.0
            compute, communication = 2 * self.half.compute, 2 * self.half.communication
        if communication <= 0:
            return 0.0
        exposed = self.measured[schedule] - compute
        return min(1.0, max(0.0, 1 - exposed / communication))

    @property
    def reread(self) -> float:
        """How much longer two halves compute than the whole."""
        return 0.0 if self.half is None else 2 * self.half.compute - self.costs.compute

    @property
    def why(self) -> str:
        """In milliseconds, for the log."""
        costs, ms = self.costs, 1e3
        told = [
            f"{name(schedule)} {ms * seconds:.3f} ({ms * self.predicted[schedule]:.3f} predicted)"
            for schedule, seconds in self.measured.items()
        ]
        parts = [f"communication {ms * costs.communication:.3f}"]
        if costs.shared:
            parts.append(f"shared experts {ms * costs.shared:.3f}")
        if self.half is not None:
            parts.append(f"two halves compute {ms * self.reread:.3f} longer")
        hidden = f"hides {self.hidden_ratio(self.chosen):.0%}" if self.chosen else "nothing hidden"
        if self._fastest != self.chosen:
            rounds, lost = len(self.rounds[Overlap.OFF]), self._lost(self._fastest)
            hidden += f", as {name(self._fastest)} was slower in {lost} of {rounds} rounds"
        return f"{name(self.chosen)}: ms: {', '.join(told)}; {', '.join(parts)}; {hidden}"

    def facts(self) -> dict[str, Any]:
        """For /server_info, metrics and benchmarks."""
        return {
            "kind": "prefill" if self.prefill else "decode",
            "tokens": self.tokens,
            "chosen": name(self.chosen),
            "compute_ms": 1e3 * self.costs.compute,
            "communication_ms": 1e3 * self.costs.communication,
            "shared_ms": 1e3 * self.costs.shared,
            "reread_ms": 1e3 * self.reread,
            "measured_ms": {name(key): 1e3 * value for key, value in self.measured.items()},
            "predicted_ms": {
                name(key): 1e3 * self.predicted[key]
                for key in self.measured
                if key in self.predicted
            },
            "hidden_ratio": {name(key): self.hidden_ratio(key) for key in self.measured},
        }


def name(schedule: Overlap) -> str:
    """As --overlap names it."""
    return schedule.name.lower()


class ChosenOverlap:
    """Chooses by measured steps; between two sizes only what both chose."""

    def __init__(self, choices: Sequence[OverlapChoice]) -> None:
        self._kinds: dict[bool, tuple[list[int], list[Overlap]]] = {}
        for prefill in (False, True):
            kind = sorted((c for c in choices if c.prefill == prefill), key=lambda c: c.tokens)
            self._kinds[prefill] = [c.tokens for c in kind], [c.chosen for c in kind]

    def choose(self, shape: StepShape) -> Overlap:
        schedule = self._of(shape.prefill, max(shape.counts))
        return Overlap.OFF if schedule == Overlap.TBO and not shape.can_split else schedule

    def choices(self, prefill: bool, tokens: range) -> set[Overlap]:
        """Steps that cannot be split are whole. The choice changes at measured sizes only."""
        measured = self._kinds[prefill][0]
        near = (size + away for size in measured for away in (-1, 0, 1) if size + away in tokens)
        marks = {tokens[0], tokens[-1], *near}
        return {Overlap.OFF, *(self._of(prefill, count) for count in marks)}

    def _of(self, prefill: bool, tokens: int) -> Overlap:
        sizes, chosen = self._kinds[prefill]
        if not sizes:
            return Overlap.OFF
        place = bisect_left(sizes, tokens)
        if place < len(sizes) and sizes[place] == tokens:
            return chosen[place]
        around = set(chosen[max(0, place - 1) : place + 1])
        return around.pop() if len(around) == 1 else Overlap.OFF
