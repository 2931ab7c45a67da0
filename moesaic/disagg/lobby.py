"""The bootstrap port of a prefill instance: requests wait here for the instance that continues
them.

A decode instance keeps a connection for each of its serving groups. It announces a room as soon as
a request waits for it, and offers its pages once they are reserved; then the request is submitted
to the ranks, which send its KV cache there. No torch here.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from moesaic.comm.network.handshake import Identity, Role, Session
from moesaic.comm.network.listener import Listener
from moesaic.core.disagg import KVShare, KVTarget
from moesaic.disagg.layout import CacheShape, shapes_of
from moesaic.disagg.messages import (
    Announce,
    Beat,
    Computed,
    Malformed,
    Offer,
    Refused,
    TransferMessage,
    Withdraw,
    receive,
)
from moesaic.disagg.outbox import Outbox

logger = logging.getLogger(__name__)

# How long a decode instance waits for a request that is not here: both are sent at once.
REQUEST_SECONDS: Final = 5.0
# How long a request, which costs nothing, waits for its decode instance: that one may have a queue.
DECODE_SECONDS: Final = 300.0
BEAT_SECONDS: Final = 0.5
# A decode instance beats twice a second, too: one that is stopped is like one that is gone.
SILENCE_SECONDS: Final = 5.0
# How long an end may take to tell decode instances about it.
CLOSE_SECONDS: Final = 0.5
# Rooms that are over before their request entered them are remembered, the last ones.
MOST_OVER: Final = 4096


class LobbyEvent(NamedTuple):
    """A request that can be computed, with its `target`, or one that ends: `why`."""

    request_no: int
    target: KVTarget | None
    why: str = ""


@dataclass(slots=True)
class MeetingRoom:
    request_no: int | None = None
    is_entered: bool = False
    """The request has left the queue in front of the engine."""
    connection: Outbox | None = None
    """To the decode instance, once it has announced the room."""
    peer: str = ""
    model: bytes = b""
    """As announced, like `wanted`."""
    draft: bytes = b""
    wanted: bytes = b""
    """The prompt that the decode instance has."""
    prompt: bytes = b""
    """The prompt of the request that was entered."""
    is_refused: bool = False
    """The decode instance was told."""
    target: KVTarget | None = None
    since: float = field(default_factory=time.monotonic)
    """The last change of phase."""

    @property
    def phase(self) -> str:
        if self.request_no is None:
            return "waits for its request"
        if not self.is_entered:
            return "waits in the queue"
        if self.target is not None:
            return "computes and sends"
        return "waits for pages of the decode instance" if self.peer else "waits for decode"


class Lobby:
    """Any thread may call it; connections have their own. The engine's thread takes the events.
    `model` and `draft` are digests of what is served, and of a draft model whose cache is sent."""

    def __init__(
        self, listening: socket.socket, secret: bytes, model: bytes, draft: bytes = b""
    ) -> None:
        self._wake: Callable[[], None] = _nothing
        self._lock = threading.RLock()
        self._rooms: dict[int, MeetingRoom] = {}
        self._room_of: dict[int, int] = {}
        """By request."""
        self._over: dict[int, str] = {}
        """Why rooms ended that no request had entered."""
        self._announced: dict[Outbox, set[int]] = {}
        """By the connection of a decode instance: its rooms."""
        self._events: deque[LobbyEvent] = deque()
        self._shapes: list[CacheShape] = []
        """By cache."""
        self._closed = threading.Event()
        self._listening, self._secret, self._model, self._draft = listening, secret, model, draft
        self._listener: Listener | None = None

    def serve(self, shares: Sequence[Sequence[KVShare]], wake: Callable[[], None]) -> None:
        """Once the ranks are ready; `shares` are theirs. An event calls `wake`."""
        self._shapes, self._wake = shapes_of(shares), wake
        identity = Identity(-1, 0)
        self._listener = Listener(self._listening, identity, self._secret, {Role.ROOM: self._serve})
        threading.Thread(target=self._tick, name="lobby", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            connections = list(self._announced)
        deadline = time.monotonic() + CLOSE_SECONDS
        for connection in connections:
            connection.flush(deadline)
        if self._listener is not None:
            self._listener.close()
        self._listening.close()

    def expect(self, request_no: int, number: int) -> None:
        """The request waits in the queue in front of the engine."""
        with self._lock:
            room = self._rooms.setdefault(number, MeetingRoom())
            if room.request_no is None:
                room.request_no, room.since = request_no, time.monotonic()
                self._room_of[request_no] = number

    def enter(self, request_no: int, number: int, prompt: bytes) -> None:
        """The request is submitted, or ends, by a later event. `prompt`: its digest."""
        with self._lock:
            self.expect(request_no, number)
            room = self._rooms[number]
            if room.request_no != request_no:
                why = f"room {number} has a request already: choose another bootstrap_room"
                self._add_event(LobbyEvent(request_no, None, why))
                return
            if (why := self._over.pop(number, "")) and room.connection is None:
                self._remove(number)
                self._add_event(LobbyEvent(request_no, None, f"room {number}: {why}"))
                return
            room.is_entered, room.since, room.prompt = True, time.monotonic(), prompt
            if self._compare(number, room) and room.target is not None:
                self._add_event(LobbyEvent(request_no, room.target))

    def leave(self, request_no: int, why: str) -> None:
        """The request has ended; `why` it failed, or nothing."""
        with self._lock:
            number = self._room_of.get(request_no)
            if number is None:
                return
            room = self._remove(number)
        if room.connection is None:
            return
        is_sent = room.target is not None and not why
        room.connection.post(Computed(number) if is_sent else Refused(number, why))

    def take(self) -> list[LobbyEvent]:
        with self._lock:
            found = list(self._events)
            self._events.clear()
        return found

    def state(self) -> list[dict[str, Any]]:
        """The rooms that `/pd_state` shows."""
        now = time.monotonic()
        with self._lock:
            return [
                {
                    "room": number,
                    "phase": room.phase,
                    "peer": room.peer or None,
                    "seconds": round(now - room.since, 3),
                }
                for number, room in self._rooms.items()
            ]

    def _add_event(self, event: LobbyEvent) -> None:
        self._events.append(event)
        self._wake()

    def _serve(self, connection: Any, session: Session, name: str) -> None:
        connection.settimeout(SILENCE_SECONDS)
        peer, why = Outbox(connection), "closed its connection"
        with self._lock:
            self._announced[peer] = set()
        try:
            while True:
                message, size = receive(connection)
                if size:
                    raise Malformed(f"{size} bytes behind a {type(message).__name__}")
                self._handle(peer, name, message)
        except TimeoutError:
            why = f"said nothing for {SILENCE_SECONDS:g} s"
        except OSError as error:
            why = str(error)
        finally:
            peer.close()
            self._lose(peer, f"the decode instance is gone: {name}: {why}")

    def _handle(self, connection: Outbox, peer: str, message: TransferMessage) -> None:
        match message:
            case Beat():
                pass
            case Announce():
                self._announce(connection, peer, message)
            case Offer(target):
                self._offer(connection, target)
            case Withdraw(room):
                self._withdraw(connection, room, "the decode instance does not want it any more")
            case _:
                raise Malformed(f"a {type(message).__name__}, which no prefill instance gets")

    def _announce(self, connection: Outbox, peer: str, half: Announce) -> None:
        with self._lock:
            room = self._rooms.setdefault(half.room, MeetingRoom())
            if room.connection is not None:
                why = f"room {half.room} is that of another request of {room.peer}"
                connection.post(Refused(half.room, why))
                return
            self._over.pop(half.room, None)
            self._announced[connection].add(half.room)
            room.connection, room.peer = connection, peer
            room.since = time.monotonic() if room.is_entered else room.since
            room.model, room.draft, room.wanted = half.model, half.draft, half.prompt
            self._compare(half.room, room)

    def _offer(self, connection: Outbox, target: KVTarget) -> None:
        number = target.ticket.room
        if not target.ranks:
            raise Malformed("pages of no rank")
        if len({len(rank.shares) for rank in target.ranks}) != 1:
            raise Malformed("ranks with different numbers of caches")
        with self._lock:
            room = self._rooms.get(number)
            if room is None or room.connection is not connection:
                return  # it was told when the room ended
            room.target = target
            room.since = time.monotonic() if room.is_entered else room.since
            if self._compare(number, room) and room.request_no is not None and room.is_entered:
                self._add_event(LobbyEvent(room.request_no, target))

    def _compare(self, number: int, room: MeetingRoom) -> bool:
        """Whether both halves have the same model and prompt, as far as they are known. If not, the
        room is refused, and the prefill half ends as soon as it is entered."""
        why = self._difference(room)
        if why:
            if not room.is_refused and room.connection is not None:
                room.connection.post(Refused(number, why))
            room.is_refused = True
            if room.request_no is not None and room.is_entered:
                self._remove(number)
                self._add_event(LobbyEvent(room.request_no, None, f"room {number}: {why}"))
        return not why

    def _difference(self, room: MeetingRoom) -> str:
        if room.connection is None:
            return ""
        if room.target is not None and self._shapes:
            theirs = shapes_of([rank.shares for rank in room.target.ranks])
            for ours, other in zip(self._shapes, theirs, strict=False):
                if ours != other:
                    return f"the instances serve different models: {ours} here, {other} there"
        if room.model != self._model:
            return (
                "the instances serve different models: config.json, the weight files, "
                "--random-seed or --enable-deterministic-inference differ"
            )
        if room.draft and room.draft != self._draft:
            if not self._draft:
                return (
                    "the decode instance makes drafts from the hidden states of prompts: give the "
                    "prefill instance its --speculative-algorithm and draft model"
                )
            return "the instances have different draft models: their files differ"
        if room.is_entered and room.wanted != room.prompt:
            return (
                "the instances got different prompts: their token ids, extra_key or cache_salt "
                "differ"
            )
        return ""

    def _withdraw(self, connection: Outbox, number: int, why: str) -> None:
        with self._lock:
            room = self._rooms.get(number)
            if room is None or room.connection is not connection:
                return
            self._remove(number)
            if room.request_no is not None and room.is_entered:
                self._add_event(LobbyEvent(room.request_no, None, f"room {number}: {why}"))
            else:  # the engine does not know the request yet
                self._remember(number, why)

    def _remove(self, number: int) -> MeetingRoom:
        """With the lock."""
        room = self._rooms.pop(number)
        if room.request_no is not None:
            self._room_of.pop(room.request_no, None)
        if room.connection is not None:
            self._announced.get(room.connection, set()).discard(number)
        return room

    def _remember(self, number: int, why: str) -> None:
        self._over[number] = why
        if len(self._over) > MOST_OVER:
            del self._over[next(iter(self._over))]

    def _lose(self, connection: Outbox, why: str) -> None:
        with self._lock:
            for number in self._announced.pop(connection, set()):
                self._withdraw(connection, number, why)

    def _tick(self) -> None:
        """Beats, and ends waits for a half that does not come."""
        while not self._closed.wait(BEAT_SECONDS):
            with self._lock:
                for connection in self._announced:
                    if connection.is_empty:
                        connection.post(Beat())
                for number in [n for n, room in self._rooms.items() if _is_late(room)]:
                    self._end_wait(number)

    def _end_wait(self, number: int) -> None:
        room = self._remove(number)
        if room.request_no is None:
            why = f"the prefill instance got no such request in {REQUEST_SECONDS:g} s"
            self._remember(number, why)
            if room.connection is not None:
                room.connection.post(Refused(number, why))
            return
        why = (
            f"no decode instance came to room {number} in {DECODE_SECONDS:g} s: send the request "
            "to both instances, with the same bootstrap_room"
        )
        self._add_event(LobbyEvent(room.request_no, None, why))


def _nothing() -> None:
    """The listener of events until the ranks are ready, which ignores them."""


def _is_late(room: MeetingRoom) -> bool:
    waited = time.monotonic() - room.since
    if room.request_no is None:
        return waited > REQUEST_SECONDS
    return room.connection is None and room.is_entered and waited > DECODE_SECONDS
