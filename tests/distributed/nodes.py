"""Ranks of one machine as if they were on several nodes: each node has an address of its own, and
only ranks of a node share memory."""

from __future__ import annotations

import mmap
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.network.handshake import Identity
from moesaic.comm.windows.factory import create_window
from moesaic.comm.windows.node_window import NodeRoute, NodeSender, NodeWindow
from moesaic.comm.windows.tcp_links import Outlet, TcpLinks
from moesaic.comm.windows.window import CHANNELS, PlaneSpec, window_bytes

SECRET = b"of all nodes of these tests"
TWO, FOUR = (0, 0, 1, 1), (0, 1, 2, 3)
UNEVEN = (0, 1, 0, 0)
LAYOUTS = (TWO, FOUR, UNEVEN)


@contextmanager
def on_nodes(
    group: RankGroup, nodes: tuple[int, ...], secret: bytes = SECRET, *, renews: bool = False
) -> Iterator[TcpLinks]:
    """The group as if its ranks were on these nodes; each node has an address of its own."""
    node = nodes[group.rank]
    links = TcpLinks(group.rank, node, f"127.0.0.{1 + node}", secret, renews=renews)
    group.nodes, group.links = nodes, links
    try:
        yield links
    finally:
        group.nodes, group.links = (), None
        for part in ("node_peers", "rail"):
            vars(group).pop(part, None)
        links.close()


def leads(group: RankGroup) -> bool:
    """Whether a rank is the first of its node."""
    return group.nodes.index(group.nodes[group.rank]) == group.rank


def lonely_window(
    specs: list[PlaneSpec], nodes: tuple[int, ...]
) -> tuple[NodeWindow, Any, socket.socket]:
    """A window of rank 0 over memory of its own, what it sends with, and where that arrives."""
    memory = mmap.mmap(-1, window_bytes(specs, len(nodes)))
    pairs = socket.socketpair()
    routes = [
        NodeRoute(Outlet(pairs[0], str(Identity(rank, node))), node, (rank,))
        for rank, node in enumerate(nodes)
        if node
    ]
    sender = NodeSender(7, memory, routes)
    group = RankGroup.alone()
    group.size, group.nodes = len(nodes), nodes
    return NodeWindow(memory, specs, group, 1.0, CHANNELS, sender), sender, pairs[1]


def rows_of(rank: int, peer: int, turn: int) -> Tensor:
    """What a rank puts to a peer: some rows, or none; known to both."""
    seed = 10_000 * turn + 100 * rank + peer
    count = random.Random(seed).choice((0, 1, 3, 50, 700))
    return torch.randn(count, 129, generator=torch.Generator().manual_seed(seed))


def puts(group: RankGroup, nodes: tuple[int, ...], turns: int) -> list[str]:
    """Everyone puts rows to everyone and writes a row of its own for all; two halves in turn and no
    barrier, so that what is overwritten too early shows."""
    size, me = group.size, group.rank
    wrong = []
    with on_nodes(group, nodes):
        specs = [
            PlaneSpec("x", (2 * size * 700, 129), torch.float32),
            PlaneSpec("own", (2, 5), torch.int64),
        ]
        window = create_window(group, specs, timeout=20)
        assert isinstance(window, NodeWindow)
        for turn in range(1, turns + 1):
            half = turn % 2
            for peer in range(size):
                rows = rows_of(me, peer, turn)
                window.put("x", peer, (half * size + me) * 700, rows, torch.arange(len(rows)))
            window.plane("own")[half] = torch.arange(5) * turn + me
            window.touch(window.plane("own")[half])
            window.signal(3, turn, f"turn {turn}")
            window.wait(3, turn, f"turn {turn}")
            for peer in range(size):
                wanted, start = rows_of(peer, me, turn), (half * size + peer) * 700
                if not torch.equal(window.plane("x")[start : start + len(wanted)], wanted):
                    wrong.append(f"turn {turn}: rows of rank {peer}")
                if not torch.equal(window.plane("own", peer)[half], torch.arange(5) * turn + peer):
                    wrong.append(f"turn {turn}: plane of rank {peer}")
        window.barrier("end")
    return wrong
