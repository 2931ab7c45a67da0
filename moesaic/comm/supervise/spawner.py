"""Starting processes from a fork server with torch loaded, while the supervisor hears all else."""

from __future__ import annotations

import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from moesaic.comm.supervise import fork_server
from moesaic.core.process import without_secrets_in_environment


@dataclass(frozen=True, slots=True)
class SpawnJob:
    """A process to start: it calls "package.module:function" with the arguments."""

    name: str
    target: str
    args: tuple[Any, ...]


class Spawner:
    """Made in the main thread: the fork server lives as long as the thread that started it."""

    def __init__(self, preload: Sequence[str]) -> None:
        os.environ[fork_server.SUPERVISOR] = str(os.getpid())
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([fork_server.__name__, *preload])
        with without_secrets_in_environment():  # ranks need none of them
            multiprocessing.forkserver.ensure_running()
        self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable when a process was born, or none can be."""
        self._born: deque[BaseProcess] = deque()
        self._trouble = ""
        self._wanted: SimpleQueue[BaseProcess] = SimpleQueue()
        threading.Thread(target=self._start, daemon=True, name="nursery").start()

    def start(self, jobs: Sequence[SpawnJob]) -> None:
        """Returns at once."""
        for job in jobs:
            args = (job.target, *job.args)
            self._wanted.put(self._context.Process(target=call, args=args, name=job.name))

    def take(self) -> tuple[list[BaseProcess], str]:
        """The processes born since the last call, and why there will be no others, if so."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.bell)
        born = []
        with suppress(IndexError):
            while True:
                born.append(self._born.popleft())
        return born, self._trouble

    def _start(self) -> None:
        # The first start waits until the fork server has loaded torch: seconds.
        try:
            while True:
                process = self._wanted.get()
                process.start()
                self._born.append(process)
                os.eventfd_write(self.bell, 1)
        except Exception as error:
            self._trouble = f"no process can be started: {error!r}"
            os.eventfd_write(self.bell, 1)


def call(target: str, *args: Any) -> None:
    """By name, since the supervisor does not load what it starts."""
    function_of(target)(*args)


def function_of(target: str) -> Callable[..., Any]:
    """Of "package.module:function"."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def kill_children() -> None:
    """End what this process has started itself: the fork server, and who cleans up after it."""
    for path in Path("/proc/self/task").glob("*/children"):
        for pid in map(int, path.read_text().split()):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
