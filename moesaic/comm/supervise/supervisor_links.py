"""The connections between the supervisors of several nodes: all others talk with the first.

Node 0 listens at --dist-init-addr, for other supervisors and for ranks that want the store. Each
connection has a thread that receives and one that sends, so that the loop of a supervisor never
waits for another machine.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from moesaic.comm.network.handshake import (
    NO_SECRET,
    Identity,
    Role,
    Session,
    WrongSecret,
    introduce,
)
from moesaic.comm.network.listener import Listener, RoleHandler, tune
from moesaic.comm.network.message_stream import MessageStream
from moesaic.comm.network.store import StoreAddress, StoreTable
from moesaic.comm.supervise.control_page import ControlPage, RankState, Seen
from moesaic.comm.supervise.secret import SECRET, new_secret, own_secret
from moesaic.comm.supervise.service_spec import ServiceSpec
from moesaic.core.messages import (
    AnyMessage,
    Beat,
    Fault,
    Hello,
    Message,
    NoMessage,
    RankSighting,
    decode,
    encode,
)

logger = logging.getLogger(__name__)

BEAT_SECONDS: Final = 0.25
# How often a node says that it waits for others.
WAIT_SECONDS: Final = 10.0
CONNECT_SECONDS: Final = 5.0
CONNECT_PAUSE: Final = 0.2
# How long the last messages may take to go out when a supervisor ends.
LINGER_SECONDS: Final = 2.0
# Messages that have been received and not handled; beyond them a connection is not read.
MOST_RECEIVED: Final = 1024
# Messages that are handled before the loop looks at everything else.
MOST_AT_ONCE: Final = 64
MADE_SECRET: Final = "secret"


@dataclass(frozen=True, slots=True)
class Connected:
    """A connection to the first node is there."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A connection has ended, or cannot be had. `refused`: it never will."""

    reason: str
    refused: bool = False


Event = AnyMessage | Connected | Disconnected


class ReceivedMessages:
    """What the threads of connections have received, with the node it came from."""

    def __init__(self) -> None:
        self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable when there is something."""
        self._events: queue.Queue[tuple[int, Event]] = queue.Queue(MOST_RECEIVED)

    def put(self, node: int, event: Event) -> None:
        """Waits while too much has not been handled: the sender then waits, too."""
        self._events.put((node, event))
        os.eventfd_write(self.bell, 1)

    def take(self) -> list[tuple[int, Event]]:
        with suppress(BlockingIOError):
            os.eventfd_read(self.bell)
        taken: list[tuple[int, Event]] = []
        with suppress(queue.Empty):
            while len(taken) < MOST_AT_ONCE:
                taken.append(self._events.get_nowait())
            os.eventfd_write(self.bell, 1)
        return taken


class Channel:
    """A connection to the supervisor of another node."""

    def __init__(self, connection: socket.socket, session: Session, *, calls: bool) -> None:
        self._connection = connection
        self._stream = MessageStream(connection, session, calls=calls)
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send, name="to a node", daemon=True)
        self._sender.start()

    def send(self, message: Message) -> None:
        """Returns at once."""
        self._outgoing.put(encode(message))

    def receive_all(self, node: int, inbox: ReceivedMessages) -> None:
        """In the thread of the connection: until it ends."""
        try:
            while True:
                inbox.put(node, decode(self._stream.receive()))
        except OSError as error:
            inbox.put(node, Disconnected(str(error)))
        except NoMessage as error:
            inbox.put(node, Disconnected(f"it sent what is no message: {error}"))

    def close(self, seconds: float = LINGER_SECONDS) -> None:
        """Closes it when what was sent is out, or after `seconds`."""
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
            return  # that the other end is gone shows where this one receives
        except ValueError as error:
            logger.error("the connection to another node is given up: %s", error)
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)


class FollowerLinks:
    """On the first node: all others, whose supervisors call here, and the store for all ranks."""

    def __init__(self, spec: ServiceSpec, listening: socket.socket) -> None:
        self._silence, self._nnodes = spec.timeouts.node, spec.mesh.nnodes
        host, port = listening.getsockname()[:2]
        given = own_secret()
        if not given:
            logger.warning(
                "%s is not set: every process that reaches %s can join this service",
                SECRET,
                spec.dist_init_addr,
            )
        secret = given or new_secret()
        self.store = StoreAddress(host, port, secret)
        self._welcome = Hello(facts={} if given else {MADE_SECRET: secret})
        self.inbox = ReceivedMessages()
        self._lock = threading.Lock()
        self._channels: dict[int, Channel] = {}
        self._heard: dict[int, float] = {}
        self._joined: set[int] = set()
        self._listener = Listener(
            listening,
            Identity(-1, 0),
            {
                Role.STORE: RoleHandler(secret, StoreTable().serve),
                Role.NODE: RoleHandler(given or NO_SECRET, self._serve),
            },
        )

    @property
    def missing(self) -> list[int]:
        """Nodes that have not joined yet."""
        return [node for node in range(1, self._nnodes) if node not in self._joined]

    def welcome(self, node: int) -> None:
        self._joined.add(node)
        self.send(node, self._welcome)

    def send(self, node: int, message: Message) -> None:
        with self._lock:
            channel = self._channels.get(node)
        if channel is not None:
            channel.send(message)

    def broadcast(self, message: Message) -> None:
        for node in range(1, self._nnodes):
            self.send(node, message)

    def receive(self, now: float) -> list[tuple[int, Event]]:
        """What has come, from which node."""
        events = self.inbox.take()
        self._heard |= dict.fromkeys((node for node, _ in events), now)
        return events

    def lost(self, now: float) -> tuple[int, float] | None:
        """A node that has been silent for too long, and for how long."""
        silent = {node: now - heard for node, heard in self._heard.items()}
        late = [(node, seconds) for node, seconds in silent.items() if seconds > self._silence]
        return late[0] if late else None

    def forgive(self, now: float) -> None:
        """After a time in which this node did not listen."""
        self._heard = dict.fromkeys(self._heard, now)

    def close(self) -> None:
        with self._lock:
            channels = list(self._channels.values())
        deadline = time.monotonic() + LINGER_SECONDS
        for channel in channels:
            channel.close(max(0.0, deadline - time.monotonic()))
        self._listener.close()

    def _serve(self, connection: socket.socket, session: Session, name: str) -> None:
        """The life of a connection from another supervisor."""
        node = session.peer.node
        channel = Channel(connection, session, calls=False)
        refusal = self._claim(node, channel)
        if refusal:
            channel.send(Fault(refusal))
            channel.close()
        else:
            channel.receive_all(node, self.inbox)

    def _claim(self, node: int, channel: Channel) -> str:
        """Why a node is not let in; empty if it is."""
        if not 0 < node < self._nnodes:
            return f"--node-rank {node}: this service has nodes 0 to {self._nnodes - 1}"
        with self._lock:
            if node in self._channels:
                return f"another node came with --node-rank {node} before: give each node its own"
            self._channels[node] = channel
        return ""


class LeadLink:
    """On every other node: the way to the first, which a thread connects to as soon as it is there.

    Its first event is Connected or Disconnected.
    """

    def __init__(self, node: int, address: tuple[str, int], seconds: float) -> None:
        self._node, self._address = node, address
        self.inbox = ReceivedMessages()
        self.met = self.heard = 0.0
        self._channel: Channel | None = None
        arguments = (time.monotonic() + seconds,)
        threading.Thread(target=self._run, args=arguments, name="to node 0", daemon=True).start()

    def send(self, message: Message) -> None:
        """Nothing where there is no connection."""
        if self._channel is not None:
            self._channel.send(message)

    def receive(self, now: float) -> list[Event]:
        events = [event for _, event in self.inbox.take()]
        self.heard = now if events else self.heard
        self.met = now if Connected() in events else self.met
        return events

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()

    def _run(self, deadline: float) -> None:
        try:
            connection, session = self._connect(deadline)
        except WrongSecret as error:
            reason = _secret_trouble(bool(own_secret()), error.keyed)
            self.inbox.put(0, Disconnected(reason, refused=True))
        except OSError as error:
            self.inbox.put(0, Disconnected(str(error)))
        else:
            self._channel = Channel(connection, session, calls=True)
            self.inbox.put(0, Connected())
            self._channel.receive_all(0, self.inbox)

    def _connect(self, deadline: float) -> tuple[socket.socket, Session]:
        """Tries again until node 0 is there: nodes start in any order."""
        while True:
            try:
                return self._call()
            except PermissionError:
                raise
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(CONNECT_PAUSE)

    def _call(self) -> tuple[socket.socket, Session]:
        connection = socket.create_connection(self._address, CONNECT_SECONDS)
        try:
            own = Identity(-1, self._node)
            session = introduce(connection, Role.NODE, own, own_secret() or NO_SECRET)
            connection.settimeout(None)
            tune(connection)
        except OSError:
            connection.close()
            raise
        return connection, session


def _secret_trouble(given: bool, keyed: bool) -> str:
    """Why this node's secret is not that of node 0. `given`: here; `keyed`: there."""
    if given and keyed:
        return f"{SECRET} here is not that of node 0: give all nodes the same"
    here, there = ("here", "on node 0") if given else ("on node 0", "here")
    return f"{SECRET} is set {here} but not {there}: set it on all nodes"


@dataclass(slots=True)
class SightingsReporter:
    """What the ranks of other nodes were last seen doing, and when."""

    seen: dict[int, tuple[float, RankSighting]]

    def take(self, beat: Beat, now: float) -> None:
        self.seen |= {sight.rank: (now, sight) for sight in beat.sights}

    def at(self, now: float) -> dict[int, Seen]:
        return {rank: _seen(sight, now - then) for rank, (then, sight) in self.seen.items()}


def beat_of(node: int, ranks: range, page: ControlPage) -> Beat:
    return Beat(node, [_sight(rank, page.seen(rank)) for rank in ranks])


def _sight(rank: int, seen: Seen) -> RankSighting:
    return RankSighting(
        rank,
        int(seen.state),
        seen.step,
        seen.operation,
        seen.beat_age,
        seen.state_age,
        seen.progress,
        seen.computed,
        seen.waited,
    )


def _seen(sight: RankSighting, later: float) -> Seen:
    return Seen(
        RankState(sight.state),
        sight.step,
        sight.operation,
        sight.beat_age + later,
        sight.state_age + later,
        sight.progress,
        sight.computed,
        sight.waited,
    )
