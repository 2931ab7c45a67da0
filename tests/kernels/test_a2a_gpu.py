"""Kernels between ranks on a GPU: ranks of one process that share it, one after the other, on
streams of their own, and under graphs.

P ranks · C rows of each · T tokens of one · K chosen · H hidden.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moesaic.comm.windows.device_window import CpuDeviceWindow
from moesaic.kernels import a2a as twins
from moesaic.kernels.a2a import LocalTokens, ResultPlane
from moesaic.kernels.triton import a2a as kernels
from moesaic.moe.quant.payload import PAYLOAD_FORMATS
from tests.kernels.a2a_cases import RESULTS, ROWS, Case, on_device
from tests.kernels.test_triton_a2a import (
    check_collected,
    collected,
    place_ids,
    test_rows_arrive_as_those_of_the_twins,
    write_results,
)
from tests.kernels.triton_cases import DEVICE, GPU

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a GPU")]
QWEN = Case(counts=(5, 0, 64, 33), rows=64, top_k=8, hidden=2048, slots=32, payload="bf16")
QWEN = replace(QWEN, dtype=torch.bfloat16)
ROUNDS = 50


@pytest.mark.parametrize("payload", PAYLOAD_FORMATS)
@pytest.mark.parametrize("hidden", [2048, 2880, 7168])
def test_payloads(payload: str, hidden: int) -> None:
    scale = 0.01 if payload == "nvfp4" else 1.0
    case = replace(QWEN, payload=payload, hidden=hidden, scale=scale, weights=True, padded=True)
    test_rows_arrive_as_those_of_the_twins(case)


@pytest.mark.parametrize("counts", [(1, 1), (16, 3, 0), (300, 1, 129, 300), (20,) * 8])
@pytest.mark.parametrize("hidden", [2048, 2880, 7168])
@pytest.mark.parametrize("pairs", [False, True])
def test_results(counts: tuple[int, ...], hidden: int, pairs: bool) -> None:
    case = replace(QWEN, counts=counts, rows=max(counts), hidden=hidden)
    ours, theirs = case.windows(DEVICE), case.windows("cpu")
    for windows in (ours, theirs):
        place_ids(case, windows)
        write_results(case, windows, seed=0)
    for window in theirs:
        twins.signal.twin(window.call(RESULTS, "combine", tag=int(pairs)))
    for window in ours:
        kernels.signal(window.call(RESULTS, "combine", tag=int(pairs)))
    for rank in range(case.size):
        out_TH = collected(case, ours, rank, pairs, signals=False)
        torch.cuda.synchronize()
        ours[rank].check()
        assert torch.equal(out_TH, collected(case, theirs, rank, pairs, False, twin=True))
        check_collected(case, theirs, rank, pairs, out_TH)


class Rank:
    """One that sends, takes what has arrived for results, and collects: n times a token, where n
    ranks had it."""

    def __init__(self, case: Case, window: CpuDeviceWindow) -> None:
        self.case, self.window = case, window
        self.tokens = on_device(case.tokens(window.rank))
        self.out_TH = torch.empty_like(self.tokens.x_TH)
        self.planes, self.stream = case.planes(window), torch.cuda.Stream()

    def renew(self, seed: int) -> None:
        tokens = self.case.tokens(self.window.rank, seed)
        for name in ("x_TH", "ids_TK"):
            getattr(self.tokens, name).copy_(getattr(tokens, name))

    def dispatch(self, receives: bool = False) -> None:
        call = self.window.call(ROWS, "dispatch")
        kernels.send(self.tokens, self.case.rows, self.planes, self.case.spread, call, receives)

    def compute(self, received: bool = False) -> None:
        if not received:
            call = self.window.call(ROWS, "dispatch")
            kernels.receive(call, self.case.rows, self.case.top_k, self.planes.ids)
        values = self.window.plane("values").view(self.case.dtype)
        self.window.plane("results").copy_(values)

    def combine(self, signals: bool) -> None:
        call = self.window.call(RESULTS, "combine")
        results = ResultPlane(self.case.rows, self.window.offset("results"), self.case.spread)
        kernels.collect_rows(self.out_TH, self.tokens, results, call, signals)

    def check(self) -> None:
        self.window.check()
        assert torch.equal(self.out_TH.cpu(), self.wanted(self.tokens))

    def wanted(self, tokens: LocalTokens) -> Tensor:
        ids_TK = tokens.ids_TK.cpu()
        groups_TK = torch.where(ids_TK < 0, -1, ids_TK // self.case.slots)
        went_TP = groups_TK[:, :, None] == torch.arange(self.case.size)
        return tokens.x_TH.cpu() * went_TP.any(1).sum(1, keepdim=True)


def one_after_the_other(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.dispatch(receives=rank is ranks[-1])
    for rank in ranks:
        rank.compute()
    for rank in ranks:
        kernels.signal(rank.window.call(RESULTS, "combine"))
    for rank in ranks:
        rank.combine(signals=False)


def at_once(ranks: list[Rank]) -> None:
    """A GPU has few queues, and streams share them: nothing of this one's may come behind a kernel
    that waits."""
    here = torch.cuda.current_stream()
    for rank in ranks:
        rank.stream.wait_stream(here)
    for rank in ranks:
        with torch.cuda.stream(rank.stream):
            rank.dispatch(receives=True)
            rank.compute(received=True)
            rank.combine(signals=True)
    for rank in ranks:
        here.wait_stream(rank.stream)


def made(counts: tuple[int, ...], same_gpu: bool) -> list[Rank]:
    """All kernels have run once: a GPU that waits may not load another one."""
    case = replace(QWEN, counts=counts, rows=max(counts), same_gpu=same_gpu)
    ranks = [Rank(case, window) for window in case.windows(DEVICE)]
    one_after_the_other(ranks)
    for one in ranks:
        for other in ranks:
            if other is not one:
                kernels.signal(other.window.call(RESULTS, "combine"))
        one.combine(signals=True)
    torch.cuda.synchronize()
    for rank in ranks:
        rank.window.check()
    return ranks


@pytest.mark.parametrize("same_gpu", [True, False])
@pytest.mark.parametrize("counts", [(1, 1), (16, 0, 5, 16), (300, 1, 129, 200), (16,) * 8])
def test_ranks_at_once(counts: tuple[int, ...], same_gpu: bool) -> None:
    """On streams of their own, which wait for each other."""
    ranks = made(counts, same_gpu)
    for seed in range(ROUNDS):
        for rank in ranks:
            rank.renew(seed)
        at_once(ranks)
        torch.cuda.synchronize()
        for rank in ranks:
            rank.check()


@pytest.mark.parametrize("steps", [one_after_the_other, at_once])
@pytest.mark.parametrize("counts", [(1, 1), (16, 0, 5, 16), (300, 1, 129, 200)])
def test_under_a_graph(counts: tuple[int, ...], steps: object) -> None:
    ranks = made(counts, same_gpu=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):
            steps(ranks)
    for seed in range(ROUNDS):
        for rank in ranks:
            rank.renew(seed)
        graph.replay()
        torch.cuda.synchronize()
        for rank in ranks:
            rank.check()


def test_nobody_hangs() -> None:
    """A peer that never comes: the wait ends, and says who it was."""
    case = replace(QWEN, counts=(4, 4), rows=4)
    window = case.windows(DEVICE)[0]
    window.signals.state[1] = int(0.2e9)
    kernels.signal(window.call(RESULTS, "combine"))
    kernels.wait(window.call(RESULTS, "combine"))
    torch.cuda.synchronize()
    with pytest.raises(Exception, match=r"\b1\b"):
        window.check()
