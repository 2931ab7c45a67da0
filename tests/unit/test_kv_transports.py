"""The ways by which a rank of one instance reads the send buffer of a rank of another: what is read
is what was sent, or nothing at all."""

from __future__ import annotations

import random
import socket
import sys
import threading
import time
from importlib.util import find_spec
from itertools import pairwise
from subprocess import PIPE, Popen
from typing import Any

import msgspec
import pytest
import torch

from moesaic.comm.network.handshake import Role, Session
from moesaic.comm.network.listener import Listener
from moesaic.core.disagg import KVSend, KVShare, KVTarget, Room, Ticket
from moesaic.disagg import outlets as outlets_module
from moesaic.disagg.messages import Chunk, Close, Exported, Opened, Place, Taken, frame, receive
from moesaic.disagg.send_buffer import ENTRIES, SendBuffer, send_buffer_bytes
from moesaic.disagg.sender import KVSender
from moesaic.disagg.staging import StagedCache
from moesaic.disagg.transports import registry, shared
from moesaic.disagg.transports.device import DeviceHandle
from moesaic.disagg.transports.nixl_reads import NixlSource
from moesaic.disagg.transports.shared import SharedHandle, SharedSource
from tests.server.serving import wait_until
from tests.unit.kv_instances import (
    BODY,
    HEADS,
    LAYERS,
    OWN,
    PROMPT,
    SECRET,
    Group,
    chunk_of,
    meet,
    next_event,
    outlets_of,
    prefill_lobby,
    receivers,
    shares,
    talk,
)

CPU = torch.device("cpu")
has_nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed")


def test_regions_do_not_overlap() -> None:
    """Of any sizes, in any order of giving back; in the end all is one hole again."""
    chooser, buffer, taken = random.Random(3), SendBuffer(1 << 20), list[Place]()
    for _ in range(3000):
        nbytes = chooser.choice([1, 255, 256, 257, chooser.randint(1, buffer.largest)])
        if chooser.random() < 0.55 and (place := buffer.take(nbytes)) is not None:
            taken.append(place)
        elif taken:
            buffer.give_back(taken.pop(chooser.randrange(len(taken))))
        spans = sorted((one.offset, one.offset + one.nbytes) for one in taken)
        assert all(one[1] <= other[0] for one, other in pairwise(spans))
        assert not spans or spans[-1][1] <= buffer.nbytes
    for place in taken:
        buffer.give_back(place)
    assert buffer._holes == [(0, buffer.nbytes)] and len(buffer._entries) == ENTRIES


def test_sizes_of_send_buffers() -> None:
    """A prompt's, within bounds."""
    assert send_buffer_bytes(100, 50, "cpu") == 1 << 20
    assert send_buffer_bytes(1000, 5000, "cuda") == 5 << 20
    assert send_buffer_bytes(98304, 40960, "cpu") == 256 << 20
    assert send_buffer_bytes(98304, 40960, "cuda") == 1 << 30


def transfer(sends: str, takes: str, tokens: int = 9) -> dict[str, str]:
    """The transports that were used between two ranks and three."""
    source = Group(shares(2, 1, False), 4, torch.float32, tokens)
    target = Group(shares(1, 3, False), 3, torch.float32, tokens)
    whole = [torch.randn(LAYERS, tokens, HEADS, dim) for dim in (2, 3)]
    source.fill(whole)
    outlets = [outlets_of(n, sends) for n in range(2)]
    with receivers(target.shares, transport=takes) as (made, rooms):
        rooms.announce(1, Room(3, "127.0.0.1", 1), PROMPT)
        ticket = rooms.offer(1, 0, tokens)
        order = KVSend(KVTarget(ticket, 0, tokens, rooms._ranks), 0, tokens)
        for n, cache in enumerate(source.caches):
            KVSender([(one,) for one in source.shares], n, outlets[n]).send(
                order, cache, source.slots(0, tokens)
            )
        wait_until(lambda: all(one.staged(ticket).is_complete for one in made), 20)
        for receiver, cache in zip(made, target.caches, strict=True):
            receiver.staged(ticket).move_to([cache], target.slots(0, tokens))
        target.check(whole, 0)
        for one in outlets:
            wait_until(lambda one=one: one.buffer.free_bytes == one.buffer.nbytes)
    return {**outlets[0].transports, **outlets[1].transports}


@pytest.mark.parametrize(
    ("sends", "takes", "used"),
    [
        ("shm", "auto", "shm"),
        ("shm", "shm", "shm"),
        ("shm", "tcp", "tcp"),
        ("shm", "cuda_ipc", "tcp"),
        ("tcp", "auto", "tcp"),
        ("tcp", "shm", "tcp"),
        pytest.param("nixl", "auto", "nixl", marks=has_nixl),
        pytest.param("nixl", "nixl", "nixl", marks=has_nixl),
        pytest.param("shm", "nixl", "tcp", marks=has_nixl),
    ],
)
def test_both_sides_choose(sends: str, takes: str, used: str) -> None:
    assert set(transfer(sends, takes).values()) == {used}


def test_auto_goes_by_the_device() -> None:
    found = [registry.transport_of("auto", kind) for kind in ("cpu", "cuda")]
    assert found == ["shm", "cuda_ipc"]
    assert registry.transport_of("tcp", "cuda") == "tcp"


def bogus(buffer: SendBuffer) -> bytes:
    return msgspec.msgpack.encode(SharedHandle(buffer.path, "moesaic-kv-of-another", 8))


def test_memory_of_another_machine_is_sent_by_tcp(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There the path is of other memory, or of none."""
    one = registry.TRANSPORTS["shm"]._replace(export=bogus)
    monkeypatch.setitem(registry.TRANSPORTS, "shm", one)
    caplog.set_level("INFO", "moesaic.disagg.outlets")
    assert set(transfer("shm", "auto").values()) == {"tcp"}
    assert "by TCP, not shm: /proc/" in caplog.text
    assert "not shared memory named moesaic-kv-of-another" in caplog.text


def test_a_gpu_is_not_read_by_a_rank_on_a_cpu() -> None:
    handle = DeviceHandle(SharedHandle.of(SendBuffer(1 << 20)), b"x" * 64, 1 << 20)
    with pytest.raises(OSError, match="this rank computes on the CPU"):
        registry.open_source("cuda_ipc", msgspec.msgpack.encode(handle), "auto", CPU)


def test_what_waits_for_one_peer_leaves_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that reads nothing holds half of the buffer, and gives it back when it is given up."""
    monkeypatch.setattr(outlets_module, "HOLD_SECONDS", 0.5)
    [one] = shares(1, 1, False)
    with receivers([one]) as ((receiver,), _), socket.create_server(("127.0.0.1", 0)) as deaf:
        outlets = outlets_of(0, "shm")
        buffer, address = outlets.buffer, deaf.getsockname()
        for _ in range(2):
            place = outlets.take(*address, buffer.largest)
            outlets.put(*address, chunk_of(Ticket(1, 1), place=place))
        assert outlets.take("127.0.0.1", receiver.port, buffer.largest) is not None
        began = time.monotonic()
        assert outlets.take(*address, 1) is None  # nobody welcomes it
        assert 0.2 < time.monotonic() - began < 20
        wait_until(lambda: buffer.free_bytes == buffer.nbytes - buffer.largest)


def test_only_what_a_peer_was_told_of_is_given_back() -> None:
    """A step still fills the other region: it would be sent with what somebody else put there."""

    def take_both(connection: Any, session: Session, name: str) -> None:
        receive(connection)
        for buffer in frame(Opened("")):
            connection.sendall(buffer)
        receive(connection)
        for place in places:
            for buffer in frame(Taken(place.entry)):
                connection.sendall(buffer)
        if not connection.recv(1):
            ended.set()

    ended = threading.Event()
    listening = socket.create_server(("127.0.0.1", 0))
    peer, outlets = Listener(listening, OWN, SECRET, {Role.KV: take_both}), outlets_of(0, "shm")
    address = "127.0.0.1", listening.getsockname()[1]
    places = [place for _ in range(2) if (place := outlets.take(*address, 256)) is not None]
    outlets.put(*address, chunk_of(Ticket(1, 1), place=places[0]))
    assert ended.wait(20)
    assert outlets.buffer.free_bytes == outlets.buffer.nbytes - 256
    peer.close()


def test_peers_that_have_left_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """With their threads, once another one comes."""
    monkeypatch.setattr(outlets_module, "FORGET_SECONDS", 0.0)
    outlets, others = outlets_of(0, "shm"), set(threading.enumerate())
    for _ in range(5):
        with receivers([shares(1, 1, False)[0]]) as ((receiver,), _rooms):
            outlets.put("127.0.0.1", receiver.port, Close(Ticket(1, 1)))
            wait_until(lambda: outlets.transports != {})
        wait_until(lambda: all(one.is_forgotten for one in outlets._outlets.values()))
        assert len(outlets._outlets) == 1

    def made() -> list[str]:
        return [thread.name for thread in set(threading.enumerate()) - others]

    wait_until(lambda: made().count("kv-outlet") == 1)


def test_a_peer_that_stops_reading_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It holds a lock here. What it then reads is something else, which it notices."""
    monkeypatch.setattr(outlets_module, "STALL_SECONDS", 0.5)
    tokens, [one] = 2, shares(1, 1, False)
    group = Group([one], 4, torch.float32, tokens)
    group.fill([torch.randn(LAYERS, tokens, HEADS, dim) for dim in (2, 3)])
    outlets = outlets_of(0, "shm")
    with prefill_lobby() as (lobby, room), receivers([one]) as ((receiver,), rooms):
        target = meet(lobby, rooms, room, 0, tokens)
        wait_until(lambda: receiver.staged_bytes > 0)
        staged = receiver.staged(target.ticket)
        with staged.lock:
            order = KVSend(target, 0, tokens)
            sender = KVSender([(one,)], 0, outlets)
            sender.send(order, group.caches[0], group.slots(0, tokens))
            wait_until(lambda: "it took nothing for 0.5 s" in caplog.text)
            wait_until(lambda: outlets.buffer.free_bytes == outlets.buffer.nbytes)
            outlets.buffer.data.fill_(255)
        event = next_event(rooms)
        assert event.result is None and "what it had sent was read too late" in event.why
        assert staged.num_missing == LAYERS * tokens * HEADS


def test_what_is_there_survives_what_is_read_too_late() -> None:
    """A chunk that comes again does not touch it; one that overlaps it makes it missing."""
    [one] = shares(1, 1, False)
    buffer = SendBuffer(1 << 20)
    with receivers([one]) as ((receiver,), rooms):
        rooms.announce(1, Room(3, "127.0.0.1", 1), PROMPT)
        ticket = rooms.offer(1, 0, 4)
        sender = talk(receiver, frame(Exported("shm", shared.export(buffer))))
        assert receive(sender)[0] == Opened("")
        [first, again, wider] = [buffer.take(len(BODY) * n) for n in (1, 1, 2)]
        assert first and again and wider
        buffer.at(first)[:] = torch.frombuffer(bytearray(BODY), dtype=torch.uint8)
        buffer.at(again).fill_(255)
        buffer.at(wider).fill_(255)
        for place in (again, wider):
            buffer.give_back(place)
        staged = receiver.staged(ticket)
        for place in (first, again):
            sender.sendall(b"".join(frame(chunk_of(ticket, place=place))))
            assert receive(sender)[0] == Taken(place.entry)
            assert staged.num_missing == LAYERS * 2 * HEADS
            assert bool((staged.parts[0].keys_LTMD[:, :2] == 1).all())
        sender.sendall(b"".join(frame(chunk_of(ticket, stop=4, place=wider))))
        wait_until(lambda: staged.num_missing == LAYERS * 4 * HEADS)
        with pytest.raises(ConnectionError):
            receive(sender)
        sender.close()


@pytest.mark.parametrize(
    ("place", "text"),
    [
        (Place(0, len(BODY) - 4, 0, 0), "with 956 bytes: 960 are expected"),
        (Place(1 << 20, len(BODY), 0, 0), "which is not in the send buffer"),
        (Place(0, len(BODY), ENTRIES, 0), "which is not in the send buffer"),
        (Place(-1, len(BODY), 0, 0), "cannot be read: Expected `int` >= 0"),
    ],
)
def test_malformed_places_end_the_connection(
    place: Place, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    [one] = shares(1, 1, False)
    buffer = SendBuffer(1 << 20)
    with receivers([one]) as ((receiver,), rooms):
        rooms.announce(1, Room(3, "127.0.0.1", 1), PROMPT)
        ticket = rooms.offer(1, 0, 2)
        wait_until(lambda: receiver.staged_bytes > 0)
        sender = talk(receiver, frame(Exported("shm", shared.export(buffer))))
        assert receive(sender)[0] == Opened("")
        sender.sendall(b"".join(frame(chunk_of(ticket, place=place))))
        wait_until(lambda: text in caplog.text)
        assert receiver.staged(ticket).num_missing == LAYERS * 2 * HEADS
        sender.close()


def test_a_place_needs_a_send_buffer(caplog: pytest.LogCaptureFixture) -> None:
    [one] = shares(1, 1, False)
    with receivers([one]) as ((receiver,), rooms):
        rooms.announce(1, Room(3, "127.0.0.1", 1), PROMPT)
        ticket = rooms.offer(1, 0, 2)
        wait_until(lambda: receiver.staged_bytes > 0)
        sender = talk(receiver, frame(chunk_of(ticket, place=Place(0, len(BODY), 0, 0))))
        wait_until(lambda: "a place in a send buffer that was not told" in caplog.text)
        sender.close()


def test_float8_has_no_infinity() -> None:
    """Larger numbers become the largest, as where a GPU writes its own cache."""
    share = KVShare((0, 1), (0, 1), 4, 0)
    given = torch.tensor([1.0, 500.0, -1e9, -0.5])
    chunk = Chunk(Ticket(1, 1), 0, 1, (0, 1), (0, 1), "float32")
    staged = StagedCache(share, 0, 1, torch.float8_e4m3fn)
    staged.check(chunk, 16)
    staged.write(chunk, given.view(torch.uint8))
    staged.add(chunk)
    assert staged.num_missing == 0
    assert staged.keys_LTMD.flatten().float().tolist() == [1.0, 448.0, -448.0, -0.5]


@has_nixl
def test_a_read_by_nixl_of_a_process_that_is_gone() -> None:
    """An error, and soon."""
    code = (
        "import sys, torch; from moesaic.disagg.send_buffer import SendBuffer\n"
        "from moesaic.disagg.transports import nixl_reads\n"
        "buffer = SendBuffer(1 << 20); buffer.data.fill_(7)\n"
        "print(nixl_reads.export(buffer).hex(), flush=True); sys.stdin.read()"
    )
    with Popen([sys.executable, "-c", code], stdin=PIPE, stdout=PIPE, text=True) as other:
        assert other.stdout is not None
        source = NixlSource(bytes.fromhex(other.stdout.readline()), CPU)
        place = Place(256, 1000, 3, 0)
        assert source.read(place).tolist() == [7] * 1000 and source.is_current(place)
        assert not source.is_current(Place(256, 1000, 3, 1))
        other.kill()
        other.wait()
        began = time.monotonic()
        with pytest.raises(OSError, match="NIXL"):
            source.read(place)
        assert time.monotonic() - began < 10


def test_shared_memory_is_that_of_the_owner() -> None:
    buffer = SendBuffer(1 << 20)
    source = SharedSource(shared.export(buffer), CPU)
    place = buffer.take(5)
    assert place is not None
    buffer.at(place)[:] = torch.arange(5, dtype=torch.uint8)
    assert source.read(place).tolist() == [0, 1, 2, 3, 4] and source.is_current(place)
    buffer.give_back(place)
    assert not source.is_current(place)
