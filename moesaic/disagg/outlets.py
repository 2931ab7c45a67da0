"""Connections to the ranks of other instances, to send KV caches on.

Each has a thread, so that a step waits for the network only once much is on its way; and then not
for a peer that takes nothing.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from moesaic.comm.network.connect import connect
from moesaic.comm.network.handshake import Identity, Role
from moesaic.disagg.messages import Buffer

logger = logging.getLogger(__name__)

CONNECT_SECONDS: Final = 2.0
# How long a peer may take nothing.
STALL_SECONDS: Final = 5.0
# The same while a step waits for room in memory: it waits for peers that are slow, not for one that
# is stopped.
HOLD_SECONDS: Final = 1.0
# A peer that could not be reached is not tried again for so long.
REST_SECONDS: Final = 2.0
# What may be on its way to all ranks together. The memory plan counts it.
MOST_QUEUED: Final = 256 << 20


class KVOutlet:
    """To one rank. A frame that cannot be sent is dropped: the other instance then misses it.
    `changed`: of all outlets, whose lock is held where a method says so."""

    def __init__(
        self,
        address: tuple[str, int],
        own: Identity,
        secret: bytes,
        changed: threading.Condition,
    ) -> None:
        self._address, self._own, self._secret = address, own, secret
        self._changed = changed
        self._queue: deque[list[Buffer]] = deque()
        self._connection: socket.socket | None = None
        self._rests_until = 0.0
        self._moved = time.monotonic()
        """When something was sent, or there was nothing to send."""
        self.queued = 0
        """Bytes, those included that are being sent."""
        self.bytes_sent = 0
        threading.Thread(target=self._run, name="kv-outlet", daemon=True).start()

    @property
    def rests(self) -> bool:
        return time.monotonic() < self._rests_until

    @property
    def is_stuck(self) -> bool:
        """With the lock."""
        return self.queued > 0 and time.monotonic() - self._moved > HOLD_SECONDS

    def append(self, buffers: list[Buffer]) -> None:
        """With the lock."""
        if not self.queued:
            self._moved = time.monotonic()
        self._queue.append(buffers)
        self.queued += _size(buffers)
        self._changed.notify_all()

    def drop(self, why: str) -> None:
        """With the lock: gives up what waits. The peer sees the end of the connection."""
        host, port = self._address
        logger.warning("no KV cache can be sent to %s:%d: %s", host, port, why)
        self._rests_until = time.monotonic() + REST_SECONDS
        self.queued -= sum(map(_size, self._queue))
        self._queue.clear()
        self._moved = time.monotonic()
        if self._connection is not None:  # its thread may be sending
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                buffers = self._queue.popleft()
            try:
                self._send(buffers)
            except (OSError, ValueError) as error:  # ValueError: no host has such a name
                self._give_up(error)
            with self._changed:
                self.queued -= _size(buffers)
                self._changed.notify_all()

    def _send(self, buffers: Sequence[Buffer]) -> None:
        if self._connection is None:
            dial = partial(socket.create_connection, self._address, CONNECT_SECONDS)
            made, _ = connect(dial, Role.KV, self._own, self._secret, CONNECT_SECONDS, waits=False)
            assert isinstance(made, socket.socket), "a data link is not encrypted"
            made.settimeout(STALL_SECONDS)
            self._connection = made
            if self.rests:
                raise ConnectionError("it was given up while it was connected to")
        for buffer in buffers:
            left = memoryview(buffer)
            while left:
                sent = self._connection.send(left)
                left, self._moved = left[sent:], time.monotonic()
                self.bytes_sent += sent

    def _give_up(self, error: Exception) -> None:
        with self._changed:
            if not self.rests:
                self.drop(str(error))
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class KVOutlets:
    """By address, made at first use."""

    def __init__(self, own: Identity, secret: bytes) -> None:
        self._own, self._secret = own, secret
        self._outlets: dict[tuple[str, int], KVOutlet] = {}
        self._changed = threading.Condition()

    def put(self, host: str, port: int, buffers: list[Buffer]) -> None:
        """Waits while too much is on its way, but not for a peer that takes nothing."""
        with self._changed:
            outlet = self._outlets.get((host, port))
            if outlet is None:
                made = KVOutlet((host, port), self._own, self._secret, self._changed)
                outlet = self._outlets[host, port] = made
            self._make_room(_size(buffers))
            if not outlet.rests:
                outlet.append(buffers)

    def _make_room(self, size: int) -> None:
        """A frame that is larger than the room goes alone."""
        while self.queued > 0 and self.queued + size > MOST_QUEUED:
            for outlet in self._outlets.values():
                if outlet.is_stuck:
                    outlet.drop(f"it took nothing for {HOLD_SECONDS:g} s, and others wait")
            self._changed.wait(HOLD_SECONDS / 4)

    @property
    def queued(self) -> int:
        return sum(outlet.queued for outlet in self._outlets.values())

    @property
    def bytes_sent(self) -> int:
        return sum(outlet.bytes_sent for outlet in self._outlets.values())


def _size(buffers: Sequence[Buffer]) -> int:
    return sum(memoryview(buffer).nbytes for buffer in buffers)
