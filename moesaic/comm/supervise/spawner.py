"""Starts processes from a fork server that has torch loaded, without blocking the supervisor."""

from __future__ import annotations

import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from moesaic.comm.supervise import fork_server
from moesaic.comm.supervise.poll_loop import WakingQueue
from moesaic.core.process import without_secrets_in_environment


class Spawner:
    """Created in the main thread: the fork server ends with the thread that started it."""

    def __init__(self, preload: Sequence[str]) -> None:
        os.environ[fork_server.SUPERVISOR] = str(os.getpid())
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([fork_server.__name__, *preload])
        with without_secrets_in_environment():  # ranks need none of them
            multiprocessing.forkserver.ensure_running()
        self.started: WakingQueue[BaseProcess | Exception] = WakingQueue()
        """The started processes, and the error after which no more can be started."""
        self._queue: SimpleQueue[BaseProcess] = SimpleQueue()
        threading.Thread(target=self._start, daemon=True, name="spawner").start()

    def start(self, name: str, target: str, *args: Any) -> None:
        """Queues a process that calls "package.module:function" with the arguments."""
        self._queue.put(self._context.Process(target=call, args=(target, *args), name=name))

    def _start(self) -> None:
        # The first start waits, for seconds, until the fork server has loaded torch.
        try:
            while True:
                process = self._queue.get()
                with without_secrets_in_environment():  # a fork server that died starts anew
                    process.start()
                self.started.put(process)
        except Exception as error:
            self.started.put(error)


def call(target: str, *args: Any) -> None:
    """Imports the target in the child: the supervisor does not load it."""
    function_of(target)(*args)


def function_of(target: str) -> Callable[..., Any]:
    """Imports "package.module:function"."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def kill_children() -> None:
    """Kills the direct children: the fork server and the resource tracker."""
    for path in Path("/proc/self/task").glob("*/children"):
        for pid in map(int, path.read_text().split()):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
