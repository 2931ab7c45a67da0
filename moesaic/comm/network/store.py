"""The store of a service: keys and values for the rendezvous of ranks. No torch here.

The supervisor of node 0 serves it: on a Unix socket in its private run folder if all ranks are on
one machine, at --dist-init-addr for several nodes. A client proves that it knows the secret of the
service (handshake.py); between nodes the connection is encrypted (tls.py).
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from moesaic.comm.network.connect import connect
from moesaic.comm.network.handshake import Identity, Role, Session
from moesaic.comm.network.held_memory import HeldDescriptors, HeldMemory
from moesaic.comm.network.listener import Listener
from moesaic.comm.network.message_stream import MessageStream
from moesaic.comm.network.tls import Connection, Tampered
from moesaic.comm.windows.shared_memory import create_memory

logger = logging.getLogger(__name__)

# Of all keys and values. Ranks exchange a few kilobytes each.
MOST_BYTES: Final = 1 << 28
ANSWER_SECONDS: Final = 60.0
# How long a client sleeps between two checks for a key: short at first, as peers mostly arrive
# together, then a twentieth of the wait so far, so that the store can serve many ranks.
FIRST_PAUSE: Final = 0.001
LONGEST_PAUSE: Final = 0.25
PAUSE_SHARE: Final = 0.05

# Methods of StoreTable that a client may call.
OPERATIONS: Final = ("set", "get", "has", "add", "delete", "count", "memory")

Answer = bool | int | list[bytes | None] | None


class StoreRequest(msgspec.Struct, array_like=True, frozen=True):
    """`operation`: the name of a method of StoreTable."""

    operation: str
    keys: list[str]
    value: bytes = b""
    number: int = 0


class StoreReply(msgspec.Struct, array_like=True, frozen=True):
    value: Answer = None
    error: str = ""


_REQUESTS: Final = msgspec.msgpack.Decoder(StoreRequest)
_REPLIES: Final = msgspec.msgpack.Decoder(StoreReply)


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """`host`: the host of `port`, or the path of a Unix socket if that is 0."""

    host: str
    port: int
    secret: bytes = field(repr=False)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}" if self.port else self.host

    def connect(self, seconds: float, identity: Identity) -> StoreClient:
        """Raises OSError if the store is not there within `seconds` or has another secret."""
        return StoreClient(self._connect(Role.STORE, seconds, identity))

    def connect_memory(self, seconds: float, identity: Identity) -> HeldMemory:
        """The same, to the memory that is held there; only where the store is on this machine."""
        assert not self.port, "descriptors go through a Unix socket"
        connection = self._connect(Role.MEMORY, seconds, identity)
        assert isinstance(connection, socket.socket)
        return HeldMemory(connection)

    def _connect(self, role: Role, seconds: float, identity: Identity) -> Connection:
        try:
            open_socket = partial(self._open_socket, min(seconds, ANSWER_SECONDS))
            connection, _ = connect(open_socket, role, identity, self.secret, seconds)
        except PermissionError as error:
            raise PermissionError(f"the store at {self}: {error}") from error
        except OSError as error:
            raise ConnectionError(f"no store at {self}: {error}") from error
        connection.settimeout(ANSWER_SECONDS)
        return connection

    def _open_socket(self, seconds: float) -> socket.socket:
        if self.port:
            return socket.create_connection((self.host, self.port), seconds)
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(seconds)
            connection.connect(self.host)
        except OSError:
            connection.close()
            raise
        return connection


class StoreTable:
    """The stored values. Any thread may call the methods, which never block."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._bytes = 0
        self._memory: dict[str, int] = {}
        """The descriptors of memory that outlives the ranks that map it."""
        self._lock = threading.Lock()
        self._on_set: Callable[[str, bytes], None] | None = None

    def fill(self, values: Mapping[str, bytes]) -> None:
        """What ranks set in a former store."""
        with self._lock:
            for key, value in values.items():
                self._put(key, value)

    def follow(self, on_set: Callable[[str, bytes], None]) -> dict[str, bytes]:
        """All values; from now on `on_set` is called with each that is set."""
        with self._lock:
            self._on_set = on_set
            return dict(self._values)

    def serve(self, connection: Connection, session: Session, name: str) -> None:
        stream = MessageStream(connection)
        try:
            while True:
                stream.send(msgspec.msgpack.encode(self.answer(stream.receive())))
        except Tampered as error:
            logger.warning("the store's connection to %s ends: %s", name, error)
        except (OSError, ValueError):
            return  # the client is gone, or reads the end of the connection

    def answer(self, data: bytes) -> StoreReply:
        try:
            request = _REQUESTS.decode(data)
            if request.operation not in OPERATIONS:
                raise KeyError(request.operation)
            with self._lock:
                return StoreReply(getattr(self, request.operation)(request))
        except (msgspec.DecodeError, KeyError, ValueError) as error:
            return StoreReply(error=f"{type(error).__name__}: {error}")

    def set(self, request: StoreRequest) -> None:
        for key in request.keys:
            self._put(key, request.value)

    def get(self, request: StoreRequest) -> list[bytes | None]:
        return [self._values.get(key) for key in request.keys]

    def has(self, request: StoreRequest) -> bool:
        return all(key in self._values for key in request.keys)

    def add(self, request: StoreRequest) -> int:
        (key,) = request.keys
        total = int(self._values.get(key, b"0")) + request.number
        self._put(key, str(total).encode())
        return total

    def delete(self, request: StoreRequest) -> bool:
        (key,) = request.keys
        value = self._values.pop(key, None)
        if value is not None:
            self._bytes -= len(key) + len(value)
        return value is not None

    def count(self, request: StoreRequest) -> int:
        return len(self._values)

    def memory(self, request: StoreRequest) -> list[bytes | None]:
        """The path of shared memory, which the first request for it creates; its name is `value`,
        its length `number`."""
        (key,) = request.keys
        if key not in self._memory:
            try:
                self._memory[key] = create_memory(request.value.decode(), request.number)
            except OSError as error:
                raise ValueError(f"{request.number} bytes of shared memory: {error}") from error
        return [f"/proc/{os.getpid()}/fd/{self._memory[key]}".encode()]

    def _put(self, key: str, value: bytes) -> None:
        old = self._values.get(key)
        grown = self._bytes + len(key) + len(value) - (0 if old is None else len(key) + len(old))
        if grown > MOST_BYTES:
            raise ValueError(f"the store holds {MOST_BYTES} bytes, not {grown}")
        self._values[key], self._bytes = value, grown
        if self._on_set is not None:
            self._on_set(key, value)


class StoreClient:
    """A rank's connection to the store. Any thread may use it; no request waits for another rank.
    OSError means that the store is gone."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._stream = MessageStream(connection)
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes) -> None:
        self._ask(StoreRequest("set", [key], value))

    def get_now(self, keys: Sequence[str]) -> list[bytes | None]:
        return self._ask(StoreRequest("get", list(keys)))

    def has(self, keys: Sequence[str]) -> bool:
        return bool(self._ask(StoreRequest("has", list(keys))))

    def add(self, key: str, number: int) -> int:
        return int(self._ask(StoreRequest("add", [key], number=number)))

    def delete(self, key: str) -> bool:
        return bool(self._ask(StoreRequest("delete", [key])))

    def count(self) -> int:
        return int(self._ask(StoreRequest("count", [])))

    def memory(self, key: str, name: str, length: int) -> str:
        """The path of memory that lives as long as the service."""
        (path,) = self._ask(StoreRequest("memory", [key], name.encode(), length))
        return str(path, "utf-8")

    def wait(
        self, keys: Sequence[str], seconds: float, look: Callable[[], object] | None = None
    ) -> list[str]:
        """Waits until all keys exist, calling `look`; returns those missing after `seconds`."""
        started = time.monotonic()
        while not self.has(keys):
            if look is not None:
                look()
            waited = time.monotonic() - started
            if waited >= seconds:
                values = self.get_now(keys)
                return [key for key, value in zip(keys, values, strict=True) if value is None]
            pause = min(max(FIRST_PAUSE, PAUSE_SHARE * waited), LONGEST_PAUSE)
            time.sleep(min(pause, seconds - waited))
        return []

    def close(self) -> None:
        self._connection.close()

    def _ask(self, request: StoreRequest) -> Any:
        with self._lock:
            try:
                self._stream.send(msgspec.msgpack.encode(request))
                reply = _REPLIES.decode(self._stream.receive())
            except BaseException:
                # A late reply would be taken for the reply to the next request.
                self._connection.close()
                raise
        if reply.error:
            raise RuntimeError(f"the store refuses {request.operation!r}: {reply.error}")
        return reply.value


class LocalStore:
    """A store for processes of this machine, served by threads of this process."""

    def __init__(self, folder: Path) -> None:
        """`folder`: one that other users cannot enter."""
        path = folder / "store"
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(path))
        listening.listen(128)
        self.address = StoreAddress(str(path), 0, secrets.token_bytes(32))
        handlers = {Role.STORE: StoreTable().serve, Role.MEMORY: HeldDescriptors().serve}
        self._listener = Listener(listening, Identity(-1, 0), self.address.secret, handlers)

    def close(self) -> None:
        self._listener.close()
