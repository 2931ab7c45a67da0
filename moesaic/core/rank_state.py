"""What the supervisor knows of a rank."""

from __future__ import annotations

from enum import IntEnum

import msgspec


class RankState(IntEnum):
    """What a rank's main thread does."""

    ABSENT = 0
    STARTING = 1
    IDLE = 2
    """It waits for requests, without a limit."""
    COMPUTING = 3
    WAITING = 4
    """It waits for another rank, in the operation that it names."""


class RankSnapshot(msgspec.Struct, array_like=True, frozen=True):
    """A rank's line of the control page at one moment. Ages are in seconds; `computed` and `waited`
    are the seconds in that state up to the last change of state."""

    state: RankState
    step: int
    operation: str
    beat_age: float
    state_age: float
    progress: int
    computed: float = 0.0
    waited: float = 0.0

    @property
    def computed_so_far(self) -> float:
        """Includes the current state: a rank may go from step to step without a wait."""
        return self.computed + (self.state_age if self.state == RankState.COMPUTING else 0.0)

    def later(self, seconds: float) -> RankSnapshot:
        """The same rank, if nothing has changed since."""
        return msgspec.structs.replace(
            self, beat_age=self.beat_age + seconds, state_age=self.state_age + seconds
        )

    def __str__(self) -> str:
        doing = f"{self.state.name.lower()} for {self.state_age:.1f} s"
        where = f", last in {self.operation!r}" if self.operation else ""
        return f"step {self.step}, {doing}{where}"
