"""TCP between nodes: frames that a rank sends into another node's memory.

A frame is a header, a text, a table of pieces (offset, length) and their bytes. One rank of the
other node receives it straight into the node's mapping of a window, and then posts the signal there
on behalf of the sender. Both ends of a connection prove first that they know the service's secret
(network/handshake.py); what follows is not encrypted. No torch here.
"""

from __future__ import annotations

import logging
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Final, Protocol
from weakref import WeakSet

from moesaic.comm.network.connect import Unreachable, connect
from moesaic.comm.network.handshake import Identity, Role, Session, read_exactly
from moesaic.comm.network.listener import Listener
from moesaic.comm.network.node_secret import check_secret
from moesaic.comm.supervise.control_page import EpochChanged, RankStatus, StepRolledBack
from moesaic.comm.windows.signals import SLICE, Signals

logger = logging.getLogger(__name__)

CONNECT_SECONDS: Final = 10.0

HEAD: Final = struct.Struct("<4sHHIIQq")
MARK: Final = b"MOEf"
PIECE_BYTES: Final = 16
MOST_TEXT: Final = 1024
MOST_PIECES: Final = 1 << 16
# The limit of one system call.
MOST_BUFFERS: Final = 1024

Buffer = bytes | bytearray | memoryview


class FrameKind(IntEnum):
    """OPEN: the sender starts to use a window. CLOSE: it stops."""

    OPEN = 0
    POST = 1
    CLOSE = 2


class Malformed(Exception):
    """A frame that violates the protocol."""


@dataclass(frozen=True, slots=True)
class Inlet:
    """The destination of one sender's frames for one window. `first`: the first byte that it may
    write; `signals` act for it."""

    memory: memoryview
    first: int
    channels: int
    signals: Signals

    def place(self, offset: int, length: int) -> memoryview:
        if offset < self.first or length == 0 or offset + length > len(self.memory):
            raise Malformed(
                f"a piece of {length} bytes at {offset}: planes are at {self.first}.."
                f"{len(self.memory)}"
            )
        return self.memory[offset : offset + length]


def frame(
    kind: FrameKind,
    window: int,
    channel: int = 0,
    epoch: int = 0,
    text: str = "",
    pieces: Sequence[tuple[int, int]] = (),
) -> bytes:
    """A frame without the bytes of its pieces."""
    assert len(pieces) <= MOST_PIECES, f"{len(pieces)} pieces in one frame"
    data = text.encode(errors="replace")[:MOST_TEXT]
    head = HEAD.pack(MARK, kind, len(data), channel, len(pieces), window, epoch)
    numbers = [number for piece in pieces for number in piece]
    return head + data + struct.pack(f"<{len(numbers)}Q", *numbers)


class Outlet:
    """A connection to a rank of another node, to send; once `broken`, frames are dropped. With
    `renewed` another one follows it in the next generation of steps."""

    def __init__(self, connection: socket.socket, name: str, *, renewed: bool = False) -> None:
        self.broken = ""
        self.bytes_sent = 0
        self._name, self._renewed = name, renewed
        self._connection = connection
        self._lock = threading.Lock()
        self._closed_windows: deque[int] = deque()

    def send(self, buffers: list[Buffer], seconds: float, status: RankStatus | None = None) -> None:
        """`seconds`: how long the peer may accept nothing. A new epoch ends it as it ends a wait. A
        new generation does only if it is renewed then; else a frame must be whole."""
        with self._lock:
            if self.broken:
                return
            try:
                while self._closed_windows:
                    last = frame(FrameKind.CLOSE, self._closed_windows.popleft())
                    self._send_all([last], seconds, status)
                self._send_all(buffers, seconds, status)
            except OSError as error:
                self._break(f"{self._name} cannot be reached: {error}")
            except (EpochChanged, StepRolledBack):
                # Part of a frame may have been sent: nothing can follow it.
                self._break(f"a frame to {self._name} was given up")
                raise

    def retire(self, window: int) -> None:
        """Tells the peer with the next frame that a window is closed. Any thread may call it."""
        self._closed_windows.append(window)

    def close(self) -> None:
        with self._lock:
            self._break("closed")

    def cut(self) -> None:
        """Closes it although another thread may be in `send`, which then ends."""
        _shut_down(self._connection)
        self.close()

    @classmethod
    def unconnected(cls, why: str) -> Outlet:
        outlet = cls(socket.socket(), "")
        outlet._break(why)
        return outlet

    def _send_all(self, buffers: list[Buffer], seconds: float, status: RankStatus | None) -> None:
        left = [memoryview(buffer) for buffer in buffers]
        left.reverse()
        deadline = time.monotonic() + seconds
        while left:
            try:
                sent = self._connection.sendmsg(left[: -MOST_BUFFERS - 1 : -1])
            except TimeoutError:
                if status is not None:
                    (status.check if self._renewed else status.check_epoch)()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"it has taken nothing for {seconds:.1f} s") from None
                continue
            deadline = time.monotonic() + seconds
            self.bytes_sent += sent
            _advance(left, sent)

    def _break(self, why: str) -> None:
        self.broken = self.broken or why
        self._connection.close()


class LinkedWindow(Protocol):
    """A window between nodes, whose routes change with the live ranks."""

    def connect_again(
        self, connect: Callable[[int], Outlet], live: Sequence[int], generation: int
    ) -> None:
        """Sends to the nodes of these ranks from now on; `connect` gives the way to a rank."""


class TcpLinks:
    """This process's connections between nodes: a listener on the node's own address, a thread for
    each rank that sends here, and connections to send on, opened at first use. `rank` and `node`
    are those of the service. All ranks have the same secret.

    With `renews` ranks come and go: connections are those of a generation. `end_generation` ends
    all of the former ones before any rank begins with the next, so that no byte of theirs arrives
    later. Which rank of a node receives from a sender depends on the live ones, so all expect it.
    """

    def __init__(
        self, rank: int, node: int, address: str, secret: bytes, *, renews: bool = False
    ) -> None:
        check_secret(secret)
        if address in ("", "0.0.0.0", "::"):
            raise ValueError(f"address {address!r}: give the one by which other nodes reach this")
        self.identity = Identity(rank, node)
        self.address = address
        self._secret = secret
        self._lock = threading.Lock()
        self._connecting = threading.Lock()
        self._expected: dict[tuple[int, int], Inlet] = {}
        self._outlets: dict[tuple[str, int], Outlet] = {}
        self._windows: dict[str, int] = {}
        self.renews = renews
        self.windows: WeakSet[LinkedWindow] = WeakSet()
        self._generation = 0
        self._serving: set[socket.socket] = set()
        self._ended = threading.Condition(self._lock)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listening = socket.create_server((address, 0), family=family, backlog=128)
        self.port: int = listening.getsockname()[1]
        self._listener = Listener(listening, self.identity, secret, {Role.LINK: self._serve})

    def next_window(self, group: str) -> str:
        """A name for the next window of a group: all its ranks create them in the same order."""
        self._windows[group] = self._windows.get(group, 0) + 1
        return f"{group}/{self._windows[group]}"

    def expect(self, window: int, sender: int, inlet: Inlet) -> None:
        """Directs the frames of a rank for a window to `inlet`."""
        with self._lock:
            assert (window, sender) not in self._expected, f"window {window:x} is there already"
            self._expected[window, sender] = inlet

    def forget(self, window: int) -> None:
        """Undoes `expect` for a window that was not created."""
        with self._lock:
            for key in [key for key in self._expected if key[0] == window]:
                del self._expected[key]

    def connect(self, host: str, port: int, peer: Identity) -> Outlet:
        """Raises OSError, with the address, if the peer is unreachable or has another secret."""
        with self._connecting:
            known = self._outlets.get((host, port))
            if known is not None and not known.broken:
                return known
            name = f"{peer} ({host}:{port})"
            connection = self._call((host, port), peer, name)
            # A blocked sender checks its rank's status this often.
            connection.settimeout(SLICE)
            outlet = self._outlets[host, port] = Outlet(connection, name, renewed=self.renews)
            return outlet

    def end_generation(self, generation: int) -> None:
        """Ends all connections; those of ranks that are behind this generation are refused."""
        with self._lock:
            self._generation = generation
            serving, outlets = set(self._serving), list(self._outlets.values())
            self._outlets.clear()
        for outlet in outlets:
            outlet.cut()
        for connection in serving:
            _shut_down(connection)
        with self._ended:
            if not self._ended.wait_for(lambda: not serving & self._serving, CONNECT_SECONDS):
                late = len(serving & self._serving)
                raise TimeoutError(
                    f"{late} connections from other nodes have not ended in {CONNECT_SECONDS:.0f} s"
                )

    def begin_generation(
        self, live: Sequence[int], address_of: Callable[[int], tuple[str, int, int]]
    ) -> None:
        """Connects to the live ranks; `address_of`: host, port and node of a rank. What cannot be
        reached is broken: the supervisor is about to say why."""

        def connect_to(rank: int) -> Outlet:
            host, port, node = address_of(rank)
            try:
                return self.connect(host, port, Identity(rank, node))
            except OSError as error:
                return Outlet.unconnected(str(error))

        for window in list(self.windows):
            window.connect_again(connect_to, live, self._generation)

    @property
    def bytes_sent(self) -> int:
        """To other nodes so far."""
        with self._lock:
            return sum(outlet.bytes_sent for outlet in self._outlets.values())

    def _call(self, address: tuple[str, int], peer: Identity, name: str) -> socket.socket:
        dial = partial(socket.create_connection, address, CONNECT_SECONDS, (self.address, 0))
        try:
            connection, session = connect(
                dial, Role.LINK, self.identity, self._secret, CONNECT_SECONDS, waits=False
            )
        except Unreachable as error:
            raise OSError(f"{name} cannot be reached: {error}") from error
        except OSError as error:
            raise OSError(f"{name} refused: {error}") from error
        assert isinstance(connection, socket.socket), "a data link is not encrypted"
        if session.peer != peer:
            connection.close()
            raise OSError(f"{name} refused: it is {session.peer}")
        return connection

    def close(self) -> None:
        """Ends all connections and the listener. May be repeated."""
        self._listener.close()
        with self._lock:
            outlets = list(self._outlets.values())
            self._expected.clear()
        for outlet in outlets:
            outlet.close()

    def _serve(self, connection: socket.socket, session: Session, name: str) -> None:
        """Receives until the connection ends; the windows of the sender then lose it."""
        inlets: dict[int, Inlet] = {}
        with self._lock:
            self._serving.add(connection)
        why = "is no longer listened to"
        try:
            while self._receive_frame(connection, session.peer, inlets):
                pass
            why = "closed its connection"
        except Malformed as error:
            why = f"sent {error}"
            logger.error("%s %s", name, why)
        except OSError as error:
            why = f"broke its connection: {error}"
        finally:
            if self._listener.closed:
                why = f"was cut off by {self.identity}, which closed its links"
            for inlet in inlets.values():
                inlet.signals.lose(f"{name} {why}")
            with self._ended:
                self._serving.discard(connection)
                self._ended.notify_all()

    def _receive_frame(
        self, connection: socket.socket, peer: Identity, inlets: dict[int, Inlet]
    ) -> bool:
        """Receives one frame and signals; False if the connection has ended."""
        head = bytearray(HEAD.size)
        if not _receive(connection, [memoryview(head)]):
            return False
        mark, kind, text_bytes, channel, count, window, epoch = HEAD.unpack(head)
        if mark != MARK or text_bytes > MOST_TEXT or count > MOST_PIECES:
            raise Malformed(f"a frame that begins with {bytes(head).hex()}")
        rest = read_exactly(connection, text_bytes + count * PIECE_BYTES)
        if kind == FrameKind.OPEN:
            inlets[window] = self._open(window, peer, epoch)
            return True
        inlet = inlets.get(window)
        if inlet is None:
            raise Malformed(f"a frame of kind {kind} for window {window:x}, which it has not open")
        if kind == FrameKind.CLOSE:
            del inlets[window]
        elif kind == FrameKind.POST:
            _check_signal(inlet, channel, epoch)
            numbers = struct.unpack(f"<{2 * count}Q", rest[text_bytes:])
            pieces = zip(numbers[::2], numbers[1::2], strict=True)
            _receive(connection, [inlet.place(*piece) for piece in pieces], inside=True)
            inlet.signals.post(channel, epoch, rest[:text_bytes].decode(errors="replace"))
        else:
            raise Malformed(f"a frame of kind {kind}")
        return True

    def _open(self, window: int, peer: Identity, generation: int) -> Inlet:
        key = window, peer.rank
        with self._lock:
            if generation < self._generation:
                raise ConnectionAbortedError(f"it is in generation {generation}")
            inlet = self._expected.get(key) if self.renews else self._expected.pop(key, None)
        if inlet is None:
            raise Malformed(f"a frame for window {window:x}, which is not expected of it")
        inlet.signals.find()
        return inlet


def _shut_down(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _check_signal(inlet: Inlet, channel: int, epoch: int) -> None:
    if channel >= inlet.channels:
        raise Malformed(f"a signal on channel {channel} of {inlet.channels}")
    if epoch < inlet.signals.posted(channel):
        raise Malformed(f"epoch {epoch} after {inlet.signals.posted(channel)}")


def _receive(connection: socket.socket, places: list[memoryview], *, inside: bool = False) -> bool:
    """Fills the places in order; False if the connection had ended before, unless `inside`."""
    left = [place for place in reversed(places) if len(place)]
    while left:
        count = connection.recvmsg_into(left[: -MOST_BUFFERS - 1 : -1], 0, socket.MSG_WAITALL)[0]
        if count == 0:
            if inside:
                raise ConnectionError("the connection was closed")
            return False
        inside = True
        _advance(left, count)
    return True


def _advance(left: list[memoryview], count: int) -> None:
    """Drops `count` bytes; the first buffer is the last of the list."""
    while count:
        length = len(left[-1])
        if length > count:
            left[-1] = left[-1][count:]
            return
        left.pop()
        count -= length
