"""Which rank does what: against tables written by hand, and from flags."""

import subprocess
import sys

import pytest

from moesaic.comm.mesh import Mesh, mesh_of, share
from moesaic.config.args import ServerArgs
from moesaic.config.parser import FlagParser, merge
from moesaic.config.resolve import resolve


def mesh(line: str) -> Mesh:
    parser = FlagParser("moesaic serve", "", "")
    parser.add_flags(ServerArgs)
    given = parser.parse(["--model-path", "m", *line.split()])
    return mesh_of(resolve(merge(ServerArgs, given, {})))


# rank: (replica, stage, tp, dp, attention rank, ep, MoE tp rank), node
PLACES = (
    (Mesh(), [(0, 0, 0, 0, 0, 0, 0)], [0]),
    (
        Mesh(tp=4, ep=2, dp=2),
        [
            (0, 0, 0, 0, 0, 0, 0),
            (0, 0, 1, 0, 1, 0, 1),
            (0, 0, 2, 1, 0, 1, 0),
            (0, 0, 3, 1, 1, 1, 1),
        ],
        [0, 0, 0, 0],
    ),
    (
        Mesh(tp=4, ep=4, dp=2, nnodes=2),
        [
            (0, 0, 0, 0, 0, 0, 0),
            (0, 0, 1, 0, 1, 1, 0),
            (0, 0, 2, 1, 0, 2, 0),
            (0, 0, 3, 1, 1, 3, 0),
        ],
        [0, 0, 1, 1],
    ),
    (
        Mesh(tp=2, pp=2, ep=2, replicas=2),
        [
            (0, 0, 0, 0, 0, 0, 0),
            (0, 0, 1, 0, 1, 1, 0),
            (0, 1, 0, 0, 0, 0, 0),
            (0, 1, 1, 0, 1, 1, 0),
            (1, 0, 0, 0, 0, 0, 0),
            (1, 0, 1, 0, 1, 1, 0),
            (1, 1, 0, 0, 0, 0, 0),
            (1, 1, 1, 0, 1, 1, 0),
        ],
        [0] * 8,
    ),
    (
        Mesh(tp=3, pp=2, dp=3, nnodes=2),
        [
            (0, 0, 0, 0, 0, 0, 0),
            (0, 0, 1, 1, 0, 0, 1),
            (0, 0, 2, 2, 0, 0, 2),
            (0, 1, 0, 0, 0, 0, 0),
            (0, 1, 1, 1, 0, 0, 1),
            (0, 1, 2, 2, 0, 0, 2),
        ],
        [0, 0, 0, 1, 1, 1],
    ),
)


@pytest.mark.parametrize(("mesh", "places", "nodes"), PLACES)
def test_places(mesh: Mesh, places: list[tuple[int, ...]], nodes: list[int]):
    assert mesh.world == len(places)
    for rank, expected in enumerate(places):
        place = mesh.place(rank)
        assert (
            place.replica,
            place.stage,
            place.tp_rank,
            place.dp_rank,
            place.attention_rank,
            place.ep_rank,
            place.moe_tp_rank,
        ) == expected
        assert mesh.rank(place.replica, place.stage, place.tp_rank) == place.rank == rank
        assert mesh.node_of(rank) == nodes[rank]
        assert rank in mesh.ranks_of_node(nodes[rank])


def test_groups_of_a_rank():
    mesh = Mesh(tp=4, pp=2, dp=2, replicas=2)
    place = mesh.place(14)  # replica 1, stage 1, tp 2
    assert list(mesh.ranks_of_replica(place.replica)) == list(range(8, 16))
    assert list(mesh.stage_ranks(place)) == [12, 13, 14, 15]
    assert list(mesh.attention_ranks(place)) == [14, 15]
    assert list(mesh.pipe_ranks(place)) == [10, 14]
    assert (mesh.num_groups, mesh.group_of(place)) == (4, 3)
    assert [mesh.leader(group) for group in range(4)] == [0, 2, 8, 10]
    leaders = [rank for rank in range(16) if mesh.place(rank).is_leader]
    assert leaders == [0, 2, 8, 10]
    assert mesh.describe(14) == "rank 14 (replica 1, pp 1, tp 2, dp 1)"
    assert Mesh().describe(0) == "rank 0"


@pytest.mark.parametrize(
    ("count", "parts", "sizes"),
    [(5, 2, [2, 3]), (4, 4, [1, 1, 1, 1]), (61, 4, [15, 15, 15, 16]), (2, 3, [0, 1, 1])],
)
def test_shares(count: int, parts: int, sizes: list[int]):
    found = [share(count, part, parts) for part in range(parts)]
    assert [len(part) for part in found] == sizes
    assert [number for part in found for number in part] == list(range(count))


FIELDS = ("tp", "pp", "dp", "ep", "replicas", "nnodes", "dense_tp", "vocab_tp")
DPA = "--enable-dp-attention"


@pytest.mark.parametrize(
    ("line", "sizes"),
    [
        ("", (1, 1, 1, 1, 1, 1, 1, 1)),
        ("--tp 8", (8, 1, 1, 1, 1, 1, 8, 8)),
        ("--tp 8 --ep 2 --pp 3", (8, 3, 1, 2, 1, 1, 8, 8)),
        ("--tp 8 --moe-a2a-backend deepep", (8, 1, 1, 8, 1, 1, 8, 8)),
        ("--tp 8 --ep 4 --moe-a2a-backend deepep", (8, 1, 1, 4, 1, 1, 8, 8)),
        ("--tp 2 --dp 3", (2, 1, 1, 1, 3, 1, 2, 2)),
        (f"--tp 8 --dp 4 {DPA}", (8, 1, 4, 1, 1, 1, 8, 8)),
        (f"--tp 8 --dp 4 {DPA} --enable-dp-lm-head", (8, 1, 4, 1, 1, 1, 8, 2)),
        (f"--tp 8 --dp 4 {DPA} --moe-dense-tp-size 1", (8, 1, 4, 1, 1, 1, 1, 8)),
        (f"--tp 8 {DPA} --enable-dp-lm-head", (8, 1, 1, 1, 1, 1, 8, 8)),
        (
            f"--tp 8 --dp 4 {DPA} --enable-deterministic-inference",
            (8, 1, 4, 1, 1, 1, 8, 8),
        ),
        ("--tp 4 --pp 4 --nnodes 4 --dist-init-addr h:1", (4, 4, 1, 1, 1, 4, 4, 4)),
    ],
)
def test_mesh_of_flags(line: str, sizes: tuple[int, ...]):
    found = mesh(line)
    assert tuple(getattr(found, name) for name in FIELDS) == sizes
    assert found.world == found.tp * found.pp * found.replicas


def test_a_mesh_needs_no_torch():
    code = "import sys, moesaic.comm.mesh; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
