"""The configuration of a service and of each rank, sent as msgpack."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from moesaic.comm.mesh import Mesh
from moesaic.comm.network.store import StoreAddress
from moesaic.comm.supervise.load_balance import METHODS
from moesaic.config.resolve import DIST_TIMEOUT, MAX_RANKS_PER_NODE


@dataclass(frozen=True, slots=True)
class Timeouts:
    """In seconds."""

    start: float = 1800.0
    """Until all ranks are ready."""
    join: float = 600.0
    """Until all nodes are connected."""
    collective: float = DIST_TIMEOUT
    """Until an operation between ranks fails."""
    hang: float = 30.0
    """How long a step may make no progress before the service ends."""
    guard: float = 1.0
    """The same, before it is logged."""
    beat: float = 5.0
    """The age of a heartbeat that means a hang."""
    stopped: float = 0.5
    """How long a process may be stopped (state T)."""
    node: float = 3.0
    """How long another node may be silent."""
    stop: float = 2.0
    """How long ranks may take to end."""
    client: float = 300.0
    """How long a service that is kept waits for its next client."""
    abandon: float = math.inf
    """How long a rank may take to abandon its step when the members change, before it is taken for
    lost, too. On a GPU, where its waits end at once, nothing else shows that the device hangs."""

    @property
    def nodes(self) -> float:
        """How long nodes wait for each other."""
        return min(self.join, self.start)


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    mesh: Mesh
    target: str
    """package.module:function, which every rank calls with its RankLink."""
    config: dict[str, Any] = field(default_factory=dict)
    """What the ranks read as link.config."""
    node_rank: int = 0
    dist_init_addr: str | None = None
    """HOST:PORT of node 0, for several nodes; behind it, with commas between, those of the nodes
    that may take its place."""
    leads: bool | None = None
    """Whether its supervisor leads the service; None: that of node 0 does."""
    listening: int = -1
    """The descriptor of a socket that is bound to this node's part of `dist_init_addr`."""
    host: str = ""
    """This node's own address; detected if empty."""
    secret_file: str | None = None
    """The file with the secret of the nodes; None: it is in the environment."""
    load_balance: str = "auto"
    prefix_page: int = 0
    """Tokens in a page of the groups' prefix caches; 0: they have none."""
    timeouts: Timeouts = Timeouts()
    threads: int = 1
    preload: tuple[str, ...] = ()
    log_level: str = "info"
    gpu_sharers: int = 0
    """The most ranks on one GPU; several need CUDA's MPS."""
    elastic: bool = False
    """Whether the service goes on without a rank that is lost, and restarts it."""
    start_size: int | None = None
    """The ranks that run at the start, if fewer than all: the others end once all have been ready,
    which the layout of shared memory needs."""
    restart_limit: int = 0
    """How often in a row a rank may be lost at once after its start; 0: no limit."""
    keeper: int = 0
    """The process whose end ends the service, which its client's does not; 0: there is none."""

    def __post_init__(self) -> None:
        mesh = self.mesh
        if self.load_balance not in METHODS:
            raise ValueError(f"load_balance {self.load_balance!r}: give one of {METHODS}")
        if ":" not in self.target:
            raise ValueError(f"target {self.target!r}: give package.module:function")
        if mesh.world % mesh.nnodes:
            raise ValueError(f"{mesh.world} ranks on {mesh.nnodes} nodes: give each as many")
        if mesh.ranks_per_node > MAX_RANKS_PER_NODE:
            raise ValueError(f"{mesh.ranks_per_node} ranks a node: {MAX_RANKS_PER_NODE} at most")
        if not 0 <= self.node_rank < mesh.nnodes:
            raise ValueError(f"node rank {self.node_rank}: give one of 0..{mesh.nnodes - 1}")
        if mesh.nnodes > 1:
            heads = self.heads
            if len(heads) > 1 and not (self.elastic and self.keeper):
                raise ValueError("dist_init_addr: several nodes lead an elastic server alone")

    @property
    def heads(self) -> list[tuple[str, int]]:
        """Where node 0 listens while it leads, and each node that may take its place."""
        return [split_address(one) for one in (self.dist_init_addr or "").split(",")]

    @property
    def is_lead(self) -> bool:
        return self.node_rank == 0 if self.leads is None else self.leads

    @property
    def ranks(self) -> range:
        return self.mesh.ranks_of_node(self.node_rank)


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What the process of a rank gets from its supervisor."""

    rank: int
    service: ServiceSpec
    control: str
    """The path of the node's control page."""
    endpoint: str
    """The supervisor's socket."""
    route: bytes
    """The identity of this rank's socket there."""
    store: StoreAddress
    host: str = ""
    """The address of this node, for several nodes."""
    secret: bytes = b""
    """What the node shares with other nodes and instances."""
    memory: StoreAddress | None = None
    """The store that keeps memory of this node's ranks, if `store` is on another node."""
    returns: bool = False
    """Whether the other ranks serve already: this one starts in the place of one that was lost."""


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"dist_init_addr {address!r}: give HOST:PORT of node 0")
    return host.strip("[]"), int(port)
