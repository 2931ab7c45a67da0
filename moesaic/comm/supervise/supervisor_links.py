"""The connections between supervisors: those of all other nodes connect to the one that leads.

It listens at its part of --dist-init-addr, for other supervisors and for ranks that use the store.
Each connection has a thread that receives and one that sends, so that the loop of a supervisor
never waits for another machine.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

from moesaic.comm.network.connect import PAUSE_SECONDS, Unreachable, connect
from moesaic.comm.network.handshake import Identity, Role, Session
from moesaic.comm.network.listener import Listener
from moesaic.comm.network.message_stream import MessageStream
from moesaic.comm.network.node_secret import NO_SECRET
from moesaic.comm.network.store import StoreAddress, StoreTable
from moesaic.comm.network.tls import Connection, WrongSecret
from moesaic.comm.supervise.poll_loop import WakingQueue
from moesaic.comm.supervise.service_spec import ServiceSpec
from moesaic.core import messages
from moesaic.core.messages import AnyMessage, Message, decode, encode
from moesaic.core.process import NODE_SECRET

logger = logging.getLogger(__name__)

BEAT_SECONDS: Final = 0.25
# How often a node logs that it waits for others.
WAIT_SECONDS: Final = 10.0
CONNECT_SECONDS: Final = 5.0
# How long the last messages may take to leave when a supervisor ends.
LINGER_SECONDS: Final = 2.0
# Received messages that are not handled yet; beyond this, connections are not read.
MOST_RECEIVED: Final = 1024


@dataclass(frozen=True, slots=True)
class Connected:
    """The connection to the node that leads is open."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The machine of that address says that no process listens there."""

    address: tuple[str, int]


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A connection has ended or failed. `refused`: retrying cannot help. `silent`: nothing comes
    from the other machine, which may go on."""

    reason: str
    refused: bool = False
    silent: bool = False


def taken(node: int) -> str:
    return f"another node came with --node-rank {node} before: give each node its own"


@dataclass(frozen=True, slots=True)
class Silent:
    """Nothing comes from that address."""

    address: tuple[str, int]


Event = AnyMessage | Connected | Refused | Silent | Disconnected
# What the threads of connections receive, with the node that sent it.
Inbox = WakingQueue[tuple[int, Event]]


class Channel:
    """A connection to the supervisor of another node."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._stream = MessageStream(connection)
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send, name="to a node", daemon=True)
        self._sender.start()

    def send(self, message: Message) -> None:
        self._outgoing.put(encode(message))

    def receive_all(self, node: int, inbox: Inbox) -> None:
        """Runs in the thread of the connection until that ends."""
        try:
            while True:
                inbox.put((node, decode(self._stream.receive())))
        except OSError as error:
            silent = not isinstance(error, ConnectionError)
            inbox.put((node, Disconnected(str(error), silent=silent)))
        except messages.NoMessage as error:
            inbox.put((node, Disconnected(f"it sent an invalid message: {error}")))

    def close(self, seconds: float = LINGER_SECONDS) -> None:
        """Closes it once all queued messages have left, or after `seconds`."""
        self._outgoing.put(None)
        self._sender.join(seconds)
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _send(self) -> None:
        try:
            while (data := self._outgoing.get()) is not None:
                self._stream.send(data)
        except OSError:
            return  # the receiving thread reports it
        except ValueError as error:
            logger.error("the connection to another node is given up: %s", error)
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)


class FollowerLinks:
    """On the node that leads: the connections of all other supervisors, and the store."""

    def __init__(self, spec: ServiceSpec, listening: socket.socket, secret: bytes) -> None:
        self._silence, nnodes = spec.timeouts.node, spec.mesh.nnodes
        self.nodes = [node for node in range(nnodes) if node != spec.node_rank]
        """The others."""
        host, port = listening.getsockname()[:2]
        if secret == NO_SECRET:
            logger.warning(
                "%s is not set: every process of this machine can join this service", NODE_SECRET
            )
        self.store = StoreAddress(host, port, secret)
        self.inbox = Inbox(MOST_RECEIVED)
        self._patience = 2 * self._silence if spec.elastic else 0.0
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)
        """Notified when the connection of a node is forgotten."""
        self._channels: dict[int, Channel] = {}
        self._hosts: dict[int, str] = {}
        self._heard: dict[int, float] = {}
        self._joined: set[int] = set()
        self.table = StoreTable()
        handlers = {Role.STORE: self.table.serve, Role.NODE: self._serve}
        own, shared = Identity(-1, spec.node_rank), spec.listening >= 0
        self._listener = Listener(listening, own, secret, handlers, shared=shared)

    @property
    def missing(self) -> list[int]:
        """Nodes that have not joined yet."""
        return [node for node in self.nodes if node not in self._joined]

    def host_of(self, node: int) -> str:
        """The address from which a node that is or was connected came."""
        with self._lock:
            return self._hosts[node]

    def welcome(self, node: int, *, serves: bool) -> None:
        self._joined.add(node)
        self.send(node, messages.Hello(facts={"serves": serves}))

    def cut(self, node: int) -> None:
        """Ends the connection of a node; Disconnected is the last that comes of it."""
        self._heard.pop(node, None)
        self._joined.discard(node)
        with self._lock:
            channel = self._channels.get(node)
        if channel is not None:
            channel.close(0.0)

    def forget(self, node: int) -> None:
        """Lets a node come again whose connection has ended."""
        self.cut(node)
        with self._left:
            self._channels.pop(node, None)
            self._left.notify_all()

    def send(self, node: int, message: Message) -> None:
        with self._lock:
            channel = self._channels.get(node)
        if channel is not None:
            channel.send(message)

    def broadcast(self, message: Message) -> None:
        for node in self.nodes:
            self.send(node, message)

    def receive(self, now: float) -> list[tuple[int, Event]]:
        events = self.inbox.drain()
        self._heard |= dict.fromkeys((node for node, _ in events), now)
        return events

    def lost(self, now: float) -> tuple[int, float] | None:
        """A node that has been silent for too long, and the seconds."""
        silent = {node: now - last_heard for node, last_heard in self._heard.items()}
        late = [(node, seconds) for node, seconds in silent.items() if seconds > self._silence]
        return late[0] if late else None

    def reset_silence(self, now: float) -> None:
        """Called after this process was stalled: the silence of others proves nothing."""
        self._heard = dict.fromkeys(self._heard, now)

    def close(self) -> None:
        with self._lock:
            channels = list(self._channels.values())
        deadline = time.monotonic() + LINGER_SECONDS
        for channel in channels:
            channel.close(max(0.0, deadline - time.monotonic()))
        self._listener.close()

    def _serve(self, connection: Connection, session: Session, name: str) -> None:
        node, host = session.peer.node, connection.getpeername()[0]
        channel = Channel(connection)
        refusal = self._claim(node, host, channel)
        if refusal:
            channel.send(messages.Fault(refusal))
            channel.close()
        else:
            channel.receive_all(node, self.inbox)

    def _claim(self, node: int, host: str, channel: Channel) -> str:
        """The reason why a node is not admitted; empty if it is. One that comes again may come
        before its former connection is known to be lost."""
        if node not in self.nodes:
            return f"--node-rank {node}: this service has nodes 0 to {len(self.nodes)}"
        with self._left:
            if not self._left.wait_for(lambda: node not in self._channels, self._patience):
                return taken(node)
            self._channels[node], self._hosts[node] = channel, host
        return ""


class LeadLink:
    """On other nodes: the connection to the one that leads, at any of the addresses; the first
    event but for Refused and Silent is Connected or Disconnected."""

    def __init__(self, node: int, addresses: Sequence[tuple[str, int]], secret: bytes) -> None:
        self.node, self._addresses, self._secret = node, list(addresses), secret
        self.address = self._addresses[0]
        """Where it is."""
        self.inbox = Inbox(MOST_RECEIVED)
        self.connected_at = self.last_heard = 0.0
        self._channel: Channel | None = None
        self._is_closed = False

    def start(self, seconds: float) -> None:
        """Connects in a thread; nodes start in any order, so it retries until one listens."""
        threading.Thread(target=self._run, args=(seconds,), name="to lead", daemon=True).start()

    def send(self, message: Message) -> None:
        """Does nothing without a connection."""
        if self._channel is not None:
            self._channel.send(message)

    def receive(self, now: float) -> list[Event]:
        events = [event for _, event in self.inbox.drain()]
        self.last_heard = now if events else self.last_heard
        self.connected_at = now if Connected() in events else self.connected_at
        return events

    def close(self) -> None:
        self._is_closed = True
        if self._channel is not None:
            self._channel.close()

    def _run(self, seconds: float) -> None:
        try:
            connection = self._connect(time.monotonic() + seconds)
        except WrongSecret:
            given = f"{NODE_SECRET} here is not that of node 0, or is not set there"
            missing = f"{NODE_SECRET} is set on node 0 but not here"
            reason = missing if self._secret == NO_SECRET else given
            event = Disconnected(f"{reason}: give all nodes the same", refused=True)
            self.inbox.put((0, event))
        except OSError as error:
            self.inbox.put((0, Disconnected(str(error))))
        else:
            self._channel = Channel(connection)
            self.inbox.put((0, Connected()))
            self._channel.receive_all(0, self.inbox)

    def _connect(self, deadline: float) -> Connection:
        own, secret = Identity(-1, self.node), self._secret
        while True:
            for address in self._addresses:
                dial = partial(socket.create_connection, address, CONNECT_SECONDS)
                try:
                    connection, _ = connect(dial, Role.NODE, own, secret, 0.0, waits=False)
                except Unreachable as error:
                    final: OSError = error
                    refuses = isinstance(error.__cause__, ConnectionRefusedError)
                    self.inbox.put((0, Refused(address) if refuses else Silent(address)))
                except PermissionError:
                    raise
                except OSError as error:
                    final = error
                else:
                    self.address = address
                    return connection
            if time.monotonic() > deadline or self._is_closed:
                raise final
            time.sleep(PAUSE_SECONDS)
