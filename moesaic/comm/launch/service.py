"""The client of a service: starts it, exchanges messages with it, ends it. No torch here."""

from __future__ import annotations

import logging
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final

import zmq

from moesaic.comm.launch.keeper_link import KeeperLink, Note
from moesaic.comm.launch.mps import start_mps
from moesaic.comm.launch.supervisor_process import (
    FoundSupervisor,
    StartedSupervisor,
    SupervisorProcess,
)
from moesaic.comm.network.node_secret import own_secret
from moesaic.comm.supervise.address import check_init_address
from moesaic.comm.supervise.process_watch import process_state
from moesaic.comm.supervise.restarts import Restarts
from moesaic.comm.supervise.service_spec import ServiceSpec, Timeouts
from moesaic.core.messages import (
    AnyMessage,
    Fault,
    Hello,
    Message,
    Ready,
    Stop,
    TakeOver,
    decode,
    encode,
)
from moesaic.core.process import NODE_SECRET, handling_signals

__all__ = ["Service", "ServiceSpec", "Timeouts", "host_ranks"]

logger = logging.getLogger(__name__)

# How long the supervisor may take to start and to end, beyond its ranks.
MARGIN: Final = 30.0
# How often to check whether the supervisor is stopped, which no event reports.
LOOK_SECONDS: Final = 0.2


class Service:
    """The supervisor of this node, and through it all ranks. One thread sends and receives.
    `receive` returns the outputs of the serving groups; on nodes other than node 0 only the end."""

    def __init__(
        self,
        spec: ServiceSpec,
        environment: Mapping[str, str] | None = None,
        keeper: KeeperLink | None = None,
        found: FoundSupervisor | None = None,
    ) -> None:
        """`keeper`: of a service that outlives this process. `found`: its supervisor, which a
        former process has started; its spec is the same."""
        environment = dict(environment or {})
        secret = own_secret(os.environ | environment, spec.secret_file)
        if spec.mesh.nnodes > 1 and spec.listening < 0:
            check_init_address(spec.node_rank, spec.dist_init_addr or "", secret, spec.host)
        environment[NODE_SECRET] = secret.decode()
        self._mps = start_mps() if spec.gpu_sharers > 1 and found is None else None
        """Starts before any rank opens CUDA, and ends after the last."""
        self.spec = spec
        self.stop_message = Stop()
        """What `close` sends to the supervisor."""
        self.facts: dict[str, object] = {}
        """The facts of rank 0; under "ranks", those of each rank."""
        self._fault: Fault | None = None
        self._stopped = math.inf
        """When the supervisor was first seen stopped."""
        self._wakeup_lock = threading.Lock()
        self._is_woken = False
        self._wakeup_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        shared = {} if self._mps is None else self._mps.for_ranks(spec.gpu_sharers)
        self.keeper = keeper
        # The caller's variables take precedence.
        self._process: SupervisorProcess = found or StartedSupervisor(spec, shared | environment)
        if keeper is not None and found is None:
            keeper.tell(Note(starting=self._process.pid))
        self.folder: Path | None = None
        """The folder of the supervisor's sockets; removed at the end of the service."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._poller = zmq.Poller()

    @classmethod
    def start(
        cls,
        spec: ServiceSpec,
        environment: Mapping[str, str] | None = None,
        keeper: KeeperLink | None = None,
    ) -> Service:
        """Returns when all ranks of all nodes are ready. Raises RuntimeError with the reason if
        that fails, and ValueError, before anything starts, if nodes cannot connect to --dist-init-
        addr. `environment`: additional variables of the ranks."""
        found = None if keeper is None else keeper.find()
        if found is not None and spec.gpu_sharers > 1:
            logger.warning("the MPS daemon has ended with the HTTP process: the ranks start again")
            found.end(MARGIN, ask=True)
            found.close()
        elif found is not None:
            service = cls(spec, environment, keeper, found)
            try:
                service.connect()
                return service
            except RuntimeError as error:
                logger.warning("%s: the ranks start again", error)
        service = cls(spec, environment, keeper)
        service.connect()
        return service

    def successor(self) -> Service:
        """A service like this one, which has ended."""
        return Service(self.spec, keeper=self.keeper)

    def connect(self) -> None:
        """Waits until the service is ready; ends it if that fails."""
        try:
            self.open()
            self._await_ready()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code of the supervisor: 0 after an orderly end, None while it runs."""
        return self._process.poll()

    def send(self, message: Message) -> None:
        """Raises nothing if the service has ended: `receive` reports that."""
        with suppress(zmq.ZMQError):
            self._socket.send(encode(message), zmq.NOBLOCK)

    def receive(self, timeout: float | None = None) -> AnyMessage | None:
        """The next message; None after `timeout` seconds or a `wake`; a Fault after the end."""
        if self._fault is not None:
            return self._fault
        if (message := self._take()) is not None:
            return message
        ready = self._poll(math.inf if timeout is None else timeout)
        if self._fault is not None:
            return self._fault
        if self._wakeup_fd in ready:
            with suppress(BlockingIOError):
                os.eventfd_read(self._wakeup_fd)
            self._is_woken = False
        if (message := self._take()) is not None:
            return message
        if self._process.end_fd in ready:
            return self._on_end()
        return None

    def wake(self) -> None:
        """Makes `receive`, or the next call of it, return at once. Any thread may call it."""
        if self._is_woken:  # `receive` has yet to clear it, and returns then
            return
        with self._wakeup_lock:
            if self._wakeup_fd >= 0:
                self._is_woken = True
                os.eventfd_write(self._wakeup_fd, 1)

    def close(self, deadline: float = 10.0) -> None:
        """Ends everything within `deadline` seconds. May be repeated."""
        if self._context.closed:
            return
        if self._process.poll() is None and self.folder is not None:
            self.send(self.stop_message)
        # Ranks end with the supervisor in every case.
        self._process.end(deadline, ask=self.folder is None)
        self._process.close()
        self._socket.close()
        self._context.term()
        with self._wakeup_lock:
            os.close(self._wakeup_fd)
            self._wakeup_fd = -1
        self._fault = self._fault or Fault("the service was stopped")
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._mps is not None:
            self._mps.stop()

    def detach(self) -> None:
        """Leaves the supervisor to its next client."""
        self._process.close()
        self._socket.close()
        self._context.term()
        with self._wakeup_lock:
            os.close(self._wakeup_fd)
            self._wakeup_fd = -1

    def open(self) -> None:
        """Connects to the supervisor, which has started; ranks may need much longer."""
        address = self._process.address(MARGIN)
        self.folder = Path(address.folder)
        if self.keeper is not None:
            self.keeper.supervisor = address
            self.keeper.tell(Note(supervisor=address))
        self._socket.identity = address.route.encode()
        self._socket.connect(f"ipc://{address.folder}/client")
        self._socket.send(encode(Hello(facts={"pid": os.getpid()})))
        for source in (self._socket, self._process.end_fd, self._wakeup_fd):
            self._poller.register(source, zmq.POLLIN)

    def _await_ready(self) -> None:
        deadline = time.monotonic() + self.spec.timeouts.start + MARGIN
        while (left := deadline - time.monotonic()) > 0:
            message = self.receive(left)
            if isinstance(message, Ready):
                self.facts = message.facts
                return
            if isinstance(message, Fault):
                if message.yields and self.keeper is not None:
                    logger.warning("%s: this one joins it", message.message)
                    self.keeper.stand_by()
                raise RuntimeError(message.message)
            if isinstance(message, Stop):
                raise RuntimeError("the service was stopped while it started")
        raise RuntimeError(f"the service was not ready within {self.spec.timeouts.start:.0f} s")

    def _poll(self, seconds: float) -> dict[Any, int]:
        """The readable sources within `seconds`; returns early after a fault."""
        deadline = time.monotonic() + seconds
        while True:
            left = max(0.0, deadline - time.monotonic())
            ready = dict(self._poller.poll(int(min(left, LOOK_SECONDS) * 1000)))
            if ready or left <= LOOK_SECONDS or self._hangs():
                return ready

    def _hangs(self) -> bool:
        """Ends a stopped supervisor, which watches no ranks, and all ranks with it."""
        now, pid = time.monotonic(), self._process.pid
        self._stopped = min(self._stopped, now) if process_state(pid) == "T" else math.inf
        if now - self._stopped < self.spec.timeouts.stopped:
            return False
        seconds = now - self._stopped
        self._fault = Fault(
            f"the supervisor hangs: its process {pid} has been stopped (state T) for "
            f"{seconds:.1f} s; it is ended, and all ranks with it",
            supervisor=True,
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
        """The supervisor has ended. Unless a signal killed it, it has sent a last message, which
        libzmq's thread may still have to read."""
        died, patience = self._process.describe_end()
        self._socket.poll(patience)
        if (message := self._take()) is not None:
            return message
        if died:
            self._fault = Fault(f"{died}, and all ranks with it", supervisor=True)
        else:
            self._fault = Fault("the service was stopped")
        return self._fault


def host_ranks(service: Service, patience: float = 0.0) -> int | TakeOver:
    """Runs a node that another one leads until the service or this node ends; the exit status.
    Launchers tell all nodes to stop at once: then the one that leads lets open requests finish, for
    which this one waits up to `patience` seconds. A node of an elastic service comes again if its
    supervisor is lost, or that of the node that leads. TakeOver: its supervisor leads from now
    on."""
    node, restarts = service.spec.node_rank, Restarts()
    with handling_signals(leaving := _Leaving(service, patience)):
        while True:
            began, message = time.monotonic(), _host(service)
            if not (isinstance(message, Fault) and message.supervisor and service.spec.elastic):
                break
            pause = restarts.next_pause(time.monotonic() - began, service.spec.restart_limit)
            if pause is None:
                break
            logger.warning("%s; node %d starts again in %.1f s", message.message, node, pause)
            time.sleep(pause)
            service = leaving.service = service.successor()
    if isinstance(message, TakeOver):
        return message
    if isinstance(message, Fault):
        logger.error("%s", message.message)
        return 1
    logger.info("node 0 has ended the service: node %d ends", node)
    return 0


def _host(service: Service) -> Stop | Fault | TakeOver:
    try:
        service.connect()
        logger.info("node %d is ready", service.spec.node_rank)
        if service.keeper is not None:
            service.keeper.tell(Note(stands_by=True))
        while not isinstance(message := service.receive(None), Stop | Fault | TakeOver):
            pass
        if isinstance(message, TakeOver):
            service.detach()
        return message
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        service.close()


class _Leaving:
    """What a node does when it is told to stop: it leaves at once while it starts, and the second
    time."""

    def __init__(self, service: Service, patience: float) -> None:
        self.service, self._patience = service, patience

    def __call__(self, number: int, _: FrameType | None) -> None:
        """Exits with status 0, like a server; while starting, with the status of the signal."""
        name, node = signal.Signals(number).name, self.service.spec.node_rank
        # At once: the second signal may come in the middle of this.
        patience, self._patience = self._patience, 0.0
        if patience and self.service.facts:
            signal.signal(signal.SIGALRM, partial(self._leave, name))
            signal.setitimer(signal.ITIMER_REAL, patience)
            logger.info("%s: node %d waits for node 0 for up to %g s", name, node, patience)
        else:
            self._leave(name, number)

    def _leave(self, name: str, number: int, _: FrameType | None = None) -> None:
        logger.info("%s: node %d leaves", name, self.service.spec.node_rank)
        self.service.stop_message = Stop(f"it was stopped by {name}")
        sys.exit(0 if self.service.facts else 128 + number)
