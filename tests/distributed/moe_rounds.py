"""Random rounds of MoE layers between ranks: cases and what becomes of them are made once, and
rounds draw from them.

T tokens · K chosen · H hidden · C rows of a rank · N cases · R = N * C rows.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from moesaic.comm.collectives.group import RankGroup
from moesaic.core.overlap import Overlap
from moesaic.core.step import Step
from moesaic.moe.backends import load_backends
from moesaic.moe.formats import TopKOutput
from moesaic.moe.layer import FusedMoE
from moesaic.moe.quant.payload import PAYLOAD_FORMATS
from tests.distributed.conformance import allowed
from tests.distributed.moe_ranks import (
    HIDDEN,
    TOP_K,
    Combination,
    num_experts,
    poison_all,
    settle,
)
from tests.distributed.test_in_flight import interleavings, own_order
from tests.moe_oracle import Experts, random_topk, reference

ROWS, CASES = 16, 64
MASKED, POISONED = 0.2, 0.1
LOOK = 50  # rounds
TOLERANCE = 0.02
"""Of bfloat16, for results of about one: a row of somebody else would be off by that."""
RUNNERS = {"nvfp4": "flashinfer_cutlass", "mxfp4": "triton_kernel"}


def with_every_payload(a2a: str, mode: str, tp: int) -> list[Combination]:
    """That a backend takes: by both ways back, on whole experts and on those cut in two, in
    turn."""
    load_backends()
    found = []
    for number, payload in enumerate((*PAYLOAD_FORMATS, "bf16")):
        formats = (RUNNERS.get(payload, "triton"), payload, "bf16", "bf16")
        ep = tp // 2 if number % 3 == 1 else tp
        combination = Combination(a2a, mode, *formats, tp, ep, number % 2 == 1, "cuda")
        if allowed(combination):
            found.append(combination)
    return found


def counts_of(tp: int) -> list[tuple[int, ...]]:
    """Tokens of each rank in each case: none, one, all there may be; one rank with all or with
    none; and random ones."""
    generator = random.Random(tp)
    others = tp - 1
    fixed = [(count,) * tp for count in (0, 1, 7, ROWS)]
    fixed += [(ROWS, *[0] * others), (*[0] * others, 5), (0, *[ROWS] * others), (*[9] * others, 0)]
    drawn = [tuple(generator.randrange(ROWS + 1) for _ in range(tp)) for _ in range(CASES)]
    return [*fixed, *drawn][:CASES]


@dataclass(frozen=True)
class Bank:
    """A rank's tokens in each case. Rows behind them are NaN and choose nobody."""

    counts_N: list[int]
    most_N: list[int]
    x_NCH: Tensor
    topk: TopKOutput
    num_tokens_N: Tensor

    @classmethod
    def make(cls, tp: int, rank: int, number: int) -> Bank:
        """`number`: of experts. In every eighth case all choose one of them first, in another none
        of the last rank's, in another none at all."""
        generator = torch.Generator().manual_seed(100 * tp + rank)
        x_RH = torch.randn(CASES * ROWS, HIDDEN, generator=generator)
        drawn = random_topk(CASES * ROWS, number, TOP_K, 100 * tp + rank)
        ids_RK = drawn.ids_TK.int()
        ids_RK[torch.rand(ids_RK.shape, generator=generator) < MASKED] = -1
        ids_NCK = ids_RK.view(CASES, ROWS, TOP_K)
        ids_NCK[1::8] = torch.where(ids_NCK[1::8] == number - 1, -1, ids_NCK[1::8])
        ids_NCK[1::8, :, 0] = number - 1
        ids_NCK[2::8] = torch.where(ids_NCK[2::8] >= number - number // tp, -1, ids_NCK[2::8])
        ids_NCK[3::8] = -1
        counts = counts_of(tp)
        counts_N = torch.tensor([each[rank] for each in counts], dtype=torch.int32)
        behind_NC = torch.arange(ROWS) >= counts_N[:, None]
        x_NCH = x_RH.bfloat16().view(CASES, ROWS, HIDDEN)
        x_NCH[behind_NC], ids_NCK[behind_NC] = torch.nan, -1
        topk = TopKOutput(ids_NCK, drawn.weights_TK.view(CASES, ROWS, TOP_K))
        return cls(counts_N.tolist(), [max(each) for each in counts], x_NCH, topk, counts_N)

    def to(self, device: str) -> Bank:
        topk = TopKOutput(self.topk.ids_TK.to(device), self.topk.weights_TK.to(device))
        tensors = (self.x_NCH.to(device), topk, self.num_tokens_N.to(device))
        return Bank(self.counts_N, self.most_N, *tensors)


@lru_cache
def bank_of(tp: int, rank: int, number: int, device: str) -> Bank:
    return Bank.make(tp, rank, number).to(device)


@lru_cache
def truth_of(combination: Combination, rank: int) -> Tensor:
    """[N, C, H], in float64 where the layer computes, of rows as they arrive; rows behind the
    tokens are zeros."""
    device = combination.where
    bank = bank_of(combination.tp, rank, num_experts(combination.ep), device)
    x_RH = bank.x_NCH.nan_to_num().flatten(0, 1)
    arrived_RH = PAYLOAD_FORMATS[combination.payload].encode(x_RH).dense(torch.bfloat16)
    own = combination.experts
    held = (w.bfloat16().to(device) for w in (own.gate_EIH, own.up_EIH, own.down_EHI))
    topk = TopKOutput(bank.topk.ids_TK.flatten(0, 1).long(), bank.topk.weights_TK.flatten(0, 1))
    with torch.device(device):
        y_RH = reference(Experts(*held), arrived_RH, topk)
    return y_RH.float().view_as(bank.x_NCH)


class Seat:
    """A layer of a rank with cases to draw from, and a graph of it where there are any."""

    def __init__(self, group: RankGroup, combination: Combination, **options: Any) -> None:
        rank = 0 if combination.replicated else group.rank
        self.combination = combination
        self.bank = bank_of(group.size, rank, num_experts(combination.ep), combination.where)
        self.wanted_NCH = truth_of(combination, rank)
        self.bound_NCH = TOLERANCE * (1 + self.wanted_NCH.abs())
        self.layer: FusedMoE = combination.layer(group, **options)

    def tokens(self, case: int) -> tuple[Tensor, TopKOutput]:
        bank, count = self.bank, self.bank.counts_N[case]
        topk = TopKOutput(bank.topk.ids_TK[case, :count], bank.topk.weights_TK[case, :count])
        return bank.x_NCH[case, :count], topk

    def step(self, case: int, prefill: bool, lane: int = 0) -> Step:
        return Step(prefill, lane, rows=self.bank.most_N[case], overlap=Overlap.TBO)

    def capture(self) -> None:
        """Of all rows; how many are tokens lies on the device."""
        first = self.bank.x_NCH[0].clone(), self.bank.topk.ids_TK[0].clone()
        self._x_TH, ids_TK = first
        self._topk = TopKOutput(ids_TK, self.bank.topk.weights_TK[0].clone())
        self._num_tokens_1 = self.bank.num_tokens_N[:1].clone()
        step = Step(False, rows=ROWS, num_tokens_1=self._num_tokens_1)
        self._graph, self._y_TH = captured(lambda: self.layer(self._x_TH, self._topk, step))

    def replay(self, case: int) -> Tensor:
        bank = self.bank
        self._x_TH.copy_(bank.x_NCH[case])
        self._topk.ids_TK.copy_(bank.topk.ids_TK[case])
        self._topk.weights_TK.copy_(bank.topk.weights_TK[case])
        self._num_tokens_1.copy_(bank.num_tokens_N[case : case + 1])
        self._graph.replay()
        return self._y_TH


def captured(run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """After two runs on a side stream, as graphs want it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y_TH = run()
    return graph, y_TH


class Tally:
    """Which rounds went wrong: compared where they were computed, looked at now and then."""

    def __init__(self, seats: list[Seat]) -> None:
        self.wrong: list[str] = []
        self._contexts = [seat.layer.context for seat in seats]
        self._pending: list[tuple[str, Tensor]] = []

    def compare(self, name: str, y_TH: Tensor, seat: Seat, case: int) -> None:
        rows = len(y_TH)
        assert rows in (seat.bank.counts_N[case], ROWS)
        off_TH = (y_TH - seat.wanted_NCH[case, :rows]).abs()
        fine = (off_TH <= seat.bound_NCH[case, :rows]).all()  # NaN is not
        self._pending.append((f"{name}, case {case} of {seat.combination}", fine))
        if len(self._pending) >= LOOK:
            self.look()

    def look(self) -> None:
        for context in self._contexts:
            settle(context)
            context.check()
        pending = [one for _, one in self._pending]
        fine = torch.stack(pending).tolist() if pending else []
        names = [name for name, _ in self._pending]
        self.wrong += [name for name, good in zip(names, fine, strict=True) if not good]
        self._pending = []


def seats_of(group: RankGroup, a2a: str, mode: str, **options: Any) -> list[Seat]:
    combinations = with_every_payload(a2a, mode, group.size)
    return [Seat(group, combination, **options) for combination in combinations]


def rounds(
    group: RankGroup, a2a: str, mode: str, counts: dict[str, int], **options: Any
) -> list[str]:
    """So many rounds of each kind, `eager` and `replayed`, in random order, each by a random layer;
    now and then all its buffers are poisoned. Those that went wrong."""
    seats = seats_of(group, a2a, mode, lanes=1, **options)
    if counts.get("replayed"):
        for seat in seats:
            seat.capture()
    common, tally = random.Random(1), Tally(seats)
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    common.shuffle(kinds)
    for number, kind in enumerate(kinds):
        seat, case, prefill = common.choice(seats), common.randrange(CASES), common.random() < 0.5
        if common.random() < POISONED:
            poison_all(group, seat.layer.context)
        if kind == "eager":
            y_TH = seat.layer(*seat.tokens(case), seat.step(case, prefill))
        else:
            y_TH = seat.replay(case)
        tally.compare(f"{number} {kind}", y_TH, seat, case)
    tally.look()
    return _done(group, seats, tally)


def flights(group: RankGroup, a2a: str, mode: str, count: int, **options: Any) -> list[str]:
    """Rounds with two lanes in flight: in an order that all ranks share, any of the 252 that there
    are, or in one of each rank's own. Those that went wrong."""
    seats = seats_of(group, a2a, mode, **options)
    common, own, tally = random.Random(2), random.Random(group.rank + 3), Tally(seats)
    orders = list(interleavings())
    for number in range(count):
        seat, prefill = common.choice(seats), common.random() < 0.5
        cases = [common.randrange(CASES) for _ in range(2)]
        shared = common.choice(orders) if common.random() < 0.5 else None
        if common.random() < POISONED:
            poison_all(group, seat.layer.context)
        values: list[Any] = [None, None]
        for lane, operation in shared or own_order(own, a2a == "ascend_fuseep"):
            values[lane] = _advance(seat, operation, values[lane], cases[lane], (prefill, lane))
        for lane, y_TH in enumerate(values):
            name = f"{number} lane {lane} in {shared or 'an order of its own'}"
            tally.compare(name, y_TH, seat, cases[lane])
    tally.look()
    return _done(group, seats, tally)


def _advance(seat: Seat, operation: str, value: Any, case: int, place: tuple[bool, int]) -> Any:
    """What an operation makes of what the last one of its lane gave. `place`: prefill, lane."""
    layer = seat.layer
    if operation == "dispatch_a":
        return layer.dispatcher.dispatch_a(*seat.tokens(case), seat.step(case, *place))
    if operation == "run":
        return layer.runner.run(value, layer.weights, layer.context.workspace)
    return getattr(layer.dispatcher, operation)(value)


def _done(group: RankGroup, seats: list[Seat], tally: Tally) -> list[str]:
    """All ranks are, before windows go."""
    group.barrier("rounds are done")
    seats.clear()
    gc.collect()
    return tally.wrong
