"""A decode instance's ranks receive KV caches and keep them until a step takes them."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from typing import Any, Final

import torch

from moesaic.comm.network.handshake import Identity, Role, Session
from moesaic.comm.network.listener import Listener
from moesaic.core.disagg import KVShare, Ticket
from moesaic.disagg.messages import (
    Arrived,
    Broken,
    Chunk,
    Close,
    Malformed,
    Open,
    PromptResult,
    TransferMessage,
    receive,
    send,
)
from moesaic.disagg.staging import StagedCache

logger = logging.getLogger(__name__)

# How long a chunk may come before its leader's Open, which takes another way.
OPEN_SECONDS: Final = 2.0
READ_AT_ONCE: Final = 1 << 20
# Tickets that are remembered after their end.
MOST_CLOSED: Final = 4096


class KVReceiver:
    """`on_result`: what a leader does with a PromptResult. Connections have threads; the thread of
    the steps calls `staged`. A chunk for a ticket that is not open is read and dropped."""

    def __init__(
        self,
        share: KVShare,
        dtype: torch.dtype,
        listening: socket.socket,
        identity: Identity,
        secret: bytes,
    ) -> None:
        self._share, self._dtype = share, dtype
        self._changed = threading.Condition()
        self._staged: dict[Ticket, StagedCache] = {}
        self._leaders: dict[Ticket, Any] = {}
        """The connection of the leader that opened it."""
        self._closed: dict[Ticket, None] = {}
        """The last ones, in order: nobody waits for them to be opened."""
        self.on_result: Callable[[PromptResult], None] | None = None
        self.bytes_received = 0
        self.port: int = listening.getsockname()[1]
        handlers = {Role.KV: self._serve}
        self._listener = Listener(listening, identity, secret, handlers)

    def staged(self, ticket: Ticket) -> StagedCache:
        with self._changed:
            return self._staged[ticket]

    @property
    def staged_bytes(self) -> int:
        with self._changed:
            return sum(
                one.keys_LTMD.nbytes + one.values_LTMD.nbytes for one in self._staged.values()
            )

    def close(self) -> None:
        self._listener.close()

    def _serve(self, connection: Any, session: Session, name: str) -> None:
        feeds: set[Ticket] = set()
        why = "closed its connection"
        try:
            while True:
                message, size = receive(connection)
                self._handle(connection, message, size, feeds)
        except Malformed as error:
            why = f"sent {error}"
            logger.error("%s %s", name, why)
        except OSError as error:
            why = f"broke its connection: {error}"
        finally:
            for ticket in feeds:
                self._tell_broken(ticket, f"{name} {why}")
            self._forget_leader(connection)

    def _handle(
        self, connection: Any, message: TransferMessage, size: int, feeds: set[Ticket]
    ) -> None:
        if isinstance(message, Chunk):
            self._receive_chunk(connection, message, size, feeds)
        elif size:
            raise Malformed(f"{size} bytes behind a {type(message).__name__}")
        elif isinstance(message, PromptResult):
            if self.on_result is not None:
                self.on_result(message)
        elif isinstance(message, Open):
            self._open(message, connection)
        elif isinstance(message, Close):
            self._close(message.ticket)
        else:
            raise Malformed(f"a {type(message).__name__}, which no rank gets")

    def _open(self, order: Open, leader: Any) -> None:
        made = StagedCache(self._share, order.first, order.stop, self._dtype)
        with self._changed:
            self._staged[order.ticket], self._leaders[order.ticket] = made, leader
            self._changed.notify_all()
        if made.is_complete:  # nothing is missing
            self._tell(order.ticket, Arrived(order.ticket))

    def _close(self, ticket: Ticket) -> None:
        with self._changed:
            self._staged.pop(ticket, None)
            self._leaders.pop(ticket, None)
            self._closed[ticket] = None
            if len(self._closed) > MOST_CLOSED:
                del self._closed[next(iter(self._closed))]
            self._changed.notify_all()

    def _receive_chunk(self, connection: Any, chunk: Chunk, size: int, feeds: set[Ticket]) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: chunk.ticket in self._staged or chunk.ticket in self._closed, OPEN_SECONDS
            )
            staged = self._staged.get(chunk.ticket)
        if staged is None:
            _skip(connection, size)
            return
        staged.check(chunk, size)
        feeds.add(chunk.ticket)
        body = bytearray(size)
        _read_into(connection, memoryview(body))
        with self._changed:
            self.bytes_received += size
            if staged.is_complete or self._staged.get(chunk.ticket) is not staged:
                feeds.discard(chunk.ticket)
                return  # a step may be reading it, or nobody will
            staged.write(chunk, body)
            is_complete = staged.is_complete
        if is_complete:
            feeds.discard(chunk.ticket)
            self._tell(chunk.ticket, Arrived(chunk.ticket))

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
