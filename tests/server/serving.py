"""Shared by the tests of the server: the app on a port, and waiting for what must come true."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from moesaic.engine.engine import Engine
from moesaic.server.app import make_app
from moesaic.server.listen import bind


@contextmanager
def served(engine: Engine) -> Iterator[str]:
    """The app on a port, in a thread; its address."""
    listener = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(make_app(engine), log_config=None))
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
