"""HTTP below the app: heads, bodies, chunks and trailers."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from moesaic.server import http_protocol as guard
from moesaic.server.http_protocol import MAX_HEAD
from moesaic.server.responses import DONE
from tests.server.echo import CHUNKED, EVENTS, GET, POST, Echo, answer_of, connect
from tests.server.serving import hear, status_of, talk, wait_until


@pytest.fixture(scope="module")
def echo() -> Iterator[Echo]:
    with Echo().serve() as echo:
        yield echo


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
        echo.wait_for(1)
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


# --- streams of events ---


def test_events_are_whole_and_in_order_however_slowly_they_are_read() -> None:
    """Small buffers: the server writes some at once, and others when the client has read."""
    with Echo().serve(write_seconds=30.0) as echo, connect(echo) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(GET.replace(b"/echo", b"/events"))
        echo.wait_for(1)
        (link,) = echo.server.server_state.connections
        wait_until(lambda: link.flow.write_paused)
        # From here on the client reads quickly: through a small window all would take 40 s.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        said = b""
        while not said.endswith(b"0\r\n\r\n"):
            said += connection.recv(1 << 16)
    head, _, body = said.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head and b"text/event-stream" in head
    assert body == chunks(*EVENTS, DONE) + b"0\r\n\r\n"


def test_a_head_request_for_events_has_no_body(echo: Echo) -> None:
    head = GET.replace(b"GET /echo", b"HEAD /events").replace(
        b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"
    )
    said = talk(echo.port, head)
    assert status_of(said) == 200 and said.endswith(b"\r\n\r\n") and said.count(b"\r\n\r\n") == 1
