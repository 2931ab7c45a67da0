"""Which connections a server holds, by the client that holds them, and which of them are closed
when there are too many.

A connection waits for the server while a whole request is answered, and for its client otherwise:
for a head, for the rest of a body, until an answer is read, for the next request. Where those that
wait for clients take what others need, the client that holds most of them loses its oldest.
"""

from __future__ import annotations

import ipaddress
import time
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Protocol

BODY_BYTES: Final = 256 << 20
PROBE_CONNECTIONS: Final = 16
# Clients that begin thousands of requests at once do not send them all in the same instant.
GRACE_SECONDS: Final = 1.0
NETWORK: Final = ~((1 << 64) - 1)


class ConnectionState(Enum):
    """What a connection waits for. HEAD: the rest of a head, or the first one. BODY: the rest of a
    body. UNREAD: a client that reads, so that its answer can go on. IDLE: the next request, or a
    client that reads the end of its answer. BUSY: an answer to a whole request."""

    HEAD = auto()
    BODY = auto()
    UNREAD = auto()
    IDLE = auto()
    BUSY = auto()


class Connection(Protocol):
    """`address`: of the client, as `network_of` gives it. `since`: when it began to wait for what
    it waits for, by the monotonic clock."""

    address: str
    since: float

    def give_way(self) -> None:
        """Closes the connection, and tells the client why where it waits for an answer."""


class Holders:
    """Connections with a weight each, by address, the oldest first."""

    def __init__(self) -> None:
        self._by_address: dict[str, dict[Connection, int]] = {}
        self._weights: dict[str, int] = {}
        self.total = 0

    def put(self, connection: Connection, weight: int) -> None:
        """A weight of 0 removes it; another weight keeps its place in the order."""
        address = connection.address
        own = self._by_address.get(address, {})
        change = weight - own.get(connection, 0)
        if not change:
            return
        if weight:
            self._by_address.setdefault(address, own)[connection] = weight
        else:
            del own[connection]
        self.total += change
        self._weights[address] = self._weights.get(address, 0) + change
        if not own:
            del self._by_address[address], self._weights[address]

    def weight_of(self, address: str) -> int:
        return self._weights.get(address, 0)

    def oldest_of(self, address: str) -> Connection:
        return next(iter(self._by_address[address]))

    def oldest_of_largest(self) -> Connection | None:
        """The oldest connection of the address with most weight; the first such address wins."""
        if not self._weights:
            return None
        return self.oldest_of(max(self._weights, key=self._weights.__getitem__))


@dataclass(frozen=True, slots=True)
class Shares:
    """`connections`: all that may be open. `for_probes`: of these, those that no request but one to
    a probe may take. `heads`: connections of one address that have waited for a whole head longer
    than `grace_seconds`. `body_bytes`: what may be held of all bodies that are not whole."""

    connections: int
    for_probes: int
    heads: int
    body_bytes: int = BODY_BYTES
    grace_seconds: float = GRACE_SECONDS

    @classmethod
    def of(cls, connections: int) -> Shares:
        """Keeps a few connections for probes, and lets one address, which may be a proxy, take half
        of all with unfinished heads."""
        return cls(connections, min(PROBE_CONNECTIONS, connections // 4), connections // 2)


class Connections:
    """Those of one server."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._waiting, self._heads = Holders(), Holders()
        self._slow, self._body_bytes = Holders(), Holders()
        self._requests: set[Connection] = set()

    def arrive(self, connection: Connection, number: int) -> None:
        """Makes room for a connection that is new, the last of this number."""
        self.place(connection, ConnectionState.HEAD)
        if number > self._shares.connections:
            self._close(self._waiting.oldest_of_largest())

    def place(self, connection: Connection, state: ConnectionState, body_bytes: int = 0) -> None:
        """Notes what a connection waits for, and how much it holds of a body that is not whole."""
        if state in (ConnectionState.HEAD, ConnectionState.IDLE):
            self._requests.discard(connection)
        self._note(connection, state, body_bytes)
        if self._heads.weight_of(connection.address) > self._shares.heads:
            oldest = self._heads.oldest_of(connection.address)
            if time.monotonic() - oldest.since >= self._shares.grace_seconds:
                self._close(oldest)
        while self._body_bytes.total > self._shares.body_bytes:
            self._close(self._body_bytes.oldest_of_largest())

    def begin_request(self, connection: Connection) -> bool:
        """Whether there is room for a request that is none to a probe: it takes that of a request
        which waits for its client, if need be."""
        if len(self._requests) >= self._shares.connections - self._shares.for_probes:
            oldest = self._slow.oldest_of_largest()
            if oldest is None:
                return False
            self._close(oldest)
        self._requests.add(connection)
        return True

    def leave(self, connection: Connection) -> None:
        self._requests.discard(connection)
        self._note(connection, ConnectionState.BUSY, 0)  # which waits for nothing

    def _note(self, connection: Connection, state: ConnectionState, body_bytes: int) -> None:
        is_slow = (
            state in (ConnectionState.BODY, ConnectionState.UNREAD) and connection in self._requests
        )
        self._waiting.put(connection, state is not ConnectionState.BUSY)
        self._heads.put(connection, state is ConnectionState.HEAD)
        self._slow.put(connection, is_slow)
        self._body_bytes.put(connection, body_bytes if state is ConnectionState.BODY else 0)

    def _close(self, connection: Connection | None) -> None:
        if connection is not None:
            self.leave(connection)
            connection.give_way()


def network_of(host: str) -> str:
    """Where a client is: an IPv4 address, or the 64 bits of an IPv6 address that name a network,
    since one client may have all addresses in it."""
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Address(int(address) & NETWORK))
