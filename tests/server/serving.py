"""Shared by the tests of the server: the app on a port, raw connections to it, and waiting for what
must come true."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

import httpx
import uvicorn
from starlette.types import ASGIApp

from moesaic.config import ServerArgs
from moesaic.engine.engine import Engine
from moesaic.server.app import make_app
from moesaic.server.connections import ConnectionQuotas
from moesaic.server.context import Context
from moesaic.server.http_protocol import ConnectionLimits
from moesaic.server.listen import bind
from moesaic.server.run import PROBES, config_of

Answer = dict[str, Any]


def served(engine: Engine) -> AbstractContextManager[str]:
    return listening(make_app(engine))


@contextmanager
def listening(app: ASGIApp) -> Iterator[str]:
    """An app on a port, in a thread; its address."""
    listener = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=60)
    assert not thread.is_alive()


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.02)


class Listening:
    """An app in a thread, behind the server's own protocol, with what a test may look at."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.loop: asyncio.AbstractEventLoop | None = None

    @contextmanager
    def serve(
        self,
        seconds: float = 60.0,
        connections: int | ConnectionQuotas = 100,
        write_seconds: float = 60.0,
        args: ServerArgs | None = None,
    ) -> Iterator[Self]:
        listener = bind("127.0.0.1", 0)
        if write_seconds < 60:  # small socket buffers, so that unread answers show
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.port = int(listener.getsockname()[1])
        quotas = ConnectionQuotas.of(connections) if isinstance(connections, int) else connections
        limits = ConnectionLimits(quotas, PROBES, seconds, write_seconds)
        config = config_of(self.app, limits, args)
        self.server = uvicorn.Server(config)

        async def main() -> None:
            self.loop = asyncio.get_running_loop()
            await self.server.serve([listener])

        thread = threading.Thread(target=lambda: asyncio.run(main()))
        thread.start()
        wait_until(lambda: self.server.started)
        try:
            yield self
        finally:
            self.server.should_exit = True
            thread.join(timeout=60)
        assert not thread.is_alive()

    def tasks(self) -> int:
        assert self.loop is not None
        return len(asyncio.all_tasks(self.loop))

    def client(self, **headers: str) -> httpx.Client:
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60, headers=headers)


class Running(Listening):
    """A server around an engine."""

    def __init__(self, engine: Engine) -> None:
        app = make_app(engine)
        super().__init__(app)
        self.engine = engine
        self.context: Context = app.state.context

    def idle(self) -> bool:
        info = self.engine.get_server_info()
        admission = self.context.admission
        return not (info["running"] + info["waiting"] + admission.running + admission.waiting)


def post_head(body: bytes) -> bytes:
    lines = "POST /generate HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"
    return "\r\n".join((*lines, "", "")).encode()


def talk(port: int, data: bytes, seconds: float = 60) -> bytes:
    """All that the server says until it closes, or until it has said a whole answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
        connection.sendall(data)
        return hear(connection)


def hear(connection: socket.socket) -> bytes:
    said = b""
    try:
        while piece := connection.recv(1 << 16):
            said += piece
            head, end, body = said.partition(b"\r\n\r\n")
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            if end and length and len(body) >= int(length):
                break
    except ConnectionResetError:
        pass
    return said


def status_of(said: bytes) -> int:
    assert said.startswith(b"HTTP/1.1 "), said[:200]
    status = int(said.split(b" ", 2)[1])
    if status >= 400:
        error = json.loads(said.partition(b"\r\n\r\n")[2])["error"]
        assert error.keys() == {"message", "type", "param", "code"}
    return status


def wait_until_idle(engine: Engine) -> None:
    def idle() -> bool:
        info = engine.get_server_info()
        return bool(info["running"] == 0 and info["waiting"] == 0)

    wait_until(idle)


@contextmanager
def held(engine: Engine) -> Iterator[None]:
    """No step meanwhile: what runs still runs afterwards."""
    go_on = threading.Event()
    engine._thread.submit(lambda core: go_on.wait(100))
    try:
        yield
    finally:
        go_on.set()


def pieces_of(response: httpx.Response) -> Iterator[Answer]:
    """The events of a stream; [DONE] must be the last."""
    done = False
    for line in response.iter_lines():
        if line:
            assert line.startswith("data: ") and not done
            done = line == "data: [DONE]"
            if not done:
                yield json.loads(line.removeprefix("data: "))
    assert done


def without_times(answer: Answer) -> Answer:
    left_out = ("id", "e2e_latency", "ttft", "cached_tokens", "cached_tokens_details")
    meta = {key: value for key, value in answer["meta_info"].items() if key not in left_out}
    return {**answer, "meta_info": meta}
