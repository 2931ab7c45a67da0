"""How answers leave: JSON, events of a stream, and work that ends when its client does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from moesaic.server.errors import INTERNAL, Refusal

logger = logging.getLogger(__name__)

DONE: Final = b"data: [DONE]\n\n"
# What the event loop does itself, in microseconds.
LIGHT: Final = 2000
# Of one call of the encoder, which lets no other thread run.
RUN_BYTES: Final = 1 << 18
# From an answer to the lists in it that may be long: the answer, its logprobs.
DEPTH: Final = 2
# Those that JSON leaves as they are: it escapes the controls below U+0020.
UNICODE_LINE_ENDS: Final = tuple(
    (char.encode(), f"\\u{ord(char):04x}".encode()) for char in "\u0085\u2028\u2029"
)

Result = TypeVar("Result")
_encoder = msgspec.json.Encoder()


def json_response(value: Any) -> Response:
    return Response(_encoder.encode(value), media_type="application/json")


def event(value: Any) -> bytes:
    return json_event(_encoder.encode(value))


def json_event(json: bytes) -> bytes:
    """The event with this JSON. The line ends of Unicode, which JSON has only in texts, are
    escaped: clients that split decoded text with `str.splitlines`, such as httpx's `iter_lines`,
    take each for the end of the line."""
    for end, escaped in UNICODE_LINE_ENDS:
        json = json.replace(end, escaped)
    return b"data: " + json + b"\n\n"


class Writer:
    """Builds large answers in a thread, where the event loop gets its turn every few milliseconds.
    There is one thread: of several, each would have its turn before the loop."""

    def __init__(self, _: object = None) -> None:
        self._thread = ThreadPoolExecutor(1, "moesaic-writer")

    async def write(self, weight: int, build: Callable[[], Result]) -> Result:
        """`weight`: about how many microseconds it takes."""
        if weight <= LIGHT:
            return build()
        return await asyncio.get_running_loop().run_in_executor(self._thread, build)


def prepared(value: Any, weight: int) -> Any:
    """For the encoder: what is large is encoded already, in runs that are short."""
    return value if weight <= LIGHT else msgspec.Raw(b"".join(_pieces(value, DEPTH)))


def _pieces(value: Any, depth: int) -> Iterator[bytes]:
    """The JSON of a value."""
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
        yield from _pieces(value, depth)
        separator = b","
    yield b"{}" if separator == b"{" else b"}"


def _runs(items: list[Any]) -> Iterator[bytes]:
    """Starts with one item, as nobody knows how large they are."""
    separator, start, size = b"[", 0, 1
    while start < len(items):
        run = _encoder.encode(items[start : start + size])
        yield separator + run[1:-1]
        separator, start = b",", start + size
        size = max(1, min(2 * size, RUN_BYTES * size // len(run)))
    yield b"]"


class Events(StreamingResponse):
    """Server-sent events, encoded already, and [DONE]. The source is closed when the client leaves,
    too, which aborts what it stands for."""

    def __init__(self, source: AsyncGenerator[bytes, None]) -> None:
        self._source = _to_the_end(source)
        super().__init__(self._source, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # starlette would use a group of tasks with scopes here, which costs more than the tasks.
        try:
            with suppress(ClientDisconnect):
                await while_connected(Request(scope, receive), self.stream_response(send))
        finally:
            await self._source.aclose()


async def _to_the_end(source: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The status is sent already, so an error is an event: no stream is merely cut."""
    try:
        async with aclosing(source):
            async for data in source:
                yield data
    except Refusal as refusal:
        yield event(refusal.body())
    except Exception:
        logger.exception("a stream failed")
        yield event(Refusal(500, INTERNAL).body())
    yield DONE


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """What the work gives; it is cancelled, which aborts its requests, if the client leaves."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
