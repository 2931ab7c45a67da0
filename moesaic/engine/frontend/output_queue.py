"""Queues that carry progress from the engine's thread to the tasks of an event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final
from weakref import WeakKeyDictionary, ref

from moesaic.core.request import Request
from moesaic.engine.schedule.request_state import Progress

logger = logging.getLogger(__name__)

# Seconds: one long delivery, such as that of a large answer, delays no token for as long again.
MAX_PAUSE: Final = 0.05


# Takes progress of a request, by its number, while a task waits for it, which then need not run;
# False if the task must. It gets no ends.
ProgressTaker = Callable[[int, Progress], bool]


class DeliveryError(Exception):
    """A ProgressTaker failed; its error is the cause."""


class OutputSender:
    """Wakes one event loop, which costs more than a token: once for all progress so far.

    While the streams take the loop more than half of its time, it is woken less often, and each
    stream gets several tokens at once. The first token and the end of a request never wait.

    There is no lock: other threads put progress into a queue, then the queue into `ready`, and then
    set a flag. The loop clears the flags, then takes the queues, and then their progress."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)
        self.ready: dict[OutputQueue, None] = {}
        """Queues that have progress which the loop has not taken."""
        self.wakes_soon = False
        """The loop is woken without a pause."""
        self._wakes_later = False
        """The loop knows that it must deliver at the end of the pause."""
        self._resume_at = 0.0
        """The end of the pause after the last delivery, which is as long as that took."""
        self._timer: asyncio.TimerHandle | None = None

    def wake(self, is_urgent: bool) -> None:
        """Delivers what has arrived, in the event loop; any thread may call it."""
        if self._wakes_later and not is_urgent:
            return
        if is_urgent or time.monotonic() >= self._resume_at:
            self.wakes_soon, deliver = True, self._deliver
        else:
            self._wakes_later, deliver = True, self._deliver_later
        try:
            if (loop := self._loop()) is not None:
                loop.call_soon_threadsafe(deliver)
                return
        except RuntimeError:  # it is closed
            pass
        while self.ready:
            self.ready.popitem()[0].arrived.clear()
        self.wakes_soon = self._wakes_later = False

    def _deliver_later(self) -> None:
        """Also with nothing to deliver: the flags must be cleared."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._resume_at - time.monotonic(), self._deliver)

    def _deliver(self) -> None:
        start = time.monotonic()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.wakes_soon = self._wakes_later = False
        ready: dict[OutputQueue, None] = {}
        while self.ready:
            ready[self.ready.popitem()[0]] = None
        for output in reversed(ready):
            try:
                output.deliver()
            except Exception:  # the others get theirs all the same
                logger.exception("progress could not be delivered")
        # Runs behind the tasks that were woken.
        asyncio.get_running_loop().call_soon(self._pause, start)

    def _pause(self, start: float) -> None:
        now = time.monotonic()
        # A delivery of nothing may follow at once, and does not end the pause.
        self._resume_at = max(self._resume_at, now + min(now - start, MAX_PAUSE))


class OutputQueue:
    """The newest progress of each request of a call, however many steps pass until it is read: then
    increments are larger."""

    def __init__(self, sender: OutputSender) -> None:
        self.arrived: dict[int, Progress] = {}
        """What the event loop has not taken yet."""
        self.newest: dict[int, Progress] = {}
        """Only the event loop uses it."""
        self.begun: set[int] = set()
        """Requests whose first token was delivered."""
        self.ended = 0
        self.on_ended: Callable[[int], None] = lambda number: None
        """Called in the event loop with the number of requests that have ended."""
        self.on_finished: Callable[[str], object] = lambda rid: None
        """Called in the thread that puts the end of a request."""
        self.taker: ProgressTaker | None = None
        self._sender = sender
        self._waiter: asyncio.Future[None] | None = None

    def put(self, number: int, progress: Progress) -> None:
        """Any thread may call it."""
        if progress.finished:
            self.on_finished(progress.rid)
        sender = self._sender
        self.arrived[number] = progress
        sender.ready[self] = None
        if not sender.wakes_soon:
            sender.wake(progress.finished or number not in self.begun)

    async def get(self) -> tuple[int, Progress]:
        """The progress that has waited longest."""
        while not self.newest:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        number = next(iter(self.newest))
        return number, self.newest.pop(number)

    def deliver(self) -> None:
        """Hands the newest progress to the taker or to the task that waits for it."""
        self._take_arrived()
        waiter, newest = self._waiter, self.newest
        if waiter is not None and not waiter.done():
            try:
                if self.taker is not None and not self.ended:
                    for number, progress in list(newest.items()):
                        if not self.taker(number, progress):
                            break
                        del newest[number]
                if newest:
                    waiter.set_result(None)
            except Exception as error:
                failure = DeliveryError("an update could not be written")
                failure.__cause__ = error
                waiter.set_exception(failure)
        if self.ended:
            ended, self.ended = self.ended, 0
            self.on_ended(ended)

    def _take_arrived(self) -> None:
        if len(self.arrived) == 1:  # a call of one request, or little to deliver
            number, progress = self.arrived.popitem()
            self.newest[number] = progress
            self.ended += progress.finished
            self.begun.add(number)
            return
        found: dict[int, Progress] = {}
        while self.arrived:  # another thread may put newer progress meanwhile
            number, progress = self.arrived.popitem()
            found[number] = progress
        for number, progress in reversed(found.items()):
            self.newest[number] = progress
            self.ended += progress.finished
        self.begun.update(found)


class DirectDelivery:
    """The requests of a call that has begun, whose progress a taker may have."""

    requests: Sequence[Request] = ()
    queue: OutputQueue | None = None

    def connect(self, taker: ProgressTaker) -> None:
        if self.queue is not None:
            self.queue.taker = taker

    def disconnect(self) -> None:
        """The taker refers to this: else only the garbage collector would free both."""
        if self.queue is not None:
            self.queue.taker = None


class OutputSenders:
    """One sender per event loop, for as long as the loop exists."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._senders: WeakKeyDictionary[asyncio.AbstractEventLoop, OutputSender] = (
            WeakKeyDictionary()
        )

    def new_queue(self) -> OutputQueue:
        """A queue for the running event loop."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if loop not in self._senders:
                self._senders[loop] = OutputSender(loop)
            return OutputQueue(self._senders[loop])
