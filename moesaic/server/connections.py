"""The open connections of a server by client, and which of them it closes when there are too many.

While the server answers a whole request the connection waits for the server. Otherwise it waits for
its client: to send a head, the rest of a body or the next request, or to read an answer. When such
connections take up the room that others need, the client with the most of them loses its oldest.
"""

from __future__ import annotations

import ipaddress
import time
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache
from typing import Final, Protocol

BODY_BYTES: Final = 256 << 20
PROBE_CONNECTIONS: Final = 16
# Clients that open thousands of connections at once need a moment to send their heads.
GRACE_SECONDS: Final = 1.0
NETWORK: Final = ~((1 << 64) - 1)
NO_WEIGHTS: Final = (0, 0, 0, 0)
# Addresses whose network is remembered.
KEPT_NETWORKS: Final = 4096


class ConnectionState(Enum):
    HEAD = auto()
    """The first head, or the rest of one."""
    BODY = auto()
    """The rest of a body."""
    UNREAD = auto()
    """The client must read, so that the server can write the rest of the answer."""
    IDLE = auto()
    """The next request, or the client must read the end of its answer."""
    BUSY = auto()
    """The answer to a whole request."""


class Connection(Protocol):
    address: str
    """The client's network, from `network_of`."""
    since: float
    """Monotonic time of the last change of state."""

    def evict(self) -> None:
        """Closes the connection; a client that waits for an answer gets the reason."""


class ConnectionWeights:
    """Weights of connections, grouped by address, the oldest first."""

    def __init__(self) -> None:
        self._by_address: dict[str, dict[Connection, int]] = {}
        self._weights: dict[str, int] = {}
        self.total = 0

    def set(self, connection: Connection, weight: int) -> None:
        """A weight of 0 removes the connection; a changed weight keeps its age."""
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
        """The oldest connection of the address with the most weight."""
        if not self._weights:
            return None
        return self.oldest_of(max(self._weights, key=self._weights.__getitem__))


@dataclass(frozen=True, slots=True)
class ConnectionQuotas:
    connections: int
    for_probes: int
    heads: int
    """Connections of one address that may wait for a head longer than `grace_seconds`."""
    body_bytes: int = BODY_BYTES
    """Bytes of all unfinished bodies together."""
    grace_seconds: float = GRACE_SECONDS

    @classmethod
    def of(cls, connections: int) -> ConnectionQuotas:
        """Reserves a few connections for probes; one address may have half of all in open heads."""
        return cls(connections, min(PROBE_CONNECTIONS, connections // 4), connections // 2)


class ConnectionTable:
    def __init__(self, quotas: ConnectionQuotas) -> None:
        self._quotas = quotas
        self._waiting, self._heads = ConnectionWeights(), ConnectionWeights()
        self._slow, self._body_bytes = ConnectionWeights(), ConnectionWeights()
        self._all = self._waiting, self._heads, self._slow, self._body_bytes
        self._current: dict[Connection, tuple[int, int, int, int]] = {}
        """The weights of each connection that has any."""
        self._requests: set[Connection] = set()

    def register(self, connection: Connection, number: int) -> None:
        """Records a new connection, and evicts another if `number` are too many."""
        self.update(connection, ConnectionState.HEAD)
        if number > self._quotas.connections:
            self._evict(self._waiting.oldest_of_largest())

    def update(self, connection: Connection, state: ConnectionState, body_bytes: int = 0) -> None:
        """Records a connection's state and the bytes of its unfinished body."""
        if state in (ConnectionState.HEAD, ConnectionState.IDLE):
            self._requests.discard(connection)
        self._set_weights(connection, state, body_bytes)
        if self._heads.weight_of(connection.address) > self._quotas.heads:
            oldest = self._heads.oldest_of(connection.address)
            if time.monotonic() - oldest.since >= self._quotas.grace_seconds:
                self._evict(oldest)
        while self._body_bytes.total > self._quotas.body_bytes:
            self._evict(self._body_bytes.oldest_of_largest())

    def admit_request(self, connection: Connection) -> bool:
        """Whether a request that is no probe has room; may evict one that waits for its client."""
        if len(self._requests) >= self._quotas.connections - self._quotas.for_probes:
            oldest = self._slow.oldest_of_largest()
            if oldest is None:
                return False
            self._evict(oldest)
        self._requests.add(connection)
        return True

    def unregister(self, connection: Connection) -> None:
        self._requests.discard(connection)
        self._set_weights(connection, ConnectionState.BUSY, 0)  # has no weight

    def _set_weights(self, connection: Connection, state: ConnectionState, body_bytes: int) -> None:
        is_slow = (
            state in (ConnectionState.BODY, ConnectionState.UNREAD) and connection in self._requests
        )
        new = (
            int(state is not ConnectionState.BUSY),
            int(state is ConnectionState.HEAD),
            int(is_slow),
            body_bytes if state is ConnectionState.BODY else 0,
        )
        old = self._current.pop(connection, NO_WEIGHTS)
        if any(new):
            self._current[connection] = new
        for weights, before, now in zip(self._all, old, new, strict=True):
            if before != now:
                weights.set(connection, now)

    def _evict(self, connection: Connection | None) -> None:
        if connection is not None:
            self.unregister(connection)
            connection.evict()


@lru_cache(KEPT_NETWORKS)
def network_of(host: str) -> str:
    """An IPv4 address, or the /64 network of an IPv6 address: one client may have all of it."""
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Address(int(address) & NETWORK))
