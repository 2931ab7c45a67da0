"""uvicorn's HTTP protocol with limits on heads, on time and on the number of connections.

uvicorn limits neither the size of a head or of trailers, nor the time in which a request arrives or
an answer is read, and it reports a disconnect only to the newest of pipelined requests.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, cast

import httptools
from starlette.responses import Response
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from moesaic.server.connections import (
    ConnectionQuotas,
    ConnectionState,
    ConnectionTable,
    network_of,
)
from moesaic.server.errors import Refusal
from moesaic.server.responses import BODY_WRITER, DISCONNECT, DisconnectWatch

MAX_HEAD: Final = 16 << 10
# Bytes of a header line besides its name and value.
LINE_OVERHEAD: Final = len(": \r\n")
# Bytes that the parser gets at once; those with the beginning of a message are not counted.
PARSE_BYTES: Final = 4 << 10
# Framing bytes that a chunk may have, besides twice the bytes of its data.
CHUNK_OVERHEAD: Final = 16
# Time for a whole request, or for the first byte on a new connection.
REQUEST_SECONDS: Final = 30.0
# Time in which a client must read something of its answer.
WRITE_SECONDS: Final = 60.0
WRITE_CHECKS: Final = 8
# Bytes of a refused body that are discarded, so that the client reads the refusal.
MAX_DISCARDED: Final = 16 << 20
MAX_PIPELINED: Final = 64
VERSIONS: Final = ("1.0", "1.1")
# RFC 9112, section 3.2: a name or an address, and optionally a port.
HOST: Final = re.compile(rb"(?:\[[\w:.%~-]+\]|(?:[\w.~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)(?::[0-9]*)?")
OK: Final = STATUS_LINE[200]
# The end of a head whose body comes in chunks, and of one whose connection closes behind it.
CHUNKED_END: Final = b"transfer-encoding: chunked\r\n\r\n"
CLOSING_CHUNKED_END: Final = b"connection: close\r\n" + CHUNKED_END
TOO_MANY_CONNECTIONS: Final = "too many connections: try again later"


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    quotas: ConnectionQuotas
    probes: frozenset[str]
    """Paths that have reserved connections."""
    request_seconds: float = REQUEST_SECONDS
    write_seconds: float = WRITE_SECONDS


class LimitedHttpProtocol(HttpToolsProtocol):
    """`protocol_with` sets the class attributes, which all connections of one server share."""

    limits: ConnectionLimits
    table: ConnectionTable

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.address, self.since = "", time.monotonic()
        self._last_state = ConnectionState.HEAD
        self._in_head = self._in_message = False
        self._messages = self._head_bytes = 0
        # Of the current message: framing, data and chunks since the last call of the parser, data
        # that is kept, and bytes after the answer.
        self._framing = self._data_bytes = self._chunks = self._body_bytes = self._discarded = 0
        self._running: RequestResponseCycle | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._ignores_input = self._lost = False
        self._write_timer: asyncio.TimerHandle | None = None
        self._unsent = self._stalled_checks = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = network_of(self.client[0]) if self.client else ""
        self._start_deadline()
        self.table.register(self, len(self.connections))

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self.table.unregister(self)
        self._cancel_deadline()
        if self._write_timer is not None:
            self._write_timer.cancel()
        self._unset_keepalive_if_required()
        running = self._running
        super().connection_lost(exc)
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
            _drop_extensions(running).disconnected()
        self.pipeline.clear()

    def data_received(self, data: bytes) -> None:
        if self._ignores_input:
            return
        self._unset_keepalive_if_required()
        if self._deadline is None:
            self._start_deadline()
        for start in range(0, len(data), PARSE_BYTES):
            part, message = data[start : start + PARSE_BYTES], self._messages
            self._data_bytes = self._chunks = 0
            try:
                self._parse(part)
            except httptools.HttpParserError as error:
                cause = error.__context__
                refusal = cause if isinstance(cause, Refusal) else Refusal(400, "this is not HTTP")
                self._refuse(refusal)
            if not self._ignores_input and self._in_message and self._messages == message:
                self._count(len(part))
            if self._ignores_input:
                return
        if self._in_message and self._deadline is None:  # it began behind the previous message
            self._start_deadline()
        self._update_state()

    def _parse(self, data: bytes) -> None:
        """Clients may propose an upgrade, and some do so in every request. The parser then stops
        after the head and reads no body, so it gets the head again without the proposal."""
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
        """Counts bytes that belong to one message."""
        # The parser buffers an unfinished header or trailer.
        data = 3 * self._data_bytes + CHUNK_OVERHEAD * self._chunks
        self._framing = max(0, self._framing + size - data)
        if self._framing > MAX_HEAD:
            self._refuse(_head_refusal())
        elif not self._in_head and self.cycle.response_complete:
            self._discarded += size
            if self._discarded > MAX_DISCARDED:
                self._ignores_input = True
                self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = self._in_message = True
        self._messages += 1
        self._head_bytes = self._framing = self._body_bytes = self._discarded = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._head_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # trailers are ignored: the request was admitted without them
            self._head_bytes += len(name) + len(value) + LINE_OVERHEAD
            super().on_header(name, value.strip(b" \t"))

    def on_headers_complete(self) -> None:
        if self._head_bytes > MAX_HEAD:
            raise _head_refusal()
        _check_head(self.parser, self.headers)
        if self.parser.should_upgrade():
            return
        if self.url[:1] not in (b"/", b"*"):
            self._use_host_of_url()
        super().on_headers_complete()
        self._in_head = False
        if len(self.pipeline) > MAX_PIPELINED:
            raise Refusal(400, f"more than {MAX_PIPELINED} requests without reading an answer")

    def _use_host_of_url(self) -> None:
        """RFC 9112, section 3.2.2: a host in the target overrides the header."""
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
        self._in_head = self._in_message = False
        self._cancel_deadline()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writes()
        self._update_state()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stalled_checks = 0
        self._update_state()

    def on_response_complete(self) -> None:
        if self._running is not None:
            _drop_extensions(self._running)
        super().on_response_complete()
        self._watch_writes()
        self._update_state()

    def send_400_response(self, msg: str) -> None:
        self._refuse(Refusal(400, msg))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        if not self._may_start(cycle):
            self._refuse(Refusal(503, TOO_MANY_CONNECTIONS))
            return
        self._running = cycle
        extensions = cast(dict[str, Any], cycle.scope)
        extensions[BODY_WRITER] = ChunkWriter(self, cycle)
        extensions[DISCONNECT] = DisconnectWatch(self.flow.resume_reading)
        super()._start_asgi_task(cycle, app)

    def _may_start(self, cycle: RequestResponseCycle) -> bool:
        if self._lost:
            return False
        self.table.update(self, ConnectionState.IDLE)  # its last request is over
        path = cycle.scope["path"].rstrip("/")
        return path in self.limits.probes or self.table.admit_request(self)

    def _update_state(self) -> None:
        if self._lost:
            return
        state = self._state
        if state is not self._last_state:
            self._last_state, self.since = state, time.monotonic()
        self.table.update(self, state, self._body_bytes)

    @property
    def _state(self) -> ConnectionState:
        running = self._running
        if running is not None and not running.response_complete:
            if running.more_body:
                return ConnectionState.BODY
            return ConnectionState.UNREAD if self.flow.write_paused else ConnectionState.BUSY
        return ConnectionState.HEAD if self._in_head or running is None else ConnectionState.IDLE

    def evict(self) -> None:
        self._lost = True
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # its client has not read the answer
        elif self._state is ConnectionState.IDLE:
            self.transport.close()
        else:
            self._refuse(Refusal(503, TOO_MANY_CONNECTIONS))

    def _start_deadline(self) -> None:
        self._cancel_deadline()
        self._deadline = self.loop.call_later(self.limits.request_seconds, self._on_deadline)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self) -> None:
        self._deadline = None
        if self._state in (ConnectionState.BUSY, ConnectionState.UNREAD):
            if self._in_message:  # a pipelined request must not end the one before it
                self._start_deadline()
        elif self._in_message:
            message = f"the request did not arrive within {self.limits.request_seconds:g} s"
            self._refuse(Refusal(408, message))
        else:
            self.transport.close()  # there is no request

    def _refuse(self, refusal: Refusal) -> None:
        """Sends the refusal as the last answer, unless another answer is being sent, and closes."""
        self._ignores_input = True
        self._cancel_deadline()
        running = self._running
        free = running is None or running.response_complete or not running.response_started
        if free and not self.transport.is_closing():
            self.transport.write(_to_bytes(refusal.response()))
        self.transport.close()
        self._watch_writes()

    def _watch_writes(self) -> None:
        """Checks that the client reads until the write buffer, also of a closed one, is empty."""
        if self._write_timer is None:
            self._unsent, self._stalled_checks = self.transport.get_write_buffer_size(), 0
            self._schedule_write_check()

    def _schedule_write_check(self) -> None:
        self._write_timer = None
        if self._unsent:
            seconds = self.limits.write_seconds / WRITE_CHECKS
            self._write_timer = self.loop.call_later(seconds, self._check_writes)

    def _check_writes(self) -> None:
        before, self._unsent = self._unsent, self.transport.get_write_buffer_size()
        self._stalled_checks = 0 if self._unsent < before else self._stalled_checks + 1
        if self._stalled_checks < WRITE_CHECKS:
            self._schedule_write_check()
        else:
            self.transport.abort()


class ChunkWriter:
    """A BodyWriter for a response that has started."""

    __slots__ = ("_cycle", "_flow", "_write")

    def __init__(self, protocol: LimitedHttpProtocol, cycle: RequestResponseCycle) -> None:
        self._cycle, self._flow, self._write = cycle, protocol.flow, protocol.transport.write

    def accepts(self) -> bool:
        cycle = self._cycle
        return bool(cycle.chunked_encoding) and not (self._flow.write_paused or cycle.disconnected)

    def start(self, headers: Iterable[tuple[bytes, bytes]], data: bytes) -> bool:
        cycle = self._cycle
        if cycle.access_log or self._flow.write_paused or cycle.disconnected or not data:
            return False
        cycle.response_started, cycle.waiting_for_100_continue = True, False
        cycle.chunked_encoding = True
        lines = [b"%b: %b\r\n" % line for line in (*cycle.default_headers, *headers)]
        end = CHUNKED_END if cycle.keep_alive else CLOSING_CHUNKED_END
        self._write(b"%b%b%b%x\r\n%b\r\n" % (OK, b"".join(lines), end, len(data), data))
        return True

    def write(self, data: bytes) -> None:
        assert data, "an empty chunk would end the response"
        self._write(b"%x\r\n%b\r\n" % (len(data), data))


def _drop_extensions(cycle: RequestResponseCycle) -> DisconnectWatch:
    """Removes our fields from the scope of a request that is over: they refer to the request, so
    that else only the garbage collector would free it."""
    scope = cast(dict[str, Any], cycle.scope)
    scope.pop(BODY_WRITER, None)
    watch: DisconnectWatch = scope.pop(DISCONNECT, None) or DisconnectWatch()
    return watch


def protocol_with(limits: ConnectionLimits) -> type[LimitedHttpProtocol]:
    attributes = {"limits": limits, "table": ConnectionTable(limits.quotas)}
    return type("ServerProtocol", (LimitedHttpProtocol,), attributes)


def _check_head(
    parser: httptools.HttpRequestParser, headers: Iterable[tuple[bytes, bytes]]
) -> None:
    """Refuses what the parser accepts and HTTP forbids: a proxy might read it differently."""
    version, method = parser.get_http_version(), parser.get_method()
    if version not in VERSIONS or method == b"CONNECT":
        raise Refusal(400, "send HTTP/1.1 or HTTP/1.0, and no CONNECT: this is not a proxy")
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (not hosts and version != "1.0"):
        raise Refusal(400, f"the request has {len(hosts)} Host headers: send one")
    if hosts and not HOST.fullmatch(hosts[0]):
        raise Refusal(400, "the Host header is not a name or an address, with a port or without")
    if any(name == b"transfer-encoding" and value.lower() != b"chunked" for name, value in headers):
        raise Refusal(400, "the only transfer encoding supported is chunked")


def _head_refusal() -> Refusal:
    return Refusal(431, f"path, headers and trailers have more than {MAX_HEAD} bytes: send less")


def _to_bytes(response: Response) -> bytes:
    lines = [STATUS_LINE[response.status_code]]
    lines += [name + b": " + value + b"\r\n" for name, value in response.raw_headers]
    return b"".join([*lines, b"connection: close\r\n\r\n", bytes(response.body)])
