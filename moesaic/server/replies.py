"""How answers leave: JSON, events of a stream, and work that ends when its client does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from moesaic.server.errors import INTERNAL, Refusal

logger = logging.getLogger(__name__)

DONE: Final = b"data: [DONE]\n\n"

Result = TypeVar("Result")
_encoder = msgspec.json.Encoder()


def json_response(value: Any) -> Response:
    return Response(_encoder.encode(value), media_type="application/json")


def event(value: Any) -> bytes:
    return b"data: " + _encoder.encode(value) + b"\n\n"


class Events(StreamingResponse):
    """Server-sent events, encoded already, and [DONE]. The source is closed when the client leaves,
    too, which aborts what it stands for."""

    def __init__(self, source: AsyncGenerator[bytes, None]) -> None:
        self._source = _to_the_end(source)
        super().__init__(self._source, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
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
