"""One thread that waits for sockets and file descriptors."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final, Generic, TypeVar

import zmq

MOST_AT_ONCE: Final = 256
MOST_ITEMS: Final = 64
T = TypeVar("T")

Source = zmq.Socket[bytes] | int


class PollLoop:
    """Calls the handler of each readable source; a handler may add and remove sources."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._handlers: dict[Source, Callable[[], None]] = {}

    def add(self, source: Source, handler: Callable[[], None]) -> None:
        self._handlers[source] = handler
        self._poller.register(source, zmq.POLLIN)

    def remove(self, source: Source) -> None:
        if self._handlers.pop(source, None) is not None:
            self._poller.unregister(source)

    def once(self, seconds: float) -> None:
        """Waits for at most `seconds` and handles what is readable."""
        ready = self._poller.poll(int(max(0.0, seconds) * 1000))
        # A handler may close the descriptor of another one, and its number may be in use again.
        for source, handler in [(source, self._handlers[source]) for source, _ in ready]:
            if self._handlers.get(source) is handler:
                handler()


class WakingQueue(Generic[T]):
    """Items that other threads pass to a loop. `put` blocks while `room` items are queued."""

    def __init__(self, room: int = 0) -> None:
        self.wakeup_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable when there are items."""
        self._items: queue.Queue[T] = queue.Queue(room)

    def put(self, item: T) -> None:
        self._items.put(item)
        os.eventfd_write(self.wakeup_fd, 1)

    def drain(self) -> list[T]:
        """Up to MOST_ITEMS of the items, so that the loop can handle its other sources."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.wakeup_fd)
        taken: list[T] = []
        with suppress(queue.Empty):
            while len(taken) < MOST_ITEMS:
                taken.append(self._items.get_nowait())
            os.eventfd_write(self.wakeup_fd, 1)
        return taken


def receive_some(socket: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
    """Yields the frames of up to MOST_AT_ONCE received messages."""
    with suppress(zmq.Again):
        for _ in range(MOST_AT_ONCE):
            yield socket.recv_multipart(zmq.NOBLOCK)
