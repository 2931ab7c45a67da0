"""Queues that carry progress from the engine's thread to the tasks of an event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
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
ProgressReader = Callable[[int, Progress], bool]


class OutputSender:
    """Wakes one event loop, which costs more than a token: once for all progress so far.

    While the streams take the loop more than half of its time, it is woken less often, and each
    stream gets several tokens at once. The first token and the end of a request never wait.

    There is no lock: other threads only append to `incoming` and then set a flag, which the loop
    clears before it reads."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)
        self.incoming: deque[tuple[OutputQueue, int, Progress]] = deque()
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
        self.incoming.clear()
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
        for output in self._receive():
            try:
                output.deliver()
            except Exception:  # the others get theirs all the same
                logger.exception("the end of a request could not be noted")
        # Runs behind the tasks that were woken.
        asyncio.get_running_loop().call_soon(self._pause, start)

    def _receive(self) -> dict[OutputQueue, None]:
        """Moves what has arrived to its queues, which it returns."""
        ready: dict[OutputQueue, None] = {}
        incoming = self.incoming
        while incoming:
            output, number, progress = incoming.popleft()
            output.newest[number] = progress
            output.begun.add(number)
            if progress.finished:
                output.ended += 1
            ready[output] = None
        return ready

    def _pause(self, start: float) -> None:
        now = time.monotonic()
        # A delivery of nothing may follow at once, and does not end the pause.
        self._resume_at = max(self._resume_at, now + min(now - start, MAX_PAUSE))


class OutputQueue:
    """The newest progress of each request of a call: a slow reader gets larger increments."""

    def __init__(self, sender: OutputSender) -> None:
        self.newest: dict[int, Progress] = {}
        """Only the event loop uses it."""
        self.begun: set[int] = set()
        """Requests whose first token was delivered."""
        self.ended = 0
        self.on_ended: Callable[[int], None] = lambda number: None
        """Called in the event loop with the number of requests that have ended."""
        self.on_finished: Callable[[str], object] = lambda rid: None
        """Called in the thread that puts the end of a request."""
        self.reader: ProgressReader | None = None
        self._sender = sender
        self._waiter: asyncio.Future[None] | None = None

    def put(self, number: int, progress: Progress) -> None:
        """Any thread may call it."""
        if progress.finished:
            self.on_finished(progress.rid)
        sender = self._sender
        sender.incoming.append((self, number, progress))
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
        """Hands the newest progress to the reader or to the task that waits for it."""
        waiter, reader, newest = self._waiter, self.reader, self.newest
        if waiter is not None and not waiter.done():
            try:
                if reader is not None and not self.ended:
                    for number, progress in list(newest.items()):
                        if not reader(number, progress):
                            break
                        del newest[number]
                if newest:
                    waiter.set_result(None)
            except Exception as error:
                waiter.set_exception(error)
        if self.ended:
            ended, self.ended = self.ended, 0
            self.on_ended(ended)


class DirectUpdates:
    """The requests of a call that has begun, whose progress a reader may take."""

    requests: Sequence[Request] = ()
    queue: OutputQueue | None = None

    def connect(self, reader: ProgressReader) -> None:
        if self.queue is not None:
            self.queue.reader = reader

    def disconnect(self) -> None:
        """The reader refers to this: else only the garbage collector would free both."""
        if self.queue is not None:
            self.queue.reader = None


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
