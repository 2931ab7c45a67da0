"""How the ranks of a replica get out of a step that one of them could not finish."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from moesaic.core.messages import ResumeSteps, RollbackStep, StepAbandoned, StepFailed

# Steps that may fail in a row without anything given out in between. Finding one request among n
# takes about log2 n of them.
MAX_FAILURES: Final = 64


@dataclass(slots=True)
class StepRollbacks:
    """Of one replica. All its ranks are in one generation, or on the way to the next: then those in
    `missing` have not abandoned their step yet. `leaders`: of its serving groups, in order."""

    replica: int
    ranks: range
    leaders: Sequence[int]
    generation: int = 0
    missing: set[int] = field(default_factory=set)
    failures: int = 0
    _round: int = 0
    _suspects: dict[int, int] = field(default_factory=dict)

    @property
    def under_way(self) -> bool:
        return bool(self.missing)

    @property
    def is_hopeless(self) -> bool:
        """Whether steps fail whoever takes part in them."""
        return self.failures > MAX_FAILURES

    def begin(self, failed: StepFailed) -> RollbackStep | None:
        """What to tell the ranks; nothing if they have been told already: several ranks may fail in
        one step."""
        if self.under_way or failed.generation != self.generation:
            return None
        self.generation += 1
        self.failures += 1
        self.missing = set(self.ranks)
        self._suspects.clear()
        return RollbackStep(self.replica, self.generation, failed.step, failed.error)

    def take(self, abandoned: StepAbandoned) -> ResumeSteps | None:
        """What to tell the ranks once the last of them has come."""
        if abandoned.generation != self.generation or abandoned.rank not in self.missing:
            return None
        self.missing.remove(abandoned.rank)
        self._round = max(self._round, abandoned.step)
        self._suspects[abandoned.rank] = abandoned.suspects
        if self.missing:
            return None
        suspects = [self._suspects[leader] for leader in self.leaders]
        return ResumeSteps(self.generation, self._round, suspects)

    def note_progress(self) -> None:
        """A rank of the replica has given something out."""
        self.failures = 0
