"""What a service is to be, and what a rank of it has to know: plain data, sent as msgpack."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from moesaic.comm.mesh import Mesh
from moesaic.comm.network.store import StoreAddress
from moesaic.config.resolve import DIST_TIMEOUT, MAX_RANKS_PER_NODE

LOAD_BALANCE: Final = ("round_robin", "total_requests", "total_tokens")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """In seconds. `start`: until all ranks are ready, all that they wait for on the way included.
    `join`: until all nodes are there. `collective`: when an operation between ranks fails by
    itself. `hang`: how long a step may stand still before the service ends. `guard`: before that is
    logged. `beat`: the age of a heartbeat that means a hang; `stopped`: the same for a process that
    was stopped. `node`: how long another node may be silent. `stop`: how long ranks may take to
    end."""

    start: float = 1800.0
    join: float = 600.0
    collective: float = DIST_TIMEOUT
    hang: float = 30.0
    guard: float = 1.0
    beat: float = 5.0
    stopped: float = 0.5
    node: float = 3.0
    stop: float = 2.0

    @property
    def meet(self) -> float:
        """How long nodes wait for each other."""
        return min(self.join, self.start)


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """`target`: "package.module:function" that every rank calls with its RankLink. `config`: what
    the ranks read as link.config. `dist_init_addr`: HOST:PORT of node 0 where several nodes meet;
    `host`: this node's own address, found out where it is empty. `threads`: of each rank.
    `gpu_sharers`: ranks on one GPU at most; several want CUDA's MPS."""

    mesh: Mesh
    target: str
    config: dict[str, Any] = field(default_factory=dict)
    node_rank: int = 0
    dist_init_addr: str | None = None
    host: str = ""
    load_balance: str = "round_robin"
    timeouts: Timeouts = Timeouts()
    threads: int = 1
    preload: tuple[str, ...] = ()
    log_level: str = "info"
    gpu_sharers: int = 0

    def __post_init__(self) -> None:
        mesh = self.mesh
        if self.load_balance not in LOAD_BALANCE:
            raise ValueError(f"load_balance {self.load_balance!r}: give one of {LOAD_BALANCE}")
        if ":" not in self.target:
            raise ValueError(f"target {self.target!r}: give package.module:function")
        if mesh.world % mesh.nnodes:
            raise ValueError(f"{mesh.world} ranks on {mesh.nnodes} nodes: give each as many")
        if mesh.ranks_per_node > MAX_RANKS_PER_NODE:
            raise ValueError(f"{mesh.ranks_per_node} ranks a node: {MAX_RANKS_PER_NODE} at most")
        if not 0 <= self.node_rank < mesh.nnodes:
            raise ValueError(f"node rank {self.node_rank}: give one of 0..{mesh.nnodes - 1}")
        if mesh.nnodes > 1:
            split_address(self.dist_init_addr or "")

    @property
    def ranks(self) -> range:
        """Those of this node."""
        return self.mesh.ranks_of_node(self.node_rank)


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What a rank is born with. `control`: the path of the node's control page; `endpoint`: where
    it talks to its supervisor, and `route` by what name. `timeout`: of an operation between ranks;
    `start_timeout`: of their meetings until all are ready. `host`: where there are several nodes,
    the address of this one."""

    rank: int
    mesh: Mesh
    target: str
    config: dict[str, Any]
    control: str
    endpoint: str
    route: bytes
    store: StoreAddress
    timeout: float
    start_timeout: float
    threads: int
    log_level: str
    host: str = ""


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"dist_init_addr {address!r}: give HOST:PORT of node 0")
    return host.strip("[]"), int(port)


def pack(value: ServiceSpec | RankSpec) -> bytes:
    return msgspec.msgpack.encode(value)


def unpack_service_spec(data: bytes) -> ServiceSpec:
    return msgspec.msgpack.decode(data, type=ServiceSpec)


def unpack_rank_spec(data: bytes) -> RankSpec:
    return msgspec.msgpack.decode(data, type=RankSpec)
