"""The store where ranks meet: a process of its own, so that the supervisor needs no torch and no
rank takes the store with it when it dies."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Final

import msgspec
from torch.distributed import Store  # type: ignore[attr-defined]

from moesaic.comm.group import RankGroup
from moesaic.comm.supervise.orphans import die_with_fork_server, name_process

PREFIX: Final = "moesaic/"
CONNECT_SECONDS: Final = 5.0
CONNECT_PAUSE: Final = 0.2


def serve(listener: socket.socket, facts: Mapping[str, str]) -> None:
    """The life of the process: hold the store open. `facts`: what it is to hold from the start."""
    _settle()
    store = RankGroup.serve_store(listener)
    for name, value in facts.items():
        store.set(PREFIX + name, value)
    _stay(store)


def meet(
    host: str,
    port: int,
    timeout: float,
    names: Sequence[str],
    answer: Connection,
) -> None:
    """On another node: fetch the facts with these names from the store, and give them to the
    supervisor; or an "error"."""
    _settle()
    store = None
    try:
        _await_listener(host, port, timeout)
        store = RankGroup.connect_store(host, port, timeout)
        facts = {name: store.get(PREFIX + name).decode() for name in names}
    except (OSError, RuntimeError) as error:
        line = str(error).strip().splitlines()[0]
        facts = {"error": f"node 0 cannot be met at {host}:{port}: {line}"}
    answer.send_bytes(msgspec.msgpack.encode(facts))
    _stay(store)


def _await_listener(host: str, port: int, seconds: float) -> None:
    """Until somebody listens there: nodes start in any order, and torch's own client is loud."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(CONNECT_PAUSE)


def _settle() -> None:
    name_process("moesaic-store")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_fork_server()


def _stay(store: Store | None) -> None:
    """Hold on to the store until this process is ended."""
    threading.Event().wait()
    del store
