"""Connections between nodes that end with a generation of steps, as ranks come and go."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from unittest.mock import patch

import pytest
import torch

from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.errors import ConnectionLost
from moesaic.comm.network.handshake import Identity
from moesaic.comm.windows import signals
from moesaic.comm.windows.factory import create_window
from moesaic.comm.windows.node_window import NodeWindow
from moesaic.comm.windows.tcp_links import FrameKind, Outlet, TcpLinks, frame
from moesaic.comm.windows.window import PlaneSpec, first_epoch
from tests.distributed.moe_ranks import Pools
from tests.distributed.nodes import FOUR, TWO, UNEVEN, on_nodes

X = [PlaneSpec("x", (2, 3), torch.int64)]


def exchange(window: NodeWindow, number: int, live: Sequence[int]) -> bool:
    """Whether the live ranks read what each of them has written, in two halves in turn."""
    half = number % 2
    own = window.plane("x")[half]
    own.fill_(100 * number + window.rank)
    window.touch(own)
    window.signal(0, number, f"exchange {number}")
    window.wait(0, number, f"exchange {number}", live)
    found = window.stacked("x")[list(live), half].tolist()
    return found == [[100 * number + rank] * 3 for rank in live]


def renew(group: RankGroup, links: TcpLinks, generation: int, live: Sequence[int]) -> None:
    """As at an epoch: all have ended their connections before anyone makes others."""
    own = json.dumps((links.address, links.port, links.identity.node)).encode()
    links.end_generation(generation)
    places = [tuple(json.loads(part)) for part in group.all_gather_bytes(own, "end a generation")]
    if group.rank in live:
        links.begin_generation(live, places.__getitem__)


def breaks_and_mends(group: RankGroup, nodes: tuple[int, ...]) -> list[bool]:
    everyone = range(group.size)
    lost = nodes.index(nodes[-1])  # it receives for others of its node
    found = []
    with on_nodes(group, nodes, renews=True) as links:
        window = create_window(group, X, timeout=20)
        assert isinstance(window, NodeWindow)
        found.append(exchange(window, 1, everyone))
        if group.rank == 0:
            for outlet in links._outlets.values():
                outlet._connection.shutdown(socket.SHUT_RDWR)
        group.barrier("cut")
        with patch.object(signals, "PATIENCE", 0.2):
            try:
                found.append(not exchange(window, 2, everyone))
            except ConnectionLost as error:
                found.append("rank" in str(error) and "is lost in 'exchange 2'" in str(error))
        for generation, live in enumerate(
            (list(everyone), [rank for rank in everyone if rank != lost], list(everyone)), 1
        ):
            renew(group, links, generation, live)
            for turn in range(1, 4):
                if group.rank in live:
                    found.append(exchange(window, first_epoch(generation) + turn, live))
        group.barrier("end")
    return found


@pytest.mark.parametrize("nodes", [TWO, FOUR, UNEVEN])
def test_ranks_make_new_connections_in_each_generation(
    pools: Pools, nodes: tuple[int, ...]
) -> None:
    """One is cut, and then the rank is away that receives for its node."""
    found = pools(4).run(breaks_and_mends, nodes)
    # Who has all signals goes on.
    assert all(all(told[:1] + told[2:]) for told in found), found
    assert any(told[1] for told in found)
    assert sorted(map(len, found)) == [8, 11, 11, 11]


def comes_late(group: RankGroup) -> list[str]:
    with on_nodes(group, (0, 1), renews=True) as links:
        window = create_window(group, X, timeout=20)
        assert isinstance(window, NodeWindow)
        number = window._sender.window
        own = json.dumps((links.address, links.port)).encode()
        host, port = json.loads(group.all_gather_bytes(own, "places")[1 - group.rank])
        links.end_generation(2)
        group.barrier("both are in generation 2")
        ends = []
        for generation in (1, 2):
            outlet = links.connect(host, port, Identity(1 - group.rank, 1 - group.rank))
            # Who is let in hears nothing.
            patience = 60.0 if generation == 1 else 1.0
            ends.append(_end(outlet, frame(FrameKind.OPEN, number, epoch=generation), patience))
            outlet.close()
        group.barrier("end")
    return ends


def _end(outlet: Outlet, opening: bytes, patience: float) -> str:
    outlet.send([opening], 5.0)
    outlet._connection.settimeout(patience)
    try:
        return "closed" if outlet._connection.recv(1) == b"" else "answered"
    except TimeoutError:
        return "open"


def test_who_is_a_generation_behind_is_not_let_in(pools: Pools) -> None:
    assert pools(2).run(comes_late) == [["closed", "open"]] * 2
