"""A decode instance's ranks receive KV caches and keep them until a step takes them."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import torch
from torch import Tensor

from moesaic.comm.network.handshake import Identity, Role, Session
from moesaic.comm.network.listener import Listener
from moesaic.core.disagg import KVShare, Ticket
from moesaic.disagg.host_buffer import HostBuffer, bytes_of
from moesaic.disagg.messages import (
    Arrived,
    Broken,
    Chunk,
    Close,
    Exported,
    Malformed,
    Open,
    Opened,
    PromptResult,
    Taken,
    TransferMessage,
    receive,
    send,
)
from moesaic.disagg.send_buffer import ENTRIES
from moesaic.disagg.staging import StagedCache, StagedCaches
from moesaic.disagg.transports.registry import AUTO, Source, open_source

logger = logging.getLogger(__name__)

# How long a chunk may come before its leader's Open, which takes another way.
OPEN_SECONDS: Final = 2.0
READ_AT_ONCE: Final = 1 << 20
# Tickets that are remembered after their end, or after a wait for it to be opened.
MOST_CLOSED: Final = 4096


class Feed:
    """What the thread of a connection knows."""

    def __init__(self, connection: Any, device: torch.device) -> None:
        self.connection = connection
        self.tickets: set[Ticket] = set()
        """The transfers of which a part has come here and a part has not."""
        self.source: Source | None = None
        """The send buffer of the rank that is connected."""
        self.body = HostBuffer(device)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def data(self, chunk: Chunk, size: int) -> Tensor:
        """The bytes of a chunk."""
        if chunk.place is None:
            data = self.body.of(size)
            _read_into(self.connection, bytes_of(data))
            return data
        if self.source is None:
            raise Malformed("a place in a send buffer that was not told")
        data = self.source.read(chunk.place)
        if data.nbytes != chunk.place.nbytes or chunk.place.entry >= ENTRIES:
            raise Malformed(f"{chunk.place}, which is not in the send buffer")
        return data

    def write(self, staged: StagedCache, chunk: Chunk, data: Tensor) -> None:
        """Returns when all is written."""
        if self.stream is None:
            staged.write(chunk, data)
            return
        with torch.cuda.stream(self.stream):
            staged.write(chunk, data)
        self.stream.synchronize()

    def close(self) -> None:
        if self.source is not None:
            self.source.close()


class KVReceiver:
    """`on_result`: what a leader does with a PromptResult. Connections have threads; the thread of
    the steps calls `staged`. A chunk for a ticket that is not open is read and dropped.
    `transport`: what this rank reads by, of what it is offered. `most_tokens`: those that may be
    on their way at once."""

    def __init__(
        self,
        shares: Sequence[KVShare],
        dtype: torch.dtype,
        listening: socket.socket,
        identity: Identity,
        secret: bytes,
        device: torch.device | str = "cpu",
        transport: str = AUTO,
        most_tokens: int = 1 << 40,
    ) -> None:
        self._shares, self._dtype = shares, dtype
        self._device, self._transport = torch.device(device), transport
        self._most_tokens = most_tokens
        self._changed = threading.Condition()
        self._staged: dict[Ticket, StagedCaches] = {}
        self._leaders: dict[Ticket, Any] = {}
        """The connection of the leader that opened it."""
        self._closed: dict[Ticket, bool] = {}
        """The last tickets that no thread waits for any more, in order, and whether their leader
        closed them."""
        self.on_result: Callable[[PromptResult], None] | None = None
        self.port: int = listening.getsockname()[1]
        handlers = {Role.KV: self._serve}
        self._listener = Listener(listening, identity, secret, handlers)

    def staged(self, ticket: Ticket) -> StagedCaches | None:
        """None once its leader has closed it: its request has ended, also if a step with it is on
        its way to this stage."""
        with self._changed:
            return None if self._closed.get(ticket) else self._staged[ticket]

    @property
    def _staged_tokens(self) -> int:
        with self._changed:
            return sum(staged.stop - staged.first for staged in self._staged.values())

    @property
    def staged_bytes(self) -> int:
        with self._changed:
            return sum(staged.nbytes for staged in self._staged.values())

    def close(self) -> None:
        self._listener.close()

    def _serve(self, connection: Any, session: Session, name: str) -> None:
        feed, why = Feed(connection, self._device), "closed its connection"
        try:
            while True:
                message, size = receive(connection)
                self._handle(feed, message, size)
        except Malformed as error:
            why = f"sent {error}"
            logger.error("%s %s", name, why)
        except OSError as error:
            why = f"broke its connection: {error}"
        except Exception as error:
            why = f"sent what cannot be kept: {error!r}"
            logger.exception("%s %s", name, why)
        finally:
            for ticket in feed.tickets:
                self._tell_broken(ticket, f"{name} {why}")
            self._forget_leader(connection)
            with suppress(OSError):  # a source whose process is gone
                feed.close()

    def _handle(self, feed: Feed, message: TransferMessage, size: int) -> None:
        if isinstance(message, Chunk):
            self._receive_chunk(feed, message, size)
        elif size:
            raise Malformed(f"{size} bytes behind a {type(message).__name__}")
        elif isinstance(message, Exported):
            self._open_source(feed, message)
        elif isinstance(message, PromptResult):
            if self.on_result is not None:
                self.on_result(message)
        elif isinstance(message, Open):
            self._open(message, feed.connection)
        elif isinstance(message, Broken):
            self._tell(message.ticket, message)
        elif isinstance(message, Close):
            self._close(message.ticket, by_leader=True)
        else:
            raise Malformed(f"a {type(message).__name__}, which no rank gets")

    def _open_source(self, feed: Feed, message: Exported) -> None:
        given, why = (message.transport, message.handle, self._transport, self._device), ""
        if feed.source is not None:
            raise Malformed("a second send buffer on a connection")
        try:
            feed.source = open_source(*given)
        except Exception as error:  # for whatever reason: it is sent by TCP then
            why = str(error) or repr(error)
        send(feed.connection, Opened(why))

    def _open(self, order: Open, leader: Any) -> None:
        tokens, most = order.stop - order.first, self._most_tokens - self._staged_tokens
        if not 0 <= order.first <= order.stop:
            raise Malformed(f"an Open of tokens {order.first} to {order.stop}")
        if tokens > most:
            why = f"there is room for {most} tokens, and the transfer has {tokens}"
            self._close(order.ticket)
            send(leader, Broken(order.ticket, why))
            return
        try:
            made = StagedCaches(self._shares, order.first, order.stop, self._dtype, self._device)
        except torch.OutOfMemoryError as error:
            self._close(order.ticket)
            send(leader, Broken(order.ticket, f"there is no memory for it: {error}"))
            return
        with self._changed:
            self._staged[order.ticket], self._leaders[order.ticket] = made, leader
            self._changed.notify_all()
        if made.is_complete:  # nothing is missing
            self._tell(order.ticket, Arrived(order.ticket))

    def _close(self, ticket: Ticket, by_leader: bool = False) -> None:
        with self._changed:
            self._staged.pop(ticket, None)
            self._leaders.pop(ticket, None)
            self._remember(ticket, by_leader)
            self._changed.notify_all()

    def _remember(self, ticket: Ticket, by_leader: bool = False) -> None:
        """Ends all waits for a ticket. The caller holds the lock."""
        self._closed[ticket] = by_leader or self._closed.get(ticket, False)
        if len(self._closed) > MOST_CLOSED:
            del self._closed[next(iter(self._closed))]

    def _receive_chunk(self, feed: Feed, chunk: Chunk, size: int) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: chunk.ticket in self._staged or chunk.ticket in self._closed, OPEN_SECONDS
            )
            staged = self._staged.get(chunk.ticket)
            if staged is None:
                self._remember(chunk.ticket)
        if staged is None:
            _skip(feed.connection, size)
        else:
            if size and chunk.place is not None:
                raise Malformed(f"{size} bytes behind a chunk at a place")
            nbytes = size if chunk.place is None else chunk.place.nbytes
            staged.part(chunk).check(chunk, nbytes)
            feed.tickets.add(chunk.ticket)
            self._keep(feed, staged, chunk, feed.data(chunk, size))
        if chunk.place is not None:
            send(feed.connection, Taken(chunk.place.entry))

    def _keep(self, feed: Feed, staged: StagedCaches, chunk: Chunk, data: Tensor) -> None:
        """Unless it has come before: a step may be reading it."""
        part = staged.part(chunk)
        with staged.lock:
            was_complete = staged.is_complete
            if part.misses(chunk):
                feed.write(part, chunk, data)
                self._check_source(feed, part, chunk)
                part.add(chunk)
            is_complete = staged.is_complete
        if is_complete:
            feed.tickets.discard(chunk.ticket)
            if not was_complete:
                self._tell(chunk.ticket, Arrived(chunk.ticket))

    def _check_source(self, feed: Feed, staged: StagedCache, chunk: Chunk) -> None:
        """OSError if the region was given to something else while it was read."""
        place = chunk.place
        if place is not None and feed.source is not None and not feed.source.is_current(place):
            staged.remove(chunk)
            raise ConnectionError("what it had sent was read too late")

    def _tell_broken(self, ticket: Ticket, why: str) -> None:
        with self._changed:
            staged = self._staged.get(ticket)
            is_missed = staged is not None and not staged.is_complete
        if is_missed:
            self._tell(ticket, Broken(ticket, why))

    def _tell(self, ticket: Ticket, message: TransferMessage) -> None:
        with self._changed:
            leader = self._leaders.get(ticket)
            if leader is None:
                return
            try:
                send(leader, message)
            except OSError as error:
                logger.warning("the leader of this group cannot be told: %s", error)

    def _forget_leader(self, connection: Any) -> None:
        with self._changed:
            gone = [ticket for ticket, one in self._leaders.items() if one is connection]
        for ticket in gone:
            self._close(ticket)


def _read_into(connection: Any, place: memoryview) -> None:
    while place:
        count = connection.recv_into(place[:READ_AT_ONCE])
        if not count:
            raise ConnectionError("the connection was closed")
        place = place[count:]


def _skip(connection: Any, size: int) -> None:
    while size:
        read = len(connection.recv(min(size, READ_AT_ONCE)))
        if not read:
            raise ConnectionError("the connection was closed")
        size -= read
