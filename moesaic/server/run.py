"""The life of a server: loads the model, listens, drains and stops."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import os
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

from moesaic.comm.launch.keeper_link import KeeperLink, Note
from moesaic.config import ServerArgs
from moesaic.core.process import STOP_SIGNALS, forget_api_keys, handling_signals
from moesaic.engine.engine import Engine
from moesaic.server.admission import AdmissionQueue
from moesaic.server.app import ROUTES, make_app
from moesaic.server.auth import Keys
from moesaic.server.connections import ConnectionQuotas
from moesaic.server.http_protocol import ConnectionLimits, protocol_with
from moesaic.server.request_log import AccessFilter, set_up_request_log
from moesaic.server.tls import check_certificate, refresh_certificate, tls_options

logger = logging.getLogger(__name__)

# Time that clients have to read the last answers at shutdown.
SHUTDOWN_SECONDS: Final = 5
KEEP_ALIVE_SECONDS: Final = 30
# Connections besides those of running and queued requests: probes, metrics, idle ones.
SPARE_CONNECTIONS: Final = 1024
# File descriptors besides those of connections.
SPARE_FILES: Final = 256
# The server refuses to start with fewer.
FEWEST_CONNECTIONS: Final = 64
POLL_SECONDS: Final = 0.1
STILL_LOADING_SECONDS: Final = 10.0
PROBES: Final = frozenset(route.path for route in ROUTES if route.probe)


def serve(args: ServerArgs, listener: socket.socket, keeper: KeeperLink | None = None) -> int:
    """Serves until a signal (status 0) or a fault of the engine (status 1). `keeper`: starts this
    process again if it is lost."""
    keys = Keys.of(args)  # a wrong key is an error before anything is loaded
    check_certificate(args)
    set_up_request_log(args)
    forget_api_keys()  # libraries start compilers, which would inherit them
    _check_file_limit()
    address = listener.getsockname()[0]
    if not keys and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        logger.warning("--host %s is reachable by others and there is no --api-key", args.host)
    start = StartSignals()
    with handling_signals(start.end), closing(listener):
        with _progress(args.model_path):
            engine = Engine(apart=True, keeper=keeper, **asdict(args))
        try:
            if not args.skip_server_warmup and (keeper is None or keeper.is_start):
                warm_up(engine)
            server = Server(engine, listener, keys, start)
            with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
                _run(runner, server, keeper)
            return 1 if engine.fault else 0
        finally:
            engine.shutdown()
            logger.info("the server has stopped")


def _run(runner: asyncio.Runner, server: Server, keeper: KeeperLink | None) -> None:
    try:
        runner.run(server.serve_until_stopped())
    except Exception:
        if keeper is None:
            raise
        logger.exception("the HTTP process failed")
        os._exit(1)  # its keeper starts another one, for which ranks go on
    if keeper is not None:
        keeper.tell(Note(ended=True))


def warm_up(engine: Engine) -> None:
    """Runs a short request on every rank, so that the first client does not wait for lazy setup."""
    start, groups = time.monotonic(), list(range(engine.mesh.num_groups))
    if engine.server_args.enable_eplb:
        engine.hold_rebalances()
    engine.generate(
        input_ids=[[0, 0, 0, 0] for _ in groups],
        sampling_params={"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True},
        data_parallel_rank=groups,
    )
    if engine.server_args.enable_eplb:
        engine.forget_load()
    logger.info("warmed up in %.1f s", time.monotonic() - start)


class Server(uvicorn.Server):
    """uvicorn's server, with our handling of signals and engine faults."""

    def __init__(
        self,
        engine: Engine,
        listener: socket.socket,
        keys: Keys,
        start: StartSignals | None = None,
    ) -> None:
        self.stopping, args, self._start = False, engine.args, start
        app = make_app(engine, lambda: self.stopping, keys)
        self._admission: AdmissionQueue = app.state.context.admission
        quotas = ConnectionQuotas.of(max_connections(self._admission.most_open))
        super().__init__(config_of(app, ConnectionLimits(quotas, PROBES), args))
        self._engine, self._listener = engine, listener

    async def serve_until_stopped(self) -> None:
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        if self._start is not None:  # from here on, signals are the loop's
            self._start.check()
        tasks = [asyncio.create_task(self._stop_when_drained())]
        if self._engine.args.enable_ssl_refresh:
            self.config.load()
            assert self.config.ssl is not None, "it needs a certificate"
            refresh = refresh_certificate(self.config.ssl, self._engine.args)
            tasks.append(asyncio.create_task(refresh))
        try:
            await self.serve(sockets=[self._listener])
        finally:
            for task in tasks:
                task.cancel()
            for ended in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(ended, Exception):
                    logger.error("a task of the server failed: %r", ended)
            if self.force_exit:
                # uvicorn would cancel the lifespan, which is logged as an error.
                with suppress(TimeoutError):
                    async with asyncio.timeout(SHUTDOWN_SECONDS):
                        await self.lifespan.shutdown()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn would raise the signal again at the end, which changes the exit status."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # A full collection of all imported objects stops every thread for 0.3 to 0.4 s. They stay
        # alive, so freezing excludes them.
        gc.collect()
        gc.freeze()
        await super().startup(sockets)
        host, port = self._listener.getsockname()[:2]
        logger.info("The server is fired up and ready to roll!")
        scheme = "https" if self.config.is_ssl else "http"
        self._engine.note_serving()
        print(f"ready: {scheme}://{f'[{host}]' if ':' in host else host}:{port}", flush=True)

    def _on_signal(self, number: signal.Signals) -> None:
        if self.stopping:
            logger.info("%s again: the server stops now", number.name)
            self.should_exit = self.force_exit = True
        else:
            seconds = self._engine.args.drain_timeout
            logger.info("%s: open requests have %g s to finish", number.name, seconds)
        self.stopping = True

    async def _stop_when_drained(self) -> None:
        """Stops after a fault, or after a signal when open requests are done; refuses new ones."""
        while not (self.stopping or self._engine.fault):
            await asyncio.sleep(POLL_SECONDS)
        if self._engine.fault:
            logger.error("the server stops: the engine has failed")
        self.stopping = True
        end = time.monotonic() + self._engine.args.drain_timeout
        while self._is_busy and time.monotonic() < end:
            await asyncio.sleep(POLL_SECONDS)
        await asyncio.to_thread(self._engine.shutdown)
        self.should_exit = True

    @property
    def _is_busy(self) -> bool:
        queue = self._admission
        return bool(
            (queue.calls or queue.arriving or queue.waiting or queue.running)
            and not self._engine.fault
            and not self.force_exit
        )


def config_of(
    app: ASGIApp, limits: ConnectionLimits, args: ServerArgs | None = None
) -> uvicorn.Config:
    """uvicorn's configuration; with `proxy_headers` a client could pretend to be many."""
    args = args or ServerArgs()
    level = args.log_level_http or "warning"
    access_log = logging.getLogger("uvicorn.access")
    access_log.filters = [AccessFilter(args.uvicorn_access_log_exclude_prefixes)]
    return uvicorn.Config(
        app,
        http=protocol_with(limits),
        ws="none",
        log_config=None,
        log_level=level,
        access_log=level in ("debug", "info"),
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        **tls_options(args),
    )


def max_connections(most_open: int) -> int:
    """As many connections as requests need, if the file limit allows."""
    useful = most_open + SPARE_CONNECTIONS
    return min(useful, _raise_file_limit(useful + SPARE_FILES) - SPARE_FILES)


def _check_file_limit() -> None:
    needed = SPARE_FILES + FEWEST_CONNECTIONS
    if (found := _raise_file_limit(needed)) < needed:
        raise ValueError(
            f"this process may open {found} files and the server needs {needed}, {SPARE_FILES} for "
            f"itself and {FEWEST_CONNECTIONS} for connections: raise the limit with ulimit -n "
            "4096, in systemd LimitNOFILE=4096, in docker --ulimit nofile=4096"
        )


def _raise_file_limit(needed: int) -> int:
    """Raises the limit on file descriptors to `needed`, as far as the system allows; the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    now, most = (sys.maxsize if n == resource.RLIM_INFINITY else n for n in (soft, hard))
    if now < min(needed, most):
        now = min(needed, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (now, hard))
    return now


class StartSignals:
    """While loading, a signal ends the process with the status that a shell reports for it."""

    def __init__(self) -> None:
        self._number: int | None = None

    def end(self, number: int, _: FrameType | None) -> None:
        self._number = number
        logger.info("%s: the server was not ready yet", signal.Signals(number).name)
        self.check()

    def check(self) -> None:
        """Ends the process after a signal. Python drops an exception that a handler raises in a
        finalizer or a callback of C code, so that loading goes on."""
        if self._number is not None:
            sys.exit(128 + self._number)


@contextmanager
def _progress(model: str) -> Iterator[None]:
    """Logs that loading continues, so that a slow load does not look like a hang."""
    done, start = threading.Event(), time.monotonic()

    def report() -> None:
        while not done.wait(STILL_LOADING_SECONDS):
            logger.info("still loading %s after %.0f s", model, time.monotonic() - start)

    logger.info("loading %s", model)
    thread = threading.Thread(target=report, daemon=True, name="progress")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    logger.info("loaded in %.1f s", time.monotonic() - start)
