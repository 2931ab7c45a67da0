"""A rank's side of the supervisor: what a rank is born with, and how it talks."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any, Final

import torch
import zmq
from tqdm import tqdm

from moesaic.comm.errors import PeerTimeout, WindowAborted
from moesaic.comm.lifecycle import Lifecycle, Membership
from moesaic.comm.mesh import RankPlace
from moesaic.comm.network.handshake import Identity
from moesaic.comm.network.rendezvous import StoreGroup
from moesaic.comm.network.store import StoreClient
from moesaic.comm.supervise.child_process import die_with_fork_server, name_process
from moesaic.comm.supervise.control_page import ControlPage, EpochChanged, RankStatus
from moesaic.comm.supervise.service_spec import RankSpec, unpack_rank_spec
from moesaic.comm.supervise.spawner import function_of
from moesaic.comm.windows.tcp_links import TcpLinks
from moesaic.core.messages import AnyMessage, Failed, Message, Ready, Stop, decode, encode
from moesaic.core.process import keep_freed_memory
from moesaic.core.rank_state import RankState

BEAT_SECONDS: Final = 0.05
LINGER_MS: Final = 1000
WAIT_FOR_REQUESTS: Final = "wait for requests"
# Exit code of a rank that ends because of another one; the supervisor knows of that already.
ABANDONED: Final = 3

logger = logging.getLogger(__name__)


class RankLink:
    """Made by the rank's process; the main thread uses it. `config` is the ServiceSpec's."""

    def __init__(self, boot: RankSpec) -> None:
        self.rank, self.mesh, self.config = boot.rank, boot.mesh, boot.config
        self.place: RankPlace = boot.mesh.place(boot.rank)
        self.timeout = boot.timeout
        """Seconds after which an operation between ranks fails."""
        self.is_ready = False
        self._boot = boot
        here = self.mesh.ranks_of_node(self.node)
        self._page = ControlPage.open(boot.control, len(here), here.start)
        self.status: RankStatus = self._page.status(boot.rank)
        self.lifecycle = Lifecycle(self._membership())
        """What this rank restarts when a step is rolled back."""
        self._store: StoreClient | None = None
        self._links: TcpLinks | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.linger = LINGER_MS
        self._socket.identity = boot.route
        self._socket.connect(boot.endpoint)
        self.status.beat()
        self.status.enter(RankState.STARTING, "start")
        threading.Thread(target=self._beat, daemon=True, name="heartbeat").start()

    @property
    def node(self) -> int:
        return self.mesh.node_of(self.rank)

    @property
    def shows_progress(self) -> bool:
        """One rank is enough to show how far all are."""
        return self.rank == 0

    @property
    def store(self) -> StoreClient:
        """Where ranks meet; connected at first use."""
        if self._store is None:
            boot = self._boot
            own = Identity(boot.rank, self.node)
            self._store = boot.store.connect(boot.start_timeout, own)
        return self._store

    @property
    def links(self) -> TcpLinks | None:
        """This rank's connections to other nodes, where there are any; made at first use."""
        if self._links is None and self.mesh.nnodes > 1:
            boot = self._boot
            self._links = TcpLinks(boot.rank, self.node, boot.host, boot.store.secret)
        return self._links

    def group(self, name: str, ranks: Sequence[int]) -> StoreGroup:
        """This rank and others of the service, in that order; they all ask for the same."""
        nodes = [self.mesh.node_of(rank) for rank in ranks]
        across = len(set(nodes)) > 1
        # Meetings are for the start, in which one rank may load for much longer than another.
        group = StoreGroup(
            self.store if len(ranks) > 1 else None,
            name,
            list(ranks).index(self.rank),
            len(ranks),
            self._boot.start_timeout,
            nodes if across else (),
            self.status,
        )
        group.collective_timeout = self.timeout
        group.members, group.lifecycle = tuple(ranks), self.lifecycle
        if across:
            group.links, group.host = self.links, self._boot.host
        return group

    def restart(self, generation: int) -> None:
        """Enters a generation that all ranks of the replica have agreed on."""
        self.lifecycle.restart(self._membership(generation))

    def ready(self, facts: dict[str, Any]) -> None:
        self.is_ready = True
        # Before it is told: whoever hears of it may look at once.
        self.status.enter(RankState.IDLE, WAIT_FOR_REQUESTS)
        self.send(Ready(self.rank, facts))

    def send(self, message: Message) -> None:
        self._socket.send(encode(message))

    def receive(
        self, timeout: float | None = None, waits_for: str | None = None
    ) -> AnyMessage | None:
        """The next message, or None after `timeout` seconds (None: never). While it waits the rank
        counts as idle, or as waiting for what `waits_for` names. Stop ends the process by
        SystemExit, with status 0."""
        if not self._socket.poll(0):
            if timeout == 0:
                return None
            if waits_for is None:
                self.status.enter(RankState.IDLE, WAIT_FOR_REQUESTS)
            else:
                self.status.enter(RankState.WAITING, waits_for)
            arrived = self._socket.poll(None if timeout is None else int(timeout * 1000))
            self.status.enter(RankState.COMPUTING)
            if not arrived:
                return None
        message = decode(self._socket.recv())
        if isinstance(message, Stop):
            raise SystemExit(0)
        return message

    def close(self) -> None:
        """Waits, for a short time, until what was sent is gone."""
        self._socket.close()
        self._context.term()

    @property
    def is_stopping(self) -> bool:
        """Whether the supervisor has ended the membership of all ranks."""
        return self._page.live == 0

    def _membership(self, generation: int = 0) -> Membership:
        """A death ends the service, so that all ranks are active in every epoch."""
        return Membership(generation, tuple(range(self.mesh.world)), self.status.epoch)

    def _beat(self) -> None:
        while True:
            self.status.beat()
            time.sleep(BEAT_SECONDS)


def main(data: bytes) -> None:
    """The life of a rank's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_fork_server()
    boot = unpack_rank_spec(data)
    name_process(process_name(boot.rank))
    _set_up(boot)
    link = RankLink(boot)
    code = _run(link, boot.target)
    link.close()
    logging.shutdown()
    sys.stderr.flush()
    # Threads and destructors of what the target left behind must not hold the process up.
    os._exit(code)


def process_name(rank: int) -> str:
    return f"moesaic-rank-{rank}" if rank < 100 else f"moesaic-rk-{rank}"


def _run(link: RankLink, target: str) -> int:
    """The target's exit code; an error is told to the supervisor first."""
    try:
        function_of(target)(link)
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except (EpochChanged, WindowAborted) as error:
        if link.is_stopping:
            return 0
        logger.info("abandoned: %s", error)
        return ABANDONED
    except Exception as error:
        # What cannot be started as it was asked for is no fault of the code: the message is enough.
        refused = isinstance(error, ValueError) and not link.is_ready
        level = logging.DEBUG if refused else logging.ERROR
        logger.log(level, "rank %d failed", link.rank, exc_info=True)
        waited = isinstance(error, PeerTimeout)
        link.send(Failed(link.rank, last_lines(error), waited=waited))
        return 1
    return 0


def last_lines(error: Exception) -> str:
    """The error, and where it was raised."""
    text = "".join(traceback.format_exception_only(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return text
    last = frames[-1]
    return f"{text} (in {last.name}, {os.path.basename(last.filename)}:{last.lineno})"


def _set_up(boot: RankSpec) -> None:
    torch.set_num_threads(boot.threads)
    keep_freed_memory()
    # Its own lock would be a named semaphore, which stays in /dev/shm when a rank is killed.
    tqdm.set_lock(threading.RLock())
    group = boot.mesh.group_of(boot.mesh.place(boot.rank))
    name = f"rank {boot.rank} DP{group}" if boot.mesh.num_groups > 1 else f"rank {boot.rank}"
    form = f"[%(asctime)s] [{name}] %(message)s"
    logging.basicConfig(level=boot.log_level.upper(), format=form, force=True)
