"""A server from start to end: loads the model, listens, and stops in order."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import resource
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
from starlette.types import ASGIApp

from moesaic.config import ServerArgs
from moesaic.core.process import forget_api_keys
from moesaic.engine.engine import Engine
from moesaic.server.admission import Admission
from moesaic.server.app import ROUTES, make_app
from moesaic.server.auth import Keys
from moesaic.server.connections import Shares
from moesaic.server.http_protocol import ConnectionLimits, guarded

logger = logging.getLogger(__name__)

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
# When requests have ended their answers must leave; who does not read them is cut off.
LEAVE_SECONDS: Final = 5
KEEP_ALIVE_SECONDS: Final = 30
# Connections beyond those of requests that run or wait: probes, metrics, idle ones.
SPARE_CONNECTIONS: Final = 1024
# Descriptors for anything but connections.
SPARE_FILES: Final = 256
# A server that can have fewer is not started.
FEWEST_CONNECTIONS: Final = 64
LOOK_SECONDS: Final = 0.1
STILL_LOADING_SECONDS: Final = 10.0
PROBES: Final = frozenset(route.path for route in ROUTES if route.probe)


def serve(args: ServerArgs, listener: socket.socket) -> int:
    """Serves until a signal (status 0) or a fault of the engine (status 1)."""
    keys = Keys.of(args)  # before anything is loaded, so that a wrong one is told at once
    forget_api_keys()  # libraries start compilers, which would inherit them
    _check_files()
    address = listener.getsockname()[0]
    if not keys and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        logger.warning("--host %s is open to others and there is no --api-key", args.host)
    with _exit_on_signals(), closing(listener):
        with _progress(args.model_path):
            engine = Engine(apart=True, **asdict(args))
        try:
            if not args.skip_server_warmup:
                warm_up(engine)
            server = Server(engine, listener, keys)
            with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
                runner.run(server.serve_until_told())
            return 1 if engine.fault else 0
        finally:
            engine.shutdown()
            logger.info("the server has stopped")


def warm_up(engine: Engine) -> None:
    """A prompt and some tokens through every rank, so that the first client does not wait for what
    is made at first use."""
    begun, groups = time.monotonic(), list(range(engine.mesh.num_groups))
    engine.generate(
        input_ids=[[0, 0, 0, 0] for _ in groups],
        sampling_params={"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True},
        data_parallel_rank=groups,
    )
    logger.info("warmed up in %.1f s", time.monotonic() - begun)


class Server(uvicorn.Server):
    """uvicorn, with signals and the end of the engine dealt with here."""

    def __init__(self, engine: Engine, listener: socket.socket, keys: Keys) -> None:
        self.stopping = False
        app = make_app(engine, lambda: self.stopping, keys)
        self._admission: Admission = app.state.context.admission
        shares = Shares.of(_connections(self._admission.most_open))
        super().__init__(config_of(app, ConnectionLimits(shares, PROBES)))
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
            if (
                self.force_exit
            ):  # which uvicorn leaves to be cancelled, and that is logged as an error
                with suppress(TimeoutError):
                    async with asyncio.timeout(LEAVE_SECONDS):
                        await self.lifespan.shutdown()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own would raise the signal again at the end, and so spoil the status."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # A search through all that was imported holds every thread for 0.3 to 0.4 s, and many
        # requests bring one about. What is there by now stays: it need not be searched.
        gc.collect()
        gc.freeze()
        await super().startup(sockets)
        host, port = self._listener.getsockname()[:2]
        logger.info("The server is fired up and ready to roll!")
        print(f"ready: http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)

    def _stop(self, number: signal.Signals) -> None:
        if self.stopping:
            logger.info("%s again: the server ends now", number.name)
            self.should_exit = self.force_exit = True
        else:
            seconds = self._engine.args.drain_timeout
            logger.info("%s: open requests have %g s to finish", number.name, seconds)
        self.stopping = True

    async def _end(self) -> None:
        """Stops the server after a fault, or when what was open at a signal is done; until then it
        still listens, so that whoever comes is told to go elsewhere."""
        while not (self.stopping or self._engine.fault):
            await asyncio.sleep(LOOK_SECONDS)
        if self._engine.fault:
            logger.error("the server stops: its engine has failed")
        self.stopping = True
        end = time.monotonic() + self._engine.args.drain_timeout
        while self._is_busy and time.monotonic() < end:
            await asyncio.sleep(LOOK_SECONDS)
        await asyncio.to_thread(self._engine.shutdown)
        self.should_exit = True

    @property
    def _is_busy(self) -> bool:
        door = self._admission
        return bool(
            (door.calls or door.arriving or door.waiting or door.running)
            and not self._engine.fault
            and not self.force_exit
        )


def config_of(app: ASGIApp, limits: ConnectionLimits) -> uvicorn.Config:
    """What uvicorn is told. It would believe `X-Forwarded-For` of clients on this machine, who
    could then be as many clients as they like."""
    return uvicorn.Config(
        app,
        http=guarded(limits),
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=LEAVE_SECONDS,
    )


def _connections(most_open: int) -> int:
    """As many as can be of use, if there are descriptors for them."""
    wanted = most_open + SPARE_CONNECTIONS
    return min(wanted, _files(wanted + SPARE_FILES) - SPARE_FILES)


def _check_files() -> None:
    """Refuses to start where there are too few descriptors to serve anybody."""
    needed = SPARE_FILES + FEWEST_CONNECTIONS
    if (found := _files(needed)) < needed:
        raise ValueError(
            f"this process may open {found} files and the server needs {needed}, {SPARE_FILES} for "
            f"itself and {FEWEST_CONNECTIONS} for connections: raise the limit with ulimit -n "
            "4096, in systemd LimitNOFILE=4096, in docker --ulimit nofile=4096"
        )


def _files(wanted: int) -> int:
    """How many descriptors this process may have, which is set to the number wanted, or the nearest
    that the system allows, where it was lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    now, most = (sys.maxsize if n == resource.RLIM_INFINITY else n for n in (soft, hard))
    if now < min(wanted, most):
        now = min(wanted, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (now, hard))
    return now


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
