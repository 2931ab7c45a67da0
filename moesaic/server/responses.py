"""Responses: JSON, event streams, and work that ends when its client disconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final, Protocol, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moesaic.server.errors import INTERNAL, Refusal

logger = logging.getLogger(__name__)

DONE: Final = b"data: [DONE]\n\n"
RESPONSE_START: Final = "http.response.start"
RESPONSE_BODY: Final = "http.response.body"
# Under this key of its scope a request has a BodyWriter, if the server's protocol gives one.
BODY_WRITER: Final = "moesaic.body_writer"
# Under this key a request has a DisconnectWatch, if the server's protocol gives one.
DISCONNECT: Final = "moesaic.disconnect"
# Microseconds of work that the event loop does itself.
LIGHT: Final = 2000
# Bytes per call of the encoder, which holds Python's lock.
RUN_BYTES: Final = 1 << 18
# Levels of an answer above its long lists: the answer, its logprobs.
DEPTH: Final = 2
# Line ends that JSON does not escape: it escapes only those below U+0020.
UNICODE_LINE_ENDS: Final = tuple(
    (char.encode(), f"\\u{ord(char):04x}".encode()) for char in "\u0085\u2028\u2029"
)

Result = TypeVar("Result")
_encoder = msgspec.json.Encoder()


class BodyWriter(Protocol):
    """Writes parts of a body past ASGI's messages: their way through all middlewares costs more
    than the rest of a token."""

    def accepts(self) -> bool:
        """False while the client does not read, and once it has gone: then they must be sent."""

    def write(self, data: bytes) -> None:
        """Writes a part that is not empty, at once."""

    def start(self, headers: Iterable[tuple[bytes, bytes]], data: bytes) -> bool:
        """Writes the head of a response with status 200 and the first part, in one piece: each call
        of the kernel costs as much as a token. False if the head must be sent by a message."""


class DisconnectWatch:
    """Tells the work for a client that its connection is lost. `resume_reading`: a connection that
    is not read does not notice."""

    __slots__ = ("_on_lost", "_resume_reading", "lost")

    def __init__(self, resume_reading: Callable[[], object] = lambda: None) -> None:
        self._resume_reading = resume_reading
        self._on_lost: Callable[[], object] | None = None
        self.lost = False

    def call(self, on_lost: Callable[[], object] | None) -> None:
        """Calls `on_lost` once the connection is lost, and no earlier callback."""
        self._on_lost = on_lost
        if on_lost is not None:
            self._resume_reading()

    def disconnected(self) -> None:
        self.lost = True
        if self._on_lost is not None:
            self._on_lost()


def json_response(value: Any) -> Response:
    return Response(_encoder.encode(value), media_type="application/json")


def event(value: Any) -> bytes:
    return json_event(_encoder.encode(value))


def json_event(json: bytes) -> bytes:
    """An event with this JSON."""
    return b"data: " + one_line(json) + b"\n\n"


def one_line(json: bytes) -> bytes:
    """Escapes Unicode's line ends, because clients that split decoded text with `str.splitlines`,
    such as httpx's `iter_lines`, would end the line there."""
    if not json.isascii():
        for end, escaped in UNICODE_LINE_ENDS:
            json = json.replace(end, escaped)
    return json


class ResponseWriter:
    """Builds large answers in a thread, so that the event loop runs every few milliseconds. There
    is one thread: several would each take a turn before the loop."""

    def __init__(self, _: object = None) -> None:
        self._thread = ThreadPoolExecutor(1, "moesaic-writer")

    async def write(self, weight: int, build: Callable[[], Result]) -> Result:
        """`weight`: the estimated microseconds that `build` takes."""
        if weight <= LIGHT:
            return build()
        return await asyncio.get_running_loop().run_in_executor(self._thread, build)


def prepared(value: Any, weight: int) -> Any:
    """A value for the encoder; a large one is encoded here, in short runs."""
    return value if weight <= LIGHT else msgspec.Raw(b"".join(_encoded(value, DEPTH)))


def _encoded(value: Any, depth: int) -> Iterator[bytes]:
    if depth and isinstance(value, dict):
        yield from _fields(value.items(), depth - 1)
    elif depth and isinstance(value, msgspec.Struct):
        fields = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
        found = ((name, getattr(value, field)) for name, field in fields)
        yield from _fields((pair for pair in found if pair[1] is not msgspec.UNSET), depth - 1)
    elif isinstance(value, list) and value:
        yield from _runs(value)
    else:
        yield _encoder.encode(value)


def _fields(fields: Iterable[tuple[str, Any]], depth: int) -> Iterator[bytes]:
    separator = b"{"
    for name, value in fields:
        yield separator + _encoder.encode(name) + b":"
        yield from _encoded(value, depth)
        separator = b","
    yield b"{}" if separator == b"{" else b"}"


def _runs(items: list[Any]) -> Iterator[bytes]:
    """Begins with one item, because the size of the items is unknown."""
    separator, start, size = b"[", 0, 1
    while start < len(items):
        run = _encoder.encode(items[start : start + size])
        yield separator + run[1:-1]
        separator, start = b",", start + size
        size = max(1, min(2 * size, RUN_BYTES * size // len(run)))
    yield b"]"


def named_event(name: str, value: Any) -> bytes:
    return f"event: {name}\n".encode() + event(value)


def error_event(refusal: Refusal) -> bytes:
    return event(refusal.body())


class EventStream(Response):
    """Encoded server-sent events; a disconnect closes the source and its requests. `on_error`: the
    event for an error after the status is sent. `end`: what follows the last event. `on_start` gets
    the writer of the body: what arrives while the source waits may be written to it. `tail`: what
    the source left to be sent in one piece with the end."""

    head: Final = ((b"content-type", b"text/event-stream; charset=utf-8"),)

    def __init__(
        self,
        source: AsyncGenerator[bytes, None],
        on_error: Callable[[Refusal], bytes] = error_event,
        end: bytes = DONE,
        on_start: Callable[[BodyWriter], None] | None = None,
        tail: Callable[[], bytes] = bytes,
    ) -> None:
        self.source, self.on_error, self.end = source, on_error, end
        self._on_start, self.tail = on_start, tail
        self.status_code, self.background = 200, None
        self.raw_headers = [*self.head]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # starlette's task group with its scopes costs more.
        try:
            with suppress(ClientDisconnect):
                await while_connected(Request(scope, receive), self._send(scope, send))
        finally:
            await self.source.aclose()

    async def _send(self, scope: Scope, send: Send) -> None:
        """Sends an error as an event, because the status is already sent."""
        writer: BodyWriter | None = scope.get(BODY_WRITER)
        error, started = b"", False
        try:
            async for data in self.source:
                if not started:
                    started = True
                    if writer is not None and writer.start(self.raw_headers, data):
                        self._connect(writer)
                        continue
                    await self._send_head(writer, send)
                if data and writer is not None and writer.accepts():
                    writer.write(data)
                else:
                    await send({"type": RESPONSE_BODY, "body": data, "more_body": True})
        except Refusal as refusal:
            error = self.on_error(refusal)
        except Exception:
            logger.exception("a stream failed")
            error = self.on_error(Refusal(500, INTERNAL))
        if not started:
            await self._send_head(None, send)
        last = self.tail() + error + self.end
        await send({"type": RESPONSE_BODY, "body": last, "more_body": False})

    async def _send_head(self, writer: BodyWriter | None, send: Send) -> None:
        await send({"type": RESPONSE_START, "status": 200, "headers": self.raw_headers})
        self._connect(writer)

    def _connect(self, writer: BodyWriter | None) -> None:
        if writer is not None and self._on_start is not None:
            self._on_start(writer)


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of the work, which is cancelled, with its requests, if the client disconnects."""
    watch: DisconnectWatch | None = request.scope.get(DISCONNECT)
    if watch is None:
        return await _while_receiving(request, work)
    if watch.lost:
        work.close()
        raise ClientDisconnect
    task = asyncio.current_task()
    assert task is not None
    others = task.cancelling()
    watch.call(task.cancel)
    try:
        return await work
    except asyncio.CancelledError:
        # As asyncio.timeout does: another may have cancelled the task, too.
        if watch.lost and task.uncancel() <= others:
            raise ClientDisconnect from None
        raise
    finally:
        watch.call(None)


async def _while_receiving(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """For servers that report a disconnect only by ASGI's messages: it takes two tasks more."""
    task, disconnect = asyncio.create_task(work), asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        disconnect.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
