"""Who may begin next: requests beyond what the engine can run wait here, in a line a client.

Lines are served in turn, counted in requests, so that a client with a thousand of them waiting does
not keep one with a single request from being next. Everything happens in one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Hashable
from typing import Final

from moesaic.engine.engine import QueueFull
from moesaic.engine.frontend.admission import Start
from moesaic.engine.frontend.fair_queue import FairQueue

logger = logging.getLogger(__name__)

MAX_QUEUED: Final = 4096
# Beyond what runs the engine has a few at hand, for the step after one has ended.
LEAD_SHARE: Final = 8
# Over how many seconds the rate of ending requests is measured, roughly.
RATE_SECONDS: Final = 10.0
LONGEST_RETRY: Final = 60


class Full(QueueFull):
    """`retry_after`: seconds in which the engine should have got through what waits now."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Admission(FairQueue["Ticket"]):
    """`waiting` and `running` are requests now, `arriving` calls that are still being made into
    requests; `refused_total` and `admitted_total` since the start."""

    def __init__(self, max_running: int, max_queued: int | None = None) -> None:
        most_open = max_running + (MAX_QUEUED if max_queued is None else max_queued)
        super().__init__(max_running + max(1, max_running // LEAD_SHARE), most_open)
        self.calls = 0
        """Calls that have come and have no answer yet, those in a chat template too."""
        self.arriving = self.admitted_total = 0
        self._max_running = max_running
        self._rate = _Rate()

    def ticket(self, client: Hashable) -> Ticket:
        """The gate for one call of a client."""
        return Ticket(self, client)

    def queue(self, waiter: Ticket) -> None:
        if waiter.wanted > self.most_open:
            raise ValueError(
                f"{waiter.wanted} answers at once are more than --max-running-requests and "
                f"--max-queued-requests allow, which is {self.most_open}: ask several times"
            )
        super().queue(waiter)

    def free(self, number: int) -> None:
        self._rate.add(number)
        super().free(number)

    def retry_after(self) -> int:
        rate = self._rate.per_second()
        seconds = 1 if rate is None else math.ceil(self.waiting / max(rate, 1e-3))
        return min(max(seconds, 1), LONGEST_RETRY)

    def full(self) -> Full:
        running = min(self.running, self._max_running)  # the others are at hand, and wait there
        waiting = self.running - running + self.waiting
        return Full(
            f"{running} requests are running and {waiting} are waiting, which is all "
            "that --max-running-requests and --max-queued-requests allow: try again later",
            self.retry_after(),
        )


class Ticket:
    """A call on its way in: a Gate of the engine. It counts as arriving until it enters or leaves,
    so whoever makes one has it leave at the end. `wanted`: requests that wait; `held`: slots that
    those which have begun take up."""

    def __init__(self, admission: Admission, client: Hashable) -> None:
        self.client, self.wanted, self.held = client, 0, 0
        self._admission = admission
        self._start: Start = lambda number: number
        self._begun: asyncio.Future[None] | None = None
        self._arriving = True
        admission.arriving += 1

    async def enter(self, number: int, start: Start) -> None:
        self._arrive()
        self.wanted, self._start = number, start
        self._begun = asyncio.get_running_loop().create_future()
        try:
            self._admission.queue(self)
            await self._begun
        except BaseException:
            self.leave()
            raise

    def begin(self, number: int) -> None:
        """So many slots were given to it; what it has no use for goes back."""
        admission = self._admission
        try:
            started = self._start(number)
        except Exception as error:
            logger.exception("requests could not begin")
            self._fail(error)
            return
        admission.admitted_total += started
        if self._begun is not None and not self._begun.done():
            self._begun.set_result(None)
        if started < number:
            self.finished(number - started)

    def finished(self, number: int) -> None:
        """Slots are free; what had not begun leaves the line."""
        slots = min(number, self.held)
        if never_begun := min(number - slots, self.wanted):
            if never_begun == self.wanted:
                self._admission.unqueue(self)
            else:
                self._admission.forget(self, never_begun)
            if not self.wanted and self._begun is not None and not self._begun.done():
                self._begun.set_result(None)
        if slots:
            self.held -= slots
            self._admission.free(slots)

    def refuse(self, error: Exception) -> None:
        self._fail(error)

    def _fail(self, error: Exception) -> None:
        if self._begun is not None and not self._begun.done():
            self._begun.set_exception(error)

    def _arrive(self) -> None:
        self._admission.arriving -= self._arriving
        self._arriving = False

    def leave(self) -> None:
        self._arrive()
        if self._admission.holds(self):
            self._admission.unqueue(self)
        self.wanted = 0
        held, self.held = self.held, 0
        if held:
            self._admission.free(held)


class _Rate:
    """Requests that end in a second, with older ones counting less and less."""

    def __init__(self) -> None:
        self._sum, self._when, self._since = 0.0, 0.0, 0.0

    def add(self, number: int) -> None:
        now = time.monotonic()
        self._since = self._since or now
        self._sum = self._sum * math.exp((self._when - now) / RATE_SECONDS) + number
        self._when = now

    def per_second(self) -> float | None:
        if not self._since:
            return None
        now = time.monotonic()
        # A young average has seen less than the whole of its time.
        share = 1 - math.exp((self._since - now - 0.1) / RATE_SECONDS)
        return self._sum * math.exp((self._when - now) / RATE_SECONDS) / (RATE_SECONDS * share)
