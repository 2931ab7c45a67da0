"""Dense collectives of ranks that share a GPU: in one process, each on a stream of its own, so that
their kernels really wait for each other. T tokens · H hidden."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from moesaic.comm.collectives.device_collective import DeviceCollective, lanes_of
from moesaic.kernels.a2a import DeviceStateWord
from tests.kernels.test_triton_collectives import add, make_ranks, needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]
H = 2048
Operation = Callable[[DeviceCollective, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """`parts`: of each rank; `expected`: of each rank."""

    parts: list[Tensor]
    run: Operation
    expected: list[Tensor]


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def cases(size: int) -> Iterator[Case]:
    for tokens in (1, 16, 63, 300, 4096):
        parts = [draw(tokens, H) for _ in range(size)]
        yield Case(parts, lambda comm, x: comm.all_reduce(x, "sum"), [add(parts)] * size)
        cut = -(-tokens // size)
        shares = [slice(rank * cut, (rank + 1) * cut) for rank in range(size)]
        expected = [add(parts)[share] for share in shares]
        yield Case(parts, lambda comm, x, s=shares: comm.sum_rows(x, s[comm.rank], "rs"), expected)
    for counts in ([5] * size, [rank * 7 for rank in range(size)], [600] * size, [0, 900] * size):
        counts = counts[:size]
        parts = [draw(count, H) for count in counts]
        everything = [torch.cat(parts)] * size
        yield Case(parts, lambda comm, x, c=counts: comm.gather_rows(x, c, "rows"), everything)
    for rows, widths in ((3, [512] * size), (64, [9 + rank for rank in range(size)])):
        parts = [draw(rows, width, dtype=torch.float32) for width in widths]
        expected = [torch.cat(parts, 1)[1:]] * size
        yield Case(
            parts,
            lambda comm, x, w=widths: comm.gather_columns(x, w, slice(1, None), "columns"),
            expected,
        )


def run_all(
    ranks: Sequence[DeviceCollective], streams: Sequence[torch.cuda.Stream], case: Case
) -> list[Tensor]:
    torch.cuda.synchronize()
    outs = []
    for comm, stream, part in zip(ranks, streams, case.parts, strict=True):
        with torch.cuda.stream(stream):
            outs.append(case.run(comm, part))
    torch.cuda.synchronize()
    for comm in ranks:
        comm.check()
    return outs


def set_broken(ranks: Sequence[DeviceCollective], broken: int) -> None:
    for comm in ranks:
        comm.window.signals.state[DeviceStateWord.BROKEN] = broken


def warm_up(
    ranks: Sequence[DeviceCollective], streams: Sequence[torch.cuda.Stream], case: Case
) -> None:
    """Ranks that are broken wait for nobody: all is compiled and loaded before one waits."""
    set_broken(ranks, 1)
    for out in run_all(ranks, streams, case):
        assert not out.any()
    set_broken(ranks, 0)


@pytest.mark.parametrize("size", [2, 4])
def test_every_operation(size: int) -> None:
    ranks = make_ranks(size, *lanes_of(size), nbytes=1 << 20)
    streams = [torch.cuda.Stream() for _ in ranks]
    every = list(cases(size))
    for case in every:
        warm_up(ranks, streams, case)
    for turn in range(5):
        for number, case in enumerate(every):
            outs = run_all(ranks, streams, case)
            for rank, (out, expected) in enumerate(zip(outs, case.expected, strict=True)):
                assert torch.equal(out, expected), (turn, number, rank)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("tokens", [1, 16, 300])
def test_a_graph_takes_turns(size: int, tokens: int) -> None:
    """Two sums in a graph, replayed: what it wrote into one half it writes into the other next."""
    ranks = make_ranks(size, *lanes_of(size), nbytes=1 << 20)
    streams = [torch.cuda.Stream() for _ in ranks]
    inputs = [draw(tokens, H) for _ in ranks]

    def both(comm: DeviceCollective, x: Tensor) -> Tensor:
        return comm.all_reduce(comm.all_reduce(x, "first") * 0.5, "second")

    warm_up(ranks, streams, Case(inputs, both, []))
    graphs, outs = [], []
    for comm, stream, x in zip(ranks, streams, inputs, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outs.append(both(comm, x))
        graphs.append(graph)
    for turn in range(50):
        for x in inputs:
            x.copy_(draw(tokens, H))
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        expected = add([add(inputs) * 0.5] * size)
        for rank, (comm, out) in enumerate(zip(ranks, outs, strict=True)):
            comm.check()
            assert torch.equal(out, expected), (turn, rank)


def test_replays_in_a_row() -> None:
    """Without the host between them: nothing is overwritten before it was read."""
    ranks = make_ranks(4, *lanes_of(4), nbytes=1 << 20)
    streams = [torch.cuda.Stream() for _ in ranks]
    inputs = [torch.ones(16, H, device="cuda") * (rank + 1) for rank in range(4)]

    def grow(comm: DeviceCollective, x: Tensor) -> Tensor:
        """x becomes its share of the sum, one more each time."""
        total = comm.all_reduce(x, "sum")
        x.copy_((total + 2) / 4)
        return total

    warm_up(ranks, streams, Case([x.clone() for x in inputs], lambda c, x: c.all_reduce(x, ""), []))
    graphs = []
    for comm, stream, x in zip(ranks, streams, inputs, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            grow(comm, x)
        graphs.append(graph)
    torch.cuda.synchronize()
    replays = 200
    for _ in range(replays):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for comm, x in zip(ranks, inputs, strict=True):
        comm.check()
        assert torch.equal(x, torch.full_like(x, 2.5 + replays * 0.5))
