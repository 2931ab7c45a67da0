"""What stands between the requests of a call and the engine: who may begin, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

# Begins the next so many requests of a call; the number that there were to begin.
Start = Callable[[int], int]


class AdmissionGate(Protocol):
    """Of one call. Everything happens in the thread of its event loop."""

    async def enter(self, number: int, start: Start) -> None:
        """Returns when the first of `number` requests has begun, or none is left to begin; `start`
        is called then, and whenever more of them may. What it raises ends the call."""

    def finished(self, number: int) -> None:
        """So many more of the requests are over, whether they had begun or not."""

    def leave(self) -> None:
        """Nobody waits for the call any more."""


class NoGate:
    """All requests begin at once."""

    async def enter(self, number: int, start: Start) -> None:
        start(number)

    def finished(self, number: int) -> None:
        pass

    def leave(self) -> None:
        pass
