"""A service as the process that wants it sees it: start it, talk with it, end it. No torch here."""

from __future__ import annotations

import logging
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final

import zmq

from moesaic.comm.launch.mps import start_mps
from moesaic.comm.supervise.address import check_init_address
from moesaic.comm.supervise.main import LENGTH_BYTES
from moesaic.comm.supervise.process_watch import process_state
from moesaic.comm.supervise.service_spec import ServiceSpec, Timeouts, pack
from moesaic.core.messages import AnyMessage, Fault, Hello, Message, Ready, Stop, decode, encode
from moesaic.core.process import NODE_SECRET, child_environment

__all__ = ["Service", "ServiceSpec", "Timeouts", "host_ranks"]

logger = logging.getLogger(__name__)

# What the supervisor itself may take to begin, and to end, beyond what its ranks take.
MARGIN: Final = 30.0
# How often to look whether the supervisor was stopped, of which nothing else tells.
LOOK_SECONDS: Final = 0.2


class Service:
    """The supervisor of this node, and through it all ranks.

    One thread sends and receives; any thread may call `wake`. On node 0 `receive` gives what the
    serving groups give out; on others nothing but Stop or Fault at the end.
    """

    def __init__(self, spec: ServiceSpec, environment: Mapping[str, str] | None = None) -> None:
        if spec.mesh.nnodes > 1:
            known = {**os.environ, **(environment or {})}
            check_init_address(spec.node_rank, spec.dist_init_addr or "", known)
        self._mps = start_mps() if spec.gpu_sharers > 1 else None
        """Before any rank opens CUDA; it ends after the last."""
        self.spec = spec
        self.stop_message = Stop()
        """What `close` tells the supervisor."""
        self.facts: dict[str, object] = {}
        """What rank 0 said when it was ready; under "ranks", what each of them said."""
        self._fault: Fault | None = None
        self._stopped = math.inf
        """Since when the supervisor has been seen stopped."""
        self._ringing = threading.Lock()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        shared = {} if self._mps is None else self._mps.for_ranks(spec.gpu_sharers)
        # What the caller says holds.
        self._process = _spawn(spec, {**shared, **(environment or {})})
        self.folder: Path | None = None
        """Where the supervisor has its sockets; gone when the service has ended."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._poller = zmq.Poller()

    @classmethod
    def start(cls, spec: ServiceSpec, environment: Mapping[str, str] | None = None) -> Service:
        """Returns when all ranks of all nodes are ready; RuntimeError with the reason if they
        cannot be, ValueError before anything is started if nodes cannot meet where they are to.
        `environment`: what the ranks are to see beyond this process's own."""
        service = cls(spec, environment)
        service.connect()
        return service

    def connect(self) -> None:
        """Wait for the service to be ready; where it cannot be, all of it is ended."""
        try:
            self._greet()
            self._await_ready()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Of the supervisor."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._fault is None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Of the supervisor: 0 after an orderly end, None while it runs."""
        return self._process.poll()

    def send(self, message: Message) -> None:
        """Without an error when the service has ended: `receive` tells of that."""
        with suppress(zmq.ZMQError):
            self._socket.send(encode(message), zmq.NOBLOCK)

    def receive(self, timeout: float | None = None) -> AnyMessage | None:
        """The next message; None after `timeout` seconds (None: never) or a `wake`. After the end
        of the service, its Fault again and again."""
        if self._fault is not None:
            return self._fault
        if (message := self._take()) is not None:
            return message
        ready = self._await_word(math.inf if timeout is None else timeout)
        if self._fault is not None:
            return self._fault
        if self._bell in ready:
            with suppress(BlockingIOError):
                os.eventfd_read(self._bell)
        if (message := self._take()) is not None:
            return message
        if self._process.stdout is not None and self._process.stdout.fileno() in ready:
            return self._on_end()
        return None

    def wake(self) -> None:
        """From any thread: makes `receive` return now, or the next one at once."""
        with self._ringing:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    def close(self, deadline: float = 10.0) -> None:
        """End everything, in `deadline` seconds at the latest. May be repeated."""
        if self._context.closed:
            return
        if self._process.poll() is None and self.folder is not None:
            self.send(self.stop_message)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._await_exit(deadline)
        self._process.stdin.close()
        self._process.stdout.close()
        self._socket.close()
        self._context.term()
        with self._ringing:
            os.close(self._bell)
            self._bell = -1
        self._fault = self._fault or Fault("the service was stopped")
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._mps is not None:
            self._mps.stop()

    def _await_exit(self, seconds: float) -> None:
        """Ranks end with the supervisor, however it ends."""
        if self.folder is None:
            self._process.terminate()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _greet(self) -> None:
        """Hear from the supervisor where it is, and greet it there."""
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        ready, _, _ = select.select([pipe], [], [], MARGIN)
        line = self._process.stdout.readline().decode().strip() if ready else "error is silent"
        kind, _, text = line.partition(" ")
        if kind != "ok":
            raise RuntimeError(f"the supervisor did not start: {text or 'its log tells why'}")
        route, _, folder = text.partition(" ")
        self.folder = Path(folder)
        self._socket.identity = route.encode()
        self._socket.connect(f"ipc://{folder}/client")
        self._socket.send(encode(Hello()))
        for source in (self._socket, pipe, self._bell):
            self._poller.register(source, zmq.POLLIN)

    def _await_ready(self) -> None:
        deadline = time.monotonic() + self.spec.timeouts.start + MARGIN
        while (left := deadline - time.monotonic()) > 0:
            message = self.receive(left)
            if isinstance(message, Ready):
                self.facts = message.facts
                return
            if isinstance(message, Fault):
                raise RuntimeError(message.message)
            if isinstance(message, Stop):
                raise RuntimeError("the service was stopped while it started")
        raise RuntimeError(f"the service was not ready within {self.spec.timeouts.start:.0f} s")

    def _await_word(self, seconds: float) -> dict[Any, int]:
        """What can be read, soon or after at most so many seconds; or there is a fault."""
        deadline = time.monotonic() + seconds
        while True:
            left = max(0.0, deadline - time.monotonic())
            ready = dict(self._poller.poll(int(min(left, LOOK_SECONDS) * 1000)))
            if ready or left <= LOOK_SECONDS or self._hangs():
                return ready

    def _hangs(self) -> bool:
        """A stopped supervisor watches nobody: it is ended, and all ranks with it."""
        now, pid = time.monotonic(), self._process.pid
        self._stopped = min(self._stopped, now) if process_state(pid) == "T" else math.inf
        if now - self._stopped < self.spec.timeouts.stopped:
            return False
        seconds = now - self._stopped
        self._fault = Fault(
            f"the supervisor hangs: its process {pid} has been stopped (state T) for "
            f"{seconds:.1f} s; it is ended, and all ranks with it"
        )
        self._process.kill()
        return True

    def _take(self) -> AnyMessage | None:
        try:
            message = decode(self._socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None
        if isinstance(message, Fault):
            self._fault = message
        return message

    def _on_end(self) -> AnyMessage:
        """The supervisor has ended; what it sent last is either here or lost."""
        code = self._process.wait()
        if (message := self._take()) is not None:
            return message
        if code == 0:
            self._fault = Fault("the service was stopped")
        else:
            self._fault = Fault(f"the supervisor died (exit code {code}), and all ranks with it")
        return self._fault


def host_ranks(service: Service) -> int:
    """The life of a node other than the first, until that ends the service or a signal this node;
    an exit status."""
    node = service.spec.node_rank
    with _leaving_on_signals(service):
        service.connect()
        logger.info("node %d is ready", node)
        try:
            while not isinstance(message := service.receive(None), Stop | Fault):
                pass
        finally:
            service.close()
    if isinstance(message, Fault):
        logger.error("%s", message.message)
        return 1
    logger.info("node 0 has ended the service: node %d ends", node)
    return 0


@contextmanager
def _leaving_on_signals(service: Service) -> Iterator[None]:
    """With status 0, as a server that is told to end; but not while nothing was served yet."""

    def leave(number: int, _: FrameType | None) -> None:
        name = signal.Signals(number).name
        logger.info("%s: node %d leaves", name, service.spec.node_rank)
        service.stop_message = Stop(f"it was stopped by {name}")
        sys.exit(0 if service.facts else 128 + number)

    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, leave) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _spawn(spec: ServiceSpec, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "moesaic.comm.supervise.main"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**child_environment(NODE_SECRET), **environment},
        start_new_session=True,
        bufsize=0,
    )
    assert process.stdin is not None
    data = pack(spec)
    with suppress(BrokenPipeError):
        process.stdin.write(len(data).to_bytes(LENGTH_BYTES, "little") + data)
    return process
