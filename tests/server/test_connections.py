"""HTTP below the app: what frames messages, and how clients share connections.

An app that answers with what it was sent stands behind the server's protocol: no engine is needed.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from moesaic.server import http_protocol as guard
from moesaic.server import run
from moesaic.server.connections import (
    ConnectionQuotas,
    ConnectionState,
    ConnectionTable,
    ConnectionWeights,
    network_of,
)
from moesaic.server.http_protocol import MAX_HEAD
from tests.server.serving import Listening, hear, status_of, talk, wait_until

GET = b"GET /echo HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /echo HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
HALF_HEAD = b"GET /echo HTTP/1.1\r\nHost: "
HALF_BODY = POST + b"Content-Length: 5\r\n\r\nab"
PROBE = GET.replace(b"/echo", b"/health")
METHODS = ["GET", "POST"]


class Echo(Listening):
    """`/hold` is answered when `go_on` is set, `/refuse` before the body is read, `/endless` for as
    long as the client reads."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        endpoints = {
            "/hold": self.hold,
            "/refuse": self.refuse,
            "/endless": self.endless,
            "/{path:path}": self.echo,
        }
        super().__init__(
            Starlette(routes=[Route(path, run, methods=METHODS) for path, run in endpoints.items()])
        )

    async def echo(self, request: Request) -> JSONResponse:
        body = await request.body()
        headers = [[name.decode(), value.decode()] for name, value in request.headers.raw]
        client = request.client and request.client.host
        return JSONResponse({"body": body.decode(), "headers": headers, "client": client})

    async def hold(self, request: Request) -> JSONResponse:
        while not self.go_on.is_set():
            await asyncio.sleep(0.01)
        return await self.echo(request)

    async def refuse(self, _: Request) -> JSONResponse:
        return JSONResponse({"error": dict.fromkeys(("message", "type", "param", "code"))}, 413)

    async def endless(self, _: Request) -> StreamingResponse:
        async def pieces() -> AsyncIterator[bytes]:
            while True:
                yield b"a" * 65536
                await asyncio.sleep(0)

        return StreamingResponse(pieces())

    def wait_for(self, number: int) -> None:
        wait_until(lambda: len(self.server.server_state.connections) == number)


@pytest.fixture(scope="module")
def echo() -> Iterator[Echo]:
    with Echo().serve() as echo:
        yield echo


@pytest.fixture
def make() -> Iterator[Callable[..., Echo]]:
    """Servers with few connections, which end with the test."""
    with ExitStack() as stack:

        def serve(connections: int, for_probes: int = 1, **others: Any) -> Echo:
            others = {"heads": connections, "grace_seconds": 0} | others
            echo, quotas = Echo(), ConnectionQuotas(connections, for_probes, **others)
            stack.enter_context(echo.serve(connections=quotas))
            stack.callback(echo.go_on.set)
            return echo

        yield serve


def connect(echo: Echo, data: bytes = b"", host: str = "127.0.0.1") -> socket.socket:
    address = "127.0.0.1", echo.port
    connection = socket.create_connection(address, timeout=60, source_address=(host, 0))
    connection.sendall(data)
    return connection


def answer_of(said: bytes) -> Any:
    assert status_of(said) == 200, said
    return json.loads(said.partition(b"\r\n\r\n")[2])


def chunks(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)


# --- what frames a message ---


@pytest.mark.parametrize(
    ("first", "again"),
    [
        (chunks(b"ab") + b"0\r\nX: ", b"a" * 4096),
        (chunks(b"ab") + b"0\r\n", b"X: y\r\n" * 700),
        (b"2;a=", b"b" * 4096),
        (b"", b"1;" + b"b" * 97 + b"\r\na\r\n"),
        (b"", b"0" * 4096),
    ],
    ids=["a trailer", "trailers", "an extension", "extensions", "zeros"],
)
def test_what_frames_a_body_has_a_limit(echo: Echo, first: bytes, again: bytes) -> None:
    """The server answers, or closes, long before the end; it would wait for that otherwise."""
    with connect(echo, CHUNKED + first) as connection:
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(again * (8 * MAX_HEAD // len(again)))
        said = hear(connection)
        assert said == b"" or status_of(said) == 431


def test_trailers_within_the_limit_are_ignored(echo: Echo) -> None:
    head = CHUNKED.replace(b"\r\n\r\n", b"\r\nTrailer: Authorization\r\n\r\n")
    trailers = b"0\r\nAuthorization: Bearer k\r\nX: " + b"a" * (MAX_HEAD // 2) + b"\r\n\r\n"
    with connect(echo) as connection:
        for split in (0, len(head), len(head) + 9, len(head) + 30):
            data = head + chunks(b"ab", b"c") + trailers
            connection.sendall(data[:split])
            connection.sendall(data[split:])
            answer = answer_of(hear(connection))
            assert answer["body"] == "abc"
            assert [name for name, _ in answer["headers"]] == [
                *("host", "transfer-encoding", "trailer")
            ]


def test_small_chunks_are_no_long_frame(echo: Echo) -> None:
    """As json.JSONEncoder.iterencode makes them."""
    body = json.dumps(list(range(5000))).encode()
    pieces = [body[at : at + 1] for at in range(len(body))]
    said = talk(echo.port, CHUNKED + chunks(*pieces) + b"0\r\n\r\n")
    assert answer_of(said)["body"] == body.decode()


def test_what_follows_an_answer_is_counted_as_it_comes(
    echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each chunk carries one byte, and the five bytes that frame it count too."""
    most, piece = 1 << 20, chunks(*[b"a"] * 30_000)
    monkeypatch.setattr(guard, "MAX_DISCARDED", most)
    before = set(echo.server.server_state.connections)
    with connect(echo, CHUNKED.replace(b"/echo", b"/refuse")) as connection:
        assert status_of(hear(connection)) == 413
        (link,) = echo.server.server_state.connections - before
        for sent in range(len(piece), most + len(piece), len(piece)):
            connection.sendall(piece)
            wait_until(lambda sent=sent: link._discarded >= min(sent, most))
        with suppress(ConnectionResetError):
            assert connection.recv(1) == b""


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAA\r\n"


@pytest.mark.parametrize("body", [b"a\r\nUpgrade: b", b"\r\nupgrade:\r\nUPGRADE: x\r\n\r\n"])
def test_bodies_are_not_changed(echo: Echo, body: bytes) -> None:
    """Whatever they look like, and however they are cut; the next request is read from its
    beginning."""
    heads = {
        "length": (POST + b"Content-Length: %d\r\n\r\n" % len(body), body),
        "chunks": (CHUNKED, chunks(body[:3], body[3:]) + b"0\r\n\r\n"),
    }
    with connect(echo) as connection:
        for head, data in heads.values():
            for split in (0, len(head), len(head) + 2):
                request = head + data + GET
                connection.sendall(request[:split])
                connection.sendall(request[split:])
                heard = b""
                while heard.count(b'"body"') < 2:
                    piece = connection.recv(1 << 16)
                    assert piece, heard
                    heard += piece
                first, second = heard.split(b"HTTP/1.1 ")[1:]
                assert json.loads(first.partition(b"\r\n\r\n")[2])["body"] == body.decode()
                assert json.loads(second.partition(b"\r\n\r\n")[2])["body"] == ""


def test_another_protocol_may_be_proposed(echo: Echo) -> None:
    """And is not taken up, at whatever byte the request is cut."""
    head = POST + UPGRADE + b"Content-Length: 3\r\n\r\n"
    with connect(echo) as connection:
        for split in range(0, len(head) + 3, 7):
            connection.sendall((head + b"abc")[:split])
            connection.sendall((head + b"abc")[split:])
            answer = answer_of(hear(connection))
            assert answer["body"] == "abc"
            assert [name for name, _ in answer["headers"]] == [
                *("host", "connection", "http2-settings", "content-length")
            ]
        connection.sendall((GET[:-2] + UPGRADE + b"\r\n") * 3)
        heard = b""
        while heard.count(b'"body"') < 3:
            heard += connection.recv(1 << 16)
        assert heard.count(b"HTTP/1.1 200 OK") == 3


def lines(*headers: bytes, version: bytes = b"1.1", target: bytes = b"/echo") -> bytes:
    return b"\r\n".join([b"GET %s HTTP/%s" % (target, version), *headers, b"", b""])


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (lines(), 400),
        (lines(version=b"1.0"), 200),
        (lines(b"Host: a", b"Host: a"), 400),
        (lines(b"Host: a", b"Host: b", version=b"1.0"), 400),
        (lines(b"Host:"), 200),
        (lines(b"Host: a.b:80 "), 200),
        (lines(b"Host: [::1]:80"), 200),
        (lines(b"Host: [fe80::1%25eth0]"), 200),
        (lines(b"Host: a_b-c.example:"), 200),
        (lines(b"Host: a b"), 400),
        (lines(b"Host: a/b"), 400),
        (lines(b"Host: a@b"), 400),
        (lines(b"Host: a:b"), 400),
        (lines(b"Host: a, b"), 400),
        (lines(b"Host: \xe9"), 400),
        (lines(b"Host: ::1"), 400),
        (lines(b"Host: a", version=b"2.0"), 400),
        (lines(version=b"0.9"), 400),
        (b"GET /echo\r\n\r\n", 400),
        (b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n", 400),
        (lines(b"Host: a", b"Transfer-Encoding: gzip, chunked"), 400),
        (lines(b"Host: a", b"Transfer-Encoding: identity"), 400),
        (lines(b"Host: a", b"Transfer-Encoding: chunked, chunked"), 400),
        (lines(b"Host: a", b"Transfer-Encoding: chunked", b"Content-Length: 5"), 400),
        (lines(b"Host: a", b"Content-Length: 5", b"Transfer-Encoding: chunked"), 400),
        (lines(b"Host: a", b"Content-Length: 0", b"Content-Length: 0"), 400),
        (lines(b"Host: a", b"Content-Length: 0, 0"), 400),
        (lines(b"Host: a", b"Content-Length: +0"), 400),
        (lines(b"Host: a", b"X: a", b" b"), 400),
        (lines(b"Host : a"), 400),
        (lines(b"Host: a", b"X(y): a"), 400),
        (lines(b"Host: a", b"X: a\0b"), 400),
        (lines(b"Host: a").replace(b"\r", b""), 400),
    ],
)
def test_heads_that_two_servers_might_read_otherwise(
    echo: Echo, request_bytes: bytes, status: int
) -> None:
    """RFC 9112, sections 2.2, 3.2, 5.1, 5.2 and 6.3."""
    assert status_of(talk(echo.port, request_bytes)) == status


def test_the_host_is_that_of_the_target(echo: Echo) -> None:
    """RFC 9112, section 3.2.2."""
    for host in (b"evil.example", b"a.example:81", b"[::1]:80"):
        target = b"http://" + host + b"/echo?x"
        found = answer_of(talk(echo.port, lines(b"Host: localhost", target=target)))["headers"]
        assert found == [["host", host.decode()]]


def test_headers_have_no_spaces_around_them(echo: Echo) -> None:
    found = answer_of(talk(echo.port, lines(b"Host:\t a \t", b"X:  b  ")))["headers"]
    assert found == [["host", "a"], ["x", "b"]]


def test_clients_do_not_choose_their_address(echo: Echo) -> None:
    said = talk(echo.port, lines(b"Host: a", b"X-Forwarded-For: 10.0.0.1", b"Forwarded: for=x"))
    assert answer_of(said)["client"] == "127.0.0.1"


# --- how clients share connections ---


@pytest.mark.parametrize("half", [b"", HALF_HEAD, HALF_BODY], ids=["nothing", "head", "body"])
def test_the_largest_holder_gives_way(make: Callable[..., Echo], half: bytes) -> None:
    """Its oldest connection first; who holds one keeps it."""
    echo = make(6)
    with ExitStack() as stack:
        one = stack.enter_context(connect(echo, HALF_HEAD, "127.0.0.2"))
        echo.wait_for(1)
        many = []
        for number in range(5):
            many.append(stack.enter_context(connect(echo, half)))
            echo.wait_for(2 + number)
        for late, first in enumerate(many[:3]):
            host = f"127.0.0.{3 + late}"
            link = stack.enter_context(connect(echo, GET, host))
            assert answer_of(hear(link))["client"] == host
            assert status_of(hear(first)) == 503 and first.recv(1) == b""
        one.sendall(b"localhost\r\n\r\n")
        assert answer_of(hear(one))["client"] == "127.0.0.2"
        if half == HALF_BODY:
            many[-1].sendall(b"cde")
            assert answer_of(hear(many[-1]))["body"] == "abcde"


def test_unfinished_heads_of_one_address_are_few(make: Callable[..., Echo]) -> None:
    """Connections that have asked for something before do not count."""
    echo = make(20, heads=3)
    with ExitStack() as stack:
        kept = []
        for _ in range(8):
            kept.append(stack.enter_context(connect(echo, GET)))
            assert answer_of(hear(kept[-1]))["body"] == ""
        many = []
        for number in range(1, 6):
            many.append(stack.enter_context(connect(echo, HALF_HEAD)))
            if number > 3:
                assert status_of(hear(many[number - 4])) == 503
            echo.wait_for(8 + min(number, 3))
        for link in kept:
            link.sendall(GET)
            assert answer_of(hear(link))["body"] == ""
        for link in many[2:]:
            link.sendall(b"localhost\r\n\r\n")
            assert answer_of(hear(link))["body"] == ""


def test_many_requests_at_once_are_no_attack(make: Callable[..., Echo]) -> None:
    """Their connections are there before the server has read any of them."""
    echo = make(20, heads=3, grace_seconds=60)
    hold = GET.replace(b"/echo", b"/hold")
    with ExitStack() as stack:
        links = [stack.enter_context(connect(echo)) for _ in range(20)]
        echo.wait_for(20)
        for link in links[1:]:
            link.sendall(hold)
        wait_until(lambda: len(echo.server.server_state.tasks) == 19)
        assert answer_of(talk(echo.port, PROBE))["body"] == ""
        assert status_of(hear(links[0])) == 503
        echo.go_on.set()
        assert [answer_of(hear(link))["body"] for link in links[1:]] == [""] * 19


def test_probes_find_a_connection(make: Callable[..., Echo]) -> None:
    """When requests that are computed have taken all others, which are not cut off."""
    echo = make(6, for_probes=2)
    hold = GET.replace(b"/echo", b"/hold")
    with ExitStack() as stack:
        held = [stack.enter_context(connect(echo, hold)) for _ in range(4)]
        wait_until(lambda: len(echo.server.server_state.tasks) == 4)
        for _ in range(3):
            assert answer_of(talk(echo.port, PROBE))["body"] == ""
            assert status_of(talk(echo.port, GET)) == 503
            stack.enter_context(connect(echo, HALF_HEAD))
        with connect(echo, PROBE + GET) as both:  # one that may, and one that may not
            heard = b""
            while piece := both.recv(1 << 16):
                heard += piece
        assert [part[:3] for part in heard.split(b"HTTP/1.1 ")] == [b"", b"200", b"503"]
        echo.go_on.set()
        assert [answer_of(hear(link))["body"] for link in held] == [""] * 4
        assert answer_of(talk(echo.port, GET))["body"] == ""


def test_requests_with_half_a_body_give_way_to_whole_ones(make: Callable[..., Echo]) -> None:
    echo = make(6, for_probes=2)
    with ExitStack() as stack:
        halves = []
        for number in range(1, 5):
            halves.append(stack.enter_context(connect(echo, HALF_BODY)))
            wait_until(lambda number=number: len(echo.server.server_state.tasks) == number)
        link = stack.enter_context(connect(echo, GET, "127.0.0.2"))
        assert answer_of(hear(link))["body"] == ""
        assert status_of(hear(halves[0])) == 503
        for half in halves[1:]:
            half.sendall(b"cde")
            assert answer_of(hear(half))["body"] == "abcde"


def test_requests_whose_answer_is_not_read_give_way(make: Callable[..., Echo]) -> None:
    """The oldest of the client with most of them."""
    echo = make(5, for_probes=2)
    endless, states = GET.replace(b"/echo", b"/endless"), (ConnectionState.UNREAD,) * 3
    with ExitStack() as stack:
        links = []
        for number, host in enumerate(("127.0.0.2", "127.0.0.1", "127.0.0.1"), start=1):
            links.append(stack.enter_context(connect(echo, endless, host)))
            wait_until(lambda number=number: states_of(echo) == states[:number])
        other = stack.enter_context(connect(echo, GET, "127.0.0.3"))
        assert answer_of(hear(other))["body"] == ""
        wait_until(lambda: len(echo.server.server_state.tasks) == 2)
        clients = [link.client for link in echo.server.server_state.connections]
        assert sorted(host for host, _ in clients) == ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
        assert links[2].getsockname() in clients


def states_of(echo: Echo) -> tuple[ConnectionState, ...]:
    return tuple(link._state for link in list(echo.server.server_state.connections))


def test_unread_answers_give_way(make: Callable[..., Echo]) -> None:
    """They are complete, and only their client holds them."""
    echo = make(3)
    body = b"a" * (4 << 20)
    with ExitStack() as stack:
        for number in range(3):
            link = stack.enter_context(connect(echo))
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            link.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            wait_until(lambda count=number + 1: echo.server.server_state.total_requests == count)
        assert len(echo.server.server_state.connections) == 3
        other = stack.enter_context(connect(echo, GET, "127.0.0.2"))
        assert answer_of(hear(other))["client"] == "127.0.0.2"
        echo.wait_for(3)


def test_what_is_held_of_bodies_has_a_limit(make: Callable[..., Echo]) -> None:
    """In all; the client that holds most loses its oldest, and others do not notice."""
    echo = make(10, body_bytes=100_000)
    head = POST + b"Content-Length: 50000\r\n\r\n"
    with ExitStack() as stack:
        other = stack.enter_context(connect(echo, head + b"a" * 10_000, "127.0.0.2"))
        wait_until(lambda: held_bytes(echo) == 10_000)
        first = stack.enter_context(connect(echo, head + b"b" * 45_000))
        wait_until(lambda: held_bytes(echo) == 55_000)
        second = stack.enter_context(connect(echo, head + b"c" * 40_000))
        wait_until(lambda: held_bytes(echo) == 95_000)
        other.sendall(b"a" * 20_000)
        assert status_of(hear(first)) == 503
        for link, size, sign in ((other, 20_000, "a"), (second, 10_000, "c")):
            link.sendall(sign.encode() * size)
            assert answer_of(hear(link))["body"] == sign * 50_000
        wait_until(lambda: held_bytes(echo) == 0)


def held_bytes(echo: Echo) -> int:
    table: ConnectionTable = echo.server.config.http_protocol_class.table  # type: ignore[union-attr]
    return table._body_bytes.total


class Link:
    def __init__(self, address: str) -> None:
        self.address, self.since, self.closed = address, 0.0, False

    def evict(self) -> None:
        self.closed = True


def test_weights_by_address() -> None:
    weights, links = ConnectionWeights(), [Link(address) for address in "abbacb"]
    assert weights.oldest_of_largest() is None
    for link in links:
        weights.set(link, 1)
    assert (weights.total, weights.weight_of("b"), weights.weight_of("x")) == (6, 3, 0)
    assert weights.oldest_of_largest() is links[1]
    weights.set(links[4], 9)
    assert weights.oldest_of_largest() is links[4] and weights.total == 14
    for link in links:
        weights.set(link, 0)
        weights.set(link, 0)
    assert weights.total == 0 and weights._by_address == {} == weights._weights


def test_nothing_is_kept_of_connections_that_are_gone() -> None:
    table = ConnectionTable(ConnectionQuotas(4, 1, 2))
    links = [Link(str(number % 3)) for number in range(30)]
    for number, link in enumerate(links):
        table.register(link, min(5, number + 1))
        if not link.closed and table.admit_request(link):
            table.update(link, ConnectionState.BODY, 10)
    for link in links:
        table.unregister(link)
    assert sum(link.closed for link in links) == 27  # one of four is for probes
    assert table._waiting.total == table._body_bytes.total == len(table._requests) == 0


def test_whose_connection_it_is() -> None:
    assert network_of("10.1.2.3") == "10.1.2.3" == network_of("::ffff:10.1.2.3")
    assert (
        network_of("2001:db8::1") == network_of("2001:db8::ffff:0:1") != network_of("2001:db8:1::")
    )
    assert network_of("fe80::1%eth0") == "fe80::"


# --- descriptors ---


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "found"),
    [
        (1024, 4096, 500, 1024),
        (256, 4096, 500, 500),
        (256, 300, 500, 300),
        (256, resource.RLIM_INFINITY, 500, 500),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 500, None),
    ],
)
def test_descriptors_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, wanted: int, found: int | None
) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    number = run._raise_file_limit(wanted)
    if found is None:
        assert number > 1 << 40 and len(limits) == 1
    else:
        assert number == found == limits[-1][0] and limits[-1][1] == hard


def test_too_few_descriptors_are_told_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    with pytest.raises(ValueError, match=r"may open 256 files and the server needs 320.*ulimit -n"):
        run._check_file_limit()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (320, 320))
    run._check_file_limit()
    assert run._max_connections(4096) == run.FEWEST_CONNECTIONS == 64
