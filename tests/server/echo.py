"""An app that answers with what it was sent, behind the server's protocol: it needs no engine."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from moesaic.server.responses import EventStream
from tests.server.serving import Listening, status_of, wait_until

GET = b"GET /echo HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /echo HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
HALF_HEAD = b"GET /echo HTTP/1.1\r\nHost: "
HALF_BODY = POST + b"Content-Length: 5\r\n\r\nab"
PROBE = GET.replace(b"/echo", b"/health")
METHODS = ["GET", "POST"]
EVENTS = [b"data: %d %s\n\n" % (number, b"a" * 1000) for number in range(2000)]


class Echo(Listening):
    """`/hold` is answered when `go_on` is set, `/refuse` before the body is read, `/endless` for as
    long as the client reads, `/events` with a stream of EVENTS."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        endpoints = {
            "/hold": self.hold,
            "/refuse": self.refuse,
            "/endless": self.endless,
            "/events": self.events,
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

    async def events(self, _: Request) -> EventStream:
        async def source() -> AsyncGenerator[bytes, None]:
            for data in EVENTS:
                yield data
                await asyncio.sleep(0)

        return EventStream(source())

    def wait_for(self, number: int) -> None:
        wait_until(lambda: len(self.server.server_state.connections) == number)


def connect(echo: Echo, data: bytes = b"", host: str = "127.0.0.1") -> socket.socket:
    address = "127.0.0.1", echo.port
    connection = socket.create_connection(address, timeout=60, source_address=(host, 0))
    connection.sendall(data)
    return connection


def answer_of(said: bytes) -> Any:
    assert status_of(said) == 200, said
    return json.loads(said.partition(b"\r\n\r\n")[2])
