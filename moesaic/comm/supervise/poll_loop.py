"""One thread that waits for sockets and file descriptors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final

import zmq

MOST_AT_ONCE: Final = 256

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
        for source, _ in self._poller.poll(int(max(0.0, seconds) * 1000)):
            handler = self._handlers.get(source)
            if handler is not None:
                handler()


def receive_some(socket: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
    """Yields the frames of up to MOST_AT_ONCE received messages."""
    with suppress(zmq.Again):
        for _ in range(MOST_AT_ONCE):
            yield socket.recv_multipart(zmq.NOBLOCK)
