"""KV caches between any two layouts: what is sent covers what is needed and arrives where it
belongs, and what comes late or malformed changes nothing."""

from __future__ import annotations

import os
import random
import re
import select
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from queue import Queue
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from moesaic.comm.errors import PeerTimeout
from moesaic.comm.lifecycle import Lifecycle, Membership, Participant
from moesaic.comm.mesh import share
from moesaic.comm.network.connect import connect
from moesaic.comm.network.handshake import Identity, Role, Session
from moesaic.comm.network.listener import Listener
from moesaic.config import ServerArgs
from moesaic.core.disagg import KVRank, KVSend, KVShare, KVTarget, Room, Ticket
from moesaic.disagg import lobby as lobby_module
from moesaic.disagg import outlets as outlets_module
from moesaic.disagg import rooms as rooms_module
from moesaic.disagg.allowed_hosts import LOOPBACK, PRIVATE, AllowedHosts, bootstrap_hosts
from moesaic.disagg.layout import CacheShape, piece
from moesaic.disagg.likeness import (
    SAMPLE_BYTES,
    SAMPLES,
    draft_digest,
    model_digest,
    prompt_digest,
)
from moesaic.disagg.lobby import Lobby, LobbyEvent
from moesaic.disagg.messages import (
    Announce,
    Broken,
    Chunk,
    Close,
    Offer,
    Open,
    Opened,
    PromptResult,
    frame,
    receive,
)
from moesaic.disagg.outlets import KVOutlet, KVOutlets, StepOnDevice
from moesaic.disagg.receiver import KVReceiver
from moesaic.disagg.rooms import DecodeRooms, RoomEvent
from moesaic.disagg.send_buffer import SendBuffer
from moesaic.disagg.sender import KVSender
from moesaic.engine.frontend.request_options import meeting_room
from moesaic.engine.runner.step_transfers import StepTransfers
from moesaic.engine.schedule.plan import PlanItem, StepPlan
from moesaic.engine.worker.arrivals import Arrivals
from moesaic.layers.attention import AttentionConfig, Heads
from moesaic.layers.context import CacheSpec
from moesaic.layers.paged_cache import PagedCache, PageTable, PageUpdate
from tests.server.serving import wait_until

SECRET = b"of both instances alike"
OWN = Identity(0, 0)
LOCAL = AllowedHosts(LOOPBACK)
PROMPT, MODEL = prompt_digest([1, 2, 3], ""), b"the digest of it"
LAYERS, HEADS = 6, 4


def shares(tp: int, pp: int, latent: bool, dims: tuple[int, int] = (2, 3)) -> list[KVShare]:
    """Of a group's ranks, as models split them."""
    config = AttentionConfig(16, 2 * HEADS, HEADS, 2)
    found = []
    for stage in range(pp):
        layers = share(LAYERS, stage, pp)
        for rank in range(tp):
            heads = range(1) if latent else Heads.of(config, rank, tp).kv
            sizes = (sum(dims), 0) if latent else dims
            found.append(KVShare((layers.start, layers.stop), (heads.start, heads.stop), *sizes))
    return found


LAYOUTS = [(tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 3, 6)]


@pytest.mark.parametrize("latent", [False, True])
def test_every_layer_and_head_comes_once(latent: bool) -> None:
    """All 256 pairs of layouts: the targets' parts are covered, by one source each."""
    for one in LAYOUTS:
        for other in LAYOUTS:
            sources, targets = shares(*one, latent), shares(*other, latent)
            for number, target in enumerate(targets):
                counts = np.zeros((LAYERS, HEADS), int)
                for source in range(len(sources)):
                    layers, heads = piece(sources, source, targets, number)
                    counts[layers.start : layers.stop, heads.start : heads.stop] += 1
                wanted = np.zeros_like(counts)
                wanted[slice(*target.layers), slice(*target.heads)] = 1
                assert (counts == wanted).all(), (one, other, number)


def test_shapes_of_other_models_differ() -> None:
    assert CacheShape.of(shares(4, 2, False)) == CacheShape.of(shares(8, 3, False))
    assert CacheShape.of(shares(1, 1, False)) != CacheShape.of(shares(1, 1, True))
    text = "6 layers, 4 key/value heads, 2 and 3 channels of keys and values"
    assert str(CacheShape.of(shares(2, 2, False))) == text


@dataclass
class Group:
    """The ranks of an instance: their parts of the cache, and the pages of one request."""

    shares: list[KVShare]
    page_size: int
    dtype: torch.dtype
    tokens: int

    def __post_init__(self) -> None:
        pages = -(-self.tokens // self.page_size)
        self.pages = np.random.default_rng(self.tokens).permutation(2 * pages)[:pages] + 1
        self.caches = [
            PagedCache(self._spec(one), 2 * pages, self.page_size, self.dtype)
            for one in self.shares
        ]
        for cache in self.caches:  # what is not sent shows
            cache.keys.fill_(torch.nan)
            cache.values.fill_(torch.nan)

    @staticmethod
    def _spec(one: KVShare) -> CacheSpec:
        layers, heads = len(range(*one.layers)), len(range(*one.heads))
        return CacheSpec(layers, heads, one.key_dim, one.value_dim)

    def slots(self, first: int, stop: int) -> torch.Tensor:
        places = np.arange(first, stop)
        pages = self.pages[places // self.page_size]
        return torch.from_numpy(pages * self.page_size + places % self.page_size)

    def fill(self, whole: list[torch.Tensor]) -> None:
        for one, cache in zip(self.shares, self.caches, strict=True):
            slots = self.slots(0, self.tokens)
            for part, kept in zip(whole, (cache.keys, cache.values), strict=True):
                kept.flatten(1, 2)[:, slots] = self._part(one, part).to(self.dtype)

    def check(self, whole: list[torch.Tensor], first: int) -> None:
        """The tokens from `first` on are there, and nothing else was written."""
        for one, cache in zip(self.shares, self.caches, strict=True):
            slots = self.slots(first, self.tokens)
            for part, kept in zip(whole, (cache.keys, cache.values), strict=True):
                found = kept.flatten(1, 2)[:, slots]
                assert torch.equal(found, self._part(one, part)[:, first:].to(self.dtype))
                others = torch.ones(kept.flatten(1, 2).shape[1], dtype=torch.bool)
                others[slots] = False
                assert kept.flatten(1, 2)[:, others].isnan().all()

    @staticmethod
    def _part(one: KVShare, part: torch.Tensor) -> torch.Tensor:
        return part[slice(*one.layers), :, slice(*one.heads)]


@contextmanager
def receivers(
    group: Sequence[KVShare | tuple[KVShare, ...]],
    dtype: torch.dtype = torch.float32,
    transport: str = "auto",
) -> Iterator[Any]:
    """A receiver for each rank, and the rooms of their leader. `group`: the shares of each rank, or
    that of its only cache."""
    made, ranks = [], []
    for n, one in enumerate(group):
        own_shares = (one,) if isinstance(one, KVShare) else one
        listening, own = socket.create_server(("127.0.0.1", 0)), Identity(n, 0)
        given = dtype, listening, own, SECRET, "cpu", transport
        made.append(KVReceiver(own_shares, *given))
        ranks.append(KVRank(n, 0, 0, own_shares, "127.0.0.1", made[-1].port))
    rooms = DecodeRooms(ranks, OWN, SECRET, MODEL, b"", LOCAL)
    made[0].on_result = rooms.on_result
    try:
        yield made, rooms
    finally:
        for receiver in made:
            receiver.close()


@contextmanager
def prefill_lobby() -> Iterator[tuple[Lobby, Room]]:
    listening = socket.create_server(("127.0.0.1", 0))
    lobby = Lobby(listening, SECRET, MODEL)
    lobby.serve([(one,) for one in shares(1, 1, False)], lambda: None)
    try:
        yield lobby, Room(7, "127.0.0.1", listening.getsockname()[1])
    finally:
        lobby.close()


def is_complete(receiver: KVReceiver, ticket: Ticket) -> bool:
    """False, too, before its leader's Open is there, which takes another way."""
    return ticket in receiver._staged and receiver.staged(ticket).is_complete


def next_event(source: Any) -> Any:
    found: list[Any] = []
    wait_until(lambda: bool(found.extend(source.take()) or found), 20)
    (event,) = found
    return event


def meet(lobby: Lobby, rooms: DecodeRooms, room: Room, first: int, stop: int) -> KVTarget:
    rooms.announce(1, room, PROMPT)
    rooms.offer(1, first, stop)
    lobby.enter(1, room.number, PROMPT)
    event = next_event(lobby)
    assert isinstance(event, LobbyEvent) and event.target is not None, event
    return event.target


TRANSPORTS = ("shm", "tcp")
DIMS = (2, 3), (8, 4)


def outlets_of(rank: int, transport: str, nbytes: int = 1 << 20) -> KVOutlets:
    return KVOutlets(Identity(rank, 1), SECRET, SendBuffer(nbytes), transport)


TYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(
    "number", [*range(32), *(pytest.param(n, marks=pytest.mark.slow) for n in range(32, 240))]
)
def test_what_is_sent_is_received(number: int) -> None:
    """Any layout, page size and type to any other, in chunks, of which one comes twice."""
    chooser = random.Random(number)
    latent, tokens = bool(number % 3 == 0), chooser.randint(1, 40)
    one, other = (
        chooser.choice([each for each in LAYOUTS if each[0] * each[1] <= 8]) for _ in "ab"
    )
    there, here = chooser.choice(TYPES), chooser.choice(TYPES)
    ours, theirs = (shares(*each, latent, DIMS[number % 2]) for each in (one, other))
    source = Group(ours, chooser.choice([1, 4, 7, 16]), there, tokens)
    target = Group(theirs, chooser.choice([1, 3, 8, 64]), here, tokens)
    heads, dims = (1, (sum(DIMS[number % 2]), 0)) if latent else (HEADS, DIMS[number % 2])
    torch.manual_seed(number)
    whole = [torch.randn(LAYERS, tokens, heads, dim).to(there) for dim in dims]
    source.fill(whole)
    first = chooser.randint(0, tokens - 1)
    outlets = [outlets_of(n, TRANSPORTS[number % 2]) for n in range(len(source.shares))]
    with receivers(target.shares, here) as (made, rooms):
        rooms.announce(1, Room(3, "127.0.0.1", 1), PROMPT)
        ticket = rooms.offer(1, first, tokens)
        order = KVTarget(ticket, first, tokens, rooms._ranks)
        cuts = sorted({first, tokens, *(chooser.randint(first, tokens) for _ in range(3))})
        chunks = [*pairwise(cuts)]
        for start, stop in [*chunks[:1], *chunks]:
            for n, cache in enumerate(source.caches):
                sender = KVSender([(one,) for one in source.shares], n, outlets[n])
                sender.send(KVSend(order, start, stop), cache, source.slots(start, stop))
        sender.finish(order, PromptResult(ticket, [5], [-0.5]))
        wait_until(lambda: all(is_complete(receiver, ticket) for receiver in made), 20)
        for receiver, cache in zip(made, target.caches, strict=True):
            receiver.staged(ticket).move_to([cache], target.slots(first, tokens))
        target.check(whole, first)
        rooms.release(1)
        wait_until(lambda: sum(receiver.staged_bytes for receiver in made) == 0, 20)
    for one_rank in outlets:
        assert set(one_rank.transports.values()) <= {TRANSPORTS[number % 2]}
        wait_until(lambda buffer=one_rank.buffer: buffer.free_bytes == buffer.nbytes)


def draft_shares(tp: int, latent: bool) -> list[KVShare]:
    """Of a draft model of one layer, with other heads than the target's."""
    config = AttentionConfig(16, HEADS, 2, 2)
    heads = [range(1) if latent else Heads.of(config, rank, tp).kv for rank in range(tp)]
    sizes = (7, 0) if latent else (5, 3)
    return [KVShare((0, 1), (one.start, one.stop), *sizes) for one in heads]


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize(("one", "other"), [(1, 4), (4, 2), (2, 2)])
def test_the_cache_of_a_draft_model_comes_with_it(one: int, other: int, latent: bool) -> None:
    """Both have to be there; an instance without drafts gets the target's alone."""
    tokens, torch_type = 9, torch.float32
    ours, theirs = (
        (Group(shares(tp, 1, latent), page, torch_type, tokens), draft_shares(tp, latent))
        for tp, page in ((one, 4), (other, 7))
    )
    drafts = [Group(some, group.page_size, torch_type, tokens) for group, some in (ours, theirs)]
    kinds = (
        ([(1, 5), (1, 0)] if latent else [(HEADS, 2), (HEADS, 3)]),
        ([(1, 7), (1, 0)] if latent else [(2, 5), (2, 3)]),
    )
    wholes = []
    for layers, group, dims in zip((LAYERS, 1), (ours[0], drafts[0]), kinds, strict=True):
        wholes.append([torch.randn(layers, tokens, *each) for each in dims])
        group.fill(wholes[-1])
    pairs = [*zip(ours[0].shares, ours[1], strict=True)]
    outlets = [outlets_of(n, "shm") for n in range(one)]
    senders = [KVSender(pairs, n, outlet) for n, outlet in enumerate(outlets)]

    def send(target: KVTarget, which: int) -> None:
        source = (ours[0], drafts[0])[which]
        order, slots = KVSend(target, 0, tokens), source.slots(0, tokens)
        for sender, cache in zip(senders, source.caches, strict=True):
            sender.send(order, cache, slots, which)

    asked = [*zip(theirs[0].shares, theirs[1], strict=True)]
    with receivers(asked) as (made, rooms):
        rooms.announce(1, Room(3, "127.0.0.1", 1), PROMPT)
        ticket = rooms.offer(1, 0, tokens)
        target = KVTarget(ticket, 0, tokens, rooms._ranks)
        send(target, 0)
        draft_entries = [len(range(*share.heads)) * tokens for share in theirs[1]]
        wait_until(lambda: all(ticket in one._staged for one in made), 20)
        wait_until(lambda: [one.staged(ticket).num_missing for one in made] == draft_entries, 20)
        send(target, 1)
        wait_until(lambda: all(is_complete(receiver, ticket) for receiver in made), 20)
        for receiver, *caches in zip(made, theirs[0].caches, drafts[1].caches, strict=True):
            receiver.staged(ticket).move_to(caches, theirs[0].slots(0, tokens))
        for group, whole in zip((theirs[0], drafts[1]), wholes, strict=True):
            group.check(whole, 0)
    with receivers(theirs[0].shares) as (made, rooms):
        rooms.announce(1, Room(3, "127.0.0.1", 1), PROMPT)
        ticket = rooms.offer(1, 0, tokens)
        target = KVTarget(ticket, 0, tokens, rooms._ranks)
        send(target, 1)
        send(target, 0)
        wait_until(lambda: all(is_complete(receiver, ticket) for receiver in made), 20)


def chunk_of(ticket: Ticket, **more: Any) -> Chunk:
    extent: dict[str, Any] = {"first": 0, "stop": 2, "layers": (0, LAYERS), "heads": (0, HEADS)}
    return Chunk(ticket, **{**extent, "dtype": "float32", **more})


def talk(receiver: KVReceiver, *frames: list[Any]) -> Any:
    """A connection on which these were sent."""
    address = "127.0.0.1", receiver.port
    made, _ = connect(lambda: socket.create_connection(address), Role.KV, OWN, SECRET, 5)
    for buffers in frames:
        for buffer in buffers:
            made.sendall(buffer)
    return made


BODY = torch.ones(LAYERS * 2 * HEADS * 5).numpy().tobytes()


@pytest.mark.parametrize(
    ("chunk", "body", "text"),
    [
        (chunk_of(Ticket(1, 1)), BODY[:-4], "with 956 bytes: 960 are expected"),
        (chunk_of(Ticket(1, 1), stop=3), BODY, "this rank holds"),
        (chunk_of(Ticket(1, 1), first=-1), BODY, "this rank holds"),
        (chunk_of(Ticket(1, 1), layers=(0, LAYERS + 1)), BODY, "this rank holds"),
        (chunk_of(Ticket(1, 1), heads=(2, 2)), BODY, "this rank holds"),
        (chunk_of(Ticket(1, 1), dtype="load"), BODY, "this rank holds"),
        (chunk_of(Ticket(1, 1), cache=1), BODY, "this rank has 1 caches"),
        (Open(Ticket(2, 2), 0, 1), BODY, "bytes behind a Open"),
    ],
)
def test_malformed_frames_end_the_connection(
    chunk: Any, body: bytes, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    [one] = shares(1, 1, False)
    with receivers([one]) as ((receiver,), _):
        leader = talk(receiver, frame(Open(Ticket(1, 1), 0, 2)))
        wait_until(lambda: receiver.staged_bytes > 0)
        sender = talk(receiver, frame(chunk, [body]))
        wait_until(lambda: text in caplog.text)
        sender.close()
        assert receiver.staged(Ticket(1, 1)).num_missing == LAYERS * 2 * HEADS
        leader.close()
        wait_until(lambda: receiver.staged_bytes == 0)


def test_what_comes_late_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of an earlier epoch of the same room, and one behind the end of its transfer: at
    once, since others are behind it."""
    monkeypatch.setattr("moesaic.disagg.receiver.OPEN_SECONDS", 600)
    [one] = shares(1, 1, False)
    with receivers([one]) as ((receiver,), _):
        old, new = Ticket(9, 1), Ticket(9, 2)
        leader = talk(receiver, frame(Open(old, 0, 2)), frame(Close(old)), frame(Open(new, 0, 2)))
        wait_until(lambda: receiver.staged_bytes > 0)
        sender = talk(receiver, frame(chunk_of(old), [BODY]))
        for buffer in frame(chunk_of(new, stop=1), [BODY[: len(BODY) // 2]]):
            sender.sendall(buffer)
        staged = receiver.staged(new)
        wait_until(lambda: staged.num_missing == LAYERS * HEADS)
        assert receiver.staged(old) is None
        sender.close()
        leader.close()


def test_a_step_outlives_the_end_of_a_request_in_it() -> None:
    """The leader of a pipeline closes a transfer while the step that moves it is on its way to a
    later stage. What a stage has lost otherwise is an error: it would compute something else."""
    [one] = shares(1, 1, False)
    ended, lasting, lost = (Ticket(room, 1) for room in (1, 2, 3))
    with receivers([one]) as ((receiver,), _):
        leader = talk(receiver, *(frame(Open(ticket, 0, 2)) for ticket in (ended, lasting)))
        other = talk(receiver, frame(Open(lost, 0, 2)))
        chunks = (frame(chunk_of(ticket), [BODY]) for ticket in (ended, lasting, lost))
        sender = talk(receiver, *chunks)
        for ticket in (ended, lasting, lost):
            wait_until(lambda ticket=ticket: is_complete(receiver, ticket))
        leader.sendall(b"".join(frame(Close(ended))))
        other.close()
        wait_until(lambda: receiver._staged.keys() == {lasting})
        cache, table = PagedCache(Group._spec(one), 3, 2, torch.float32), PageTable(3, 1)
        table.write([PageUpdate(row, 0, [row + 1]) for row in range(3)])
        cache.keys.zero_()
        items = [
            PlanItem(row, [5], 2, row, kv_from=ticket)
            for row, ticket in enumerate((ended, lasting))
        ]
        transfers = StepTransfers(receiver=receiver)
        transfers.receive(StepPlan(items), [cache], table)
        found = [cache.keys[:, page].unique().tolist() for page in (1, 2)]
        assert found == [[0.0], [1.0]]
        with pytest.raises(KeyError):
            transfers.receive(StepPlan([PlanItem(2, [5], 2, 2, kv_from=lost)]), [cache], table)
        sender.close()
        leader.close()


def test_a_ticket_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with those of a rank's predecessor: what is behind their chunks is good."""
    monkeypatch.setattr("moesaic.disagg.receiver.OPEN_SECONDS", 0.01)
    [one] = shares(1, 1, False)
    with receivers([one]) as ((receiver,), _):
        old, new = Ticket(9, 1), Ticket(9, 2)
        leader = talk(receiver, frame(Open(new, 0, 2)))
        wait_until(lambda: receiver.staged_bytes > 0)
        half = frame(chunk_of(new, stop=1), [BODY[: len(BODY) // 2]])
        sender = talk(receiver, frame(chunk_of(old), [BODY]), half)
        wait_until(lambda: receiver.staged(new).num_missing == LAYERS * HEADS)
        monkeypatch.setattr("moesaic.disagg.receiver.OPEN_SECONDS", 600)
        for buffer in frame(chunk_of(old), [BODY]) + frame(chunk_of(new), [BODY]):
            sender.sendall(buffer)
        wait_until(lambda: receiver.staged(new).is_complete)
        sender.close()
        leader.close()


def test_ends_are_remembered_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk whose ticket is closed while it waits is dropped, too."""
    monkeypatch.setattr("moesaic.disagg.receiver.OPEN_SECONDS", 600)
    monkeypatch.setattr("moesaic.disagg.receiver.MOST_CLOSED", 2)
    [one] = shares(1, 1, False)
    with receivers([one]) as ((receiver,), _):
        late, new = Ticket(9, 1), Ticket(9, 2)
        sender = talk(receiver, frame(chunk_of(late), [BODY]), frame(chunk_of(new), [BODY]))
        ends = [frame(Close(Ticket(9, epoch))) for epoch in (5, 6, 7)]
        leader = talk(receiver, *ends, frame(Open(new, 0, 2)))
        wait_until(lambda: receiver.staged_bytes > 0)
        assert list(receiver._closed) == [Ticket(9, 6), Ticket(9, 7)]
        assert not receiver.staged(new).is_complete  # behind the chunk that waits
        for buffer in frame(Close(late)):
            leader.sendall(buffer)
        wait_until(lambda: receiver.staged(new).is_complete)
        sender.close()
        leader.close()


def test_two_instances_meet_and_part() -> None:
    """Also in the other order; a withdrawn room ends the request, a lost one the transfer."""
    with prefill_lobby() as (lobby, room), receivers(shares(2, 3, False)) as (_, rooms):
        assert meet(lobby, rooms, room, 2, 5).stop == 5
        assert [one["phase"] for one in lobby.state()] == ["computes and sends"]
        assert [(one["room"], one["phase"], one["peer"]) for one in rooms.state()] == [
            (7, "waits for prefill", room.address)
        ]
        rooms.release(1)
        event = next_event(lobby)
        assert event.target is None and "does not want it any more" in event.why
        assert lobby.state() == rooms.state() == []

        lobby.enter(2, 8, PROMPT)
        [waiting] = lobby.state()
        assert (waiting["phase"], waiting["peer"]) == ("waits for decode", None)
        again = Room(8, room.host, room.port)
        rooms.announce(2, again, PROMPT)
        wait_until(lambda: lobby.state()[0]["phase"].startswith("waits for pages"))
        rooms.offer(2, 0, 4)
        assert next_event(lobby).target.first == 0
        lobby.enter(3, 8, PROMPT)
        assert "has a request already" in next_event(lobby).why
        lobby.leave(2, "it was stopped")
        assert next_event(rooms) == RoomEvent(2, None, "room 8: it was stopped")
        rooms.announce(4, Room(9, room.host, room.port), PROMPT)
        wait_until(lambda: bool(lobby.state()))
        lobby.close()
        assert next_event(rooms).why.startswith("room 9: the prefill instance at 127.0.0.1:")


def test_waits_end_and_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REQUEST_SECONDS", "DECODE_SECONDS"):
        monkeypatch.setattr(lobby_module, name, 0.1)
    monkeypatch.setattr(rooms_module, "ARRIVE_SECONDS", 0.1)
    with prefill_lobby() as (lobby, room), receivers(shares(2, 1, False)) as (_, rooms):
        rooms.announce(1, room, PROMPT)
        assert "got no such request in 0.1 s" in next_event(rooms).why
        rooms.release(1)
        lobby.enter(5, 70, PROMPT)
        assert "no decode instance came to room 70" in next_event(lobby).why
        meet(lobby, rooms, Room(8, room.host, room.port), 0, 4)
        lobby.leave(1, "")
        why = next_event(rooms).why
        assert why.startswith("room 8: not all has come: keys and values of ranks [0, 1] and the ")
        rooms.release(1)
        rooms.announce(2, Room(9, "127.0.0.1", 1), PROMPT)
        assert "the prefill instance at 127.0.0.1:1 is lost" in next_event(rooms).why


def test_other_models_and_secrets_are_refused() -> None:
    with prefill_lobby() as (lobby, room), receivers(shares(1, 1, True)) as (_, rooms):
        lobby.enter(1, room.number, PROMPT)
        rooms.announce(1, room, PROMPT)
        rooms.offer(1, 0, 4)
        assert "the instances serve different models: 6 layers, 4 key" in next_event(rooms).why
        stranger = DecodeRooms([], OWN, b"of somebody else entirely", MODEL, b"", LOCAL)
        stranger.announce(2, Room(9, room.host, room.port), PROMPT)
        assert "is lost: it does not know this node's secret" in next_event(stranger).why


@dataclass
class Call:
    bootstrap_host: Any
    bootstrap_port: Any = None
    bootstrap_room: Any = 1


@pytest.mark.parametrize("host", ["a..b", ".a", "x" * 64, "x" * 64 + ".org", "a\0b", "\ud800", ""])
def test_hosts_that_no_lookup_takes(host: str) -> None:
    text = f"bootstrap_host is {host!r}: give the host of the prefill"
    with pytest.raises(ValueError, match=re.escape(text)):
        meeting_room(Call(host), "decode", LOCAL)


@pytest.mark.parametrize("host", ["node-1.example.org.", "10.0.0.7", "::1", "fe80::1%eth0", "käse"])
def test_hosts_that_a_lookup_takes(host: str) -> None:
    allowed = AllowedHosts((*PRIVATE, *LOOPBACK, "fe80::/10"))
    assert meeting_room(Call(host), "decode", allowed) == Room(1, host, 8998)


@pytest.mark.parametrize(
    ("own", "nodes", "given", "asked", "passes"),
    [
        ("127.0.0.1", 1, None, "127.0.0.9", True),
        ("127.0.0.1", 1, None, "10.0.0.7", False),
        ("127.0.0.1", 2, None, "10.0.0.7", True),
        ("0.0.0.0", 1, None, "10.0.0.7", True),
        ("0.0.0.0", 1, None, "::ffff:192.168.0.2", True),
        ("::", 1, None, "fd00::7", True),
        ("::", 1, None, "169.254.169.254", False),
        ("::", 1, None, "::ffff:8.8.8.8", False),
        ("0.0.0.0", 1, None, "fe80::1%eth0", False),
        ("0.0.0.0", 1, ("8.8.8.0/24",), "8.8.8.8", True),
        ("0.0.0.0", 1, ("8.8.8.8", "prefill-0"), "10.0.0.7", False),
        ("0.0.0.0", 1, ("0.0.0.0/0", "::/0"), "169.254.169.254", True),
    ],
)
def test_hosts_that_are_not_allowed(
    own: str, nodes: int, given: tuple[str, ...] | None, asked: str, passes: bool
) -> None:
    flags: dict[str, Any] = {"host": own, "nnodes": nodes, "disaggregation_mode": "decode"}
    args = ServerArgs(**flags, disaggregation_bootstrap_allow=given)
    allowed = AllowedHosts(bootstrap_hosts(args))
    if passes:
        assert meeting_room(Call(asked), "decode", allowed) == Room(1, asked, 8998)
        return
    text = f"bootstrap_host: this instance does not connect to {asked}, only to "
    with pytest.raises(ValueError, match=re.escape(text)):
        meeting_room(Call(asked), "decode", allowed)


def test_names_are_those_of_allowed_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name may be given to any address after it was looked up: that one is connected to."""
    found = {"inside": "127.0.0.1", "outside": "203.0.113.7", "listed": "127.0.0.1"}
    lookup = socket.getaddrinfo

    def look_up(host: str, *more: Any, **options: Any) -> Any:
        return lookup(found.pop(host, host), *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        AllowedHosts(LOOPBACK).connect("inside", port, 5).close()
        AllowedHosts(("LISTED.",)).connect("listed", port, 5).close()
        with pytest.raises(PermissionError, match=r"outside, which is 203\.0\.113\.7, only to"):
            AllowedHosts(LOOPBACK).connect("outside", port, 5)


def test_a_transfer_that_cannot_fit_gets_no_memory() -> None:
    """Whoever orders it."""
    [one] = shares(1, 1, False)
    with receivers([one]) as ((receiver,), _):
        receiver._most_tokens = 6
        leader = talk(receiver, *(frame(Open(Ticket(n, 1), 0, 4)) for n in (1, 2)))
        assert receive(leader)[0] == Broken(
            Ticket(2, 1), "there is room for 2 tokens, and the transfer has 4"
        )
        for order in (Close(Ticket(1, 1)), Open(Ticket(3, 1), 9, 15)):
            leader.sendall(b"".join(frame(order)))
        wait_until(lambda: Ticket(3, 1) in receiver._staged)
        assert Ticket(1, 1) not in receiver._staged
        leader.sendall(b"".join(frame(Open(Ticket(4, 1), 4, 3))))
        with pytest.raises(ConnectionError):
            receive(leader)
        leader.close()


def test_seconds_are_those_of_the_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what has not come yet is named."""
    now = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep)
    monkeypatch.setattr(rooms_module, "time", clock)
    with prefill_lobby() as (_, room), receivers(shares(2, 1, False)) as (_, rooms):

        def told() -> tuple[str, float, str]:
            [one] = rooms.state()
            assert (one["room"], one["peer"]) == (7, room.address)
            return one["phase"], one["seconds"], one.get("why", "")

        rooms.announce(1, room, PROMPT)
        first, now[0] = rooms._transfers[1].since, 1003.0
        assert told()[:2] == ("waits for pages", round(1003.0 - first, 3))
        ticket = rooms.offer(1, 0, 4)
        now[0] = 1005.0
        assert told() == ("waits for prefill", 2.0, "")
        rooms.on_result(PromptResult(ticket, [5]))
        now[0] = 1008.0
        assert told() == ("arrives", 3.0, "not all has come: keys and values of ranks [0, 1]")


def test_seconds_of_a_prefill_half_are_those_of_the_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which begins anew when its decode half is announced, and offers pages."""
    now = [1000.0]
    monkeypatch.setattr(lobby_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with prefill_lobby() as (lobby, room), receivers(shares(1, 1, False)) as (_, rooms):

        def told(phase: str) -> float:
            wait_until(lambda: lobby.state()[0]["phase"] == phase)
            return float(lobby.state()[0]["seconds"])

        lobby.enter(1, room.number, PROMPT)
        now[0] = 1003.0
        assert told("waits for decode") == 3.0
        rooms.announce(1, room, PROMPT)
        assert told("waits for pages of the decode instance") == 0.0
        now[0] = 1005.0
        rooms.offer(1, 0, 3)
        assert told("computes and sends") == 0.0
        other = Room(8, room.host, room.port)
        rooms.announce(2, other, PROMPT)
        wait_until(lambda: 8 in lobby._rooms)
        lobby._rooms[8].since = 1001.0
        rooms.offer(2, 0, 3)
        wait_until(lambda: lobby._rooms[8].target is not None)
        assert lobby.state()[1]["phase"] == "waits for its request"
        assert lobby.state()[1]["seconds"] == 4.0, "that it is offered pages is no phase of it"


def test_a_link_is_lost_for_any_reason() -> None:
    with receivers(shares(1, 1, False)) as (_, rooms):
        rooms.announce(1, Room(9, "a..b", 9), PROMPT)
        assert "room 9: the prefill instance at a..b:9 is lost: Unicode" in next_event(rooms).why


def test_a_link_that_is_not_connected_in_time_fails_its_rooms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its lookup, or a prefill instance that is stopped and whose kernel accepts, takes longer.
    Once it is connected after all, rooms use it."""
    lookup, is_found = socket.getaddrinfo, Event()

    def look_up(host: str, *more: Any, **options: Any) -> Any:
        if host == "slow":
            is_found.wait(60)
            host = "127.0.0.1"
        return lookup(host, *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with (
        prefill_lobby() as (lobby, room),
        receivers(shares(1, 1, False)) as (_, rooms),
        socket.create_server(("127.0.0.1", 0)) as stopped,
    ):
        slow = Room(7, "slow", room.port)
        for one in (slow, Room(8, "127.0.0.1", stopped.getsockname()[1])):
            rooms.announce(1, one, PROMPT)
            link = rooms._links[one.address]
            link._begun = -float("inf")
            text = f"{one}: the prefill instance at {one.address} is not connected after 2 s"
            assert next_event(rooms) == RoomEvent(1, None, text)
            rooms.release(1)
        is_found.set()
        wait_until(lambda: not rooms._links[slow.address].is_late)
        wait_until(lambda: 7 in lobby._over)
        assert meet(lobby, rooms, Room(9, "slow", room.port), 0, 3).stop == 3


@pytest.mark.parametrize("port", [-1, 70_000])
def test_ports_out_of_range_end_the_connection(port: int) -> None:
    [one] = shares(1, 1, False)
    with prefill_lobby() as (lobby, room), receivers([one]) as (_, rooms):
        rooms._ranks = (KVRank(0, 0, 0, (one,), "127.0.0.1", port),)
        lobby.enter(1, room.number, PROMPT)
        rooms.announce(1, room, PROMPT)
        rooms.offer(1, 0, 4)
        assert "a message that cannot be read: Expected `int`" in next_event(lobby).why


def test_pages_of_no_rank_end_the_connection() -> None:
    """The request may come later, in the engine's thread."""
    with prefill_lobby() as (lobby, room):
        address = room.host, room.port
        made, _ = connect(lambda: socket.create_connection(address), Role.ROOM, OWN, SECRET, 5)
        messages = Announce(7, MODEL, PROMPT), Offer(KVTarget(Ticket(7, 1), 0, 2, ()))
        for buffer in (part for message in messages for part in frame(message)):
            made.sendall(buffer)
        wait_until(lambda: 7 in lobby._over)
        lobby.enter(1, 7, PROMPT)
        assert "pages of no rank" in next_event(lobby).why
        made.close()


def test_an_outlet_outlives_a_host_that_no_lookup_takes(caplog: pytest.LogCaptureFixture) -> None:
    outlets = outlets_of(0, "shm")
    outlets.put("a..b", 9, Close(Ticket(1, 1)))
    wait_until(lambda: "no KV cache can be sent to a..b:9" in caplog.text)
    assert outlets.take("a..b", 9, 8) is None
    outlets._outlets["a..b", 9]._rests_until = 0.0
    outlets.put("a..b", 9, Close(Ticket(1, 1)))
    wait_until(lambda: caplog.text.count("no KV cache can be sent to a..b:9") == 2)


def test_a_sender_outlives_an_error_of_its_device(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down(*given: Any) -> None:
        raise RuntimeError("the device is lost")

    outlets, told = outlets_of(0, "shm"), "no KV cache can be sent to 127.0.0.1:9: the device"
    monkeypatch.setattr(KVOutlet, "_send", break_down)
    for number in (1, 2):
        outlets.put("127.0.0.1", 9, Close(Ticket(1, 1)))
        wait_until(lambda count=number: caplog.text.count(told) == count)
        assert outlets.take("127.0.0.1", 9, 8) is None
        outlets._outlets["127.0.0.1", 9]._rests_until = 0.0


@pytest.mark.parametrize("misses", ["chunk", "result", "what waits"])
def test_a_sender_knows_what_it_has_dropped(
    misses: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """So that the other instance does not wait for it; another transfer is complete."""
    monkeypatch.setattr(KVOutlet, "_run", lambda outlet: None)
    [one] = shares(1, 1, False)
    outlets, source = outlets_of(0, "tcp"), Group([one], 4, torch.float32, 2)
    sender = KVSender([(one,)], 0, outlets)
    ranks = (KVRank(0, 0, 0, (one,), "127.0.0.1", 9),)
    target, other = (KVTarget(Ticket(n, 1), 0, 2, ranks) for n in (1, 2))
    outlet = outlets._outlet("127.0.0.1", 9)

    def drop() -> None:
        with outlets.buffer.changed:
            outlet.drop("it took nothing")

    if misses == "chunk":
        drop()
    sender.send(KVSend(target, 0, 2), source.caches[0], source.slots(0, 2))
    if misses == "what waits":
        drop()
    if misses != "result":
        outlet._rests_until = 0.0  # it is tried again behind what was dropped
    else:
        drop()
    text = "its KV cache could not be sent to 127.0.0.1:9"
    assert sender.finish(target, PromptResult(target.ticket, [5])) == text
    outlet._rests_until = 0.0
    assert sender.finish(other, PromptResult(other.ticket, [5])) == ""


def test_a_rank_is_told_what_was_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is reached again: the leader of the sender may not know."""
    monkeypatch.setattr(outlets_module, "REST_SECONDS", 0.05)
    [one] = shares(1, 1, False)
    with receivers([one]) as ((receiver,), rooms):
        link: Any = SimpleNamespace(post=lambda message: None, beat=lambda: None, is_late=False)
        rooms._links["stays:1"] = link
        rooms.announce(1, Room(4, "stays", 1), PROMPT)
        ticket, outlets = rooms.offer(1, 0, 2), outlets_of(1, "tcp")
        outlet = outlets._outlet("127.0.0.1", receiver.port)
        with outlets.buffer.changed:
            outlet.drop("it took nothing")
            outlets.put("127.0.0.1", receiver.port, PromptResult(ticket, [5]))
        text = "room 4: the prefill instance could not send all of it"
        assert next_event(rooms) == RoomEvent(1, None, text)


def test_a_rank_is_told_what_it_has_not_read() -> None:
    """Its connection has ended before: others of its transfers may wait for this."""
    heard = Queue[Any]()

    def end_the_first(connection: Any, session: Session, name: str) -> None:
        receive(connection)
        for buffer in frame(Opened("")):
            connection.sendall(buffer)
        heard.put(receive(connection)[0])

    listening = socket.create_server(("127.0.0.1", 0))
    peer, outlets = Listener(listening, OWN, SECRET, {Role.KV: end_the_first}), outlets_of(0, "shm")
    address, chunk = ("127.0.0.1", listening.getsockname()[1]), chunk_of(Ticket(1, 1))
    place = outlets.take(*address, 256)
    outlets.put(*address, replace(chunk, place=place))
    assert heard.get(timeout=20) == replace(chunk, place=place)
    assert heard.get(timeout=20) == Broken(
        Ticket(1, 1), "the prefill instance could not send all of it"
    )
    assert outlets.buffer.free_bytes == outlets.buffer.nbytes
    peer.close()


class Failing(Participant):
    """`why`: what waits of kernels have failed with."""

    why = ""

    def check(self) -> None:
        if self.why:
            raise PeerTimeout(self.why)

    def restart(self, membership: Membership) -> None:
        self.why = ""


@pytest.mark.parametrize("end", ["whole", "failed", "rolled back"])
def test_what_an_abandoned_step_has_computed_is_not_sent(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that waited in vain end, too, and what they compute would not be replaced by what the
    repeated step computes. Until the end nobody takes the peer for one that takes nothing."""
    lifecycle, kernels, passed = Lifecycle(Membership(0, (0,))), Failing(), Event()
    lifecycle.register(kernels, (0,))
    event = SimpleNamespace(synchronize=lambda: passed.wait(60))
    step = StepOnDevice(event, lifecycle, lifecycle.membership.generation)
    monkeypatch.setattr(StepOnDevice, "recorded", lambda *given: step)
    [one] = shares(1, 1, False)
    with receivers([one]) as ((receiver,), rooms):
        link: Any = SimpleNamespace(post=lambda message: None, beat=lambda: None, is_late=False)
        rooms._links["stays:1"] = link
        rooms.announce(1, Room(4, "stays", 1), PROMPT)
        ticket, outlets = rooms.offer(1, 0, 2), outlets_of(1, "tcp")
        outlet, there = outlets._outlet("127.0.0.1", receiver.port), ("127.0.0.1", receiver.port)
        outlets.buffer.device = SimpleNamespace(type="cuda")  # type: ignore[assignment]
        place = outlets.take(*there, len(BODY))
        outlets.put(*there, chunk_of(ticket, place=place))
        wait_until(lambda: outlet._awaits_step)
        with outlets.buffer.changed:
            assert outlet.held_bytes and not outlet.is_stuck(-1.0)
        kernels.why = "no rank 1" if end != "whole" else ""
        if end == "rolled back":
            lifecycle.restart()
        passed.set()
        if end == "whole":
            wait_until(lambda: is_complete(receiver, ticket))
        else:
            text = "room 4: the prefill instance could not send all of it"
            assert next_event(rooms) == RoomEvent(1, None, text)
            assert receiver.staged(ticket).num_missing == LAYERS * 2 * HEADS
        wait_until(lambda: outlets.buffer.free_bytes == outlets.buffer.nbytes)


def test_digests_tell_prompts_and_models_apart(tmp_path: Path) -> None:
    calls = [([1, 2], ""), ([2, 1], ""), ([1, 2, 0], ""), ([1, 2], "key"), ([], "")]
    assert len({prompt_digest(*call) for call in calls}) == len(calls)
    folders = []
    for name, config, file, size in [
        ("one", "{}", "model.safetensors", 8),
        ("copy", "{}", "model.safetensors", 8),
        ("config", "{ }", "model.safetensors", 8),
        ("name", "{}", "part.safetensors", 8),
        ("size", "{}", "model.safetensors", 9),
        ("empty", "{}", "model.safetensors", 0),
    ]:
        folders.append(tmp_path / name)
        folders[-1].mkdir()
        (folders[-1] / "config.json").write_text(config)
        (folders[-1] / file).write_bytes(b"x" * size)
    one, copy, *others = [model_digest(ServerArgs(model_path=str(path))) for path in folders]
    assert one == copy and len({one, *others}) == 5
    drawn = [
        ServerArgs(model_path=str(folders[0]), load_format="dummy", random_seed=seed)
        for seed in (None, 0, 1)
    ]
    unset, zero, other = map(model_digest, drawn)
    steady = ServerArgs(model_path=str(folders[0]), enable_deterministic_inference=True)
    assert unset == zero and len({one, zero, other, model_digest(steady)}) == 4


def test_digests_tell_draft_models_apart(tmp_path: Path) -> None:
    """Only of those whose cache is sent."""
    for name, data in (("one", b"x"), ("copy", b"x"), ("other", b"y")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(data * 9)

    def digest(algorithm: str | None, name: str | None = None) -> bytes:
        path = None if name is None else str(tmp_path / name)
        flags = {"speculative_algorithm": algorithm, "speculative_draft_model_path": path}
        return draft_digest(ServerArgs(**flags))  # type: ignore[arg-type]

    assert digest(None) == digest("NGRAM") == digest("STANDALONE", "one") == b""
    assert digest("NEXTN") == digest("EAGLE") != digest("EAGLE", "one") == digest("EAGLE", "copy")
    assert len({digest("EAGLE3", "one"), digest("EAGLE3", "other"), digest("NEXTN")}) == 3


def test_weights_of_the_same_size_differ(tmp_path: Path) -> None:
    """All that is in the header counts, and of the rest what a training changes: a little of
    everything."""
    header, data = b'{"a":1}', np.zeros(10 * SAMPLES * SAMPLE_BYTES, np.uint8)
    (tmp_path / "config.json").write_text("{}")

    def digest() -> bytes:
        content = len(header).to_bytes(8, "little") + header + data.tobytes()
        (tmp_path / "model.safetensors").write_bytes(content)
        return model_digest(ServerArgs(model_path=str(tmp_path)))

    found = {digest()}
    header = b'{"b":1}'
    found.add(digest())
    data[:: 9 * SAMPLE_BYTES] = 1
    found.add(digest())
    data[0] = 2
    found.add(digest())
    assert len(found) == 4


@pytest.mark.parametrize("enters_first", [False, True])
@pytest.mark.parametrize(
    ("prompt", "model", "drafts", "why"),
    [
        (prompt_digest([1, 2, 4], ""), MODEL, b"", "the instances got different prompts"),
        (prompt_digest([1, 2, 3], "key"), MODEL, b"", "the instances got different prompts"),
        (PROMPT, b"another", b"", "the instances serve different models: config.json, the weight"),
        (PROMPT, MODEL, b"a head", "the decode instance makes drafts from the hidden states"),
    ],
)
def test_halves_of_others_do_not_meet(
    prompt: bytes, model: bytes, drafts: bytes, why: str, enters_first: bool
) -> None:
    """Both get told, whoever comes first; the room can then be used."""
    with prefill_lobby() as (lobby, room), receivers(shares(1, 1, False)) as (_, rooms):
        rooms._model, rooms._draft = model, drafts
        if enters_first:
            lobby.enter(1, room.number, PROMPT)
        rooms.announce(1, room, prompt)
        rooms.offer(1, 0, 3)
        if not enters_first:
            wait_until(lambda: bool(lobby.state()))
            lobby.enter(1, room.number, PROMPT)
        for source in (lobby, rooms):
            assert f"room 7: {why}" in next_event(source).why
        rooms.release(1)
        assert lobby.state() == rooms.state() == []
        rooms._model, rooms._draft = MODEL, b""
        assert meet(lobby, rooms, room, 0, 3).stop == 3


def test_a_room_has_one_request() -> None:
    """Of one instance's second request it is refused there, of a second connection's or a late
    one's in the lobby; the first is not disturbed."""
    with (
        prefill_lobby() as (lobby, room),
        receivers(shares(1, 1, False)) as (_, rooms),
        receivers(shares(1, 1, False)) as (_, others),
    ):
        meet(lobby, rooms, room, 0, 3)
        first = lobby._rooms[7].target
        rooms.announce(2, room, PROMPT)
        text = "room 7: it has a request already: choose another bootstrap_room"
        assert next_event(rooms) == RoomEvent(2, None, text)
        rooms.release(2)
        others.announce(3, room, PROMPT)
        assert "room 7 is that of another request of rank 0" in next_event(others).why
        lobby.enter(4, 7, PROMPT)
        assert "room 7 has a request already" in next_event(lobby).why
        lobby.leave(4, "")
        rooms._link(room).post(Announce(7, MODEL, PROMPT))
        assert "is that of another request" in next_event(rooms).why
        assert lobby._rooms[7].target is first and lobby._rooms[7].request_no == 1


def test_a_rank_that_dies_breaks_its_transfers() -> None:
    [one] = shares(1, 1, False)
    with prefill_lobby() as (lobby, room), receivers([one]) as ((receiver,), rooms):
        ticket = meet(lobby, rooms, room, 0, 4).ticket
        wait_until(lambda: receiver.staged_bytes > 0)
        sender = talk(receiver, frame(chunk_of(ticket), [BODY]))
        staged = receiver.staged(ticket)
        wait_until(lambda: staged.num_missing == LAYERS * 2 * HEADS)
        sender.close()
        event = next_event(rooms)
        assert event.result is None and "room 7: rank 0 of node 0 (127.0.0.1:" in event.why
        event = next_event(lobby)  # what is not computed yet need not be
        assert event.target is None and "does not want it any more" in event.why
        assert lobby.state() == []
        rooms.release(1)


@pytest.mark.parametrize("is_queued", [False, True])
def test_a_half_that_comes_late_ends_at_once(is_queued: bool) -> None:
    """Its decode instance has given up, also while it was in the queue: nobody else will come to
    this room, until one does."""
    with prefill_lobby() as (lobby, room), receivers(shares(1, 1, False)) as (_, rooms):
        if is_queued:
            lobby.expect(5, room.number)
        rooms.announce(1, room, PROMPT)
        wait_until(lambda: any(one["peer"] for one in lobby.state()))
        rooms.release(1)
        wait_until(lambda: not lobby.state())
        assert not lobby.take()
        lobby.enter(5, room.number, PROMPT)
        assert next_event(lobby) == LobbyEvent(
            5, None, "room 7: the decode instance does not want it any more"
        )
        assert meet(lobby, rooms, room, 0, 3).stop == 3


def test_events_of_requests_that_have_ended_are_taken() -> None:
    """Else the descriptor stays readable, and the leader of a group never sleeps again."""
    with receivers(shares(1, 1, False)) as (_, rooms):
        planner: Any = SimpleNamespace(states={})
        arrivals = Arrivals(planner, rooms, lambda message: None)
        assert not arrivals.advance()
        rooms.announce(1, Room(9, "127.0.0.1", 1), PROMPT)
        assert select.select([rooms.wakeup_fd], [], [], 20)[0]
        rooms.release(1)
        assert not arrivals.advance()
        assert not select.select([rooms.wakeup_fd], [], [], 0)[0]
        with pytest.raises(BlockingIOError):
            os.eventfd_read(rooms.wakeup_fd)


def test_a_decode_instance_that_is_stopped_holds_up_nobody() -> None:
    """It takes nothing, however much it is told; others meet, and its rooms end."""
    with prefill_lobby() as (lobby, room), receivers(shares(1, 1, False)) as (_, rooms):
        address = room.host, room.port
        stopped, _ = connect(lambda: socket.create_connection(address), Role.ROOM, OWN, SECRET, 5)
        for number in range(100, 164):
            lobby.enter(number, number, PROMPT)
            for buffer in frame(Announce(number, MODEL, PROMPT)):
                stopped.sendall(buffer)
        wait_until(lambda: all(one["peer"] for one in lobby.state()))
        begun = time.monotonic()
        for number in range(100, 163):
            lobby.leave(number, "x" * (1 << 20))
        assert meet(lobby, rooms, room, 0, 3).stop == 3
        assert time.monotonic() - begun < lobby_module.SILENCE_SECONDS - 0.5, (
            "nobody waits for what it does not take"
        )
        event = next_event(lobby)
        assert event.request_no == 163 and "rank 0 of node 0 (127.0.0.1" in event.why
        assert [one["room"] for one in lobby.state()] == [room.number]
        stopped.close()


def test_a_peer_that_takes_nothing_does_not_hold_up_steps(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor take the memory of others. What it gets later begins on a new connection."""
    monkeypatch.setattr(outlets_module, "HOLD_SECONDS", 0.2)
    monkeypatch.setattr(outlets_module, "REST_SECONDS", 0.1)
    taken = Queue[bytes]()
    begin = Event()

    def stop(connection: Any, session: Session, name: str) -> None:
        begin.wait(60)
        try:
            while True:
                taken.put(bytes([receive(connection)[0].ticket.room]))  # type: ignore[union-attr]
        except OSError:
            pass

    listening = socket.create_server(("127.0.0.1", 0))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    stopped = Listener(listening, OWN, SECRET, {Role.KV: stop})
    [one] = shares(1, 1, False)
    outlets = outlets_of(1, "tcp", 4 << 20)
    with receivers([one]) as ((receiver,), rooms):
        rooms.announce(1, Room(3, "127.0.0.1", 1), PROMPT)
        ticket = rooms.offer(1, 0, 2)
        begun = time.monotonic()
        port = listening.getsockname()[1]
        for _ in range(48):
            if (place := outlets.take("127.0.0.1", port, 1 << 20)) is not None:
                outlets.put("127.0.0.1", port, chunk_of(ticket, place=place))
            assert outlets.buffer.free_bytes >= 2 << 20
        place = outlets.take("127.0.0.1", receiver.port, len(BODY))
        assert place is not None
        outlets.buffer.at(place)[:] = torch.frombuffer(bytearray(BODY), dtype=torch.uint8)
        outlets.put("127.0.0.1", receiver.port, chunk_of(ticket, place=place))
        assert time.monotonic() - begun < 20
        wait_until(lambda: is_complete(receiver, ticket))
    assert "it took nothing for 0.2 s, and others wait" in caplog.text
    begin.set()
    wait_until(lambda: outlets.buffer.free_bytes == outlets.buffer.nbytes)

    def is_reached() -> bool:
        outlets.put("127.0.0.1", port, Close(Ticket(77, 1)))
        return not taken.empty() and taken.get() == bytes([77])

    wait_until(is_reached)
    stopped.close()
