"""Queues that carry progress from the engine's thread to the tasks of an event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final
from weakref import WeakKeyDictionary, ref

from moesaic.engine.schedule.request_state import Progress

logger = logging.getLogger(__name__)

# Seconds: one long delivery, such as that of a large answer, delays no token for as long again.
MAX_PAUSE: Final = 0.05


class OutputSender:
    """Wakes one event loop, which costs more than a token: once for all progress so far.

    While the streams take the loop more than half of its time, it is woken less often, and each
    stream gets several tokens at once. The first token and the end of a request never wait."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)
        self._lock = threading.Lock()
        self._ready: dict[OutputQueue, None] = {}
        self._wakes_soon = False
        """The loop is woken without a pause."""
        self._resume_at = 0.0
        """The end of the pause after the last delivery, which is as long as that took."""
        self._timer: asyncio.TimerHandle | None = None

    def put(self, output: OutputQueue, number: int, progress: Progress) -> None:
        """May be called from any thread."""
        with self._lock:
            is_urgent = progress.finished or number not in output.begun
            output.begun.add(number)
            output.newest[number] = progress
            output.ended += progress.finished
            is_first = not self._ready
            self._ready[output] = None
            if self._wakes_soon or not (is_first or is_urgent):
                return
            pauses = not is_urgent and time.monotonic() < self._resume_at
            self._wakes_soon = not pauses
        if (loop := self._loop()) is not None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._deliver_later if pauses else self._deliver)

    def pop(self, output: OutputQueue) -> tuple[int, Progress] | None:
        """The progress that has waited longest."""
        with self._lock:
            for number in output.newest:
                return number, output.newest.pop(number)
        return None

    def _deliver_later(self) -> None:
        if self._ready and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._resume_at - time.monotonic(), self._deliver)

    def _deliver(self) -> None:
        start = time.monotonic()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        with self._lock:
            ready = [(output, output.ended) for output in self._ready]
            for output in self._ready:
                output.ended = 0
            self._ready = {}
            self._wakes_soon = False
        for output, ended in ready:
            try:
                output.wake(ended)
            except Exception:  # the others are woken all the same
                logger.exception("the end of a request could not be noted")
        # Runs behind the tasks that were woken.
        asyncio.get_running_loop().call_soon(self._pause, start)

    def _pause(self, start: float) -> None:
        now = time.monotonic()
        self._resume_at = now + min(now - start, MAX_PAUSE)


class OutputQueue:
    """The newest progress of each request of a call: a slow reader gets larger increments."""

    def __init__(self, sender: OutputSender) -> None:
        self.newest: dict[int, Progress] = {}
        self.begun: set[int] = set()
        """Requests with a first token."""
        self.ended = 0
        self.on_ended: Callable[[int], None] = lambda number: None
        """Called in the event loop with the number of requests that have ended."""
        self._sender = sender
        self._waiter: asyncio.Future[None] | None = None

    def put(self, number: int, progress: Progress) -> None:
        self._sender.put(self, number, progress)

    async def get(self) -> tuple[int, Progress]:
        while (found := self._sender.pop(self)) is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return found

    def wake(self, ended: int) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if ended:
            self.on_ended(ended)


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
