"""A server process for benchmarks, and what it must have given back when they are over."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psutil

SETTLE_SECONDS: Final = 30.0
# What Python and its allocator may keep of a load for the next one.
KEPT_BYTES: Final = 192 << 20


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
    model: str, flags: Sequence[str], module: str = "moesaic.launch_server"
) -> Iterator[Server]:
    """A server that is ready, on a free port; it must end in order afterwards. `module`: what
    starts it."""
    with socket.create_server(("127.0.0.1", 0)) as free, tempfile.TemporaryDirectory() as folder:
        port = free.getsockname()[1]
        free.close()
        command = [sys.executable, "-m", module, "--model-path", model]
        command += ["--port", str(port), "--log-level", "warning", *flags]
        env = os.environ | {"MOESAIC_PROFILER_DIR": folder}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
        try:
            assert process.stdout is not None
            if not process.stdout.readline().startswith("ready: "):
                raise RuntimeError(f"{' '.join(command)} ended with status {process.wait()}")
            yield Server(f"http://127.0.0.1:{port}", process.pid)
            process.terminate()
            if (status := process.wait(60)) != 0:
                raise RuntimeError(f"the server ended with status {status}")
        finally:
            process.kill()
            process.wait()
