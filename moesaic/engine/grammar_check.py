"""Grammars are checked in the caller's process before anything is submitted.

llguidance's own limits do not bound all of its work: {"multipleOf": 99999989} takes two minutes and
7 GB to compile. So every new grammar is tried in a process that has a second of processor time and
a bounded memory, is started with the first of them and kept; verdicts are remembered.
"""

from __future__ import annotations

import hashlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from typing import Final

import msgspec

from moesaic.core.sampling import BadParameter, Grammar
from moesaic.engine.errors import QueueFull
from moesaic.engine.grammar import check_depth, is_installed
from moesaic.engine.grammar_child import LENGTH_BYTES, ROOM, SECONDS, Setup, write

REMEMBERED: Final = 4096
# They are tried one after another, each for a second at worst, and take a thread while they wait.
MAX_WAITING: Final = 32
# There are always some left for grammars that are known.
THREADS: Final = MAX_WAITING + 4
START_SECONDS: Final = 120.0
ANSWER_SECONDS: Final = 30.0


class GrammarChecker:
    """May be called from any thread. `setup`: None without a tokenizer."""

    def __init__(self, setup: Setup | None, backend: str | None) -> None:
        self._setup, self._backend = setup, backend
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._waiting = 0
        self._lock = threading.Lock()
        self._child_lock = threading.Lock()
        self._child: _Child | None = None
        self._closed = False

    def check(self, grammar: Grammar) -> None:
        """ValueError if the engine cannot serve it, QueueFull if it cannot be tried now."""
        if why := self._unavailable() or self._verdict(grammar):
            raise BadParameter(grammar.kind, f"{grammar.kind} is not possible: {why}")

    def close(self) -> None:
        with self._child_lock:
            self._closed = True
            self._drop()

    def _unavailable(self) -> str:
        if self._backend == "none":
            return "this server runs with --grammar-backend none"
        if not is_installed():
            return "llguidance is not installed: pip install 'moesaic[structured]'"
        if self._setup is None:
            return "grammars need a tokenizer and skip_tokenizer_init is set"
        return ""

    def _verdict(self, grammar: Grammar) -> str:
        key = hashlib.sha256("\0".join(grammar).encode()).digest()
        if (known := self._recall(key)) is not None:
            return known
        try:
            check_depth(grammar)
        except ValueError as error:
            return str(error)
        self._enter()
        try:
            with self._child_lock:
                if (known := self._recall(key)) is not None:
                    return known
                verdict = self._try(grammar)
        finally:
            with self._lock:
                self._waiting -= 1
        self._remember(key, verdict)
        return verdict

    def _enter(self) -> None:
        with self._lock:
            if self._waiting >= MAX_WAITING:
                raise QueueFull(
                    f"{self._waiting} grammars that were not seen before wait to be checked, which "
                    "is all that may, and this one is new too: try again later"
                )
            self._waiting += 1

    def _recall(self, key: bytes) -> str | None:
        with self._lock:
            if key in self._verdicts:
                self._verdicts.move_to_end(key)
            return self._verdicts.get(key)

    def _remember(self, key: bytes, verdict: str) -> None:
        with self._lock:
            self._verdicts[key] = verdict
            while len(self._verdicts) > REMEMBERED:
                self._verdicts.popitem(last=False)

    def _try(self, grammar: Grammar) -> str:
        assert self._setup is not None
        if self._closed:
            raise RuntimeError("the engine is shut down: make a new Engine")
        if self._child is None or not self._child.alive:
            self._drop()
            self._child = _Child(self._setup)
        try:
            return self._child.ask(grammar)
        except EOFError:
            status = self._child.end()
            self._child = None
        except TimeoutError:
            self._drop()
            raise QueueFull("a grammar could not be checked in time: try again later") from None
        if status == -signal.SIGPROF:
            return f"it takes more than {SECONDS:g} s to compile: simplify it"
        return f"it takes more than {ROOM // 2**20} MB of memory to compile: simplify it"

    def _drop(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


class _Child:
    def __init__(self, setup: Setup) -> None:
        # Whatever this program imports from is where the child finds the package.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moesaic.engine.grammar_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        try:
            self._send(setup)
            why = self._answer(START_SECONDS)
        except (EOFError, TimeoutError) as error:
            why = f"the process that checks grammars did not start: {error!r}"
        if why:
            self.end()
            raise ValueError(why)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, grammar: Grammar) -> str:
        self._send(grammar)
        return self._answer(ANSWER_SECONDS)

    def end(self) -> int:
        """Its exit status; it is killed if it has none yet."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        process.kill()
        status = process.wait()
        process.stdout.close()
        return status

    def _send(self, value: Setup | Grammar) -> None:
        assert self._process.stdin is not None
        try:
            write(self._process.stdin, value)  # type: ignore[arg-type]
        except BrokenPipeError:
            raise EOFError from None

    def _answer(self, seconds: float) -> str:
        deadline = time.monotonic() + seconds
        length = int.from_bytes(self._take(LENGTH_BYTES, deadline), "little")
        return msgspec.msgpack.decode(self._take(length, deadline), type=str)

    def _take(self, number: int, deadline: float) -> bytes:
        assert self._process.stdout is not None
        found = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while len(found) < number:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                piece = os.read(self._process.stdout.fileno(), number - len(found))
                if not piece:
                    raise EOFError
                found += piece
        return found
