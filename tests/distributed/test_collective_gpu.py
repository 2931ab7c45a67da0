"""Dense collectives of processes that share a GPU, under an MPS daemon of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from moesaic.comm.collectives.device_collective import DeviceCollective, device_collective
from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.errors import PeerTimeout
from moesaic.comm.launch.local_ranks import LocalRanks
from moesaic.comm.launch.mps import Mps, start_mps
from moesaic.comm.lifecycle import Membership
from moesaic.config.devices import cuda_missing
from moesaic.kernels.a2a import DeviceStateWord
from tests.distributed.test_collective import total
from tests.distributed.test_symmetric_gpu import open_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(cuda_missing()), reason=f"needs a CUDA device: {cuda_missing()}"),
]

HIDDEN, REPLAYS = 2048, 200
TOKENS = (1, 16, 63, 300, 2048)
SECONDS = 60.0


@pytest.fixture(scope="module")
def mps() -> Iterator[Mps]:
    with start_mps() as daemon:
        yield daemon


@pytest.fixture(scope="module", params=[2, 4, 8])
def ranks(request: pytest.FixtureRequest, mps: Mps) -> Iterator[LocalRanks]:
    with LocalRanks(request.param, timeout=300, peer_timeout=SECONDS) as pool:
        yield pool


def make(group: RankGroup, environment: dict[str, str], seconds: float) -> DeviceCollective:
    comm = device_collective(group, 1 << 20, seconds, open_gpu(environment), shares_gpu=True)
    assert isinstance(comm, DeviceCollective)
    return comm


def draw(seed: int, rows: list[int], width: int) -> list[Tensor]:
    """What each rank brings, drawn on the GPU, where all ranks draw the same."""
    generator = torch.Generator("cuda").manual_seed(seed)
    make_rows = partial(torch.randn, device="cuda", dtype=torch.bfloat16, generator=generator)
    return [make_rows(count, width) for count in rows]


def pairs(comm: DeviceCollective, tokens: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """What every operation gives for so many tokens, and what it should."""
    size, rows = comm.size, slice(comm.rank, tokens - comm.rank)
    parts = draw(seed, [tokens] * size, HIDDEN)
    yield comm.all_reduce(parts[comm.rank], "sum"), total(parts)
    yield comm.sum_rows(parts[comm.rank], rows, "rows of a sum"), total(parts)[rows]
    counts = [tokens * (rank % 3) for rank in range(size)]
    parts = draw(seed, counts, HIDDEN)
    yield comm.gather_rows(parts[comm.rank], counts, "rows"), torch.cat(parts)
    widths = [30 + 10 * rank for rank in range(size)]
    parts = draw(seed, [tokens] * size, max(widths))
    parts = [whole[:, :width] for whole, width in zip(parts, widths, strict=True)]
    found = comm.gather_columns(parts[comm.rank], widths, rows, "columns")
    yield found, torch.cat(parts, 1)[rows]


def compile_in_turn(group: RankGroup, comm: DeviceCollective) -> None:
    """Ranks that are broken wait for nobody: the first compiles all kernels, which the others then
    find on disk, instead of each by itself while others wait."""
    for first in (True, False):
        if (group.rank == 0) == first:
            comm.window.signals.state[DeviceStateWord.BROKEN] = 1
            for tokens in TOKENS:
                list(pairs(comm, tokens, 0))
            torch.cuda.synchronize()
        group.barrier(f"compiled, {first}")
    comm.restart(Membership(1, tuple(range(comm.size))))
    group.barrier("all begin")


def operations(group: RankGroup, environment: dict[str, str]) -> int:
    comm, count = make(group, environment, SECONDS), 0
    compile_in_turn(group, comm)
    for turn in range(3):
        for tokens in TOKENS:
            for number, (found, wanted) in enumerate(pairs(comm, tokens, 10 * tokens + turn)):
                assert torch.equal(found, wanted), (turn, tokens, number)
                count += 1
    torch.cuda.synchronize()
    comm.check()
    comm.close()
    return count


def test_every_operation(ranks: LocalRanks, mps: Mps) -> None:
    assert ranks.run(operations, mps.for_ranks(ranks.size)) == [60] * ranks.size


def replays(group: RankGroup, environment: dict[str, str], tokens: int) -> float:
    """Every rank's rows become the sum's share and one more, over and over; microseconds of one."""
    comm = make(group, environment, SECONDS)
    x_TH = torch.full((tokens, HIDDEN), float(comm.rank), device="cuda")

    def grow() -> None:
        x_TH.copy_(comm.all_reduce(x_TH, "sum") / comm.size + 1)

    grow()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grow()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    stop.record()
    torch.cuda.synchronize()
    comm.check()
    expected = (comm.size - 1) / 2 + 1 + REPLAYS
    assert torch.equal(x_TH, torch.full_like(x_TH, expected)), (x_TH[0, 0], expected)
    comm.close()
    return start.elapsed_time(stop) * 1000 / REPLAYS


@pytest.mark.parametrize("tokens", [1, 16, 512])
def test_replays_in_a_row(tokens: int, ranks: LocalRanks, mps: Mps) -> None:
    """Each takes microseconds: time slices instead would take milliseconds."""
    found = ranks.run(replays, mps.for_ranks(ranks.size), tokens)
    print(f"{ranks.size} ranks, {tokens} rows of {HIDDEN} float32: {max(found):.1f} us")
    assert max(found) < 500


def missing(group: RankGroup, environment: dict[str, str]) -> str:
    """The last rank does not come; then all begin anew."""
    comm = make(group, environment, SECONDS)
    ones = torch.ones(4, HIDDEN, device="cuda")
    assert comm.all_reduce(ones, "first")[0, 0] == comm.size
    comm.window.timeout = 1.0
    group.barrier("all have come")
    comm.restart(Membership(1, tuple(range(comm.size))))
    group.barrier("with less patience")
    told = ""
    if comm.rank < comm.size - 1:
        assert not comm.all_reduce(ones, "layer 3, dense sum").any()
        with pytest.raises(PeerTimeout) as error:
            comm.check()
        told = f"{error.value.missing} {error.value.operation}"
    group.barrier("abandoned")
    comm.restart(Membership(2, tuple(range(comm.size))))
    group.barrier("begin anew")
    assert comm.all_reduce(ones, "again")[0, 0] == comm.size
    torch.cuda.synchronize()
    comm.check()
    comm.close()
    return told


def test_a_missing_rank_is_named(ranks: LocalRanks, mps: Mps) -> None:
    last = ranks.size - 1
    told = ranks.run(missing, mps.for_ranks(ranks.size))
    named = f"({last},) layer 3, dense sum (sum_rows float32 {4 * HIDDEN})"
    assert told == [named] * last + [""]
