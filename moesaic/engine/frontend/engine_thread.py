"""The engine's thread: it steps the core and runs the commands of other threads in between."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from moesaic.engine.errors import EngineShutDown
from moesaic.engine.frontend.core_client import CoreClient
from moesaic.engine.frontend.queries import CALLER_SECONDS, QueryTimeout
from moesaic.engine.worker.local_core import LocalCore

logger = logging.getLogger(__name__)

Core = LocalCore | CoreClient
Command = Callable[[Core], None]


class EngineThread:
    """Only this thread uses the core. Every other method may be called from any thread."""

    def __init__(self, core: Core) -> None:
        self._core = core
        # Re-entrant: the garbage collector may close an abandoned stream while it is held.
        self.lock = threading.RLock()
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._closed = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="moesaic-engine", daemon=True)
        self._thread.start()

    def submit(self, command: Command) -> None:
        """Runs a command before the next step; RuntimeError once the thread has stopped."""
        with self.lock:
            if os.getpid() != self._pid:
                raise RuntimeError(
                    f"this Engine belongs to process {self._pid}: make one in this process, and "
                    "start processes by spawn instead of fork"
                )
            if self._closed:
                raise EngineShutDown
            self._commands.put(command)
            self._core.wake()

    def query(self, what: str, options: Mapping[str, Any] | None = None) -> Any:
        """The core's answer to a query, or QueryTimeout."""
        future: Future[Any] = Future()

        def ask(core: Core) -> None:
            try:
                core.ask(what, future, options)
            except Exception as error:
                future.set_exception(error)

        self.submit(ask)
        try:
            return future.result(CALLER_SECONDS)
        except TimeoutError:
            raise QueryTimeout(
                f"the engine did not answer {what!r} within {CALLER_SECONDS:g} s: it computes a "
                "long step, or its thread is blocked"
            ) from None

    def close(self) -> None:
        """Fails all requests and joins the thread. Repeated calls do nothing."""
        with self.lock:
            if not self._closed:
                self._closed = True
                self._commands.put(None)
                self._core.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        """An error outside of any single request fails all requests, but the engine goes on."""
        core = self._core
        try:
            while self._run_commands():
                try:
                    core.step()
                except Exception as error:
                    logger.exception("the engine failed; all %d requests fail", len(core.states))
                    if core.on_failure is not None:
                        core.on_failure(repr(error))
                    core.fail_all(f"the engine failed: {error!r}")
        except BaseException as error:
            core.fault = core.fault or f"the engine's thread ended: {error!r}"
            raise
        finally:
            with self.lock:
                self._closed = True
            while not self._commands.empty():
                self._run_command(self._commands.get())
            core.fail_all(core.fault or "the engine was shut down")
            core.close()

    def _run_commands(self) -> bool:
        """Runs commands until the core has work; False once the thread must stop."""
        while True:
            has_work, slack = self._core.has_work, self._core.slack
            if has_work and not slack and self._commands.empty():
                return True
            try:
                command = self._commands.get(timeout=slack or self._core.idle_timeout)
            except queue.Empty:
                if not has_work:
                    self._core.idle()
                continue
            if command is None:
                return False
            self._run_command(command)

    def _run_command(self, command: Command | None) -> None:
        """A failing command affects no other."""
        try:
            if command is not None:
                command(self._core)
        except Exception:
            logger.exception("a command to the engine failed")
