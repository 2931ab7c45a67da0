"""Dispatchers between ranks that share a GPU: eagerly, under graphs, with two lanes in flight.

T tokens · K chosen · H hidden · C rows of a rank.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from moesaic.comm.group import RankGroup
from moesaic.comm.local import LocalRanks
from moesaic.comm.mps import start_mps
from moesaic.config.devices import cuda_missing
from moesaic.core.step import Step
from moesaic.moe.formats import TopKOutput
from moesaic.moe.layer import FusedMoE
from tests.distributed.conformance import SPLITS, Verdict, check_all
from tests.distributed.moe_ranks import EXPERTS, HIDDEN, TOP_K, Combination, experts_for
from tests.distributed.test_device_dispatch import CHOSEN, EVERY_A2A, SLICE, product_of
from tests.distributed.test_in_flight import interleavings
from tests.moe_oracle import random_topk, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    # Ranks import this too, and to ask torch would open CUDA before they know of the MPS daemon.
    pytest.mark.skipif(bool(cuda_missing()), reason=f"needs a CUDA device: {cuda_missing()}"),
]

ROWS = 16
TOLERANCE = 0.02
"""Of bfloat16, for results of about one: a row of somebody else would be off by that."""
each_a2a = pytest.mark.parametrize(("a2a", "mode"), EVERY_A2A)
Ranks = Callable[..., list]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """ranks(n, function, …): on n ranks that share GPU 0, by a daemon of CUDA's MPS."""
    made: dict[int, LocalRanks] = {}
    with start_mps() as mps:

        def run(size: int, function: Callable, *args: object) -> list:
            if size not in made:
                made[size] = LocalRanks(size, timeout=500)
            return made[size].run(on_gpu, mps.environment, function, *args)

        yield run
        for pool in made.values():
            pool.close()


def on_gpu(group: RankGroup, environment: dict[str, str], function: Callable, *args: object):
    os.environ.update(environment)  # before this process opens CUDA
    torch.cuda.set_device(0)
    with torch.inference_mode():
        return function(group, *args)


def complaints(chosen: list[Combination], by_rank: list[list[Verdict]]) -> list[str]:
    return [
        f"{combination}, rank {rank}: {text}"
        for rank, verdicts in enumerate(by_rank)
        for combination, verdict in zip(chosen, verdicts, strict=True)
        for text in verdict.complaints
    ]


@pytest.mark.parametrize("tp", [2, 3])
def test_chosen_combinations(tp: int, ranks: Ranks):
    chosen = [c for c in CHOSEN if c.tp == tp]
    assert complaints(chosen, ranks(tp, check_all, chosen)) == []


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "ep"), [split for split in SPLITS if split[0] > 1])
def test_whole_product(tp: int, ep: int, ranks: Ranks):
    whole = product_of(tp, ep, "bf16")
    told: list[str] = []
    for start in range(0, len(whole), SLICE):
        part = whole[start : start + SLICE]
        told += complaints(part, ranks(tp, check_all, part))
    assert told == []


@dataclass(frozen=True)
class Tokens:
    """A step's tokens where a graph reads them: up to C of them, the rest are nobody's."""

    x_TH: Tensor
    topk: TopKOutput
    count_1: Tensor

    @classmethod
    def empty(cls) -> Tokens:
        ids_TK = torch.full((ROWS, TOP_K), -1, dtype=torch.int32, device="cuda")
        weights_TK = torch.zeros(ROWS, TOP_K, device="cuda")
        x_TH = torch.zeros(ROWS, HIDDEN, dtype=torch.bfloat16, device="cuda")
        count_1 = torch.zeros(1, dtype=torch.int32, device="cuda")
        return cls(x_TH, TopKOutput(ids_TK, weights_TK), count_1)

    def fill(self, count: int, seed: int) -> Tensor:
        """What a layer should make of them."""
        generator = torch.Generator().manual_seed(seed)
        x_TH = torch.randn(count, HIDDEN, generator=generator).bfloat16()
        topk = random_topk(count, EXPERTS, TOP_K, seed)
        topk.ids_TK[torch.rand(count, TOP_K, generator=generator) < 0.2] = -1
        self.topk.ids_TK.fill_(-1)
        self.x_TH[:count], self.topk.ids_TK[:count] = x_TH.cuda(), topk.ids_TK.int().cuda()
        self.topk.weights_TK[:count] = topk.weights_TK.cuda()
        self.count_1.fill_(count)
        return reference(experts_for(1), x_TH, topk)

    def step(self, lane: int) -> Step:
        return Step(False, lane, rows=ROWS, num_tokens_1=self.count_1)

    def wrong(self, y_TH: Tensor, wanted_TH: Tensor) -> bool:
        found_TH, behind_TH = y_TH.cpu().double().tensor_split([len(wanted_TH)])
        near = torch.allclose(found_TH, wanted_TH, rtol=TOLERANCE, atol=TOLERANCE)
        return not near or bool((behind_TH != 0).any())


def make_layer(group: RankGroup, a2a: str, mode: str, **options: int) -> FusedMoE:
    plain = Combination(a2a, mode, "triton", "bf16", "bf16", "bf16", group.size, group.size)
    return replace(plain, device="cuda").layer(group, **options)


def capture(run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
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


def replays(group: RankGroup, a2a: str, mode: str, count: int) -> list[str]:
    """Steps of a graph, now and then one that is not; the rounds that went wrong."""
    layer, tokens = make_layer(group, a2a, mode, lanes=1), Tokens.empty()
    same = mode == "replicated"
    graph, y_TH = capture(lambda: layer(tokens.x_TH, tokens.topk, tokens.step(0)))
    generators = random.Random(1), random.Random(0 if same else group.rank + 2)
    wrong = []
    for number in range(count):
        wanted_TH = tokens.fill(
            generators[1].randrange(ROWS + 1), 100 * number + 7 * (0 if same else group.rank)
        )
        eager = generators[0].random() < 0.2
        if eager:
            found_TH = layer(tokens.x_TH, tokens.topk, tokens.step(0))
        else:
            graph.replay()
            found_TH = y_TH
        if tokens.wrong(found_TH, wanted_TH):
            wrong.append(f"{number} {'eager' if eager else 'replayed'}")
        layer.context.check()
    return wrong


@each_a2a
def test_replays_of_a_graph(a2a: str, mode: str, ranks: Ranks):
    assert ranks(2, replays, a2a, mode, 20) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@each_a2a
def test_a_thousand_replays(a2a: str, mode: str, size: int, ranks: Ranks):
    assert ranks(size, replays, a2a, mode, 1000) == [[]] * size


def lanes_in_flight(group: RankGroup, a2a: str, mode: str, every: int) -> list[str]:
    """Orders of the halves of two lanes in which something came out wrong."""
    layer, lanes = make_layer(group, a2a, mode), (Tokens.empty(), Tokens.empty())
    wrong = []
    for number, order in enumerate(list(interleavings())[::every]):
        wanted = [
            t.fill((5 * number + lane) % ROWS, 2 * number + lane) for lane, t in enumerate(lanes)
        ]
        values: list = [None, None]
        for lane, operation in order:
            tokens, dispatcher = lanes[lane], layer.dispatcher
            if operation == "dispatch_a":
                args = (tokens.x_TH, tokens.topk, tokens.step(lane))
                values[lane] = dispatcher.dispatch_a(*args)
            elif operation == "run":
                workspace = layer.context.workspace
                values[lane] = layer.runner.run(values[lane], layer.weights, workspace)
            else:
                values[lane] = getattr(dispatcher, operation)(values[lane])
        parts = zip(lanes, values, wanted, strict=True)
        if any(tokens.wrong(y, truth) for tokens, y, truth in parts):
            wrong.append(str(order))
        layer.context.check()
    return wrong


@each_a2a
def test_two_lanes_in_flight(a2a: str, mode: str, ranks: Ranks):
    assert ranks(2, lanes_in_flight, a2a, mode, 18) == [[], []]


@pytest.mark.slow
@each_a2a
def test_two_lanes_in_every_order(a2a: str, mode: str, ranks: Ranks):
    assert ranks(3, lanes_in_flight, a2a, mode, 1) == [[], [], []]


def missing(group: RankGroup, a2a: str, mode: str) -> str:
    """The last rank does not come to a step: what the others are told."""
    tokens = Tokens.empty()
    tokens.fill(3, 0)
    make_layer(group, a2a, mode)(tokens.x_TH, tokens.topk, tokens.step(0))  # compiles
    torch.cuda.synchronize()
    layer = make_layer(group, a2a, mode, timeout=2)
    group.barrier("before one is missing")
    told = ""
    if group.rank < group.size - 1:
        layer(tokens.x_TH, tokens.topk, tokens.step(0))
        torch.cuda.synchronize()
        try:
            layer.context.check()
        except RuntimeError as error:
            told = str(error)
    group.barrier("after one was missing")
    layer.context.restart(3)
    group.barrier("all have restarted")
    wanted_TH = tokens.fill(4, group.rank)
    y_TH = layer(tokens.x_TH, tokens.topk, tokens.step(0))
    layer.context.check()
    assert mode == "replicated" or not tokens.wrong(y_TH, wanted_TH)
    return told


@each_a2a
def test_a_missing_rank_is_named_and_all_go_on(a2a: str, mode: str, ranks: Ranks):
    *others, _ = ranks(3, missing, a2a, mode)
    assert all(told.startswith("rank 2 did not reach") for told in others), others
