"""A window between ranks of several nodes.

Every node has one mapping with the planes of all ranks, with the same layout, so that a rank reads
from its own node's mapping regardless of the writer. A rank touches what it writes; its next signal
sends that to the other nodes, ahead of the signal. For each sender one rank in every other node
receives, so that each byte of a mapping has one writer.

A write reaches another node between its writer's previous signal and its next one: later than in
the writer's own node, never earlier. So a protocol in which a rank overwrites data only after its
readers have acknowledged it is safe in every node.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import weakref
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moesaic.comm.collectives.group import Peers
from moesaic.comm.network.handshake import Identity
from moesaic.comm.supervise.control_page import RankStatus
from moesaic.comm.windows.signals import Signals, page_bytes
from moesaic.comm.windows.tcp_links import FrameKind, Inlet, Outlet, TcpLinks, frame
from moesaic.comm.windows.window import (
    PlaneSpec,
    SharedWindow,
    control_bytes,
    layout_of,
    share_memory,
    window_bytes,
)


@dataclass(frozen=True, slots=True)
class NodeRoute:
    """The connection to another node, and the group's ranks there."""

    outlet: Outlet
    node: int
    ranks: tuple[int, ...]


class NodeSender:
    """Sends what a rank has written: pieces of the mapping, and the routes that each takes."""

    def __init__(self, window: int, memory: mmap.mmap, routes: Sequence[NodeRoute]) -> None:
        self.window = window
        self._bytes = memoryview(memory)
        self._address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        self._pieces: list[tuple[int, int, int]] = []
        """The first byte, the one after the last, and a mask of nodes."""
        self.take(routes)

    def take(self, routes: Sequence[NodeRoute]) -> None:
        """Sends on these routes from now on. What was not sent on the former ones is dropped."""
        self.clear()
        self.routes = routes
        self._mask_of = {rank: 1 << route.node for route in routes for rank in route.ranks}
        self._everywhere = sum(1 << route.node for route in routes)

    def add(self, view: Tensor, ranks: Sequence[int] | None) -> None:
        mask = self._everywhere
        if ranks is not None:
            mask = 0
            for rank in ranks:
                mask |= self._mask_of.get(rank, 0)
        if not mask or not view.numel():
            return
        assert view.is_contiguous(), f"a part of {tuple(view.shape)} {view.stride()} has gaps"
        start = view.data_ptr() - self._address
        stop = start + view.nbytes
        assert 0 <= start < stop <= len(self._bytes), "what is touched is not part of the window"
        if self._pieces and self._pieces[-1][1:] == (start, mask):
            start = self._pieces.pop()[0]
        self._pieces.append((start, stop, mask))

    def post(
        self, channel: int, epoch: int, operation: str, seconds: float, status: RankStatus | None
    ) -> None:
        loaded, self._pieces = self._pieces, []
        for route in self.routes:
            pieces = [(start, stop) for start, stop, mask in loaded if mask >> route.node & 1]
            table = [(start, stop - start) for start, stop in pieces]
            head = frame(FrameKind.POST, self.window, channel, epoch, operation, table)
            data = [self._bytes[start:stop] for start, stop in pieces]
            route.outlet.send([head, *data], seconds, status)

    def open(self, generation: int, seconds: float, status: RankStatus | None = None) -> None:
        """From here on the receivers notice when this rank ends."""
        for route in self.routes:
            opening = frame(FrameKind.OPEN, self.window, epoch=generation)
            route.outlet.send([opening], seconds, status)

    def clear(self) -> None:
        self._pieces = []

    def unreachable(self) -> dict[int, str]:
        """The ranks that cannot be reached any more, and why."""
        return {
            rank: f"node {route.node} ({_names(route.ranks)}): {broken}"
            for route in self.routes
            if (broken := route.outlet.broken)
            for rank in route.ranks
        }


class NodeSignals(Signals):
    """Also sends signals to other nodes."""

    sender: NodeSender
    timeout: float

    def post(self, channel: int, epoch: int, operation: str) -> None:
        super().post(channel, epoch, operation)
        self.sender.post(channel, epoch, operation, self.timeout, self._status)
        if any(route.outlet.broken for route in self.sender.routes):
            self.unreachable.update(self.sender.unreachable())


class NodeWindow(SharedWindow):
    """`signal` returns when the kernel has accepted the touched data."""

    spans_nodes = True
    signals_type = NodeSignals
    _signals: NodeSignals

    def __init__(
        self,
        memory: mmap.mmap,
        specs: Sequence[PlaneSpec],
        group: Peers,
        timeout: float,
        channels: int,
        sender: NodeSender,
    ) -> None:
        super().__init__(memory, specs, group, timeout, channels)
        self._sender = self._signals.sender = sender
        self._signals.timeout = timeout
        weakref.finalize(self, _retire, sender, group.links)
        if group.links is not None and group.links.renews:
            self._signals.renews = True
            group.links.windows.add(self)

    def touch(self, view: Tensor, ranks: Sequence[int] | None = None) -> None:
        self._sender.add(view, ranks)

    def forget(self) -> None:
        self._sender.clear()

    def connect_again(
        self, connect: Callable[[int], Outlet], live: Sequence[int], generation: int
    ) -> None:
        group, sender = self.group, self._sender
        members = [number for number, rank in enumerate(group.members) if rank in live]
        sender.take(_routes(group, lambda number: connect(group.members[number]), members))
        sender.open(generation, self.timeout, group.status)
        self._signals.unreachable = sender.unreachable()


def _retire(sender: NodeSender, links: TcpLinks | None) -> None:
    for route in sender.routes:
        route.outlet.retire(sender.window)
    if links is not None and links.renews:
        links.forget(sender.window)


def create_node_window(
    group: Peers, specs: Sequence[PlaneSpec], timeout: float, channels: int
) -> NodeWindow:
    links = group.links
    if links is None:
        raise ValueError(
            f"group {group.name} is on nodes {sorted(set(group.nodes))}: give it links"
        )
    name = links.next_window(group.name)
    window = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    found: list[NodeSender] = []

    def join(memory: mmap.mmap, notes: list[str]) -> str:
        peers = [_Peer(*json.loads(note)) for note in notes]
        _expect(links, group, memory, peers, channels, window)

        def connect(number: int) -> Outlet:
            peer = peers[number]
            return links.connect(peer.address, peer.port, Identity(peer.rank, peer.node))

        # A rank that is started again connects when it joins: what it knows of the others is old.
        live = [] if group.repeats else range(group.size)
        try:
            found.append(NodeSender(window, memory, _routes(group, connect, live)))
        except OSError as error:
            return str(error)
        return ""

    length = window_bytes(specs, group.size, channels)
    layout = f"{name}: {layout_of(specs, channels)}"
    note = json.dumps(_Peer(links.identity.rank, links.identity.node, links.address, links.port))
    try:
        memory = share_memory(group, length, layout, note, join)
    except BaseException:
        links.forget(window)
        raise
    found[0].open(0, timeout)
    return NodeWindow(memory, specs, group, timeout, channels, found[0])


def receiver(nodes: Sequence[int], sender: int, node: int, live: Container[int]) -> int | None:
    """The live rank of `node` that receives from `sender`: the ranks of a node share the work."""
    there = [rank for rank in _ranks_of(nodes, node) if rank in live]
    place = _ranks_of(nodes, nodes[sender]).index(sender)
    return there[place % len(there)] if there else None


def _ranks_of(nodes: Sequence[int], node: int) -> tuple[int, ...]:
    return tuple(rank for rank, other in enumerate(nodes) if other == node)


class _Peer(NamedTuple):
    """A member of the group, as it describes itself."""

    rank: int
    node: int
    address: str
    port: int


def _expect(
    links: TcpLinks,
    group: Peers,
    memory: mmap.mmap,
    peers: Sequence[_Peer],
    channels: int,
    window: int,
) -> None:
    """Prepares to receive from the senders that this rank serves, or may serve."""
    here, everyone = group.nodes[group.rank], range(group.size)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    for sender, node in enumerate(group.nodes):
        serves = links.renews or receiver(group.nodes, sender, here, everyone) == group.rank
        if node == here or not serves:
            continue
        page = memoryview(memory)[: page_bytes(group.size, channels + 1)]
        signals = Signals(page, address, sender, group.size, channels + 1)
        first = control_bytes(group.size, channels)
        inlet = Inlet(memoryview(memory), first, channels + 1, signals)
        links.expect(window, peers[sender].rank, inlet)


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _routes(
    group: Peers, connect: Callable[[int], Outlet], live: Container[int]
) -> list[NodeRoute]:
    """To the other nodes that have live ranks."""
    nodes = group.nodes
    routes = []
    for node in dict.fromkeys(nodes):
        there = None if node == nodes[group.rank] else receiver(nodes, group.rank, node, live)
        if there is not None:
            routes.append(NodeRoute(connect(there), node, _ranks_of(nodes, node)))
    return routes
