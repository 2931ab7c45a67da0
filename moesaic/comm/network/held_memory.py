"""Descriptors of memory that outlives the ranks that map it: the supervisor holds them. No torch
here.

A rank that allocates memory for all ranks of its node hands over a descriptor of it, and every rank
takes copies of those that the others have handed over, also one that is started again. The memory
exists as long as any process maps it or has a descriptor of it: so the supervisor needs neither
CUDA nor the memory itself to keep a GPU's.

    request: operation, length of the key (u16), key; HOLD sends a descriptor along
    reply: HERE or NONE; to TAKE, HERE brings a descriptor along
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from typing import Final

from moesaic.comm.network.handshake import Session

HEAD: Final = struct.Struct("<BH")
HOLD, TAKE = 1, 2
HERE, NONE = b"+", b"-"
MOST_KEY: Final = 1024
# Of a service: a few windows of each rank.
MOST_HELD: Final = 4096


class HeldDescriptors:
    """The descriptors that are held. Threads of connections call `serve`."""

    def __init__(self) -> None:
        self._held: dict[str, int] = {}
        self._lock = threading.Lock()

    def serve(self, connection: socket.socket, session: Session, name: str) -> None:
        while (request := _receive_request(connection)) is not None:
            operation, key, found = request
            if operation == HOLD:
                connection.sendall(HERE if found and self._hold(key, found) else NONE)
                continue
            _close(found)
            with self._lock:
                held = self._held.get(key)
            if held is None:
                connection.sendall(NONE)
            else:
                socket.send_fds(connection, [HERE], [held])

    def _hold(self, key: str, found: list[int]) -> bool:
        with self._lock:
            if key in self._held or len(self._held) >= MOST_HELD:
                _close(found)
                return False
            self._held[key] = found[0]
        return True


class HeldMemory:
    """A rank's connection to what the supervisor holds. OSError means that it is gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def hold(self, key: str, descriptor: int) -> None:
        """Hands over a copy of a descriptor; the caller still closes its own."""
        if _ask(self._connection, self._lock, HOLD, key, [descriptor]) is None:
            raise RuntimeError(f"the supervisor does not hold {key!r}: it has one, or too many")

    def take(self, key: str) -> int | None:
        """A descriptor, which the caller closes; None if nothing is held under this key."""
        found = _ask(self._connection, self._lock, TAKE, key, [])
        return found[0] if found else None

    def close(self) -> None:
        self._connection.close()


def _ask(
    connection: socket.socket, lock: threading.Lock, operation: int, key: str, given: list[int]
) -> list[int] | None:
    """The descriptors of the reply; None if it is NONE."""
    data = key.encode()
    if not 0 < len(data) <= MOST_KEY:
        raise ValueError(f"a key of {len(data)} bytes: give 1 to {MOST_KEY}")
    with lock:
        socket.send_fds(connection, [HEAD.pack(operation, len(data)) + data], given)
        reply, found = _receive(connection, 1)
    if not reply:
        raise ConnectionError("the supervisor has closed the connection")
    return found if reply == HERE else None


def _receive_request(connection: socket.socket) -> tuple[int, str, list[int]] | None:
    """None at the end of the connection, or of sense in it."""
    data, found = _receive(connection, HEAD.size + MOST_KEY)
    try:
        while len(data) < HEAD.size or len(data) < HEAD.size + HEAD.unpack_from(data)[1]:
            more = connection.recv(MOST_KEY) if data else b""
            if not more:
                raise ValueError("the connection has ended")
            data += more
        operation, length = HEAD.unpack_from(data)
        if len(data) != HEAD.size + length or operation not in (HOLD, TAKE):
            raise ValueError("not a request")
        return operation, data[HEAD.size :].decode(), found
    except ValueError:  # also of a key that is not text
        _close(found)
        return None


def _receive(connection: socket.socket, most: int) -> tuple[bytes, list[int]]:
    data, found, _, _ = socket.recv_fds(connection, most, 1)
    for descriptor in found:
        os.set_inheritable(descriptor, False)
    return data, list(found)


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
