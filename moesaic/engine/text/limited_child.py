"""A child process for work whose time and memory no input check can bound.

The kernel enforces a limit of CPU time and of memory for each request. The child calls `serve`; the
parent makes a `LimitedChild`. Both exchange messages with a length prefix over pipes.
"""

from __future__ import annotations

import logging
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import BinaryIO, Final

from moesaic.core.process import child_environment
from moesaic.engine.errors import EngineShutDown

logger = logging.getLogger(__name__)

LENGTH_BYTES: Final = 4
START_SECONDS: Final = 120.0
# Wall-clock time for an answer whose CPU time is limited: the machine may be busy.
ANSWER_SECONDS: Final = 30.0

PIECE: Final = 1 << 18
# Exit statuses of the child; an uncaught exception gives 1.
RECYCLED, OUT_OF_MEMORY = 0, 3

Answer = Callable[[bytes], bytes]


@dataclass(frozen=True, slots=True)
class Allowance:
    """The limits of one request: CPU seconds, and bytes beyond the child's own memory."""

    seconds: float
    room: int


class Exceeded(Exception):
    """The work exceeded a limit, and would do so again. Its process has ended."""


class ChildUnresponsive(Exception):
    """The process was too slow or was killed from outside. The same request may succeed later."""


def serve(begin: Callable[[bytes], Answer]) -> None:
    """The child's loop. `begin` turns the first message into the function that answers requests;
    the reply to it is empty or an error. The command line has the limits."""
    allowance = Allowance(float(sys.argv[1]), int(sys.argv[2]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    try:
        answer = begin(_read(source))
    except Exception as error:
        _write(sink, str(error).encode() or repr(error).encode())
        return
    _write(sink, b"")
    least = _memory()
    while request := _read(source):
        _write(sink, _limited(answer, request, allowance))
        if _memory() > least + 2 * allowance.room:  # freed memory is not returned: start anew
            os._exit(RECYCLED)


def _limited(answer: Answer, request: bytes, allowance: Allowance) -> bytes:
    """The timer's signal kills the process, whatever it computes."""
    most = _memory() + allowance.room
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_PROF, allowance.seconds)
    try:
        return answer(request)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@cache
def _status() -> int:
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)


def _memory() -> int:
    return int(os.pread(_status(), 64, 0).split()[0]) * resource.getpagesize()


def _write(stream: BinaryIO, data: bytes) -> None:
    stream.write(len(data).to_bytes(LENGTH_BYTES, "little") + data)
    stream.flush()


def _read(stream: BinaryIO) -> bytes:
    """A message; empty at the end of the stream."""
    head = stream.read(LENGTH_BYTES)
    return stream.read(int.from_bytes(head, "little")) if head else b""


class LimitedChild:
    """Runs `module` in a process, from `start` or the first request on. One thread asks; any may
    close it."""

    def __init__(self, module: str, setup: bytes, allowance: Allowance) -> None:
        self._module, self._setup, self.allowance = module, setup, allowance
        self._process: subprocess.Popen[bytes] | None = None
        self._last_resort: weakref.finalize[..., LimitedChild]
        self._lock = threading.Lock()
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The id of the process while it runs."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def start(self) -> None:
        """Starts the process unless it runs. ValueError if it cannot start."""
        if self._process is None or self._process.poll() is not None:
            self._end(0.0)
            self._start()

    def ask(self, request: bytes) -> bytes:
        """The answer, or Exceeded, ChildUnresponsive, or ValueError if the child cannot start."""
        status = self._attempt(request)
        if status == RECYCLED:  # it ended after the previous request
            status = self._attempt(request)
        if not isinstance(status, int):
            return status
        raise self._error_of(status)

    def _attempt(self, request: bytes) -> bytes | int:
        """The answer, or the exit status if the process ended."""
        self.start()
        try:
            return self._exchange(request, ANSWER_SECONDS)
        except EOFError:
            return self._end(ANSWER_SECONDS)
        except TimeoutError:
            self._end(0.0)
            logger.warning("%s did not answer within %g s", self._module, ANSWER_SECONDS)
            raise ChildUnresponsive from None

    def close(self) -> None:
        """A running request fails with EngineShutDown. May be repeated."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()
                self._process.wait()

    def _start(self) -> None:
        allowed = self.allowance
        with self._lock:
            if self._closed:
                raise EngineShutDown
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module, str(allowed.seconds), str(allowed.room)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                # The memory limit counts address space, of which each arena reserves 64 MB.
                env=child_environment() | {"MALLOC_ARENA_MAX": "1"},
                start_new_session=True,
                bufsize=0,
            )
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdin.fileno(), False)
            self._last_resort = weakref.finalize(self, _kill, self._process)
        try:
            why = self._exchange(self._setup, START_SECONDS).decode()
        except (EOFError, TimeoutError) as error:
            why = f"{self._module} did not start: {error!r}"
        if why:
            self._end(0.0)
            raise ValueError(why)

    def _end(self, seconds: float) -> int:
        """The exit status; kills a process that does not end in time."""
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return 0
        self._last_resort.detach()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        process.kill()
        status = process.wait()
        process.stdout.close()
        return status

    def _error_of(self, status: int) -> Exception:
        if self._closed:
            return EngineShutDown()
        if status == -signal.SIGPROF:
            return Exceeded(f"more than {self.allowance.seconds:g} s")
        # Rust aborts without memory. SIGKILL would be ambiguous: others may send it.
        if status in (OUT_OF_MEMORY, -signal.SIGABRT):
            return Exceeded(f"more than {self.allowance.room // 2**20} MB of memory")
        logger.warning("%s ended with status %d without an answer", self._module, status)
        return ChildUnresponsive()

    def _exchange(self, request: bytes, seconds: float) -> bytes:
        process, deadline = self._process, time.monotonic() + seconds
        assert process is not None and process.stdin is not None and process.stdout is not None
        _send(process.stdin.fileno(), request, deadline)
        source = process.stdout.fileno()
        found = _receive(source, LENGTH_BYTES, deadline)
        end = LENGTH_BYTES + int.from_bytes(found[:LENGTH_BYTES], "little")
        return bytes((found + _receive(source, end - len(found), deadline))[LENGTH_BYTES:])


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills the process of an owner that was not closed."""
    process.kill()
    process.wait()


def _send(sink: int, data: bytes, deadline: float) -> None:
    """Writes a message to a non-blocking pipe."""
    rest = memoryview(len(data).to_bytes(LENGTH_BYTES, "little") + data)
    while rest:
        _wait_for(sink, select.POLLOUT, deadline)
        try:
            rest = rest[os.write(sink, rest) :]
        except BlockingIOError:  # the pipe has room, but not for a whole page
            continue
        except BrokenPipeError:
            raise EOFError from None


def _receive(source: int, least: int, deadline: float) -> bytearray:
    """Reads at least `least` bytes."""
    found = bytearray()
    while len(found) < least:
        _wait_for(source, select.POLLIN, deadline)
        piece = os.read(source, PIECE)
        if not piece:
            raise EOFError
        found += piece
    return found


def _wait_for(pipe: int, event: int, deadline: float) -> None:
    poller = select.poll()
    poller.register(pipe, event)
    if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError
