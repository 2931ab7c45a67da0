"""A server process for benchmarks, and what it must have given back when they are over."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

START_SECONDS: Final = 300.0
END_SECONDS: Final = 60.0
# Lines of the log that an error shows.
SHOWN_LINES: Final = 30
SETTLE_SECONDS: Final = 30.0
# What Python and its allocator may keep of a load for the next one.
KEPT_BYTES: Final = 192 << 20
# Linux gives connections, and servers that ask for any port, those from 32768 on.
FREE_PORTS: Final = range(20_000, 30_000)


@dataclass(frozen=True)
class Server:
    """`pid` is None for one that somebody else runs."""

    url: str
    pid: int | None

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=30) as response:
            return json.load(response)


@dataclass(frozen=True)
class ServerState:
    """What must not grow: requests, pages in use, sockets of the HTTP process, its memory."""

    running: int
    waiting: int
    pages_in_use: int
    sockets: int
    rss: int

    @classmethod
    def of(cls, server: Server) -> ServerState:
        import psutil  # only here: servers can be measured on machines without it

        info = server.get("/server_info")
        sockets = rss = 0
        if server.pid is not None:
            process = psutil.Process(server.pid)
            connections = process.net_connections("tcp")
            sockets = sum(1 for c in connections if c.status != psutil.CONN_LISTEN)
            rss = process.memory_info().rss
        in_use = info["pages_used"] - info["pages_cached"]
        return cls(info["running"], info["waiting"], in_use, sockets, rss)

    def beyond(self, before: ServerState) -> list[str]:
        counts = [
            f"{name} {getattr(self, name)} (before: {getattr(before, name)})"
            for name in ("running", "waiting", "pages_in_use", "sockets")
            if getattr(self, name) > getattr(before, name)
        ]
        if self.rss > before.rss + KEPT_BYTES:
            counts.append(f"memory {(self.rss - before.rss) >> 20} MiB")
        return counts


def settle(server: Server, before: ServerState) -> list[str]:
    """What is left behind once it has had time to end what it was told to."""
    end = time.monotonic() + SETTLE_SECONDS
    while (left := ServerState.of(server).beyond(before)) and time.monotonic() < end:
        time.sleep(0.2)
    return left


@contextlib.contextmanager
def started(
    model: str,
    flags: Sequence[str],
    log: Path | None = None,
    seconds: float = START_SECONDS,
    module: str = "moesaic.launch_server",
) -> Iterator[Server]:
    """Yields a server that is ready, on a free port; it must end in order afterwards. Its output
    goes to `log`, and the end of that is in the error where it does not start or does not end.
    `module`: what starts it."""
    with tempfile.TemporaryDirectory() as folder:
        path, port = log or Path(folder, "server.log"), free_port()
        command = [sys.executable, "-m", module, "--model-path", model]
        command += ["--port", str(port), *flags]
        command += [] if "--log-level" in flags else ["--log-level", "warning"]
        env = os.environ | {"MOESAIC_PROFILER_DIR": folder}
        with path.open("w") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env)
        try:
            _wait_until_ready(process, path, seconds)
            yield Server(f"http://127.0.0.1:{port}", process.pid)
            process.terminate()
            if (status := process.wait(END_SECONDS)) != 0:
                raise RuntimeError(f"the server ended with status {status}{_tail(path)}")
        finally:
            _end(process)


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not re.search(r"^ready: ", log.read_text(errors="replace"), re.MULTILINE):
        if (status := process.poll()) is not None:
            raise RuntimeError(f"the server ended with status {status} at start{_tail(log)}")
        if time.monotonic() > end:
            raise RuntimeError(f"the server is not ready after {seconds:g} s{_tail(log)}")
        time.sleep(0.1)


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-SHOWN_LINES:]
    return "\n".join(["; the end of its log:", *lines]) if lines else ", and it logged nothing"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process in order if that is possible, so that its ranks end with it."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    process.kill()
    process.wait()


def free_port() -> int:
    """A port that nobody is given before its server comes."""
    while True:
        port = random.SystemRandom().choice(FREE_PORTS)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
