"""Control connections between nodes: what is seen on the wire, and who is refused."""

from __future__ import annotations

import hashlib
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from moesaic.comm.network import quiet_log
from moesaic.comm.network.connect import connect
from moesaic.comm.network.handshake import (
    GREETING,
    PROOF_SECONDS,
    Identity,
    Role,
    identify,
    introduce,
)
from moesaic.comm.network.listener import Listener
from moesaic.comm.network.message_stream import MessageStream
from moesaic.comm.network.node_secret import NO_SECRET
from moesaic.comm.network.store import StoreAddress, StoreTable
from moesaic.comm.network.tls import (
    HANDSHAKE_BYTES,
    Connection,
    Tampered,
    TlsConnection,
    WrongSecret,
    derive_certificate,
    tls_context,
)

ME, SECRET = Identity(0, 0), b"a secret of some length"
MARKER = b"a marker that must not be on the wire"


@contextmanager
def served(secret: bytes = SECRET) -> Iterator[int]:
    """The port of a store."""
    listening = socket.create_server(("127.0.0.1", 0))
    listener = Listener(listening, Identity(-1, 0), secret, {Role.STORE: StoreTable().serve})
    yield listening.getsockname()[1]
    listener.close()


class Proxy:
    """Passes bytes between a caller and a port, records them, and may change them on the way."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.seen = bytearray()
        self.change: Callable[[bytes], bytes] = bytes
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self._listening.accept()
                there = socket.create_connection(("127.0.0.1", self._port))
                for pair in ((caller, there), (there, caller)):
                    threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                target.sendall(self.change(data))
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listening.close()


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with served() as port:
        made = Proxy(port)
        yield made
        made.close()


def store_at(port: int, secret: bytes = SECRET) -> StoreAddress:
    return StoreAddress("127.0.0.1", port, secret)


def test_nothing_is_readable_on_the_wire(proxy: Proxy):
    client = store_at(proxy.port).connect(5.0, ME)
    client.set(MARKER.decode(), MARKER * 100)
    assert client.get_now([MARKER.decode()]) == [MARKER * 100]
    client.close()
    assert len(proxy.seen) > 2 * 100 * len(MARKER), "it did not go through the proxy"
    for word in (MARKER, MARKER[:8], GREETING, SECRET, b"set", b"-----BEGIN"):
        assert word not in proxy.seen


def flip_last(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(
    "change",
    [flip_last, lambda data: data + data, lambda data: data[1:]],
    ids="flip twice cut".split(),
)
def test_a_change_on_the_wire_ends_the_connection(
    change: Callable[[bytes], bytes], proxy: Proxy, caplog: pytest.LogCaptureFixture
):
    """The listener hangs up, so that the caller has no answer or one that it refuses as well."""
    client = store_at(proxy.port).connect(5.0, ME)
    client.set("balance", b"1")
    proxy.change = change
    with pytest.raises(ConnectionError):
        for number in range(3):  # the first message comes through if it is repeated
            client.set("balance", str(number).encode())
    proxy.change = bytes
    with pytest.raises(OSError):
        client.has(["balance"])
    assert store_at(proxy.port).connect(5.0, ME).has(["balance"])
    deadline = soon()
    while not caplog.records and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "the store's connection to rank 0 of node 0 (127.0.0.1:" in caplog.text
    assert "was changed on its way" in caplog.text


@contextmanager
def both_ends(caller: bytes, listener: bytes) -> Iterator[tuple[TlsConnection, TlsConnection]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield (
            TlsConnection(ours, tls_context(caller, calls=True), calls=True),
            TlsConnection(theirs, tls_context(listener, calls=False), calls=False),
        )


def soon() -> float:
    return time.monotonic() + 30


def test_what_was_changed_is_named():
    with both_ends(SECRET, SECRET) as (caller, listener):
        thread = threading.Thread(target=listener.hand_shake, args=(soon(),))
        thread.start()
        caller.hand_shake(soon())
        thread.join()
        caller.sendall(b"first")
        assert listener.recv(100) == b"first"
        caller._connection.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))  # a record of a stranger
        with pytest.raises(Tampered, match="was changed on its way"):
            listener.recv(100)


@pytest.mark.parametrize(
    ("caller", "listener"),
    [(b"another secret of some length", SECRET), (NO_SECRET, SECRET), (SECRET, NO_SECRET)],
    ids=["another", "caller without", "listener without"],
)
def test_another_secret_is_named_at_both_ends(
    caller: bytes,
    listener: bytes,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(quiet_log, "QUIET_SECONDS", 0.0)
    with served(listener) as port:
        with pytest.raises(
            PermissionError, match=r"the store at .* does not know this node's secret"
        ):
            store_at(port, caller).connect(5.0, ME)
        assert store_at(port, listener).connect(5.0, ME).count() == 0
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "it does not accept this node's certificate, or has not the same: it has no or another "
        "secret"
    ]


@pytest.mark.parametrize("brings", ["nothing", "another certificate"])
def test_a_caller_that_accepts_any_listener(brings: str):
    """It trusts whatever it meets; the listener still does not trust it."""
    context = tls_context(b"another secret of some length", calls=True)
    if brings == "nothing":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with served() as port, socket.create_connection(("127.0.0.1", port), 5) as plain:
        caller = TlsConnection(plain, context, calls=True)
        caller.hand_shake(soon())
        with pytest.raises(ConnectionError):  # although it knows the secret, in this test
            introduce(caller, Role.STORE, ME, SECRET, soon())


def test_old_versions_of_tls_are_refused():
    context = tls_context(SECRET, calls=True)
    context.minimum_version, context.maximum_version = (
        ssl.TLSVersion.TLSv1_2,
        ssl.TLSVersion.TLSv1_2,
    )
    with (
        served() as port,
        socket.create_connection(("127.0.0.1", port), 5) as plain,
        pytest.raises(OSError),
    ):
        TlsConnection(plain, context, calls=True).hand_shake(soon())


def test_a_plain_caller_hears_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(quiet_log, "QUIET_SECONDS", 0.0)
    hello = GREETING + bytes([Role.STORE]) + bytes(48)
    endless = b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc\x03\x03" + bytes(2 * HANDSHAKE_BYTES)
    with served() as port:
        for said in (hello, b"GET / HTTP/1.1\r\n\r\n", bytes(100), b"\x16\x03\x01", endless):
            with socket.create_connection(("127.0.0.1", port), 10) as stranger:
                heard = b""
                try:
                    stranger.sendall(said)
                    stranger.shutdown(socket.SHUT_WR)
                    heard = stranger.recv(1000)
                except OSError as error:  # the other end is closed already
                    assert not isinstance(error, TimeoutError), said[:20]
                assert heard == b"", said[:20]
        assert store_at(port).connect(5.0, ME).count() == 0
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 5
    assert all("refused a connection from 127.0.0.1:" in text for text in told)
    assert all("it does not speak this protocol: TLS 1.3 is expected" in text for text in told)


def test_one_thread_sends_while_another_receives():
    """In both directions at once, more than the kernel buffers: neither waits for the other."""
    messages = [os.urandom(200_000) for _ in range(20)]
    with both_ends(SECRET, SECRET) as ends:
        shakes = [threading.Thread(target=end.hand_shake, args=(soon(),)) for end in ends]
        for thread in shakes:
            thread.start()
        for thread in shakes:
            thread.join()
        found: dict[int, list[bytes]] = {0: [], 1: []}

        def send(end: TlsConnection) -> None:
            for message in messages:
                MessageStream(end).send(message)

        def receive(number: int) -> None:
            ends[number].settimeout(30)
            found[number] = [MessageStream(ends[number]).receive() for _ in messages]

        threads = [threading.Thread(target=send, args=(end,)) for end in ends]
        threads += [threading.Thread(target=receive, args=(number,)) for number in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert found == {0: messages, 1: messages}


def test_a_wait_for_data_ends():
    with both_ends(SECRET, SECRET) as (caller, listener):
        thread = threading.Thread(target=listener.hand_shake, args=(soon(),))
        thread.start()
        caller.hand_shake(soon())
        thread.join()
        caller.settimeout(0.05)
        with pytest.raises(TimeoutError):
            caller.recv(1)
        listener.sendall(b"late")
        assert caller.recv(10) == b"late"
        threading.Timer(0.05, caller.shutdown, (socket.SHUT_RDWR,)).start()
        caller.settimeout(10)
        assert caller.recv(1) == b""


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_killed_process_ends_its_connection(encrypted: bool):
    """The kernel resets the connection of a process that ends with bytes unread."""
    with both_ends(SECRET, SECRET) as (caller, listener):
        ends: list[Connection] = [caller, listener]
        if encrypted:
            thread = threading.Thread(target=listener.hand_shake, args=(soon(),))
            thread.start()
            caller.hand_shake(soon())
            thread.join()
        else:
            ends = [end._connection for end in (caller, listener)]
        ends[0].sendall(b"unread")
        ends[0].settimeout(10)
        assert select.select([listener._connection], [], [], 10)[0]
        listener.close()
        with pytest.raises(ConnectionError, match=r"^the connection was closed$"):
            MessageStream(ends[0]).receive()


def test_data_links_are_plain():
    """They are authenticated, and their bytes go straight into shared memory."""
    ended = threading.Event()

    def serve(connection: object, *_: object) -> None:
        assert isinstance(connection, socket.socket)
        ended.set()

    listening = socket.create_server(("127.0.0.1", 0))
    listener = Listener(listening, Identity(0, 0), SECRET, {Role.LINK: serve})
    address = listening.getsockname()
    connection, _ = connect(lambda: socket.create_connection(address), Role.LINK, ME, SECRET, 5.0)
    assert isinstance(connection, socket.socket) and ended.wait(5)
    connection.close()
    listener.close()


def test_the_certificate_of_a_secret():
    """All nodes make the same, whatever versions of libraries they have: the digest may not
    change."""
    certificate, key = derive_certificate(SECRET)
    assert derive_certificate(SECRET) == (certificate, key)
    der = ssl.PEM_cert_to_DER_cert(certificate.decode())
    assert hashlib.sha256(der).hexdigest() == (
        "af05e969f5b6d9eddb1e8b93d27b4bcd27ba542e061c67a15cef9a8a4c92ed6c"
    )
    assert derive_certificate(SECRET + b".")[1] != key
    open_files = len(os.listdir("/proc/self/fd"))
    context = tls_context(SECRET, calls=False)
    assert (context.verify_mode, context.minimum_version) == (
        ssl.CERT_REQUIRED,
        ssl.TLSVersion.TLSv1_3,
    )
    assert context.get_ca_certs(binary_form=True) == []  # no authority, this certificate alone
    assert context.cert_store_stats()["x509"] == 1
    assert len(os.listdir("/proc/self/fd")) <= open_files


def test_only_the_same_secret_is_proved_inside():
    """The handshake within TLS is that of data links: it tells role and identity."""
    with both_ends(SECRET, SECRET) as (caller, listener):
        wrong: list[Exception] = []

        def listen() -> None:
            try:
                listener.hand_shake(soon())
                identify(listener, [Role.STORE], ME, SECRET, soon())
            except PermissionError as error:
                wrong.append(error)
                listener.close()

        thread = threading.Thread(target=listen)
        thread.start()
        caller.hand_shake(soon())
        with pytest.raises(WrongSecret):
            introduce(caller, Role.STORE, ME, b"another secret of some length", soon())
        caller.shutdown(socket.SHUT_RDWR)
        thread.join()
        assert len(wrong) == 1


def test_a_stranger_may_send_little():
    """OpenSSL alone would wait for 128 KiB of a first message."""
    first = b"\x16\x03\x01\x40\x00\x01\x01\xff\x00\x03\x03" + bytes(0x4000 - 6)
    with served() as port, socket.create_connection(("127.0.0.1", port), 10) as stranger:
        begun = time.monotonic()
        with suppress(ConnectionError):
            stranger.sendall(first)
            stranger.sendall(b"\x16\x03\x03\x40\x00")
            assert stranger.recv(100) == b""
        assert time.monotonic() - begun < PROOF_SECONDS - 1
