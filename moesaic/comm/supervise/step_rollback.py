"""How the ranks of a replica roll back a step that one of them could not finish."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from moesaic.core.messages import ResumeSteps, RollbackStep, StepAbandoned, StepFailed

# Steps that may fail in a row without output; finding one bad request in n takes about log2 n.
MAX_FAILURES: Final = 64


@dataclass(slots=True)
class StepRollbacks:
    replica: int
    ranks: Sequence[int]
    """Those that live."""
    leaders: Sequence[int]
    """The leaders of its serving groups, in order."""
    generation: int = 0
    missing: set[int] = field(default_factory=set)
    """During a rollback, the ranks that have not abandoned their step yet."""
    failures: int = 0
    _round: int = 0
    _suspects: dict[int, int] = field(default_factory=dict)

    @property
    def in_progress(self) -> bool:
        return bool(self.missing)

    @property
    def is_hopeless(self) -> bool:
        """Whether steps fail regardless of the requests in them."""
        return self.failures > MAX_FAILURES

    def start(self, failed: StepFailed) -> RollbackStep | None:
        """The message for all ranks; None if a rollback has started, as several ranks may fail."""
        if self.in_progress or failed.generation != self.generation:
            return None
        self.generation += 1
        self.failures += 1
        self.missing = set(self.ranks)
        self._suspects.clear()
        return RollbackStep(self.replica, self.generation, failed.step, failed.error)

    def change(self, ranks: Sequence[int]) -> RollbackStep:
        """The message for all ranks, which are others from now on. A rollback that is in progress
        ends with it."""
        self.ranks, self.failures = ranks, 0
        self.generation += 1
        self.missing = set(ranks)
        self._suspects.clear()
        return RollbackStep(self.replica, self.generation, 0, "", ends_links=True)

    def note_abandoned(self, abandoned: StepAbandoned) -> ResumeSteps | None:
        """The message for all ranks once the last of them has abandoned its step."""
        if abandoned.generation != self.generation or abandoned.rank not in self.missing:
            return None
        self.missing.remove(abandoned.rank)
        self._round = max(self._round, abandoned.step)
        self._suspects[abandoned.rank] = abandoned.suspects
        if self.missing:
            return None
        suspects = [self._suspects.get(leader, 0) for leader in self.leaders]
        return ResumeSteps(self.generation, self._round, suspects)

    def note_progress(self) -> None:
        """A rank of the replica has sent an output."""
        self.failures = 0
