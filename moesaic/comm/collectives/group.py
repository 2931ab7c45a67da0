"""A group of ranks and its collectives, over gloo and without torch.distributed's global state."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from moesaic.comm.errors import PeerTimeout
from moesaic.comm.lifecycle import Lifecycle, Membership, Participant
from moesaic.comm.network.held_memory import HeldMemory
from moesaic.comm.network.store import StoreClient
from moesaic.comm.network.torch_store import TorchStore
from moesaic.comm.supervise.control_page import RankStatus

if TYPE_CHECKING:
    from moesaic.comm.windows.tcp_links import TcpLinks

LOOPBACK: Final = "127.0.0.1"
# How long a rank whose collective failed waits for the reports of the others.
REPORT_SECONDS: Final = 0.5
REPORT_POLL: Final = 0.02


class Peers(ABC):
    """Ranks that create something together, such as a window.

    `nodes`: the node of each rank, empty if all are on one. `links`: this rank's connections to
    other nodes, if there are several. `status`: this rank's line in the control page, which waits
    check and update.
    """

    rank: int
    size: int
    name: str
    timeout: float
    nodes: tuple[int, ...] = ()
    links: TcpLinks | None = None
    host: str = LOOPBACK
    """This rank's address for connections between nodes."""
    status: RankStatus | None = None
    repeats: bool = False
    """Whether this rank's predecessor has made its last exchange, with the same outcome."""

    @cached_property
    def members(self) -> tuple[int, ...]:
        """The ranks of the service that form the group, in order."""
        return tuple(range(self.size))

    @cached_property
    def lifecycle(self) -> Lifecycle:
        """The registry of the process; outside of a service, one per group."""
        return Lifecycle(Membership(0, self.members))

    def register(self, participant: Participant) -> None:
        self.lifecycle.register(participant, self.members)

    @cached_property
    def node_peers(self) -> Peers:
        """The ranks of this rank's node."""
        return Subgroup(self, self._ranks_by_node[self.nodes[self.rank]]) if self.nodes else self

    @cached_property
    def rail(self) -> Peers:
        """The ranks of all nodes that have this rank's place in their node."""
        by_node = self._ranks_by_node
        if len(set(map(len, by_node.values()))) > 1:
            raise ValueError(
                f"group {self.name}: nodes have "
                f"{', '.join(str(len(ranks)) for ranks in by_node.values())} of its ranks: choose "
                "sizes by which all have as many"
            )
        place = by_node[self.nodes[self.rank]].index(self.rank)
        return Subgroup(self, [ranks[place] for ranks in by_node.values()])

    @property
    def _ranks_by_node(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for rank, node in enumerate(self.nodes):
            found.setdefault(node, []).append(rank)
        return found

    @abstractmethod
    def all_gather_bytes(self, data: bytes, operation: str) -> list[bytes]:
        """The data of each rank, of any length."""

    @property
    def store(self) -> Store:
        """The store of the group, for torch; its keys are the group's own."""
        raise NotImplementedError(f"group {self.name} has no store")

    def lasting_memory(self, name: str, length: int) -> str | None:
        """The path of memory that outlives the ranks, so that one that is restarted can map it
        again; None: ranks create it themselves. All ranks call it."""
        return None

    def held_memory(self) -> tuple[HeldMemory, str] | None:
        """Where descriptors of memory are kept that outlives the ranks, and the key of those of the
        next window; None: nothing outlives them. All ranks call it."""
        return None

    def collectives(self) -> RankGroup:
        """The same ranks with collectives over gloo; all ranks call it."""
        raise NotImplementedError(f"group {self.name} has no collectives")


class Subgroup(Peers):
    """Some ranks of a group. All ranks of the group run the same exchanges at once, each in a
    subgroup of its own."""

    def __init__(self, whole: Peers, ranks: Sequence[int]) -> None:
        self._whole, self._ranks = whole, tuple(ranks)
        self.rank, self.size = self._ranks.index(whole.rank), len(self._ranks)
        self.name = f"{whole.name}, ranks {', '.join(map(str, ranks))}"
        self.timeout, self.links, self.host = whole.timeout, whole.links, whole.host
        self.status = whole.status
        nodes = tuple(whole.nodes[rank] for rank in ranks)
        self.nodes = nodes if len(set(nodes)) > 1 else ()
        self.members = tuple(whole.members[rank] for rank in ranks)
        self.lifecycle = whole.lifecycle

    def all_gather_bytes(self, data: bytes, operation: str) -> list[bytes]:
        parts = self._whole.all_gather_bytes(data, operation)
        return [parts[rank] for rank in self._ranks]

    @property
    def store(self) -> Store:
        """Keys must differ from those of other subgroups."""
        return self._whole.store


class RankGroup(Peers):
    """Ranks that run the same collectives in the same order. If one fails, PeerTimeout names the
    operation and the missing ranks, and the group is unusable: form another under a new name."""

    def __init__(self, gloo: Any, store: Store | None, name: str, timeout: float) -> None:
        self.rank: int = gloo.rank() if gloo else 0
        self.size: int = gloo.size() if gloo else 1
        self.name = name
        self.timeout = timeout
        self._gloo = gloo
        self._store = store
        self._sequence = 0
        self._last_complete = ""

    @classmethod
    def form(
        cls,
        store: StoreClient,
        name: str,
        rank: int,
        size: int,
        timeout: float,
        *,
        host: str = LOOPBACK,
    ) -> RankGroup:
        """A group of several ranks. `host`: what gloo binds. Use a name once per store."""
        own = TorchStore(store, name, timeout)
        operation = f"form group {name}"
        started = time.monotonic()
        _await_all(own, rank, size, timeout, operation)
        try:
            gloo = _gloo(own, rank, size, timeout, host)
        except RuntimeError as error:
            raise PeerTimeout((), operation, time.monotonic() - started) from error
        return cls(gloo, own, name, timeout)

    @classmethod
    def alone(cls, name: str = "alone", timeout: float = 0.0) -> RankGroup:
        return cls(None, None, name, timeout)

    def collectives(self) -> RankGroup:
        return self

    @property
    def store(self) -> Store:
        if self._store is None:
            raise RuntimeError(f"group {self.name} has one rank: it has no store")
        return self._store

    def barrier(self, operation: str) -> None:
        self._run(lambda gloo: gloo.barrier(), operation)

    def all_gather(self, tensor: Tensor, operation: str) -> list[Tensor]:
        """The tensors of all ranks; shapes and types are equal on all of them."""
        source = tensor.contiguous()
        parts = [torch.empty_like(source) for _ in range(self.size)]
        if self.size == 1:
            parts[0].copy_(source)
        wires = [_wire(part) for part in parts]
        self._run(lambda gloo: gloo.allgather([wires], [_wire(source)]), operation)
        return parts

    def all_gather_bytes(self, data: bytes, operation: str) -> list[bytes]:
        with torch.device("cpu"):  # a model may be in the making on another one
            length = torch.tensor([len(data)])
            lengths = [int(part) for part in self.all_gather(length, operation)]
            padded = bytearray(data.ljust(max(1, *lengths), b"\0"))
            parts = self.all_gather(torch.frombuffer(padded, dtype=torch.uint8), operation)
        return [
            part.numpy().tobytes()[:length] for part, length in zip(parts, lengths, strict=True)
        ]

    def all_to_all(
        self,
        out: Tensor,
        source: Tensor,
        out_splits: Sequence[int],
        in_splits: Sequence[int],
        operation: str,
    ) -> None:
        """Sends in_splits[r] rows of `source` to rank r, receives out_splits[r] rows of `out`."""
        if self.size == 1:
            out.copy_(source)
        self._run(
            lambda gloo: gloo.alltoall_base(
                _wire(out), _wire(source), list(out_splits), list(in_splits)
            ),
            operation,
        )

    def all_reduce(self, tensor: Tensor, operation: str) -> None:
        """Sums over ranks, in place."""
        self._run(lambda gloo: gloo.allreduce([tensor]), operation)

    def broadcast(self, tensor: Tensor, root: int, operation: str) -> None:
        """Overwrites `tensor` with the root's."""
        # A rank may leave a broadcast before the others enter it.
        self._run(lambda gloo: gloo.broadcast(_wire(tensor), root), operation, proves=False)

    def _run(self, start: Callable[[Any], Any], operation: str, *, proves: bool = True) -> None:
        """Runs one collective; `proves`: a rank that leaves it knows that all ranks entered it."""
        if self.size == 1:
            return
        if self._gloo is None:
            raise RuntimeError(
                f"{operation!r} on group {self.name}, which has failed: form another"
            )
        self._sequence += 1
        started = time.monotonic()
        work = None
        try:
            work = start(self._gloo)
            work.wait()
        except RuntimeError as error:
            seconds = time.monotonic() - started
            # Closes the connections, which the work holds, too: waiting peers fail and report.
            del work
            self._gloo = None
            raise self._failure(operation, seconds) from error
        if proves:
            self._last_complete = operation

    def _failure(self, operation: str, seconds: float) -> PeerTimeout:
        """Reports this rank's position, reads those of the others, and names the missing ranks."""
        seen = dict.fromkeys(range(self.size), (0, self._last_complete))
        del seen[self.rank]
        try:
            self._exchange_reports(operation, seen)
        except RuntimeError:
            # The store ended with its host, so that the missing ranks are unknown.
            return PeerTimeout((), operation, seconds)
        missing = tuple(rank for rank, (sequence, _) in seen.items() if sequence < self._sequence)
        return PeerTimeout(missing, operation, seconds, {rank: seen[rank][1] for rank in missing})

    def _exchange_reports(self, operation: str, seen: dict[int, tuple[int, str]]) -> None:
        """Updates `seen`: the last operation of each rank, by its own report."""
        assert self._store is not None
        self._store.set(f"failed/{self.rank}", f"{self._sequence} {operation}")
        deadline = time.monotonic() + REPORT_SECONDS
        late = set(seen)
        while late and time.monotonic() < deadline:
            for rank in sorted(late):
                if self._store.check([f"failed/{rank}"]):
                    sequence, _, text = self._store.get(f"failed/{rank}").decode().partition(" ")
                    seen[rank] = (int(sequence), text)
            late = {rank for rank in late if seen[rank][0] < self._sequence}
            if late:
                time.sleep(REPORT_POLL)


def _await_all(store: Store, rank: int, size: int, timeout: float, operation: str) -> None:
    """Waits until all ranks are about to connect: gloo does not say which one is missing."""
    keys = [f"joined/{peer}" for peer in range(size)]
    store.set(keys[rank], "")
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except RuntimeError as error:
        missing = tuple(peer for peer in range(size) if not store.check([keys[peer]]))
        raise PeerTimeout(missing, operation, timeout) from error


def _gloo(store: Store, rank: int, size: int, timeout: float, host: str) -> Any:
    factory: Any = torch.distributed.ProcessGroupGloo
    options = factory._Options()
    options._devices = [factory.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout)
    return factory(store, rank, size, options)


def _wire(tensor: Tensor) -> Tensor:
    """A view that gloo can send: it refuses float8, but not its bytes."""
    is_float8 = tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point
    return tensor.view(torch.uint8) if is_float8 else tensor
