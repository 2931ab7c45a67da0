"""Connections to the ranks of other instances, to send KV caches on.

Each has a thread, so that a step waits for the network only once much is on its way.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Final

from moesaic.comm.network.connect import connect
from moesaic.comm.network.handshake import Identity, Role
from moesaic.disagg.messages import Buffer

logger = logging.getLogger(__name__)

CONNECT_SECONDS: Final = 2.0
# How long a peer may take nothing, also one that a step waits for.
STALL_SECONDS: Final = 5.0
# A peer that could not be reached is not tried again for so long.
REST_SECONDS: Final = 2.0
# What may be on its way to one rank.
MOST_QUEUED: Final = 256 << 20


class KVOutlet:
    """To one rank. A frame that cannot be sent is dropped: the other instance then misses it."""

    def __init__(self, address: tuple[str, int], own: Identity, secret: bytes) -> None:
        self._address, self._own, self._secret = address, own, secret
        self._changed = threading.Condition()
        self._queue: deque[list[Buffer]] = deque()
        self._queued = 0
        self._connection: socket.socket | None = None
        self._rests_until = 0.0
        self.bytes_sent = 0
        threading.Thread(target=self._run, name="kv-outlet", daemon=True).start()

    def put(self, buffers: list[Buffer]) -> None:
        """Waits while too much is on its way."""
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        with self._changed:
            self._changed.wait_for(lambda: self._queued <= MOST_QUEUED or self._rests)
            if not self._rests:
                self._queue.append(buffers)
                self._queued += size
                self._changed.notify_all()

    @property
    def _rests(self) -> bool:
        return time.monotonic() < self._rests_until

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
                self._queued -= sum(memoryview(buffer).nbytes for buffer in buffers)
                self._changed.notify_all()

    def _send(self, buffers: Sequence[Buffer]) -> None:
        if self._connection is None:
            dial = partial(socket.create_connection, self._address, CONNECT_SECONDS)
            made, _ = connect(dial, Role.KV, self._own, self._secret, CONNECT_SECONDS, waits=False)
            assert isinstance(made, socket.socket), "a data link is not encrypted"
            self._connection = made
            made.settimeout(STALL_SECONDS)
        for buffer in buffers:
            left = memoryview(buffer)
            while left:
                sent = self._connection.send(left)
                left = left[sent:]
                self.bytes_sent += sent

    def _give_up(self, error: Exception) -> None:
        """The peer sees the end of the connection, unless there was none."""
        host, port = self._address
        logger.warning("no KV cache can be sent to %s:%d: %s", host, port, error)
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        with self._changed:
            self._rests_until = time.monotonic() + REST_SECONDS
            dropped = [memoryview(part).nbytes for parts in self._queue for part in parts]
            self._queued -= sum(dropped)
            self._queue.clear()
            self._changed.notify_all()


class KVOutlets:
    """By address, made at first use."""

    def __init__(self, own: Identity, secret: bytes) -> None:
        self._own, self._secret = own, secret
        self._outlets: dict[tuple[str, int], KVOutlet] = {}

    def put(self, host: str, port: int, buffers: list[Buffer]) -> None:
        outlet = self._outlets.get((host, port))
        if outlet is None:
            outlet = self._outlets[host, port] = KVOutlet((host, port), self._own, self._secret)
        outlet.put(buffers)

    @property
    def bytes_sent(self) -> int:
        return sum(outlet.bytes_sent for outlet in self._outlets.values())
