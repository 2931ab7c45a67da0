"""The supervisor of one node: starts its ranks, watches them, ends them."""

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

import zmq

from moesaic.comm.network.quiet_log import QuietLog
from moesaic.comm.network.store import StoreAddress
from moesaic.comm.supervise.control_page import ControlPage
from moesaic.comm.supervise.poll_loop import PollLoop, receive_some
from moesaic.comm.supervise.process_watch import ProcessWatch, describe_exit
from moesaic.comm.supervise.service_spec import RankSpec, ServiceSpec, pack
from moesaic.comm.supervise.spawner import Spawner, SpawnJob, kill_children
from moesaic.core.messages import AnyMessage, Message, NoMessage, RollbackStep, Stop, decode, encode

logger = logging.getLogger(__name__)

TICK: Final = 0.1
# How long the last words of a rank that ended with an error may be under way.
LAST_WORDS: Final = 0.3
LINGER_MS: Final = 2000


class NodeSupervisor(ABC):
    """What the head and the agents of other nodes have in common.

    `client`: the socket of the process that started this one.
    """

    def __init__(
        self, spec: ServiceSpec, folder: Path, context: zmq.Context[zmq.Socket[bytes]]
    ) -> None:
        self.spec, self.mesh = spec, spec.mesh
        self.folder = folder
        self.loop = PollLoop()
        self.exit_code: int | None = None
        self.page, descriptor = ControlPage.create(len(spec.ranks), spec.ranks.start)
        self._control = f"/proc/{os.getpid()}/fd/{descriptor}"
        self._watch = ProcessWatch(self.page, spec.timeouts)
        self._processes: dict[int, BaseProcess] = {}
        self._strangers = QuietLog(logger)
        self._routes = {rank: new_route() for rank in spec.ranks}
        self._senders = {route: rank for rank, route in self._routes.items()}
        self._spawner = Spawner(_preloads(spec))
        self.loop.add(self._spawner.bell, self._on_born)
        self._endpoint = f"ipc://{folder}/ranks"
        self.sockets = context
        self._ranks = self.socket(zmq.ROUTER)
        self._ranks.bind(self._endpoint)
        self.loop.add(self._ranks, self._on_ranks)
        self.client_route = new_route()
        self.client = self.socket(zmq.ROUTER)
        self.client.bind(f"ipc://{folder}/client")
        self.loop.add(self.client, self._on_client)
        self.has_client = False
        """Whether somebody is there to be told how it ends, and to log it."""
        self.excused: set[int] = set()
        """Ranks whose end is known, and being judged."""
        self.was_late = False
        """Whether this process was held up, so that the silence of others says nothing."""
        self.is_fair = False
        """Whether that was long enough ago to judge who stands still."""
        self.is_serving = False
        """Whether all ranks have said that they are ready."""

    def run(self) -> int:
        """The exit status of the supervisor."""
        # Before anything can go wrong, so that the client hears of it.
        while self.exit_code is None and not self.has_client:
            self.loop.once(TICK)
        if self.exit_code is None:
            self.begin()
        while self.exit_code is None:
            self.loop.once(TICK)
            if self.exit_code is None:
                self.tick(time.monotonic())
        return self.exit_code

    @abstractmethod
    def begin(self) -> None:
        """Start what is to be started."""

    @abstractmethod
    def on_rank(self, rank: int, message: AnyMessage, data: bytes) -> None:
        """A message from a rank of this node; `data`: the same, as it came."""

    @abstractmethod
    def on_client(self, message: AnyMessage) -> None:
        """A message from the process that started this one."""

    @abstractmethod
    def fail(self, message: str, ranks: Sequence[int]) -> None:
        """End the service everywhere, because of these ranks."""

    @abstractmethod
    def stop(self, reason: str) -> None:
        """End the service in order."""

    def tick(self, now: float) -> None:
        """Look around: at least ten times a second."""
        pids = {rank: process.pid or 0 for rank, process in self._processes.items()}
        found = self._watch.look(pids, now, starting=not self.is_serving)
        self.was_late, self.is_fair = self._watch.was_late, self._watch.is_fair
        if found is not None:
            rank, why = found
            self.fail(self.blame(rank, why), [rank])

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        made = self.sockets.socket(kind)
        # Nothing is ever dropped for want of room: what is under way is bounded by open requests.
        made.set_hwm(0)
        made.linger = LINGER_MS
        return made

    def send_local(self, rank: int, data: bytes) -> None:
        self._ranks.send_multipart([self._routes[rank], data])

    def roll_back(self, rollback: RollbackStep) -> None:
        """Those ranks of the replica that are in this node: those in a wait see the word, those
        that sleep get the message."""
        for rank in self.mesh.ranks_of_replica(rollback.replica):
            if rank in self.spec.ranks:
                self.page.roll_back(rank, rollback.generation)
                self.send_local(rank, encode(rollback))

    def send_client(self, message: Message | bytes) -> None:
        data = message if isinstance(message, bytes) else encode(message)
        # When it has gone: that is seen by other means.
        with suppress(zmq.Again):
            self.client.send_multipart([self.client_route, data], zmq.NOBLOCK)

    def log_end(self, level: int, text: str) -> None:
        """Once is enough: the client logs what it is told."""
        logger.log(logging.DEBUG if self.has_client else level, "%s", text)

    def blame(self, rank: int, what: str) -> str:
        """What a rank of this node did, and where it was last."""
        return f"{self.mesh.describe(rank)} {what}; {self.page.seen(rank)}"

    def start_ranks(self, store: StoreAddress, host: str = "") -> None:
        spec = self.spec
        jobs = []
        for rank in spec.ranks:
            boot = RankSpec(
                rank=rank,
                mesh=spec.mesh,
                target=spec.target,
                config=spec.config,
                control=self._control,
                endpoint=self._endpoint,
                route=self._routes[rank],
                store=store,
                timeout=spec.timeouts.collective,
                start_timeout=spec.timeouts.start,
                threads=spec.threads,
                log_level=spec.log_level,
                host=host,
            )
            jobs.append(
                SpawnJob(f"rank{rank}", "moesaic.comm.launch.rank_link:main", (pack(boot),))
            )
        self._spawner.start(jobs)

    def fence(self, ranks: Sequence[int], reason: str) -> None:
        """A new epoch without these ranks, whose processes are killed before anybody goes on
        without them; then all others."""
        lost = [rank for rank in ranks if rank in self.spec.ranks]
        live = self.page.live
        for rank in lost:
            live &= ~(1 << (rank - self.page.first_rank))
        self.page.change(live, reason)
        for rank in lost:
            if rank in self._processes:
                self._processes[rank].kill()
        self._kill_all()

    def stop_ranks(self) -> None:
        """Ask all ranks to end, and end those that do not."""
        for rank in self._processes:
            self.send_local(rank, encode(Stop()))
        # A rank that waits for one that has already ended must not wait for ever.
        self.page.change(0, "the service is stopped")
        # Those that still load do not listen, and have nothing to bring to an end.
        deadline = time.monotonic() + (self.spec.timeouts.stop if self.is_serving else 0.0)
        for process in self._processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
        self._kill_all()

    def close(self) -> None:
        """Leave nothing behind."""
        self._kill_all()
        self._ranks.close(0)
        self.client.close()
        kill_children()

    def _kill_all(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            self.loop.remove(process.sentinel)
            process.join(LAST_WORDS)

    def _on_born(self) -> None:
        born, trouble = self._spawner.take()
        for process in born:
            rank = int(process.name.removeprefix("rank"))
            self._processes[rank] = process
            self.loop.add(process.sentinel, self._on_rank_end)
        if trouble:
            self.loop.remove(self._spawner.bell)
            self.fail(f"{trouble}; the fork server may have failed to load", [])

    def _on_rank_end(self) -> None:
        """Some have ended; those that raised have said why, and that may still be under way."""
        dead = [rank for rank, process in self._processes.items() if not process.is_alive()]
        if any(self._processes[rank].exitcode == 1 for rank in dead):
            self._await_last_words()
        for rank in self.excused.intersection(dead):
            self.loop.remove(self._processes[rank].sentinel)
            dead.remove(rank)
        if dead and self.exit_code is None:
            told = [
                self.blame(rank, describe_exit(self._processes[rank].exitcode)) for rank in dead
            ]
            self.fail("; ".join(told), dead)

    def _await_last_words(self) -> None:
        deadline = time.monotonic() + LAST_WORDS
        while self.exit_code is None and time.monotonic() < deadline:
            if self._ranks.poll(int(LAST_WORDS * 1000)):
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
        """(sender, message, the same as it came). libzmq passes on whatever a process of this user
        writes to the socket; what is not from one of the senders is dropped."""
        for frames in receive_some(socket):
            try:
                sender, message = senders[frames[0]], decode(frames[1])
            except (KeyError, IndexError, NoMessage) as error:
                self._strangers.warn(f"dropped a stranger's message ({type(error).__name__})")
                continue
            if self.exit_code is None:
                yield sender, message, frames[1]


def new_route() -> bytes:
    """The identity of a socket at the supervisor's. It cannot be guessed: a stranger who finds the
    socket can neither pass for a rank or the client nor be sent what is for them."""
    return secrets.token_hex(16).encode()


def _preloads(spec: ServiceSpec) -> list[str]:
    module = spec.target.partition(":")[0]
    return ["moesaic.comm.launch.rank_link", *spec.preload, module]
