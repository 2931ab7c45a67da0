"""The transfers of a decode instance's serving group, on its leader.

The thread of the steps asks for them and takes events; other threads listen to the ranks of the
group and to prefill instances. A transfer that fails is an event, too: the group then computes the
prompt itself.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from moesaic.comm.network.connect import connect
from moesaic.comm.network.handshake import Identity, Role
from moesaic.core.disagg import KVRank, KVTarget, Room, Ticket
from moesaic.disagg.allowed_hosts import AllowedHosts
from moesaic.disagg.messages import (
    Announce,
    Arrived,
    Beat,
    Broken,
    Close,
    Computed,
    Offer,
    Open,
    PromptResult,
    Refused,
    TransferMessage,
    Withdraw,
    receive,
    send,
)
from moesaic.disagg.outbox import Outbox

logger = logging.getLogger(__name__)

CONNECT_SECONDS: Final = 2.0
# A prefill instance beats twice a second.
SILENCE_SECONDS: Final = 3.0
# How long the rest may take to come once the prompt is computed.
ARRIVE_SECONDS: Final = 10.0
TICK_SECONDS: Final = 0.5
EPOCH_BITS: Final = 62
ARRIVES: Final = "arrives"


class RoomEvent(NamedTuple):
    """The KV cache of a request is here, with its `result`; or it does not come: `why`."""

    request_no: int
    result: PromptResult | None
    why: str = ""


@dataclass(slots=True)
class Transfer:
    request_no: int
    room: Room
    ticket: Ticket | None = None
    """None until pages are reserved."""
    arrived: set[int] = field(default_factory=set)
    """The ranks of this group that have all of their part."""
    result: PromptResult | None = None
    computed_at: float | None = None
    """When the prefill instance had sent everything."""
    is_over: bool = False
    is_announced: bool = False
    """The prefill instance knows the room, and may still do something for it."""
    since: float = field(default_factory=time.monotonic)
    """The last change of phase."""

    @property
    def phase(self) -> str:
        if self.is_over:
            return "is here"
        if self.ticket is None:
            return "waits for pages"
        return ARRIVES if self.is_coming else "waits for prefill"

    @property
    def is_coming(self) -> bool:
        return bool(self.arrived) or self.result is not None or self.computed_at is not None

    def begin_to_arrive(self) -> None:
        """Before the first thing that has come is noted."""
        if not self.is_coming:
            self.since = time.monotonic()


class BootstrapLink:
    """The connection to a prefill instance. Its thread calls `on_message`, and `on_lost` once."""

    def __init__(
        self,
        address: tuple[str, int],
        own: Identity,
        secret: bytes,
        allowed: AllowedHosts,
        on_message: Callable[[TransferMessage], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._address, self._own, self._secret = address, own, secret
        self._allowed = allowed
        self._on_message, self._on_lost = on_message, on_lost
        self._lock = threading.Lock()
        self._waiting: list[TransferMessage] | None = []
        """What is sent once it is connected; None from then on."""
        self._connection: Any = None
        self._outbox: Outbox | None = None
        self.own_host = ""
        """The address of this machine by which the prefill instance reaches it."""
        self._begun = time.monotonic()
        threading.Thread(target=self._run, name="bootstrap-link", daemon=True).start()

    def post(self, message: TransferMessage) -> None:
        with self._lock:
            if self._waiting is not None:
                self._waiting.append(message)
            elif self._outbox is not None:
                self._outbox.post(self._with_hosts(message))

    @property
    def is_late(self) -> bool:
        """Whether it is still not connected, for whatever reason: a lookup may take its time."""
        with self._lock:
            waits = self._waiting is not None
        return waits and time.monotonic() - self._begun > CONNECT_SECONDS

    def beat(self) -> None:
        with self._lock:
            if self._outbox is not None and self._outbox.is_empty:
                self._outbox.post(Beat())

    def _with_hosts(self, message: TransferMessage) -> TransferMessage:
        if not isinstance(message, Offer):
            return message
        ranks = tuple(
            replace(rank, host=rank.host or self.own_host) for rank in message.target.ranks
        )
        return Offer(replace(message.target, ranks=ranks))

    def _run(self) -> None:
        why = "its thread has ended"
        try:
            self._connect()
            while True:
                message, _ = receive(self._connection)
                self._on_message(message)
        except TimeoutError:
            why = f"it has said nothing for {SILENCE_SECONDS:g} s"
        except OSError as error:
            why = str(error)
        except Exception as error:
            why = repr(error)
            logger.exception("a connection to a prefill instance failed")
        finally:
            self._lose(why)

    def _lose(self, why: str) -> None:
        with self._lock:
            outbox, self._outbox, self._waiting = self._outbox, None, None
        if outbox is not None:
            outbox.close()
            self._connection.close()
        host, port = self._address
        self._on_lost(f"the prefill instance at {host}:{port} is lost: {why}")

    def _connect(self) -> None:
        plain: list[socket.socket] = []

        def dial() -> socket.socket:
            plain[:] = [self._allowed.connect(*self._address, CONNECT_SECONDS)]
            return plain[0]

        made, _ = connect(dial, Role.ROOM, self._own, self._secret, CONNECT_SECONDS, waits=False)
        made.settimeout(SILENCE_SECONDS)
        with self._lock:
            self._connection, self.own_host = made, plain[0].getsockname()[0]
            self._outbox = Outbox(made)
            waiting, self._waiting = self._waiting or [], None
            for message in waiting:
                self._outbox.post(self._with_hosts(message))


class RankOrders:
    """The leader's connection to a rank of its group, or to itself. It is made when it is needed,
    anew for the successor of a rank that was lost, which listens at the same port."""

    def __init__(
        self, rank: KVRank, own: Identity, secret: bytes, on_message: Callable[[Any], None]
    ) -> None:
        self.rank, self._own, self._secret = rank, own, secret
        self._on_message = on_message
        self._connection: Any = None

    def send(self, message: TransferMessage) -> None:
        """OSError if the rank is not reached."""
        send(self._connection or self._connect(), message)

    def tell(self, message: TransferMessage) -> None:
        """Nothing that a rank has to be started for."""
        if (connection := self._connection) is not None:
            with suppress(OSError):
                send(connection, message)

    def _connect(self) -> Any:
        address = self.rank.host or "localhost", self.rank.port
        dial = partial(socket.create_connection, address, CONNECT_SECONDS)
        made, _ = connect(dial, Role.KV, self._own, self._secret, CONNECT_SECONDS)
        self._connection = made
        threading.Thread(target=self._run, args=(made,), name="rank-orders", daemon=True).start()
        return made

    def _run(self, connection: Any) -> None:
        try:
            while True:
                message, _ = receive(connection)
                self._on_message(message)
        except OSError as error:
            logger.info("rank %d is not listened to any more: %s", self.rank.rank, error)
        finally:
            if self._connection is connection:
                self._connection = None
            connection.close()


class DecodeRooms:
    """`ranks`: those of the group, this one first. `model`, `draft`: digests, as of the Lobby.
    `allowed`: the prefill instances that are connected to."""

    def __init__(
        self,
        ranks: Sequence[KVRank],
        own: Identity,
        secret: bytes,
        model: bytes,
        draft: bytes,
        allowed: AllowedHosts,
    ) -> None:
        self._ranks, self._own, self._secret = tuple(ranks), own, secret
        self._model, self._draft, self._allowed = model, draft, allowed
        self._lock = threading.RLock()
        self._transfers: dict[int, Transfer] = {}
        """By request."""
        self._waiting: dict[str, dict[int, Transfer]] = {}
        """Those that are not over, by the prefill instance's address and the room."""
        self._by_ticket: dict[Ticket, Transfer] = {}
        self._links: dict[str, BootstrapLink] = {}
        self._events: deque[RoomEvent] = deque()
        self.wakeup_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._orders = [
            RankOrders(rank, own, secret, partial(self._on_rank, rank.rank)) for rank in ranks
        ]
        self.num_arrived = self.num_failed = 0
        threading.Thread(target=self._tick, name="rooms", daemon=True).start()

    def announce(self, request_no: int, room: Room, prompt: bytes) -> None:
        """The request waits for pages. `prompt`: its digest."""
        with self._lock:
            transfer = self._transfers[request_no] = Transfer(request_no, room)
            waiting = self._waiting.setdefault(room.address, {})
            if room.number in waiting:  # messages name rooms only: the prefill instance is not told
                self._fail(transfer, "it has a request already: choose another bootstrap_room")
                return
            waiting[room.number], transfer.is_announced = transfer, True
            self._link(room).post(Announce(room.number, self._model, prompt, self._draft))

    def offer(self, request_no: int, first: int, stop: int) -> Ticket:
        """Its tokens from `first` up to `stop` have pages: they may come."""
        with self._lock:
            transfer = self._transfers[request_no]
            ticket = Ticket(transfer.room.number, secrets.randbits(EPOCH_BITS))
            transfer.ticket, transfer.since = ticket, time.monotonic()
            self._by_ticket[ticket] = transfer
            target = KVTarget(ticket, first, stop, self._ranks)
        for orders in self._orders:
            try:
                orders.send(Open(ticket, first, stop))
            except OSError as error:
                with self._lock:
                    self._fail(transfer, f"rank {orders.rank.rank} is not reached: {error}")
                return ticket
        self._link(transfer.room).post(Offer(target))
        return ticket

    def release(self, request_no: int) -> None:
        """What has come of it is not needed, or not any more. May be repeated."""
        with self._lock:
            transfer = self._transfers.pop(request_no, None)
            if transfer is None:
                return
            self._forget(transfer)
            if transfer.ticket is not None:
                del self._by_ticket[transfer.ticket]
        if transfer.ticket is not None:
            for orders in self._orders:  # a rank that was lost has forgotten it
                orders.tell(Close(transfer.ticket))
        if not transfer.is_over:
            self._withdraw(transfer)

    def take(self) -> list[RoomEvent]:
        if not self._events:
            return []
        with self._lock:  # so that the descriptor is readable while there are events, and else not
            with suppress(BlockingIOError):
                os.eventfd_read(self.wakeup_fd)
            found = list(self._events)
            self._events.clear()
        return found

    def state(self) -> list[dict[str, Any]]:
        now = time.monotonic()
        with self._lock:
            return [
                {
                    "room": transfer.room.number,
                    "phase": transfer.phase,
                    "peer": transfer.room.address,
                    "seconds": round(now - transfer.since, 3),
                    **({"why": self._missing(transfer)} if transfer.phase == ARRIVES else {}),
                }
                for transfer in self._transfers.values()
            ]

    def on_result(self, result: PromptResult) -> None:
        with self._lock:
            transfer = self._by_ticket.get(result.ticket)
            if transfer is not None and transfer.result is None:
                transfer.begin_to_arrive()
                transfer.result = result
                self._check(transfer)

    def _link(self, room: Room) -> BootstrapLink:
        with self._lock:
            link = self._links.get(room.address)
            if link is None:
                heard = partial(self._on_prefill, room.address)
                lost = partial(self._on_lost, room.address)
                given = (room.host, room.port), self._own, self._secret, self._allowed
                link = BootstrapLink(*given, heard, lost)
                self._links[room.address] = link
            return link

    def _on_rank(self, rank: int, message: TransferMessage) -> None:
        with self._lock:
            if not isinstance(message, Arrived | Broken):
                return
            transfer = self._by_ticket.get(message.ticket)
            if transfer is None:
                return
            if isinstance(message, Broken):
                self._fail(transfer, message.why)
            else:
                transfer.begin_to_arrive()
                transfer.arrived.add(rank)
                self._check(transfer)

    def _on_prefill(self, address: str, message: TransferMessage) -> None:
        if not isinstance(message, Refused | Computed):
            return
        with self._lock:
            transfer = self._waiting.get(address, {}).get(message.room)
            if transfer is None:
                return
            if isinstance(message, Refused):
                transfer.is_announced = False
                self._fail(transfer, message.why)
            else:
                self._note_computed(transfer)

    def _on_lost(self, address: str, why: str) -> None:
        """What is on its way from its ranks may still come; the next room tries again."""
        with self._lock:
            self._links.pop(address, None)
            for transfer in list(self._waiting.get(address, {}).values()):
                transfer.is_announced = False
                if transfer.result is None and transfer.computed_at is None:
                    self._fail(transfer, why)
                else:
                    self._note_computed(transfer)

    def _note_computed(self, transfer: Transfer) -> None:
        transfer.begin_to_arrive()
        transfer.computed_at = transfer.computed_at or time.monotonic()

    def _forget(self, transfer: Transfer) -> None:
        """It is over."""
        waiting = self._waiting.get(transfer.room.address, {})
        if waiting.get(transfer.room.number) is transfer:
            del waiting[transfer.room.number]
        if not waiting:
            self._waiting.pop(transfer.room.address, None)

    def _check(self, transfer: Transfer) -> None:
        is_here = transfer.result is not None and len(transfer.arrived) == len(self._ranks)
        if is_here and not transfer.is_over:
            self.num_arrived += 1
            self._end(transfer, RoomEvent(transfer.request_no, transfer.result))

    def _fail(self, transfer: Transfer, why: str) -> None:
        if not transfer.is_over:
            self.num_failed += 1
            self._end(transfer, RoomEvent(transfer.request_no, None, f"{transfer.room}: {why}"))
            self._withdraw(transfer)

    def _withdraw(self, transfer: Transfer) -> None:
        """What the prefill instance still does for the room is in vain."""
        with self._lock:
            is_heard, transfer.is_announced = transfer.is_announced, False
            link = self._links.get(transfer.room.address)
        if is_heard and link is not None:
            link.post(Withdraw(transfer.room.number))

    def _end(self, transfer: Transfer, event: RoomEvent) -> None:
        transfer.is_over, transfer.since = True, time.monotonic()
        self._forget(transfer)
        self._events.append(event)
        os.eventfd_write(self.wakeup_fd, 1)

    def _tick(self) -> None:
        while True:
            time.sleep(TICK_SECONDS)
            now = time.monotonic()
            with self._lock:
                for address, link in self._links.items():
                    link.beat()
                    for transfer in list(self._waiting.get(address, {}).values()):
                        if link.is_late:
                            when = f"is not connected after {CONNECT_SECONDS:g} s"
                            self._fail(transfer, f"the prefill instance at {address} {when}")
                waiting = [one for rooms in self._waiting.values() for one in rooms.values()]
                for transfer in waiting:
                    computed = transfer.computed_at
                    if computed is not None and now - computed > ARRIVE_SECONDS:
                        when = f"{ARRIVE_SECONDS:g} s after the prompt was computed"
                        self._fail(transfer, f"{self._missing(transfer)} {when}")

    def _missing(self, transfer: Transfer) -> str:
        late = [rank.rank for rank in self._ranks if rank.rank not in transfer.arrived]
        parts = [f"keys and values of ranks {late}"] * bool(late)
        parts += ["the first token"] * (transfer.result is None)
        return f"not all has come: {' and '.join(parts)}"
