"""A rank's connection to its supervisor."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Final

import msgspec
import torch
import zmq
from tqdm import tqdm

from moesaic.comm.errors import PeerTimeout, StateLost, WindowAborted
from moesaic.comm.lifecycle import Lifecycle, Membership
from moesaic.comm.mesh import RankPlace
from moesaic.comm.network.handshake import Identity
from moesaic.comm.network.held_memory import HeldMemory
from moesaic.comm.network.rendezvous import StoreGroup
from moesaic.comm.network.store import StoreClient
from moesaic.comm.supervise.child_process import die_with_fork_server, name_process
from moesaic.comm.supervise.control_page import ControlPage, EpochChanged, RankStatus
from moesaic.comm.supervise.service_spec import RankSpec, ServiceSpec
from moesaic.comm.supervise.spawner import function_of
from moesaic.comm.windows.tcp_links import TcpLinks
from moesaic.core.messages import AnyMessage, Failed, Message, Ready, Stop, decode, encode
from moesaic.core.process import keep_freed_memory
from moesaic.core.rank_state import RankState

BEAT_SECONDS: Final = 0.05
LINGER_MS: Final = 1000
WAIT_FOR_REQUESTS: Final = "wait for requests"
# The exit code of a rank that ends because of another one, of which the supervisor knows.
ABANDONED: Final = 3
# How long kernels may take to end with their process.
KERNEL_SECONDS: Final = 1.0

logger = logging.getLogger(__name__)


class RankLink:
    """The main thread of the rank's process uses it. `config` is the ServiceSpec's."""

    def __init__(self, spec: RankSpec) -> None:
        service = spec.service
        self.rank, self.mesh, self.config = spec.rank, service.mesh, service.config
        self.place: RankPlace = self.mesh.place(self.rank)
        self.timeout = service.timeouts.collective
        """Seconds after which an operation between ranks fails."""
        self.is_ready = False
        self.returns = spec.returns
        """Whether the other ranks serve already: what they exchanged at their start is known, and
        none of them is there to wait for."""
        self._spec = spec
        self._has_ended_links = False
        here = self.mesh.ranks_of_node(self.node)
        self._page = ControlPage.open(spec.control, len(here), here.start)
        self.status: RankStatus = self._page.status(spec.rank)
        self.lifecycle = Lifecycle(self._membership())
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.linger = LINGER_MS
        self._socket.identity = spec.route
        self._socket.connect(spec.endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self.status.beat()
        self.status.enter(RankState.STARTING, "start")
        threading.Thread(target=self._beat, daemon=True, name="heartbeat").start()

    @property
    def node(self) -> int:
        return self.mesh.node_of(self.rank)

    @property
    def host(self) -> str:
        """The address of this node; empty if there is one node."""
        return self._spec.host

    @property
    def secret(self) -> bytes:
        """What the node shares with other nodes and instances."""
        return self._spec.secret

    @cached_property
    def store(self) -> StoreClient:
        own = Identity(self.rank, self.node)
        return self._spec.store.connect(self._spec.service.timeouts.start, own)

    @cached_property
    def node_store(self) -> StoreClient:
        """The store that keeps memory of this node's ranks."""
        if self._spec.memory is None:
            return self.store
        own = Identity(self.rank, self.node)
        return self._spec.memory.connect(self._spec.service.timeouts.start, own)

    @cached_property
    def held_memory(self) -> HeldMemory:
        own = Identity(self.rank, self.node)
        return self._spec.store.connect_memory(self._spec.service.timeouts.start, own)

    @cached_property
    def links(self) -> TcpLinks:
        spec, renews = self._spec, self._spec.service.elastic
        links = TcpLinks(self.rank, self.node, spec.host, spec.store.secret, renews=renews)
        if renews:
            self.store.set(_place_of(self.rank), f"{links.port} {links.address}".encode())
        return links

    def group(self, name: str, ranks: Sequence[int]) -> StoreGroup:
        """A group of this rank and others, in that order; all of them ask for the same."""
        nodes = [self.mesh.node_of(rank) for rank in ranks]
        across = len(set(nodes)) > 1
        # Groups are formed at the start, when one rank may load much longer than another.
        group = StoreGroup(
            self.store if len(ranks) > 1 else None,
            name,
            list(ranks).index(self.rank),
            len(ranks),
            self._spec.service.timeouts.start,
            nodes if across else (),
        )
        group.status, group.collective_timeout = self.status, self.timeout
        group.members, group.lifecycle = tuple(ranks), self.lifecycle
        group.lasts = self._spec.service.elastic
        if group.lasts and len(ranks) > 1:
            group.node_store = self.node_store
        if self.mesh.nnodes == 1:
            group.connect_memory = lambda: self.held_memory
        if across:
            group.links, group.host = self.links, self._spec.host
        return group

    def restart(self, generation: int, active: Sequence[int] = ()) -> None:
        """Enters a generation that all ranks of the replica have agreed on. `active`: the live
        ranks, if not all ranks are."""
        if self._has_ended_links:
            self._has_ended_links = False
            self.links.begin_generation(active, self._addresses(active).__getitem__)
        self.lifecycle.restart(self._membership(generation, tuple(active)))

    def end_links(self, generation: int) -> None:
        """Ends the connections to ranks of other nodes, until `restart` makes new ones."""
        if "links" in self.__dict__:
            self.links.end_generation(generation)
            self._has_ended_links = True

    def _addresses(self, ranks: Sequence[int]) -> dict[int, tuple[str, int, int]]:
        """Where each rank listens, as it lives now: host, port and node."""
        told = self.store.get_now([_place_of(rank) for rank in ranks])
        found = {}
        for rank, value in zip(ranks, told, strict=True):
            port, _, host = (value or b"0").decode().partition(" ")
            found[rank] = host, int(port), self.mesh.node_of(rank)
        return found

    def ready(self, facts: dict[str, Any]) -> None:
        self.is_ready = True
        # Set before it is sent: the receiver may look at once.
        self.status.enter(RankState.IDLE, WAIT_FOR_REQUESTS)
        self.send(Ready(self.rank, facts))

    def send(self, message: Message) -> None:
        self._socket.send(encode(message))

    def watch(self, descriptor: int) -> None:
        """`receive` and `poll` return early while it is readable."""
        self._poller.register(descriptor, zmq.POLLIN)

    def poll(self, seconds: float) -> bool:
        """Waits up to `seconds` for a message; returns whether there is one to receive."""
        return self._socket in dict(self._poller.poll(round(seconds * 1000)))

    def receive(
        self, timeout: float | None = None, waits_for: str | None = None
    ) -> AnyMessage | None:
        """The next message, or None after `timeout` seconds (None: no limit), or when a watched
        descriptor is readable. While it waits, the rank is idle, or waits for `waits_for`. Stop
        ends the process with status 0."""
        if not self._socket.poll(0):
            if timeout == 0:
                return None
            if waits_for is None:
                self.status.enter(RankState.IDLE, WAIT_FOR_REQUESTS)
            else:
                self.status.enter(RankState.WAITING, waits_for)
            ready = self._poller.poll(None if timeout is None else int(timeout * 1000))
            self.status.enter(RankState.COMPUTING)
            if self._socket not in dict(ready):
                return None
        message = decode(self._socket.recv())
        if isinstance(message, Stop):
            raise SystemExit(0)
        return message

    def close(self) -> None:
        """Waits briefly until sent messages have left."""
        self._socket.close()
        self._context.term()

    @property
    def is_stopping(self) -> bool:
        """Whether the supervisor has ended the membership of all ranks."""
        return self._page.live == 0

    def _membership(self, generation: int = 0, active: tuple[int, ...] = ()) -> Membership:
        ranks = active or tuple(range(self.mesh.world))
        return Membership(generation, ranks, self.status.epoch)

    def _beat(self) -> None:
        while True:
            self.status.beat()
            time.sleep(BEAT_SECONDS)


def main(data: bytes) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_fork_server()
    spec = msgspec.msgpack.decode(data, type=RankSpec)
    name_process(f"moesaic-rank-{spec.rank}" if spec.rank < 100 else f"moesaic-rk-{spec.rank}")
    _set_up(spec.rank, spec.service)
    link = RankLink(spec)
    code = _run(link, spec.service.target)
    _end_kernels(link)
    link.close()
    logging.shutdown()
    sys.stderr.flush()
    # Threads and destructors of the target must not delay the exit.
    os._exit(code)


def _run(link: RankLink, target: str) -> int:
    """Runs the target and returns the exit code; reports an error to the supervisor first."""
    try:
        function_of(target)(link)
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except (EpochChanged, WindowAborted) as error:
        if link.is_stopping:
            return 0
        logger.info("abandoned: %s", error)
        return ABANDONED
    except (Exception, StateLost) as error:
        # A ValueError before the rank is ready is a refusal: its message is enough.
        refused = isinstance(error, ValueError) and not link.is_ready
        level = logging.DEBUG if refused else logging.ERROR
        logger.log(level, "rank %d failed", link.rank, exc_info=True)
        waited = isinstance(error, PeerTimeout)
        request_no = error.request_no if isinstance(error, StateLost) else -1
        failed = Failed(link.rank, last_lines(error), waited=waited, request_no=request_no)
        link.send(failed)
        return 1
    return 0


def _end_kernels(link: RankLink) -> None:
    """Kernels of a process that ends in their midst may take those of other ranks on the same GPU
    along: waiting ones return, and the others have a second."""
    if not torch.cuda.is_initialized():
        return
    link.lifecycle.abort("this rank ends")

    def wait() -> None:
        with suppress(RuntimeError):
            torch.cuda.synchronize()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(KERNEL_SECONDS)


def last_lines(error: BaseException) -> str:
    """The error, and where it was raised."""
    text = "".join(traceback.format_exception_only(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return text
    last = frames[-1]
    return f"{text} (in {last.name}, {os.path.basename(last.filename)}:{last.lineno})"


def _place_of(rank: int) -> str:
    """The key of where a rank listens for those of other nodes."""
    return f"links of rank {rank}"


def _set_up(rank: int, spec: ServiceSpec) -> None:
    torch.set_num_threads(spec.threads)
    keep_freed_memory()
    # The default lock is a named semaphore, which stays in /dev/shm when a rank is killed.
    tqdm.set_lock(threading.RLock())
    group = spec.mesh.group_of(spec.mesh.place(rank))
    name = f"rank {rank} DP{group}" if spec.mesh.num_groups > 1 else f"rank {rank}"
    form = f"[%(asctime)s] [{name}] %(message)s"
    logging.basicConfig(level=spec.log_level.upper(), format=form, force=True)
