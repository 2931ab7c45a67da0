"""The store, the shared memory that ranks find through it, and who gets at either."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from moesaic.comm.network import quiet_log
from moesaic.comm.network.connect import connect
from moesaic.comm.network.handshake import (
    GREETING,
    IDENTITY,
    NONCE_BYTES,
    WELCOME,
    Identity,
    Role,
    Session,
    identify,
    introduce,
)
from moesaic.comm.network.listener import MOST_UNPROVED, Listener
from moesaic.comm.network.message_stream import HEAD, MessageStream
from moesaic.comm.network.rendezvous import StoreGroup
from moesaic.comm.network.store import LocalStore, StoreAddress, StoreClient, StoreReply, StoreTable
from moesaic.comm.network.tls import Connection, WrongSecret
from moesaic.comm.network.torch_store import TorchStore
from moesaic.comm.windows.factory import create_window
from moesaic.comm.windows.shared_memory import create_memory, map_memory
from moesaic.comm.windows.window import PlaneSpec

ME, SECRET = Identity(0, 0), b"a secret of some length"


def soon() -> float:
    return time.monotonic() + 30


def client_of(store: LocalStore) -> StoreClient:
    return store.address.connect(5.0, ME)


def test_a_restarted_rank_gets_what_its_predecessor_got(store: LocalStore):
    """It needs no other rank for that, not even its own memory."""

    def member(rank: int) -> StoreGroup:
        group = StoreGroup(client_of(store), "team", rank, 2, 5)
        group.lasts = True
        return group

    def start(group: StoreGroup, told: bytes) -> tuple[list[bytes], Tensor]:
        parts = group.all_gather_bytes(told, "tell")
        window = create_window(group, [PlaneSpec("rows", (4,), torch.int64)], 5)
        group.barrier("ready")
        return parts, window.stacked("rows")

    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(start, member(rank), b"%d" % rank) for rank in range(2)]
        (first, first_rows), (second, second_rows) = (one.result(10) for one in both)
    assert first == second == [b"0", b"1"]
    first_rows[0] = 7
    for rank in (1, 0):  # alone, and with something else to tell
        parts, rows = start(member(rank), b"other")
        assert parts == [b"0", b"1"] and rows.tolist() == second_rows.tolist()
        rows[1] += 1
    assert second_rows.tolist() == [[7] * 4, [2] * 4]


def test_what_a_store_does(store: LocalStore):
    first, second = client_of(store), client_of(store)
    first.set("a", b"\0\xff")
    assert second.get_now(["a", "b"]) == [b"\0\xff", None]
    assert (second.has(["a"]), second.has(["a", "b"]), second.count()) == (True, False, 1)
    assert [first.add("n", 2), second.add("n", -3)] == [2, -1]
    assert first.wait(["a", "b"], 0.01) == ["b"]
    threading.Timer(0.05, second.set, ("b", b"late")).start()
    assert first.wait(["a", "b"], 10.0) == []
    assert (first.delete("b"), first.delete("b")) == (True, False)
    with pytest.raises(RuntimeError, match="the store refuses 'add': ValueError"):
        first.add("a", 1)
    assert second.get_now(["a"]) == [b"\0\xff"]  # an error costs nothing else


def test_a_store_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("moesaic.comm.network.store.MOST_BYTES", 100)
    table = StoreTable()
    for request in (b"", b"\xc1", b"\x90", b"garbage"):
        assert table.answer(request).error

    def put(key: str, count: int) -> str:
        return table.answer(msgspec.msgpack.encode(["set", [key], bytes(count)])).error

    assert put("k", 99) == ""
    assert put("k", 98) == ""  # in place of the first
    assert put("l", 1) == "ValueError: the store holds 100 bytes, not 101"


def test_torch_sees_the_store(store: LocalStore):
    one, two = (TorchStore(client_of(store), "g", 0.05) for _ in range(2))
    one.set("a", "text")
    assert (two.get("a"), two.check(["a"]), two.check(["b"])) == (b"text", True, False)
    assert (two.add("n", 1), one.delete_key("n"), one.delete_key("n")) == (1, True, False)
    assert client_of(store).get_now(["g/a"]) == [b"text"]
    with pytest.raises(RuntimeError, match=r"'g/b'\] did not come within 0\.05 s"):
        two.get("b")
    store.close()
    with pytest.raises(RuntimeError, match="the store cannot be reached"):
        one.check(["a"])


def test_no_store_is_reported(tmp_path: Path):
    with pytest.raises(ConnectionError, match=f"no store at {tmp_path}/none: "):
        StoreAddress(f"{tmp_path}/none", 0, SECRET).connect(0.1, ME)


def test_a_store_keeps_out_who_has_not_the_secret(store: LocalStore):
    stranger = StoreAddress(store.address.host, 0, b"another secret of some length")
    with pytest.raises(PermissionError, match="does not know this node's secret"):
        stranger.connect(5.0, ME)
    assert client_of(store).count() == 0


def test_only_a_refusal_is_told(store: LocalStore, caplog: pytest.LogCaptureFixture):
    """A process of this machine may end in the middle of a handshake."""
    with socket.socket(socket.AF_UNIX) as ended:
        ended.connect(str(store.address.host))
        ended.sendall(GREETING + bytes([Role.STORE]) + bytes(NONCE_BYTES + IDENTITY.size))
        ended.recv(1)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(store.address.host))
        with pytest.raises(WrongSecret):
            introduce(stranger, Role.STORE, ME, b"another secret of some length", soon())
        assert stranger.recv(1) == b""
    assert [record.getMessage() for record in caplog.records] == [
        "refused a connection from this machine:socket: "
        "it does not accept this node's proof: it has no or another secret"
    ]


@contextmanager
def pair(secret: bytes = SECRET) -> Iterator[tuple[socket.socket, Session, socket.socket, Session]]:
    """Both ends of a connection after the handshake."""
    ours, theirs = socket.socketpair()
    found: list[Session] = []

    def listen() -> None:
        found.append(identify(theirs, [Role.STORE], Identity(-1, 7), secret, soon()))
        theirs.sendall(WELCOME)

    thread = threading.Thread(target=listen)
    thread.start()
    session = introduce(ours, Role.STORE, Identity(3, 1), secret, soon())
    thread.join()
    with ours, theirs:
        yield ours, session, theirs, found[0]


def test_both_ends_know_each_other():
    with pair() as (_, caller, _, listener):
        assert (caller.peer, listener.peer) == (Identity(-1, 7), Identity(3, 1))


def test_a_message_that_is_too_long():
    with pair() as (ours, _, theirs, _):
        ours.sendall(HEAD.pack(1 << 60))
        with pytest.raises(ConnectionError, match=f"a message of {1 << 60} bytes"):
            MessageStream(theirs).receive()


def hear(connection: socket.socket, said: bytes) -> bytes:
    """What it answers; empty if it hangs up, at whatever point."""
    with connection, suppress(ConnectionError):
        connection.settimeout(10)
        connection.sendall(said)
        return connection.recv(1000)
    return b""


@contextmanager
def echo() -> Iterator[tuple[str, int]]:
    """The address of a listener that gives back one message of each connection."""

    def serve(connection: Connection, session: Session, name: str) -> None:
        stream = MessageStream(connection)
        stream.send(stream.receive())

    listening = socket.create_server(("127.0.0.1", 0))
    address = listening.getsockname()
    made = Listener(listening, Identity(-1, 0), SECRET, {Role.NODE: serve})
    yield address
    made.close()


def said_back(address: tuple[str, int], text: bytes) -> bytes:
    connection, _ = connect(
        lambda: socket.create_connection(address, 10), Role.NODE, ME, SECRET, 10
    )
    with connection:
        stream = MessageStream(connection)
        stream.send(text)
        return stream.receive()


def test_strangers_get_nothing():
    with echo() as address:
        for junk in (b"GET / HTTP/1.1\r\n\r\n", bytes(100), GREETING + bytes([Role.STORE]) * 99):
            assert hear(socket.create_connection(address), junk) == b""
        assert said_back(address, b"still here") == b"still here"


def test_a_flood_of_strangers(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """Connections that say nothing take the place of each other, not of those that prove
    themselves; and the log has a line a second at most."""
    monkeypatch.setattr(quiet_log, "QUIET_SECONDS", 1e9)
    with echo() as address:
        flood = [socket.create_connection(address) for _ in range(3 * MOST_UNPROVED)]
        assert said_back(address, b"through") == b"through"
        # The oldest were closed, without waiting for them to prove anything.
        for connection in flood[: 2 * MOST_UNPROVED]:
            assert hear(connection, b"") == b""
        for connection in flood:
            connection.close()
        assert said_back(address, b"again") == b"again"
    assert len(caplog.records) <= 1


class Delayed:
    """A connection on which something happens after the first thing that is sent."""

    def __init__(self, connection: socket.socket, happen: Callable[[], None]) -> None:
        self._connection, self._happen = connection, happen

    def sendall(self, data: bytes) -> None:
        self._connection.sendall(data)
        self._happen()
        self._happen = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


def test_a_flood_does_not_cut_off_a_slow_caller_from_elsewhere():
    """It has greeted the listener, and proves itself only when the flood has come in."""
    flood: list[socket.socket] = []

    def come_in(address: tuple[str, int]) -> None:
        flood.extend(socket.create_connection(address) for _ in range(2 * MOST_UNPROVED))
        assert hear(flood[0], b"") == b""  # the flood makes the listener close its oldest

    with (
        echo() as address,
        socket.create_connection(address, 10, source_address=("127.0.0.2", 0)) as connection,
    ):
        slow: Any = Delayed(connection, lambda: come_in(address))
        caller, _ = connect(lambda: slow, Role.NODE, ME, SECRET, 10)
        stream = MessageStream(caller)
        stream.send(b"through")
        assert stream.receive() == b"through"
        for stranger in flood:
            stranger.close()


def test_a_listener_survives_a_lack_of_threads(monkeypatch: pytest.MonkeyPatch):
    with echo() as address:
        start, failures = threading.Thread.start, [RuntimeError("can't start new thread")]

        def fail_once(thread: threading.Thread) -> None:
            if failures:
                raise failures.pop()
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", fail_once)
        assert hear(socket.create_connection(address), b"") == b""
        assert said_back(address, b"again") == b"again"


def test_a_late_answer_is_not_taken_for_the_next():
    with pair() as (ours, _, theirs, _):
        client = StoreClient(ours)
        ours.settimeout(0.05)
        with pytest.raises(TimeoutError):
            client.has(["there"])
        with suppress(BrokenPipeError):  # it has hung up, which is as well
            MessageStream(theirs).send(msgspec.msgpack.encode(StoreReply(True)))
        with pytest.raises(OSError):
            client.has(["missing"])


def test_secrets_are_not_shown(store: LocalStore):
    assert repr(store.address.secret) not in repr(store.address)


MIB = 1 << 20


def test_only_our_memory_is_mapped(tmp_path: Path):
    """Not a file, however it is called; not memory of another name, size, or that may shrink."""
    good = create_memory("moesaic-window", MIB)
    with pytest.raises(OSError):
        os.truncate(good, 10)
    own = f"/proc/{os.getpid()}/fd"
    mapped = map_memory(f"{own}/{good}", "moesaic-window", MIB)
    mapped[:2] = b"ok"
    assert os.pread(good, 2, 0) == b"ok"

    victim = tmp_path / "memfd:moesaic-window (deleted)"
    victim.write_bytes(b"precious" * (MIB // 8))
    file = os.open(victim, os.O_RDWR)
    unsealed = os.memfd_create("moesaic-window", os.MFD_CLOEXEC)
    os.truncate(unsealed, MIB)
    pipe = os.pipe()
    other = create_memory("moesaic-control", MIB)
    small = create_memory("moesaic-window", MIB // 2)
    for path, told in (
        (str(victim), "is not the path of a descriptor"),
        (f"{own}/{good}/../{file}", "is not the path of a descriptor"),
        (f"{own}/{file}", "not shared memory named moesaic-window"),
        (f"{own}/{pipe[0]}", "not shared memory named moesaic-window"),
        (f"{own}/{other}", "not shared memory named moesaic-window"),
        (f"{own}/{small}", "has 524288 bytes, not 1048576"),
        (f"{own}/{unsealed}", "may change its size"),
    ):
        with pytest.raises(ValueError, match=told):
            map_memory(path, "moesaic-window", MIB)
    with pytest.raises(OSError):
        map_memory(f"{own}/99999", "moesaic-window", MIB)
    for descriptor in (good, file, unsealed, *pipe, other, small):
        os.close(descriptor)
    assert victim.read_bytes() == b"precious" * (MIB // 8)


def test_memory_of_another_user_is_not_mapped(monkeypatch: pytest.MonkeyPatch):
    descriptor = create_memory("moesaic-window", MIB)
    monkeypatch.setattr(os, "geteuid", lambda: os.fstat(descriptor).st_uid + 1)
    with pytest.raises(ValueError, match="is memory of user"):
        map_memory(f"/proc/{os.getpid()}/fd/{descriptor}", "moesaic-window", MIB)
    os.close(descriptor)


def test_a_window_offered_as_a_file(store: LocalStore, tmp_path: Path):
    """A peer that offers a file as the memory of a window is refused, and the file stays as it is:
    ranks once mapped whatever path they read from the store, for writing."""
    file = tmp_path / "precious"
    file.write_bytes(b"x" * (4 * MIB))
    before = file.read_bytes()
    offer = b'{"path": "%s", "layout": "((), 16)", "note": "", "error": ""}' % bytes(file)

    def lie() -> None:
        peers = StoreGroup(client_of(store), "g", 0, 2, 10.0)
        peers.all_gather_bytes(offer, "create a shared window")
        peers.all_gather_bytes(b'{"error": ""}', "create a shared window")

    thread = threading.Thread(target=lie)
    thread.start()
    with pytest.raises(RuntimeError, match=r"no shared window: rank 1: .*not the path of a desc"):
        create_window(StoreGroup(client_of(store), "g", 1, 2, 10.0), [], timeout=5)
    thread.join()
    assert file.read_bytes() == before
