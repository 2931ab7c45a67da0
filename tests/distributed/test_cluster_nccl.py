"""The check of NCCL between nodes: its order, limits and words on CPU ranks, with collectives over
windows in the place of NCCL; and by NCCL where there is a GPU, which two nodes share."""

from __future__ import annotations

import json

import msgspec
import pytest
import torch

from bench.http_server import free_port
from moesaic.cli.doctor_cluster import _nccl_lines
from moesaic.comm.collectives.collective import Collective, WindowCollective
from moesaic.comm.collectives.group import Peers, RankGroup
from moesaic.comm.errors import RankFailed
from moesaic.comm.launch import cluster_nccl
from moesaic.comm.launch.cluster_check import NodeFacts, PairFacts, _bad_nccl, _notes
from moesaic.comm.launch.cluster_nccl import (
    NcclEnd,
    NcclFacts,
    NcclPair,
    NcclSpec,
    check_pairs,
    measure_nccl,
    network_of,
)
from moesaic.comm.launch.local_ranks import LocalRanks
from moesaic.comm.network.handshake import Identity
from moesaic.comm.network.store import LocalStore, StoreAddress, StoreClient
from moesaic.config.devices import cuda_missing
from tests.distributed.moe_ranks import Pools
from tests.distributed.test_cluster_check import doctor

PAIRS = ("0-1", "0-2", "1-2")


def connected(address: StoreAddress, rank: int) -> StoreClient:
    return address.connect(20.0, Identity(-1, rank))


def checked(group: RankGroup, address: StoreAddress, broken: str) -> str:
    """What this rank, as a node, found; one that is `broken` has no collective for this pair."""
    store, cpu = connected(address, group.rank), torch.device("cpu")

    def make(pair: Peers) -> Collective:
        if pair.name.endswith(broken) and pair.rank == 1:
            raise RuntimeError("no route to host\n(a second line)")
        return WindowCollective(pair, 1 << 20, 5.0)

    try:
        check_pairs(group.rank, group.size, store, make, cpu, 1 << 18)
    except RuntimeError as error:
        return str(error)
    return ""


def pairs_in(store: LocalStore) -> dict[str, NcclPair]:
    client = connected(store.address, 9)
    found = zip(PAIRS, client.get_now([f"nccl pair/{name}" for name in PAIRS]), strict=True)
    return {name: msgspec.msgpack.decode(data, type=NcclPair) for name, data in found if data}


def test_all_pairs_of_three_nodes(pools: Pools, store: LocalStore):
    assert pools(3).run(checked, store.address, "none") == ["", "", ""]
    pairs = pairs_in(store)
    assert list(pairs) == list(PAIRS)
    assert all(one.error == "" and one.latency_us > 0 and one.gbit_s > 0 for one in pairs.values())


def test_a_pair_that_fails_is_named_and_is_the_last(store: LocalStore):
    """The other node of the pair would wait in NCCL, so that its process ends at once."""
    with LocalRanks(3) as ranks, pytest.raises(RankFailed) as told:
        ranks.run(checked, store.address, "0-2")
    assert told.value.results == {1: "", 2: ""}
    assert list(told.value.failures) == [0] and "exit code 1" in told.value.failures[0]
    pairs = pairs_in(store)
    assert list(pairs) == ["0-1", "0-2"]
    assert pairs["0-2"].error == "node 2: no route to host"


def late(group: RankGroup, address: StoreAddress) -> str:
    """The process of the last node has ended before the others came."""
    if group.rank == group.size - 1:
        connected(address, group.rank).set(f"nccl end/{group.rank}", b"")
        group.barrier("it is known")
        return ""
    group.barrier("it is known")
    with pytest.raises(RuntimeError) as told:
        check_pairs(
            group.rank,
            group.size,
            connected(address, group.rank),
            lambda pair: WindowCollective(pair, 1 << 20, 5.0),
            torch.device("cpu"),
        )
    return str(told.value)


def test_nobody_waits_for_a_process_that_has_ended(pools: Pools, store: LocalStore):
    assert pools(3).run(late, store.address) == ["node 2 has given up"] * 2 + [""]


def test_a_process_that_fails_says_why(store: LocalStore, monkeypatch: pytest.MonkeyPatch):
    """Here for lack of a GPU; the node that it would wait for never comes."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    address = store.address
    spec = NcclSpec(0, ["127.0.0.1"], 0, address.host, address.port, address.secret)
    facts = measure_nccl(spec, connected(address, 0))
    assert facts.pairs == {} and len(facts.nodes) == 1
    assert "CUDA" in facts.nodes[0].error or "NVIDIA" in facts.nodes[0].error, facts


def test_what_nccl_says_of_its_network():
    """Lines as NCCL 2.28 logs them."""
    head = "vm:7:7 [0] NCCL INFO "
    ib = f"{head}NET/IB : No device found.\n"
    socket = f"{head}NET/Socket : Using [0]eth0:10.0.0.1<0> [1]eth1:10.1.0.1<0>\n"
    roce = f"{head}NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.1<0>\n"
    assert network_of(ib + socket) == "Socket over eth0, eth1"
    assert network_of(roce) == "IB over mlx5_0, mlx5_1"
    assert network_of(f"{head}Using network Libfabric\n") == "Libfabric"
    assert network_of("") == ""


def node(number: int, *rdma: str) -> NodeFacts:
    address = f"10.0.0.{number + 1}"
    return NodeFacts(f"host{number}", address, 1, "eth0", 0, list(rdma), {}, "m", {}, True)


def test_what_is_told_of_nccl():
    nodes, tcp = [node(0), node(1, "mlx5_0"), node(2)], dict.fromkeys(PAIRS, PairFacts(30, 10.0))
    ends = [NcclEnd("IB over mlx5_0"), NcclEnd("Socket over eth1"), NcclEnd("Socket over eth0")]
    good = NcclFacts(ends, dict.fromkeys(PAIRS, NcclPair(50.0, 9.0)))
    assert list(_bad_nccl(nodes, tcp, good)) == []
    (note,) = _notes(nodes, good)
    assert note.startswith("node 1 has RDMA devices (mlx5_0), but NCCL takes sockets")
    slow = NcclFacts(ends, good.pairs | {"0-1": NcclPair(500.0, 0.9)})
    (told,) = _bad_nccl(nodes, tcp, slow)
    assert told == (
        "node 0 reaches node 1 by NCCL (Socket over eth1) at 0.9 Gbit/s, and over TCP at 10.0: set "
        "NCCL_SOCKET_IFNAME to the interface of the fastest network (node 0 has eth0, node 1 has "
        "eth0)"
    )
    # Slow by comparison with TCP alone, where it takes another interface, or with another pair.
    fast = dict.fromkeys(PAIRS, PairFacts(30, 40.0))
    assert len(list(_bad_nccl(nodes, fast, good))) == 3
    same = NcclFacts([NcclEnd("Socket over eth1, eth0")] * 3, good.pairs)
    assert list(_bad_nccl(nodes, fast, same)) == []
    uneven = NcclFacts(ends, good.pairs | {"1-2": NcclPair(50.0, 90.0)})
    assert len(list(_bad_nccl(nodes, tcp, uneven))) == 2
    failed = NcclFacts(ends, {"0-1": NcclPair(error="node 1: no route")})
    (told,) = _bad_nccl(nodes, tcp, failed)
    assert told.startswith("NCCL between node 0 and node 1 (host1): node 1: no route; if that is")
    ended = NcclFacts([NcclEnd(), NcclEnd(error="out of memory"), NcclEnd()], {})
    assert list(_bad_nccl(nodes, tcp, ended)) == ["NCCL on node 1 (host1): out of memory"]
    assert [line.split() for line in _nccl_lines(good)][3][:3] == ["0-1", "50", "9.0"]


@pytest.mark.gpu
@pytest.mark.timeout(200)
@pytest.mark.skipif(bool(cuda_missing()), reason=f"needs a CUDA device: {cuda_missing()}")
def test_two_nodes_on_one_gpu():
    """They take turns on it without MPS, so that nothing is judged by speed."""
    port = free_port()
    nodes = [doctor(n, 2, port, "--json", "--device", "cuda") for n in (1, 0)]
    said = [one.communicate(timeout=180) for one in nodes]
    reports = [json.loads(out) for out, _ in said]
    assert reports[0] == reports[1]
    assert [one for one in reports[0]["problems"] if "NCCL" in one and "lo" not in one] == [], said
    nccl = reports[0]["nccl"]
    assert [(end["network"], end["error"]) for end in nccl["nodes"]] == [("Socket over lo", "")] * 2
    assert nccl["pairs"]["0-1"]["error"] == ""
    assert nccl["pairs"]["0-1"]["latency_us"] > 0 and nccl["pairs"]["0-1"]["gbit_s"] > 0


def test_limits_are_long_enough_for_a_slow_pair():
    """Of 0.1 Gbit/s, which is called slow, not broken off."""
    seconds = 8e-9 * cluster_nccl.LARGE_BYTES * sum(cluster_nccl.LARGE_TIMES) / 0.1
    assert seconds < cluster_nccl.PAIR_SECONDS - 5, "NCCL has to connect, too"
