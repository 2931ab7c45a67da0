"""Admission control: when the requests of a call start."""

from __future__ import annotations

from collections.abc import Callable

# Starts up to this number of a call's requests; returns how many it started.
Start = Callable[[int], int]


class CallAdmission:
    """Admits the requests of one call, in the thread of its event loop; here all at once."""

    async def enter(self, number: int, start: Start) -> None:
        """Calls `start` whenever more of the `number` requests may run. Returns once the first has
        started or none is left; an exception ends the call."""
        start(number)

    def finished(self, number: int) -> None:
        """This number of requests has ended, started or not."""

    def leave(self) -> None:
        """The call is over."""
