"""A server from start to end: loads the model, listens, and stops in order."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from types import FrameType
from typing import Final

import uvicorn

from moesaic.config import ServerArgs
from moesaic.engine.engine import Engine
from moesaic.server.app import make_app

logger = logging.getLogger(__name__)

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
# Running requests may finish for so long after a signal; then they end with an error.
DRAIN_SECONDS: Final = 5.0
# After that the answers must leave; who does not read them is cut off.
LEAVE_SECONDS: Final = 5
LOOK_SECONDS: Final = 0.1
STILL_LOADING_SECONDS: Final = 10.0


def serve(args: ServerArgs, listener: socket.socket) -> int:
    """Serves until a signal (status 0) or a fault of the engine (status 1)."""
    with _exit_on_signals(), closing(listener):
        with _progress(args.model_path):
            engine = Engine(apart=True, **asdict(args))
        try:
            server = Server(engine, listener)
            with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
                runner.run(server.serve_until_told())
            return 1 if engine.fault else 0
        finally:
            engine.shutdown()
            logger.info("the server has stopped")


class Server(uvicorn.Server):
    """uvicorn, with signals and the end of the engine dealt with here."""

    def __init__(self, engine: Engine, listener: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                make_app(engine, lambda: self.should_exit),
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=int(DRAIN_SECONDS) + LEAVE_SECONDS,
            )
        )
        self._engine, self._listener = engine, listener

    async def serve_until_told(self) -> None:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._stop, number)
        end = asyncio.create_task(self._end())
        try:
            await self.serve(sockets=[self._listener])
        finally:
            end.cancel()
            with suppress(asyncio.CancelledError):
                await end

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own would raise the signal again at the end, and so spoil the status."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        host, port = self._listener.getsockname()[:2]
        logger.info("The server is fired up and ready to roll!")
        print(f"ready: http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)

    def _stop(self, number: signal.Signals) -> None:
        if self.should_exit:
            self.force_exit = True  # asked twice
        logger.info("%s: running requests have %g s to finish", number.name, DRAIN_SECONDS)
        self.should_exit = True

    async def _end(self) -> None:
        """Stops the server after a fault, and the engine if it keeps a server that is to stop."""
        while not (self.should_exit or self._engine.fault):
            await asyncio.sleep(LOOK_SECONDS)
        if self._engine.fault:
            logger.error("the server stops: its engine has failed")
        self.should_exit = True
        await asyncio.sleep(DRAIN_SECONDS)
        await asyncio.to_thread(self._engine.shutdown)


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """While nothing is served yet, a signal ends the process and all that it started, with the
    status that a shell gives to one which a signal has ended."""
    before = {number: signal.signal(number, _exit) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit(number: int, _: FrameType | None) -> None:
    logger.info("%s: the server was not ready yet", signal.Signals(number).name)
    sys.exit(128 + number)


@contextmanager
def _progress(model: str) -> Iterator[None]:
    """Says that loading goes on, so that a long one is not taken for a hang."""
    done, start = threading.Event(), time.monotonic()

    def say() -> None:
        while not done.wait(STILL_LOADING_SECONDS):
            logger.info("still loading %s after %.0f s", model, time.monotonic() - start)

    logger.info("loading %s", model)
    thread = threading.Thread(target=say, daemon=True, name="progress")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    logger.info("loaded in %.1f s", time.monotonic() - start)
