"""Connections to the ranks of other instances, to send KV caches on.

Each has a thread, so that a step waits for others only once much is on its way; and then not for a
peer that takes nothing. What is sent lies in the send buffer: a rank of the same machine reads it
there, for others it is sent by TCP.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from msgspec.structs import replace

from moesaic.comm.lifecycle import Lifecycle, Membership
from moesaic.comm.network.connect import connect
from moesaic.comm.network.handshake import Identity, Role
from moesaic.core.disagg import Ticket
from moesaic.disagg.host_buffer import HostBuffer, bytes_of
from moesaic.disagg.messages import (
    Broken,
    Buffer,
    Chunk,
    Exported,
    Malformed,
    Opened,
    Place,
    PromptResult,
    Taken,
    TransferMessage,
    frame,
    receive,
)
from moesaic.disagg.send_buffer import SendBuffer
from moesaic.disagg.transports.registry import TCP, TRANSPORTS

logger = logging.getLogger(__name__)

CONNECT_SECONDS: Final = 2.0
# How long a peer may take nothing.
STALL_SECONDS: Final = 5.0
# The same while a step waits for room in memory: it waits for peers that are slow, not for one that
# is stopped.
HOLD_SECONDS: Final = 1.0
# A peer that could not be reached is not tried again for so long.
REST_SECONDS: Final = 2.0
# One that has left is forgotten after so long: a rank that is started again has another port.
FORGET_SECONDS: Final = 60.0
# Incomplete transfers that an outlet remembers; it forgets the oldest first.
MOST_MISSED: Final = 4096


@dataclass(frozen=True, slots=True)
class StepOnDevice:
    """The step that computes a piece, until its `event` on the device."""

    event: Any
    lifecycle: Lifecycle
    generation: int
    """That of the lifecycle when the step began."""

    @classmethod
    def recorded(cls, device: torch.device, lifecycle: Lifecycle) -> StepOnDevice:
        """Behind what the current stream has to do."""
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(device))
        return cls(event, lifecycle, lifecycle.membership.generation)

    def wait(self) -> str:
        """Why the piece is not what was asked for, if it is not: an abandoned step runs to its end
        without what other ranks have not sent, and is computed again."""
        self.event.synchronize()
        with self.lifecycle.lock:
            if self.lifecycle.membership.generation != self.generation:
                return "its step was rolled back"
            try:
                self.lifecycle.check()
            except Exception as error:
                return str(error) or repr(error)
        return ""


class KVOutlet:
    """To one rank. What cannot be sent is dropped: the other instance then misses it. The lock is
    that of the send buffer, and held where a method says so."""

    def __init__(
        self,
        address: tuple[str, int],
        own: Identity,
        secret: bytes,
        buffer: SendBuffer,
        lifecycle: Lifecycle,
        transport: str = TCP,
    ) -> None:
        self._address, self._own, self._secret = address, own, secret
        self._buffer, self._offered = buffer, transport
        self._changed, self._lifecycle = buffer.changed, lifecycle
        self._queue: deque[tuple[TransferMessage, StepOnDevice | None]] = deque()
        """Each with what it waits for on the device."""
        self._held: dict[int, Place] = {}
        """The regions that are not given back yet, by entry."""
        self._read: dict[int, Ticket] = {}
        """Those of which the peer knows, and their transfers."""
        self._moved = time.monotonic()
        """When something was sent or taken, or there was nothing to send."""
        self._connection: socket.socket | None = None
        self._body = HostBuffer(buffer.device)
        self._rests_until = 0.0
        self._awaits_step = False
        """The device computes what is sent next: nothing is known of the peer."""
        self._lost = ""
        """Why the connection has ended, if its reader found out."""
        self.transport = ""
        """What the peer reads by, once it is connected."""
        self.missed: dict[Ticket, None] = {}
        """The last transfers that lost a chunk or a result."""
        self._untold: list[Ticket] = []
        """The incomplete transfers that the peer is told of when it is reached again."""
        self._ended = False
        threading.Thread(target=self._run, name="kv-outlet", daemon=True).start()

    @property
    def rests(self) -> bool:
        return time.monotonic() < self._rests_until

    def is_stuck(self, seconds: float) -> bool:
        """With the lock: it has taken nothing for so long."""
        is_waiting = bool(self._held) and not self._awaits_step
        return is_waiting and time.monotonic() - self._moved > seconds

    @property
    def held_bytes(self) -> int:
        """With the lock."""
        return sum(place.nbytes for place in self._held.values())

    @property
    def is_forgotten(self) -> bool:
        """With the lock: nothing has been sent for long, and the peer has left."""
        is_idle = self._connection is None and not (self._held or self._queue)
        return is_idle and time.monotonic() - self._moved > FORGET_SECONDS

    def end(self) -> None:
        """With the lock: of one that is forgotten, the thread."""
        self._ended = True
        self._changed.notify_all()

    def hold(self, place: Place) -> None:
        """With the lock: a region that is filled and put next."""
        if not self._held:
            self._moved = time.monotonic()
        self._held[place.entry] = place

    def put(self, message: TransferMessage) -> None:
        step = None
        if isinstance(message, Chunk) and self._buffer.device.type == "cuda":
            step = StepOnDevice.recorded(self._buffer.device, self._lifecycle)
        with self._changed:
            if self.rests:
                self._drop_message(message)
            else:
                self._queue.append((message, step))
                self._moved = self._moved if self._held else time.monotonic()
            self._changed.notify_all()

    def miss(self, ticket: Ticket) -> None:
        """With the lock."""
        if ticket not in self.missed:
            self._untold.append(ticket)
        self.missed[ticket] = None
        if len(self.missed) > MOST_MISSED:
            del self.missed[next(iter(self.missed))]

    def drop(self, why: str) -> None:
        """With the lock: gives up what waits. The peer sees the end of the connection."""
        logger.warning("no KV cache can be sent to %s: %s", self, why)
        self._rests_until = time.monotonic() + REST_SECONDS
        self._disconnect()
        for message, _ in self._queue:
            self._drop_message(message)
        self._queue.clear()
        self._changed.notify_all()

    def _run(self) -> None:
        while not self._ended:
            message: TransferMessage | None = None
            with self._changed:
                self._changed.wait_for(
                    lambda: self._queue or self._lost or self._ended, STALL_SECONDS / 10
                )
                self._look_after_peer()
                if self._untold and not self.rests:
                    self._tell_missed()
                message, step = self._queue.popleft() if self._queue else (None, None)
            try:
                if message is not None:
                    self._send(message, step)
            except Exception as error:  # also a GPU's: results must not wait here for ever
                with self._changed:
                    self._drop_message(message)
                    if not self.rests:
                        self.drop(str(error) or repr(error))
        with self._changed:
            self._disconnect()

    def _tell_missed(self) -> None:
        """With the lock. Before what is sent next."""
        why = "the prefill instance could not send all of it"
        self._queue.extendleft((Broken(ticket, why), None) for ticket in self._untold)
        self._untold.clear()

    def _look_after_peer(self) -> None:
        """With the lock. A connection that has ended is made again when it is needed."""
        if self._lost:
            if self._read:
                logger.warning("%s has not read all of its KV caches: %s", self, self._lost)
            self._disconnect()
        elif self._read and self.is_stuck(STALL_SECONDS):
            self.drop(f"it took nothing for {STALL_SECONDS:g} s")

    def _send(self, message: TransferMessage, step: StepOnDevice | None) -> None:
        connection = self._connection or self._connect()
        if step is not None and (why := self._wait(step)):
            logger.info("a piece of a KV cache is not sent to %s: %s", self, why)
            with self._changed:
                self._drop_message(message)
        elif not isinstance(message, Chunk) or message.place is None:
            self._send_frame(connection, message)
        elif self.transport == TCP:
            body = self._body.copy_of(self._buffer.at(message.place))
            self._send_frame(connection, replace(message, place=None), [bytes_of(body)])
            self._give_back(message.place.entry)
        else:
            with self._changed:
                self._read[message.place.entry] = message.ticket
            self._send_frame(connection, message)

    def _wait(self, step: StepOnDevice) -> str:
        """Why what it has computed is not sent, if it is not."""
        self._awaits_step = True
        try:
            return step.wait()
        finally:
            self._awaits_step, self._moved = False, time.monotonic()

    def _send_frame(
        self, connection: socket.socket, message: TransferMessage, body: Sequence[Buffer] = ()
    ) -> None:
        for part in frame(message, body):
            left = memoryview(part)
            while left:
                sent = connection.send(left)
                left, self._moved = left[sent:], time.monotonic()

    def _connect(self) -> socket.socket:
        dial = partial(socket.create_connection, self._address, CONNECT_SECONDS)
        made, _ = connect(dial, Role.KV, self._own, self._secret, CONNECT_SECONDS, waits=False)
        assert isinstance(made, socket.socket), "a data link is not encrypted"
        made.settimeout(STALL_SECONDS)
        self.transport = self._agree(made)
        with self._changed:
            if self.rests:
                made.close()
                raise ConnectionError("it was given up while it was connected to")
            self._connection, self._lost = made, ""
        threading.Thread(target=self._read_answers, args=(made,), daemon=True).start()
        return made

    def _agree(self, connection: socket.socket) -> str:
        """The transport that the peer can read by."""
        if self._offered == TCP:
            return TCP
        handle = TRANSPORTS[self._offered].export(self._buffer)
        self._send_frame(connection, Exported(self._offered, handle))
        answer, _ = receive(connection)
        if not isinstance(answer, Opened):
            raise Malformed(f"a {type(answer).__name__} in answer to a send buffer")
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
                self._note_taken(connection, message.entry)
        except (OSError, ValueError) as error:
            why = str(error)
        finally:
            with self._changed:
                if self._connection is connection:
                    self._lost = why
                    self._changed.notify_all()

    def _note_taken(self, connection: socket.socket, entry: int) -> None:
        """Its entry may be that of another region by now if the connection was given up."""
        with self._changed:
            if self._connection is not connection:
                raise ConnectionError("it was given up")
            if entry not in self._read:
                raise Malformed(f"entry {entry} of the send buffer, of which it was not told")
            self._give_back(entry)

    def _give_back(self, entry: int) -> None:
        with self._changed:
            place = self._held.pop(entry)
            self._read.pop(entry, None)
            self._moved = time.monotonic()
            self._buffer.give_back(place)

    def _drop_message(self, message: TransferMessage | None) -> None:
        """With the lock."""
        if isinstance(message, Chunk | PromptResult):
            self.miss(message.ticket)
        place = message.place if isinstance(message, Chunk) else None
        if place is not None and place.entry in self._held:
            self._give_back(place.entry)

    def _disconnect(self) -> None:
        """With the lock. What the peer knows of is given back, and it has not read that."""
        if self._connection is not None:
            with suppress(OSError):  # its reader waits on it, and a thread may be sending
                self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()
        self._connection, self._lost = None, ""
        for entry, ticket in list(self._read.items()):
            self._give_back(entry)
            self.miss(ticket)

    def __str__(self) -> str:
        host, port = self._address
        return f"{host}:{port}"


class KVOutlets:
    """By address, made at first use, by one thread. `transport`: what is offered to peers.
    `lifecycle`: None for a rank alone, whose steps are not rolled back."""

    def __init__(
        self,
        own: Identity,
        secret: bytes,
        buffer: SendBuffer,
        transport: str = TCP,
        lifecycle: Lifecycle | None = None,
    ) -> None:
        self._own, self._secret = own, secret
        self.buffer, self._transport = buffer, transport
        self._lifecycle = lifecycle or Lifecycle(Membership(0, (0,)))
        self._outlets: dict[tuple[str, int], KVOutlet] = {}

    def take(self, host: str, port: int, nbytes: int) -> Place | None:
        """A region of the send buffer for a chunk that is then put; None: the peer is not reached.
        Waits while too much is on its way, but not for a peer that takes nothing."""
        outlet, half = self._outlet(host, port), max(self.buffer.nbytes // 2, nbytes)
        with self.buffer.changed:
            while not outlet.rests:
                # Half of it stays for other peers.
                fits = outlet.held_bytes + nbytes <= half
                if fits and (place := self.buffer.take(nbytes)) is not None:
                    outlet.hold(place)
                    return place
                for other in self._outlets.values():
                    if other.is_stuck(HOLD_SECONDS):
                        other.drop(f"it took nothing for {HOLD_SECONDS:g} s, and others wait")
                self.buffer.changed.wait(HOLD_SECONDS / 4)
        return None

    def put(self, host: str, port: int, message: TransferMessage) -> None:
        self._outlet(host, port).put(message)

    def miss(self, host: str, port: int, ticket: Ticket) -> None:
        """A chunk for which there was no region."""
        with self.buffer.changed:
            self._outlet(host, port).miss(ticket)

    def why_missed(self, ticket: Ticket) -> str:
        """Why something of a transfer was dropped, if it was."""
        with self.buffer.changed:
            found = [str(one) for one in self._outlets.values() if ticket in one.missed]
        return f"its KV cache could not be sent to {' and '.join(found)}" if found else ""

    def _outlet(self, host: str, port: int) -> KVOutlet:
        with self.buffer.changed:
            outlet = self._outlets.get((host, port))
            if outlet is None:
                for address in [a for a, one in self._outlets.items() if one.is_forgotten]:
                    self._outlets.pop(address).end()
                given = (host, port), self._own, self._secret, self.buffer, self._lifecycle
                outlet = self._outlets[host, port] = KVOutlet(*given, self._transport)
        return outlet

    @property
    def transports(self) -> dict[str, str]:
        """What each peer that is connected reads by."""
        found = {f"{host}:{port}": one.transport for (host, port), one in self._outlets.items()}
        return {address: name for address, name in found.items() if name}
