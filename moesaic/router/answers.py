"""Answers of a router: streams that it passes on, and those of its own."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from moesaic.router.workers import Worker


class Events(StreamingResponse):
    """A stream that ends the instance's work however it ends itself: a client may leave before its
    first event, when nothing has been asked of the source yet."""

    def __init__(
        self,
        source: AsyncGenerator[bytes, None],
        first: AsyncExitStack,
        status: int,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(source, status, headers)
        self._source, self._first = source, first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._source.aclose()
            await self._first.aclose()


def unavailable(workers: list[Worker]) -> Response:
    told = "; ".join(f"{one.url}: {one.why or 'it did not answer'}" for one in workers)
    message = f"no instance can answer: {told}"
    error = {"message": message, "type": "server_error", "param": None, "code": 503}
    return Response(
        json.dumps({"error": error}), 503, {"Retry-After": "1"}, media_type="application/json"
    )
