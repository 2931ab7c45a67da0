"""Progress of requests, from the engine's thread to the tasks of an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

from moesaic.engine.schedule.request_state import Progress


class OutputSender:
    """Of one event loop. Waking a loop costs more than a token, so all that happens until it looks
    is delivered in one go."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._boxes: dict[OutputQueue, None] = {}

    def put(self, box: OutputQueue, number: int, progress: Progress) -> None:
        """From any thread."""
        with self._lock:
            box.newest[number] = progress
            box.ended += progress.finished
            due = not self._boxes
            self._boxes[box] = None
        if due:
            with suppress(RuntimeError):  # the loop was closed: nobody listens any more
                self._loop.call_soon_threadsafe(self._deliver)

    def take(self, box: OutputQueue) -> tuple[int, Progress] | None:
        """What has waited for longest."""
        with self._lock:
            for number in box.newest:
                return number, box.newest.pop(number)
        return None

    def _deliver(self) -> None:
        with self._lock:
            boxes = [(box, box.take_ended()) for box in self._boxes]
            self._boxes = {}
        for box, ended in boxes:
            box.wake(ended)


class OutputQueue:
    """Of one call, by the numbers of its requests. Of each only the newest progress is kept: a slow
    reader gets larger pieces, and costs no memory. `on_ended` hears how many requests have ended,
    also when nobody reads."""

    def __init__(self, post: OutputSender) -> None:
        self.newest: dict[int, Progress] = {}
        self.ended = 0
        self.on_ended: Callable[[int], None] = lambda number: None
        self._post = post
        self._waiter: asyncio.Future[None] | None = None

    def put(self, number: int, progress: Progress) -> None:
        self._post.put(self, number, progress)

    async def get(self) -> tuple[int, Progress]:
        while (found := self._post.take(self)) is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return found

    def take_ended(self) -> int:
        ended, self.ended = self.ended, 0
        return ended

    def wake(self, ended: int) -> None:
        if ended:
            self.on_ended(ended)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
