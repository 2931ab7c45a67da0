"""The connection itself: limits on its head, its pace and its number, before any handler is asked.

uvicorn's protocol does the rest. It has no limit on the size of a head, nor on the time in which
one comes or an answer is read, and tells only the newest of pipelined requests that the client has
left.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, Final

import httptools
from starlette.responses import Response
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from moesaic.server.errors import Refusal

MAX_HEAD: Final = 16 << 10
# From its first byte to its last; a connection without any request has as long.
REQUEST_SECONDS: Final = 30.0
# In which a client must take something of what waits for it.
WRITE_SECONDS: Final = 60.0
LOOKS: Final = 8
# What is thrown away of a body that was refused, so that the client reads why instead of an error.
MAX_DISCARDED: Final = 16 << 20
MAX_PIPELINED: Final = 64
# Clients may propose another protocol, and some do with every request. The parser then takes the
# body for that protocol, so it is not to see it.
UPGRADE: Final = re.compile(rb"\r\nupgrade:", re.IGNORECASE)


class GuardedProtocol(HttpToolsProtocol):
    """`request_seconds`, `write_seconds` and `max_connections` are set by `guarded`."""

    request_seconds = REQUEST_SECONDS
    write_seconds = WRITE_SECONDS
    max_connections = 1024

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = self._begun = False
        self._messages = self._head_bytes = self._unread_head = self._discarded = 0
        self._running: RequestResponseCycle | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._deaf = False
        self._look: asyncio.TimerHandle | None = None
        self._unsent = self._looks = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._end(Refusal(503, "too many connections: try again later"))
        else:
            self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
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
        message = self._messages if self._in_head else -1
        if (self._in_head or not self._begun) and b"pgrade:" in data:
            data = UPGRADE.sub(b"\r\nx-upgrade:", data, count=1)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # The header came in pieces; what follows it the parser does not read.
            self._deaf = True
            self.cycle.keep_alive = False
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._end(cause if isinstance(cause, Refusal) else Refusal(400, "this is no HTTP"))
            return
        if self._in_head and self._messages == message:
            # The parser keeps the beginning of a header until it has the end.
            self._unread_head += len(data)
            if self._unread_head > MAX_HEAD:
                self._end(_head_refusal())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = self._begun = True
        self._messages += 1
        self._head_bytes = self._unread_head = self._discarded = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._head_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._head_bytes > MAX_HEAD:
            raise _head_refusal()
        super().on_headers_complete()
        self._in_head = False
        if len(self.pipeline) > MAX_PIPELINED:
            raise Refusal(400, f"more than {MAX_PIPELINED} requests without reading an answer")

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if self.cycle.response_complete:
            self._discarded += len(body)
            if self._discarded > MAX_DISCARDED:
                self.transport.close()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = self._begun = False
        self._expect_nothing()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._looks = 0

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_reader()

    def send_400_response(self, msg: str) -> None:
        self._end(Refusal(400, msg))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _expect(self) -> None:
        self._expect_nothing()
        self._deadline = self.loop.call_later(self.request_seconds, self._late)

    def _expect_nothing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        self._deadline = None
        if self._begun:
            message = f"the request did not come within {self.request_seconds:g} s"
            self._end(Refusal(408, message))
        elif self._running is None or self._running.response_complete:
            self.transport.close()  # nobody has asked for anything

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
            self._look = self.loop.call_later(self.write_seconds / LOOKS, self._look_at_reader)

    def _look_at_reader(self) -> None:
        before, self._unsent = self._unsent, self.transport.get_write_buffer_size()
        self._looks = 0 if self._unsent < before else self._looks + 1
        if self._looks < LOOKS:
            self._look_again()
        else:
            self.transport.abort()


def guarded(
    request_seconds: float = REQUEST_SECONDS,
    max_connections: int = 1024,
    write_seconds: float = WRITE_SECONDS,
) -> type[GuardedProtocol]:
    """The protocol with these limits."""
    limits = {
        "request_seconds": request_seconds,
        "max_connections": max_connections,
        "write_seconds": write_seconds,
    }
    return type("GuardedProtocol", (GuardedProtocol,), limits)


def _head_refusal() -> Refusal:
    return Refusal(431, f"path and headers have more than {MAX_HEAD} bytes: send less")


def _raw(response: Response) -> bytes:
    lines = [STATUS_LINE[response.status_code]]
    lines += [name + b": " + value + b"\r\n" for name, value in response.raw_headers]
    return b"".join([*lines, b"connection: close\r\n\r\n", bytes(response.body)])
