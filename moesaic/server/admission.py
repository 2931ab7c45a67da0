"""The queue in front of the engine, for requests beyond those that it can run.

Each client has its own line, and the lines are served in turn, counted in requests: a client with a
thousand queued requests does not delay a client with one. Everything runs in one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Hashable
from typing import Final

from moesaic.engine.engine import QueueFull
from moesaic.engine.frontend.admission import CallAdmission, Start
from moesaic.engine.frontend.fair_queue import FairQueue

logger = logging.getLogger(__name__)

MAX_QUEUED: Final = 4096
# The engine gets 1/8 more requests than it runs, so that the next step finds one.
LEAD_SHARE: Final = 8
# Time constant of the rate at which requests end.
RATE_SECONDS: Final = 10.0
LONGEST_RETRY: Final = 60


class AdmissionQueueFull(QueueFull):
    """`retry_after`: seconds that the engine needs for the requests queued now."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class AdmissionQueue(FairQueue["QueuedCall"]):
    """Counts requests: `waiting` and `running` now, the totals since the start."""

    def __init__(self, max_running: int, max_queued: int | None = None) -> None:
        most_open = max_running + (MAX_QUEUED if max_queued is None else max_queued)
        super().__init__(max_running + max(1, max_running // LEAD_SHARE), most_open)
        self.calls = 0
        """HTTP calls without a response, including those in a chat template."""
        self.arriving = 0
        """Calls whose requests are not queued yet."""
        self.admitted_total = 0
        self.meeting = 0
        """Requests of a prefill instance that two instances share."""
        self._max_running = max_running
        self._rate = _EndRate()

    @property
    def open_requests(self) -> int:
        return self.arriving + self.waiting + self.running

    def new_call(self, client: Hashable) -> QueuedCall:
        return QueuedCall(self, client)

    def new_meeting(self) -> MeetingCall:
        return MeetingCall(self)

    def queue(self, waiter: QueuedCall) -> None:
        if waiter.wanted > self.most_open:
            raise ValueError(
                f"{waiter.wanted} answers at once are more than --max-running-requests and "
                f"--max-queued-requests allow, which is {self.most_open}: send several requests"
            )
        super().queue(waiter)

    def free(self, number: int) -> None:
        self._rate.record(number)
        super().free(number)

    def retry_after(self) -> int:
        rate = self._rate.per_second()
        seconds = 1 if rate is None else math.ceil(self.waiting / max(rate, 1e-3))
        return min(max(seconds, 1), LONGEST_RETRY)

    def full(self) -> AdmissionQueueFull:
        running = min(self.running, self._max_running)  # the rest is queued in the engine
        waiting = self.running - running + self.waiting + self.meeting
        return AdmissionQueueFull(
            f"{running} requests are running and {waiting} are waiting, which is all "
            "that --max-running-requests and --max-queued-requests allow: try again later",
            self.retry_after(),
        )


class QueuedCall(CallAdmission):
    """The engine's CallAdmission for one call, and a waiter of the queue. The call counts as
    arriving until it enters or leaves, so its owner must call `leave`."""

    def __init__(self, admission: AdmissionQueue, client: Hashable) -> None:
        self.client = client
        self.wanted = 0
        """Requests in the queue."""
        self.held = 0
        """Slots of requests that were admitted."""
        self._admission = admission
        self._start: Start = lambda number: number
        self._admitted: asyncio.Future[None] | None = None
        self._arriving = True
        admission.arriving += 1

    async def enter(self, number: int, start: Start) -> None:
        self._stop_arriving()
        self.wanted, self._start = number, start
        self._admitted = asyncio.get_running_loop().create_future()
        try:
            self._admission.queue(self)
            await self._admitted
        except BaseException:
            self.leave()
            raise

    def begin(self, number: int) -> None:
        """Takes `number` slots and returns those that it does not need."""
        try:
            started = self._start(number)
        except Exception as error:
            logger.exception("requests could not start")
            self.refuse(error)
            return
        self._admission.admitted_total += started
        self._resolve()
        if started < number:
            self.finished(number - started)

    def finished(self, number: int) -> None:
        """Frees the slots of ended requests; requests that were not admitted leave the queue."""
        slots = min(number, self.held)
        if never_admitted := min(number - slots, self.wanted):
            if never_admitted == self.wanted:
                self._admission.unqueue(self)
            else:
                self._admission.forget(self, never_admitted)
            if not self.wanted:
                self._resolve()
        if slots:
            self.held -= slots
            self._admission.free(slots)

    def refuse(self, error: Exception) -> None:
        if self._admitted is not None and not self._admitted.done():
            self._admitted.set_exception(error)

    def leave(self) -> None:
        self._stop_arriving()
        if self._admission.holds(self):
            self._admission.unqueue(self)
        self.wanted = 0
        held, self.held = self.held, 0
        if held:
            self._admission.free(held)

    def _resolve(self) -> None:
        if self._admitted is not None and not self._admitted.done():
            self._admitted.set_result(None)

    def _stop_arriving(self) -> None:
        self._admission.arriving -= self._arriving
        self._arriving = False


class MeetingCall(CallAdmission):
    """A call of a prefill instance whose requests wait for pages of decode instances. They take no
    slots while they wait: others, whose pages are there, would wait for these slots, and these
    pages for the others' prompts. The ranks compute prompts in the order in which there are pages
    for them. The call counts as arriving until it enters or leaves."""

    def __init__(self, admission: AdmissionQueue) -> None:
        self._admission, self._open = admission, 0
        self._arriving = True
        admission.arriving += 1

    async def enter(self, number: int, start: Start) -> None:
        self._stop_arriving()
        admission = self._admission
        if admission.meeting + number > admission.most_open:
            admission.refused_total += number
            raise admission.full()
        self._open = number
        admission.meeting += number
        started = start(number)
        admission.admitted_total += started
        self.finished(number - started)

    def finished(self, number: int) -> None:
        ended = min(number, self._open)
        self._open -= ended
        self._admission.meeting -= ended

    def leave(self) -> None:
        self._stop_arriving()
        self.finished(self._open)

    def _stop_arriving(self) -> None:
        self._admission.arriving -= self._arriving
        self._arriving = False


class _EndRate:
    """Requests that end per second, as an exponentially weighted mean."""

    def __init__(self) -> None:
        self._sum, self._when, self._since = 0.0, 0.0, 0.0

    def record(self, number: int) -> None:
        now = time.monotonic()
        self._since = self._since or now
        self._sum = self._sum * math.exp((self._when - now) / RATE_SECONDS) + number
        self._when = now

    def per_second(self) -> float | None:
        if not self._since:
            return None
        now = time.monotonic()
        # Corrects for the time before the first request.
        share = 1 - math.exp((self._since - now - 0.1) / RATE_SECONDS)
        return self._sum * math.exp((self._when - now) / RATE_SECONDS) / (RATE_SECONDS * share)
