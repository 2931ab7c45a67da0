"""The connection itself: limits on its head, its pace and its number, before any handler is asked.

uvicorn's protocol does the rest. It has no limit on the size of a head or of trailers, nor on the
time in which one comes or an answer is read, and tells only the newest of pipelined requests that
the client has left.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import httptools
from starlette.responses import Response
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from moesaic.server.connections import Connections, ConnectionState, Shares, network_of
from moesaic.server.errors import Refusal

MAX_HEAD: Final = 16 << 10
# Of a line of a head: what is neither its name nor its value.
LINE_SIGNS: Final = len(": \r\n")
# The bytes that the parser is fed at once. It does not say at which of them a message begins, so
# the piece with the beginning is not counted.
PIECE: Final = 4 << 10
# What frames the data of a chunk may have as many bytes, and twice as many as the data.
CHUNK_SIGNS: Final = 16
# From its first byte to its last; a connection without any request has as long.
REQUEST_SECONDS: Final = 30.0
# In which a client must take something of what waits for it.
WRITE_SECONDS: Final = 60.0
LOOKS: Final = 8
# What is thrown away of a body that was refused, so that the client reads why instead of an error.
MAX_DISCARDED: Final = 16 << 20
MAX_PIPELINED: Final = 64
VERSIONS: Final = ("1.0", "1.1")
# RFC 9112, section 3.2: a name or an address, and a port.
HOST: Final = re.compile(rb"(?:\[[\w:.%~-]+\]|(?:[\w.~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)(?::[0-9]*)?")
CROWDED: Final = "too many connections: try again later"


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """`probes`: paths whose requests find a connection when no others do."""

    shares: Shares
    probes: frozenset[str]
    request_seconds: float = REQUEST_SECONDS
    write_seconds: float = WRITE_SECONDS


class LimitedHttpProtocol(HttpToolsProtocol):
    """`limits` and `held`, the connections of one server, are set by `guarded`."""

    limits: ConnectionLimits
    held: Connections

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.address, self.since = "", time.monotonic()
        self._placed = ConnectionState.HEAD
        self._in_head = self._begun = False
        self._messages = self._head_bytes = 0
        # Of the message that is being read: what is no data, data and chunks that came lately, data
        # that was kept, and bytes after the answer.
        self._signs = self._data_bytes = self._chunks = self._body_bytes = self._discarded = 0
        self._running: RequestResponseCycle | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._deaf = self._gone = False
        self._look: asyncio.TimerHandle | None = None
        self._unsent = self._looks = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = network_of(self.client[0]) if self.client else ""
        self._expect()
        self.held.arrive(self, len(self.connections))

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone = True
        self.held.leave(self)
        self._expect_nothing()
        if self._look is not None:
            self._look.cancel()
        self._unset_keepalive_if_required()
        running = self._running
        super().connection_lost(exc)
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        self.pipeline.clear()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._unset_keepalive_if_required()
        if self._deadline is None:
            self._expect()
        for start in range(0, len(data), PIECE):
            piece, message = data[start : start + PIECE], self._messages
            self._data_bytes = self._chunks = 0
            try:
                self._parse(piece)
            except httptools.HttpParserError as error:
                cause = error.__context__
                self._end(cause if isinstance(cause, Refusal) else Refusal(400, "this is no HTTP"))
            if not self._deaf and self._begun and self._messages == message:
                self._count(len(piece))
            if self._deaf:
                return
        if self._begun and self._deadline is None:  # it came with the end of the one before
            self._expect()
        self._place()

    def _parse(self, data: bytes) -> None:
        """Clients may propose another protocol, and some do with every request. The parser then
        stops after the head, and takes no body: it is given the head again without the proposal."""
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as proposal:
                data = data[proposal.args[0] :]
                self.parser.feed_data(self._plain_head())

    def _plain_head(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % line for line in self.headers if line[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def _count(self, size: int) -> None:
        """Bytes of the message that was being read before them, and still is."""
        # The parser keeps the beginning of a header or trailer until it has the end.
        data = 3 * self._data_bytes + CHUNK_SIGNS * self._chunks
        self._signs = max(0, self._signs + size - data)
        if self._signs > MAX_HEAD:
            self._end(_head_refusal())
        elif not self._in_head and self.cycle.response_complete:
            self._discarded += size
            if self._discarded > MAX_DISCARDED:
                self._deaf = True
                self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = self._begun = True
        self._messages += 1
        self._head_bytes = self._signs = self._body_bytes = self._discarded = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._head_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # and is no trailer: the request was let in without it
            self._head_bytes += len(name) + len(value) + LINE_SIGNS
            super().on_header(name, value.strip(b" \t"))

    def on_headers_complete(self) -> None:
        if self._head_bytes > MAX_HEAD:
            raise _head_refusal()
        _check_head(self.parser, self.headers)
        if self.parser.should_upgrade():
            return
        if self.url[:1] not in (b"/", b"*"):
            self._take_host_of_url()
        super().on_headers_complete()
        self._in_head = False
        if len(self.pipeline) > MAX_PIPELINED:
            raise Refusal(400, f"more than {MAX_PIPELINED} requests without reading an answer")

    def _take_host_of_url(self) -> None:
        """RFC 9112, section 3.2.2: where the target has a host, the header does not count."""
        url = httptools.parse_url(self.url)
        host = url.host or b""
        host = b"[%s]" % host if b":" in host else host
        value = host if url.port is None else b"%s:%d" % (host, url.port)
        self.headers[:] = [line for line in self.headers if line[0] != b"host"]
        self.headers.append((b"host", value))

    def on_chunk_header(self) -> None:
        self._chunks += 1

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._data_bytes += len(body)
        self._body_bytes += len(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._in_head = self._begun = False
        self._expect_nothing()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()
        self._place()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._looks = 0
        self._place()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_reader()
        self._place()

    def send_400_response(self, msg: str) -> None:
        self._end(Refusal(400, msg))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        if not self._may_start(cycle):
            self._end(Refusal(503, CROWDED))
            return
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _may_start(self, cycle: RequestResponseCycle) -> bool:
        if self._gone:
            return False
        self.held.place(self, ConnectionState.IDLE)  # its last request is over
        return cycle.scope["path"] in self.limits.probes or self.held.begin_request(self)

    def _place(self) -> None:
        if self._gone:
            return
        state = self._state
        if state is not self._placed:
            self._placed, self.since = state, time.monotonic()
        self.held.place(self, state, self._body_bytes)

    @property
    def _state(self) -> ConnectionState:
        running = self._running
        if running is not None and not running.response_complete:
            if running.more_body:
                return ConnectionState.BODY
            return ConnectionState.UNREAD if self.flow.write_paused else ConnectionState.BUSY
        return ConnectionState.HEAD if self._in_head or running is None else ConnectionState.IDLE

    def give_way(self) -> None:
        self._gone = True
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # its client has not read the answer
        elif self._state is ConnectionState.IDLE:
            self.transport.close()
        else:
            self._end(Refusal(503, CROWDED))

    def _expect(self) -> None:
        self._expect_nothing()
        self._deadline = self.loop.call_later(self.limits.request_seconds, self._late)

    def _expect_nothing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        self._deadline = None
        if self._state in (ConnectionState.BUSY, ConnectionState.UNREAD):
            if self._begun:  # it was sent ahead, and does not end the one before it
                self._expect()
        elif self._begun:
            message = f"the request did not come within {self.limits.request_seconds:g} s"
            self._end(Refusal(408, message))
        else:
            self.transport.close()  # nothing was asked

    def _end(self, refusal: Refusal) -> None:
        """The last answer on this connection, unless another is being given."""
        self._deaf = True
        self._expect_nothing()
        running = self._running
        free = running is None or running.response_complete or not running.response_started
        if free and not self.transport.is_closing():
            self.transport.write(_raw(refusal.response()))
        self.transport.close()
        self._watch_reader()

    def _watch_reader(self) -> None:
        """From when something may be left unread until it is not. A transport that is closed keeps
        what it has for ever, too."""
        if self._look is None:
            self._unsent, self._looks = self.transport.get_write_buffer_size(), 0
            self._look_again()

    def _look_again(self) -> None:
        self._look = None
        if self._unsent:
            seconds = self.limits.write_seconds / LOOKS
            self._look = self.loop.call_later(seconds, self._look_at_reader)

    def _look_at_reader(self) -> None:
        before, self._unsent = self._unsent, self.transport.get_write_buffer_size()
        self._looks = 0 if self._unsent < before else self._looks + 1
        if self._looks < LOOKS:
            self._look_again()
        else:
            self.transport.abort()


def guarded(limits: ConnectionLimits) -> type[LimitedHttpProtocol]:
    """The protocol of one server, with these limits."""
    own = {"limits": limits, "held": Connections(limits.shares)}
    return type("GuardedProtocol", (LimitedHttpProtocol,), own)


def _check_head(
    parser: httptools.HttpRequestParser, headers: Iterable[tuple[bytes, bytes]]
) -> None:
    """What the parser lets pass and HTTP does not; two servers in a row might read it otherwise."""
    version, method = parser.get_http_version(), parser.get_method()
    if version not in VERSIONS or method == b"CONNECT":
        raise Refusal(400, "send HTTP/1.1 or HTTP/1.0, and no CONNECT: this is no proxy")
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (not hosts and version != "1.0"):
        raise Refusal(400, f"the request has {len(hosts)} Host headers: send one")
    if hosts and not HOST.fullmatch(hosts[0]):
        raise Refusal(400, "the Host header is not a name or an address, with a port or without")
    if any(name == b"transfer-encoding" and value.lower() != b"chunked" for name, value in headers):
        raise Refusal(400, "of transfer encodings only chunked is known")


def _head_refusal() -> Refusal:
    return Refusal(431, f"path, headers and trailers have more than {MAX_HEAD} bytes: send less")


def _raw(response: Response) -> bytes:
    lines = [STATUS_LINE[response.status_code]]
    lines += [name + b": " + value + b"\r\n" for name, value in response.raw_headers]
    return b"".join([*lines, b"connection: close\r\n\r\n", bytes(response.body)])
