"""The supervisor of one node: it starts, watches and ends the ranks of the node."""

from __future__ import annotations

import logging
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

import msgspec
import zmq

from moesaic.comm.launch.mps import terminate_client
from moesaic.comm.network.node_secret import NO_SECRET, own_secret
from moesaic.comm.network.quiet_log import QuietLog
from moesaic.comm.network.store import LocalStore, StoreAddress
from moesaic.comm.supervise.control_page import ControlPage
from moesaic.comm.supervise.membership_policy import EndService, MembershipPolicy
from moesaic.comm.supervise.poll_loop import PollLoop, receive_some
from moesaic.comm.supervise.process_watch import ProcessWatch, describe_exit
from moesaic.comm.supervise.service_spec import RankSpec, ServiceSpec
from moesaic.comm.supervise.spawner import Spawner, kill_children
from moesaic.core.messages import (
    AnyMessage,
    Fault,
    Hello,
    Message,
    NoMessage,
    RollbackStep,
    Stop,
    decode,
    encode,
)

logger = logging.getLogger(__name__)

TICK: Final = 0.1
# How long the last messages of a rank that ended with an error may take to arrive.
DRAIN_SECONDS: Final = 0.3
LINGER_MS: Final = 2000
# How long the kernel may take to end a process that was killed.
FENCE_SECONDS: Final = 5.0


class NodeSupervisor(ABC):
    """The base of both kinds of supervisors. Its client is the process that started it."""

    secret: bytes
    """What the nodes share."""
    client: zmq.Socket[bytes]
    client_route: bytes
    _ranks: zmq.Socket[bytes]
    _spawner: Spawner

    def __init__(
        self,
        spec: ServiceSpec,
        folder: Path,
        context: zmq.Context[zmq.Socket[bytes]],
        former: NodeSupervisor | None = None,
    ) -> None:
        """`former`: another one of this process, which has handed over."""
        self.spec, self.mesh = spec, spec.mesh
        self.folder = folder
        self.loop = PollLoop()
        self.exit_code: int | None = None
        self.page, descriptor = ControlPage.create(len(spec.ranks), spec.ranks.start)
        self._control = f"/proc/{os.getpid()}/fd/{descriptor}"
        self.watch = ProcessWatch(self.page, spec.timeouts)
        self._processes: dict[int, BaseProcess] = {}
        self._dropped_log = QuietLog(logger)
        self._routes = {rank: new_route() for rank in spec.ranks}
        self._senders = {route: rank for rank, route in self._routes.items()}
        self._former: set[bytes] = set() if former is None else former._former | {*former._senders}
        """The routes of processes that are gone: what they sent is dropped."""
        self._store: StoreAddress | None = None
        self._host = ""
        self._memory: StoreAddress | None = None if former is None else former._memory
        """Where this node keeps memory of ranks that are lost, if the store is on another."""
        # Not from the environment later: a thread hides it there from processes that it starts.
        self.secret = (own_secret() or NO_SECRET) if former is None else former.secret
        self._endpoint = f"ipc://{folder}/ranks"
        self.sockets = context
        if former is None:
            self._open()
        else:
            self._take_from(former)
        self.loop.add(self._spawner.started.wakeup_fd, self._on_spawned)
        self.loop.add(self._ranks, self._on_ranks)
        self.loop.add(self.client, self._on_client)
        self.has_client = False
        """Whether the client is connected; it then logs how the service ends."""
        self._client_process = -1
        self._client_lost = time.monotonic()
        self.policy: MembershipPolicy = EndService()
        self.reported: set[int] = set()
        """Ranks that have reported their own failure, which node 0 handles."""
        self.is_serving = False
        """Whether all ranks are ready."""

    def _take_from(self, former: NodeSupervisor) -> None:
        self._spawner, self._ranks = former._spawner, former._ranks
        self.client_route, self.client = former.client_route, former.client

    def _open(self) -> None:
        target = self.spec.target.partition(":")[0]
        self._spawner = Spawner(["moesaic.comm.launch.rank_link", *self.spec.preload, target])
        self._ranks = self.socket(zmq.ROUTER)
        self._ranks.bind(self._endpoint)
        self.client_route = new_route()
        self.client = self.socket(zmq.ROUTER)
        # The client of a service that is kept may be lost, and another take its place.
        self.client.setsockopt(zmq.ROUTER_HANDOVER, bool(self.spec.keeper))
        self.client.bind(f"ipc://{self.folder}/client")

    def run(self) -> int:
        # The client connects before anything can fail, so that it learns of every failure.
        while self.exit_code is None and not (self.has_client or self.is_serving):
            self.loop.once(TICK)
            self._await_client()
        if self.exit_code is None:
            self.start()
        while self.exit_code is None:
            self.loop.once(TICK)
            if self.exit_code is None:
                self.tick(time.monotonic())
                self._await_client()
        return self.exit_code

    def _await_client(self) -> None:
        """A service that is kept serves nobody while its client is lost."""
        away = time.monotonic() - self._client_lost
        if self.spec.keeper and not self.has_client and away > self.spec.timeouts.client:
            self.stop(f"no client has come for {away:.0f} s")

    @abstractmethod
    def start(self) -> None:
        """Starts the ranks, or what must precede them."""

    @abstractmethod
    def on_rank(self, rank: int, message: AnyMessage, data: bytes) -> None:
        """Handles a message from a rank of this node; `data` is the same message, encoded."""

    def on_client(self, message: AnyMessage) -> None:
        """Handles a message from the client."""
        if isinstance(message, Stop):
            self.stop(message.reason)
        elif isinstance(message, Hello) and self.spec.keeper:
            self.lose_client()  # the end of the former one may not have been noticed yet
            self._watch_client(message.facts["pid"])

    def lose_client(self) -> None:
        """The client of a service that is kept is lost; another one comes, or has come."""
        self.has_client, self._client_lost = False, time.monotonic()
        if self._client_process >= 0:
            self.loop.remove(self._client_process)
            os.close(self._client_process)
            self._client_process = -1

    def _watch_client(self, pid: int) -> None:
        with suppress(ProcessLookupError):
            self._client_process = os.pidfd_open(pid)
            self.loop.add(self._client_process, self._on_client_end)
            self.has_client = True

    def _on_client_end(self) -> None:
        logger.warning("the client is lost")
        self.lose_client()

    @abstractmethod
    def tell_nodes(self, message: Message) -> None:
        """Sends to the supervisors of other nodes that are connected to this one."""

    @abstractmethod
    def stop(self, reason: str) -> None:
        """Ends the service in order."""

    def fail(self, message: str, ranks: Sequence[int], *, tell: bool = True) -> None:
        """Ends the service, on all nodes if `tell`; `ranks` are at fault."""
        self.fail_with(Fault(message, list(ranks)), tell=tell)

    def fail_with(self, fault: Fault, *, tell: bool = True) -> None:
        message, ranks = fault.message, fault.ranks
        if self.end(1, logging.ERROR, f"the service ends: {message}"):
            if tell:
                self.tell_nodes(fault)
            self.fence(ranks, message)
            self.send_client(fault)

    def tick(self, now: float) -> None:
        """Checks the processes of this node, at least ten times a second."""
        pids = {rank: process.pid or 0 for rank, process in self._processes.items()}
        found = self.watch.look(pids, now, starting=self.is_starting)
        if found is not None:
            rank, why = found
            self.lose_ranks([rank], self.describe_loss(rank, why))

    def is_starting(self, rank: int) -> bool:
        return not self.is_serving

    def lose_ranks(self, ranks: Sequence[int], cause: str) -> None:
        """Every death, hang and lost connection ends up here."""
        self.policy.on_ranks_lost(self, ranks, cause)

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        made = self.sockets.socket(kind)
        # No message is dropped for lack of room: open requests bound what is in flight.
        made.set_hwm(0)
        made.linger = LINGER_MS
        return made

    def send_local(self, rank: int, data: bytes) -> None:
        self._ranks.send_multipart([self._routes[rank], data])

    def roll_back(self, rollback: RollbackStep, ranks: Sequence[int]) -> None:
        """Rolls back the `ranks` that are here: by the control page in a wait, else by message."""
        for rank in ranks:
            if rank in self.spec.ranks:
                self.page.roll_back(rank, rollback.generation)
                self.send_local(rank, encode(rollback))

    def send_client(self, message: Message | bytes) -> None:
        data = message if isinstance(message, bytes) else encode(message)
        # The end of the client is noticed by other means.
        with suppress(zmq.Again):
            self.client.send_multipart([self.client_route, data], zmq.NOBLOCK)

    def end(self, exit_code: int, level: int, text: str) -> bool:
        """Ends the loop; False if it has ended before. A client logs the reason itself."""
        if self.exit_code is not None:
            return False
        self.exit_code = exit_code
        logger.log(logging.DEBUG if self.has_client else level, "%s", text)
        return True

    def describe_loss(self, rank: int, what: str) -> str:
        """Says what happened to a rank of this node, and what it did last."""
        return f"{self.mesh.describe(rank)} {what}; {self.page.snapshot(rank)}"

    def start_ranks(self, store: StoreAddress, host: str = "") -> None:
        self.set_store(store, host)
        for rank in self.spec.ranks:
            self.start_rank(rank)

    def set_store(self, store: StoreAddress, host: str = "") -> None:
        self._store, self._host = store, host
        if self.spec.elastic and self.mesh.nnodes > 1 and self._memory is None:
            self._memory = LocalStore(self.folder).address

    def start_rank(self, rank: int) -> None:
        assert self._store is not None, "start_ranks has been called"
        sockets, place = (self._endpoint, self._routes[rank]), (self._store, self._host)
        spec = RankSpec(
            rank,
            self.spec,
            self._control,
            *sockets,
            *place,
            self.secret,
            self._memory,
            self.is_serving,
        )
        data = msgspec.msgpack.encode(spec)
        name = f"rank{rank} {self._routes[rank].decode()}"
        self._spawner.start(name, "moesaic.comm.launch.rank_link:main", data)

    def strike(self, ranks: Sequence[int]) -> None:
        """Kills the processes of the ranks that are here, and waits for none to be gone."""
        for rank in ranks:
            if (process := self._processes.get(rank)) is not None:
                process.kill()

    def kill_rank(self, rank: int) -> bool:
        """Ends a rank's process and drops what it still sends. Returns whether it is gone."""
        process = self._processes.pop(rank, None)
        if process is not None:
            if self.spec.gpu_sharers > 1 and process.is_alive() and process.pid is not None:
                terminate_client(process.pid)
            process.kill()
            self.loop.remove(process.sentinel)
            process.join(FENCE_SECONDS)
            if process.is_alive():
                return False
        route, self._routes[rank] = self._routes[rank], new_route()
        del self._senders[route]
        self._former.add(route)
        self._senders[self._routes[rank]] = rank
        self.page.clear(rank)
        return True

    def note_members(self, live: Sequence[int]) -> None:
        """Writes the ranks of this node that live to its control page."""
        here = [rank - self.page.first_rank for rank in live if rank in self.spec.ranks]
        self.page.note_live(sum(1 << number for number in here))

    def fence(self, ranks: Sequence[int], reason: str) -> None:
        """Declares an epoch without these ranks, and kills all ranks of this node."""
        live = self.page.live
        for rank in ranks:
            if rank in self.spec.ranks:
                live &= ~(1 << (rank - self.page.first_rank))
        self.page.change(live, reason)
        self._kill_all()

    def stop_ranks(self) -> None:
        """Asks all ranks to end, kills those that do not, and reports the end to the client."""
        for rank in self._processes:
            self.send_local(rank, encode(Stop()))
        # Ends the waits of ranks whose peers have already ended.
        self.page.change(0, "the service is stopped")
        # Ranks that still load do not listen, and have nothing to finish.
        deadline = time.monotonic() + (self.spec.timeouts.stop if self.is_serving else 0.0)
        for process in self._processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
        self._kill_all()
        self.send_client(Stop())

    def abandon(self, reason: str) -> None:
        """The process that keeps the service has ended."""
        self.stop(reason)

    def close(self) -> None:
        self._kill_all()
        self._ranks.close(0)
        self.client.close()
        kill_children()

    def _kill_all(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            self.loop.remove(process.sentinel)
            process.join(DRAIN_SECONDS)

    def _on_spawned(self) -> None:
        for started in self._spawner.started.drain():
            if isinstance(started, Exception):
                why = f"no process can be started: {started!r}"
                text = f"{why}; the fork server may have failed to load"
                self.fail_with(Fault(text, supervisor=True))
            else:
                rank, route = started.name.removeprefix("rank").split()
                if self._routes[int(rank)] != route.encode():  # it was to be ended meanwhile
                    started.kill()
                    started.join(FENCE_SECONDS)
                    continue
                self._processes[int(rank)] = started
                self.loop.add(started.sentinel, self._on_rank_end)

    def _on_rank_end(self) -> None:
        """A rank that raised has sent the reason, which may still be in flight."""
        dead = [rank for rank, process in self._processes.items() if not process.is_alive()]
        self._drain_messages([r for r in dead if self._processes[r].exitcode == 1])
        dead = [rank for rank in dead if rank in self._processes]
        for rank in self.reported.intersection(dead):
            self.loop.remove(self._processes[rank].sentinel)
            dead.remove(rank)
        if dead and self.exit_code is None:
            exits = {rank: describe_exit(self._processes[rank].exitcode) for rank in dead}
            self.lose_ranks(dead, "; ".join(self.describe_loss(*item) for item in exits.items()))

    def _drain_messages(self, ranks: Sequence[int]) -> None:
        """Receives until these ranks' reports have ended the service, or the ranks."""
        deadline = time.monotonic() + DRAIN_SECONDS
        while self.exit_code is None and time.monotonic() < deadline:
            if not self._processes.keys() & set(ranks):
                return
            if self._ranks.poll(int(DRAIN_SECONDS * 1000)):
                self._on_ranks()

    def _on_ranks(self) -> None:
        for rank, message, data in self._received(self._ranks, self._senders):
            self.on_rank(rank, message, data)

    def _on_client(self) -> None:
        for _, message, _ in self._received(self.client, {self.client_route: 0}):
            self.has_client = True
            self.on_client(message)

    def _received(
        self, socket: zmq.Socket[bytes], senders: Mapping[bytes, int]
    ) -> Iterator[tuple[int, AnyMessage, bytes]]:
        """Yields (sender, message, encoded message). libzmq passes on whatever a process of this
        user writes to the socket; messages of unknown senders are dropped."""
        for frames in receive_some(socket):
            sender = senders.get(frames[0])
            if sender is None and frames[0] in self._former:
                continue
            try:
                message = decode(frames[1], passing=True)
            except (IndexError, NoMessage) as error:
                who = "an unknown sender" if sender is None else f"sender {sender}"
                self._dropped_log.warn(f"dropped a message of {who}: {error!r:.200}")
                continue
            if sender is None:
                self._dropped_log.warn("dropped a message of an unknown sender")
                continue
            if self.exit_code is None:
                yield sender, message, frames[1]


def new_route() -> bytes:
    """The identity of a peer's socket. It cannot be guessed: a process that finds the supervisor's
    socket can neither impersonate a rank or the client nor receive their messages."""
    return secrets.token_hex(16).encode()
