"""Nodes of ranks that all share one GPU: windows inside of a node, NCCL between them. To NCCL every
rank is a host of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.launch.local_ranks import LocalRanks
from moesaic.comm.launch.mps import start_mps
from moesaic.config.devices import cuda_missing
from tests.distributed.conformance import check_all
from tests.distributed.moe_rounds import rounds
from tests.distributed.nodes import TWO
from tests.distributed.test_device_dispatch import EVERY_A2A
from tests.distributed.test_device_dispatch_gpu import complaints, on_gpu
from tests.distributed.test_node_dispatch import CHOSEN, PAIR, TRIO, Nodes, there

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(cuda_missing()), reason=f"needs a CUDA device: {cuda_missing()}"),
]

PAIRS_OF_FOUR = (0, 0, 0, 0, 1, 1, 1, 1)
Ranks = Callable[..., list]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """ranks(nodes, function, …): on as many ranks of GPU 0, on these nodes."""
    pools: list[LocalRanks] = []
    with start_mps() as mps:

        def run(nodes: Nodes, function: Callable, *args: object) -> list:
            size = len(nodes)
            if pools and pools[0].size != size:
                pools.pop().close()
            if not pools:
                pools.append(LocalRanks(size, timeout=500, peer_timeout=60.0))
            return pools[0].run(as_hosts, mps.for_ranks(size), nodes, function, *args)

        yield run
        for pool in pools:
            pool.close()


def as_hosts(
    group: RankGroup, environment: dict[str, str], nodes: Nodes, function: Callable, *args: object
) -> list:
    os.environ |= {"NCCL_HOSTID": f"host {group.rank}", "NCCL_SOCKET_IFNAME": "lo"}
    return on_gpu(group, environment, there, nodes, function, *args)


@pytest.mark.parametrize("nodes", [PAIR, TRIO, TWO], ids=str)
def test_chosen_combinations(nodes: Nodes, ranks: Ranks):
    chosen = [combination for there, combination in CHOSEN if there == nodes]
    assert complaints(chosen, ranks(nodes, check_all, chosen)) == []


@pytest.mark.parametrize(("a2a", "mode"), EVERY_A2A)
@pytest.mark.parametrize("nodes", [PAIR, TWO], ids=str)
def test_rounds(nodes: Nodes, a2a: str, mode: str, ranks: Ranks):
    counts = {"eager": 20, "replayed": 20}
    assert ranks(nodes, rounds, a2a, mode, counts) == [[]] * len(nodes)


@pytest.mark.slow
@pytest.mark.parametrize(("a2a", "mode"), EVERY_A2A)
@pytest.mark.parametrize("nodes", [PAIR, TRIO, TWO, PAIRS_OF_FOUR], ids=str)
def test_thousands_of_rounds(nodes: Nodes, a2a: str, mode: str, ranks: Ranks):
    counts = {"eager": 1000, "replayed": 1000}
    assert ranks(nodes, rounds, a2a, mode, counts) == [[]] * len(nodes)
