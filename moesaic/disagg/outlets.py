"""Connections to the ranks of other instances, to send KV caches on.

Each has a thread, so that a step waits for others only once much is on its way. What is sent lies
in the outbox: a rank of the same machine reads it there, for others it is sent by TCP.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from functools import partial
from typing import Any, Final

import torch
from msgspec.structs import replace

from moesaic.comm.network.connect import connect
from moesaic.comm.network.handshake import Identity, Role
from moesaic.disagg.host_buffer import HostBuffer, bytes_of
from moesaic.disagg.messages import (
    Buffer,
    Chunk,
    Exported,
    Malformed,
    Opened,
    Place,
    Taken,
    TransferMessage,
    frame,
    receive,
)
from moesaic.disagg.outbox import Outbox
from moesaic.disagg.transports.registry import TCP, TRANSPORTS

logger = logging.getLogger(__name__)

CONNECT_SECONDS: Final = 2.0
# How long a peer may take nothing, also one that a step waits for.
STALL_SECONDS: Final = 5.0
# A peer that could not be reached is not tried again for so long.
REST_SECONDS: Final = 2.0


class KVOutlet:
    """To one rank. What cannot be sent is dropped: the other instance then misses it."""

    def __init__(
        self,
        address: tuple[str, int],
        own: Identity,
        secret: bytes,
        outbox: Outbox,
        transport: str = TCP,
    ) -> None:
        self._address, self._own, self._secret = address, own, secret
        self._outbox, self._offered = outbox, transport
        self._most_held = max(outbox.largest, outbox.nbytes // 2)
        """Bytes of the outbox, so that there is room for other peers."""
        self._changed = outbox.changed
        self._queue: deque[tuple[TransferMessage, Any]] = deque()
        """Each with what it waits for on the device."""
        self._held: dict[int, Place] = {}
        """The regions that are not given back yet, by entry."""
        self._read: dict[int, float] = {}
        """Those of which the peer knows, and since when."""
        self._connection: socket.socket | None = None
        self._body = HostBuffer(outbox.device)
        self._rests_until = 0.0
        self._lost = ""
        """Why the connection has ended, if its reader found out."""
        self.transport = ""
        """What the peer reads by, once it is connected."""
        self.bytes_sent = 0
        threading.Thread(target=self._run, name="kv-outlet", daemon=True).start()

    def take(self, nbytes: int) -> Place | None:
        """A region, to be filled and put; waits while too much is on its way. None: the peer cannot
        be reached."""
        with self._changed:
            self._changed.wait_for(lambda: self._rests or self._has_room(nbytes))
        place = self._outbox.take(nbytes, lambda: self._rests)
        if place is not None:
            with self._changed:
                self._held[place.entry] = place
        return place

    def _has_room(self, nbytes: int) -> bool:
        return sum(place.nbytes for place in self._held.values()) + nbytes <= self._most_held

    def put(self, message: TransferMessage) -> None:
        """Also what other threads have to send."""
        event = None
        if isinstance(message, Chunk) and self._outbox.device.type == "cuda":
            event = torch.cuda.Event(blocking=True)
            event.record(torch.cuda.current_stream(self._outbox.device))
        with self._changed:
            if self._rests:
                self._drop(message)
            else:
                self._queue.append((message, event))
            self._changed.notify_all()

    @property
    def _rests(self) -> bool:
        return time.monotonic() < self._rests_until

    def _run(self) -> None:
        while True:
            message: TransferMessage | None = None
            with self._changed:
                self._changed.wait_for(self._is_due, STALL_SECONDS / 10)
            try:
                self._check()
                with self._changed:
                    message, event = self._queue.popleft() if self._queue else (None, None)
                if message is not None:
                    self._send(message, event)
            except (OSError, ValueError) as error:  # ValueError: no host has such a name
                self._give_up(error, message)

    def _is_due(self) -> bool:
        return bool(self._queue or self._lost)

    def _check(self) -> None:
        """Forgets a connection that has ended; OSError if the peer reads nothing."""
        with self._changed:
            if self._lost:
                if self._read:
                    logger.warning("%s has not read all of its KV caches: %s", self, self._lost)
                self._disconnect()
            oldest = min(self._read.values(), default=time.monotonic())
        if time.monotonic() - oldest > STALL_SECONDS:
            raise TimeoutError(f"it has read nothing for {STALL_SECONDS:g} s")

    def _send(self, message: TransferMessage, event: Any) -> None:
        if self._connection is None:
            self._connect()
        if event is not None:
            event.synchronize()
        if not isinstance(message, Chunk) or message.place is None:
            self._send_frame(message)
        elif self.transport == TCP:
            body = self._body.copy_of(self._outbox.at(message.place))
            self._send_frame(replace(message, place=None), [bytes_of(body)])
            self._give_back(message.place.entry)
        else:
            with self._changed:
                self._read[message.place.entry] = time.monotonic()
            self._send_frame(message)
            self.bytes_sent += message.place.nbytes

    def _send_frame(self, message: TransferMessage, body: list[Buffer] | None = None) -> None:
        assert self._connection is not None
        for buffer in frame(message, body or []):
            left = memoryview(buffer)
            while left:
                sent = self._connection.send(left)
                left = left[sent:]
                self.bytes_sent += sent

    def _connect(self) -> None:
        dial = partial(socket.create_connection, self._address, CONNECT_SECONDS)
        made, _ = connect(dial, Role.KV, self._own, self._secret, CONNECT_SECONDS, waits=False)
        assert isinstance(made, socket.socket), "a data link is not encrypted"
        self._connection, self._lost = made, ""
        made.settimeout(STALL_SECONDS)
        self.transport = self._agree()
        reader = threading.Thread(target=self._read_answers, args=(made,), daemon=True)
        reader.start()

    def _agree(self) -> str:
        """The transport that the peer can read by."""
        assert self._connection is not None
        if self._offered == TCP:
            return TCP
        handle = TRANSPORTS[self._offered].export(self._outbox)
        self._send_frame(Exported(self._offered, handle))
        answer, _ = receive(self._connection)
        if not isinstance(answer, Opened):
            raise Malformed(f"a {type(answer).__name__} in answer to an outbox")
        if not answer.why:
            return self._offered
        logger.info("KV caches go to %s by TCP, not %s: %s", self, self._offered, answer.why)
        return TCP

    def _read_answers(self, connection: socket.socket) -> None:
        why, poll = "its answers cannot be read", select.poll()
        poll.register(connection, select.POLLIN)
        try:
            while poll.poll():  # without the connection's limit, which is that of sending
                message, size = receive(connection)
                if size or not isinstance(message, Taken):
                    raise Malformed(f"a {type(message).__name__}, which no outlet gets")
                self._give_back(message.entry)
        except (OSError, ValueError) as error:
            why = str(error)
        finally:
            with self._changed:
                if self._connection is connection:
                    self._lost = why
                    self._changed.notify_all()

    def _give_back(self, entry: int) -> None:
        with self._changed:
            place = self._held.pop(entry, None)
            if place is None:
                raise Malformed(f"entry {entry} of the outbox is not this peer's")
            self._read.pop(entry, None)
            self._outbox.give_back(place)

    def _drop(self, message: TransferMessage | None) -> None:
        if isinstance(message, Chunk) and message.place is not None:
            with self._changed:
                if message.place.entry in self._held:
                    self._give_back(message.place.entry)

    def _disconnect(self) -> None:
        if self._connection is not None:
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)  # wakes its reader
            self._connection.close()
        self._connection, self._lost = None, ""
        for entry in list(self._read):
            self._give_back(entry)

    def _give_up(self, error: Exception, message: TransferMessage | None) -> None:
        """The peer sees the end of the connection, unless there was none."""
        logger.warning("no KV cache can be sent to %s: %s", self, error)
        with self._changed:
            self._drop(message)
            self._disconnect()
            self._rests_until = time.monotonic() + REST_SECONDS
            for waiting, _ in self._queue:
                self._drop(waiting)
            self._queue.clear()
            self._changed.notify_all()

    def __str__(self) -> str:
        host, port = self._address
        return f"{host}:{port}"


class KVOutlets:
    """By address, made at first use. `transport`: what is offered to peers."""

    def __init__(self, own: Identity, secret: bytes, outbox: Outbox, transport: str = TCP) -> None:
        self._own, self._secret = own, secret
        self.outbox, self._transport = outbox, transport
        self._outlets: dict[tuple[str, int], KVOutlet] = {}

    def take(self, host: str, port: int, nbytes: int) -> Place | None:
        """A region of the outbox for a chunk that is then put; None: the peer is not reached."""
        return self._outlet(host, port).take(nbytes)

    def put(self, host: str, port: int, message: TransferMessage) -> None:
        self._outlet(host, port).put(message)

    def _outlet(self, host: str, port: int) -> KVOutlet:
        outlet = self._outlets.get((host, port))
        if outlet is None:
            given = (host, port), self._own, self._secret, self.outbox, self._transport
            outlet = self._outlets[host, port] = KVOutlet(*given)
        return outlet

    @property
    def bytes_sent(self) -> int:
        return sum(outlet.bytes_sent for outlet in self._outlets.values())

    @property
    def transports(self) -> dict[str, str]:
        """What each peer that is connected reads by."""
        found = {f"{host}:{port}": one.transport for (host, port), one in self._outlets.items()}
        return {address: name for address, name in found.items() if name}
