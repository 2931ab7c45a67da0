"""Two micro-batches under way at once, in every order; and hooks.

T tokens · K chosen · H hidden.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, islice
from typing import Any

import pytest
import torch
from torch import Tensor

from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.launch.local_ranks import LocalRanks
from moesaic.core.overlap import Overlap
from moesaic.core.step import Step
from moesaic.moe.context import MoeContext
from moesaic.moe.dispatch.base import BaseDispatcher
from moesaic.moe.formats import TopKOutput
from moesaic.moe.layer import FusedMoE
from moesaic.moe.quant.weights import WEIGHT_FORMATS
from moesaic.moe.registry import MoeProblem
from moesaic.moe.runner.base import Workspace
from tests.distributed.moe_ranks import A2A as EVERY_A2A
from tests.moe_oracle import Experts, config_of, random_topk, reference

EXPERTS, HIDDEN, INNER, TOP_K, MOST = 12, 32, 32, 3, 24
A2A = tuple(a2a for a2a in EVERY_A2A if a2a != ("none", "replicated"))
each_a2a = pytest.mark.parametrize(("a2a", "mode"), A2A)
OPERATIONS = ("dispatch_a", "dispatch_b", "run", "combine_a", "combine_b")
Order = list[tuple[int, str]]  # (lane, operation)
DRAWS = 7  # of two batches each


def make_layer(
    group: RankGroup, a2a: str, mode: str, experts: Experts, device: str = "cpu", **options: Any
) -> FusedMoE:
    """On CPU tensors, whatever the device whose providers it takes."""
    problem = MoeProblem(
        a2a=a2a,
        mode=mode,
        weights=WEIGHT_FORMATS["fp32"],
        dtype="fp32",
        tp=group.size,
        ep=group.size,
        phases=("decode",),
        device=device,
    )
    options = {"timeout": 20.0, "max_tokens": MOST, "max_decode_tokens": MOST} | options
    context = MoeContext.make(problem, torch.float32, group, **options)
    context = replace(context, workspace=Workspace())
    layer = FusedMoE(config_of(experts, TOP_K), context)
    experts.fill(layer)
    return layer


def batch(count: int, seed: int) -> tuple[Tensor, TopKOutput]:
    generator = torch.Generator().manual_seed(seed)
    x_TH = torch.randn(count, HIDDEN, generator=generator)
    topk = random_topk(count, EXPERTS, TOP_K, seed)
    topk.ids_TK[torch.rand(count, TOP_K, generator=generator) < 0.2] = -1
    return x_TH, topk


def step_of(lane: int) -> Step:
    return Step(lane == 0, lane, rows=MOST, overlap=Overlap.TBO)


class Flight:
    """The state between the operations of two lanes of a layer."""

    def __init__(self, layer: FusedMoE, batches: Sequence[tuple[Tensor, TopKOutput]]) -> None:
        self.layer, self.batches = layer, batches
        self.values: list[Any] = [None, None]

    def do(self, lane: int, operation: str) -> None:
        layer, value = self.layer, self.values[lane]
        if operation == "dispatch_a":
            x_TH, topk = self.batches[lane]
            self.values[lane] = layer.dispatcher.dispatch_a(x_TH, topk, step_of(lane))
        elif operation == "run":
            workspace = layer.context.workspace
            self.values[lane] = layer.runner.run(value, layer.weights, workspace)
        else:
            self.values[lane] = getattr(layer.dispatcher, operation)(value)


def alone(layer: FusedMoE, batches: Sequence[tuple[Tensor, TopKOutput]]) -> list[Tensor]:
    """One after the other."""
    return [layer(x, topk, step_of(lane)) for lane, (x, topk) in enumerate(batches)]


def interleavings() -> Iterator[Order]:
    """All 252 ways to merge the five operations of two lanes."""
    count = len(OPERATIONS)
    for places in combinations(range(2 * count), count):
        lanes = [0 if place in places else 1 for place in range(2 * count)]
        iterators = [iter(OPERATIONS), iter(OPERATIONS)]
        yield [(lane, next(iterators[lane])) for lane in lanes]


def all_orders(
    group: RankGroup, a2a: str, mode: str, device: str = "cpu", every: int = 1, first: int = 0
) -> list[str]:
    """The same order on all ranks: none of them can then wait for one that waits for it."""
    experts = Experts.random(EXPERTS, HIDDEN, INNER)
    layer = make_layer(group, a2a, mode, experts, device)
    draws = []
    for number in range(DRAWS):
        counts = random.Random(group.rank + 10 * number)
        batches = [batch(counts.randrange(5), 2 * number + lane) for lane in (0, 1)]
        draws.append((batches, alone(layer, batches)))
    wrong = []
    for number, order in enumerate(islice(interleavings(), first, None, every)):
        batches, wanted = draws[number % DRAWS]
        flight = Flight(layer, batches)
        for lane, operation in order:
            flight.do(lane, operation)
        if not all(torch.equal(a, b) for a, b in zip(flight.values, wanted, strict=True)):
            wrong.append(str(order))
    return wrong


@each_a2a
def test_orders(a2a: str, mode: str, pools: Callable[[int], LocalRanks]):
    """A quarter of them for each dispatcher, and each order for two; the slow test below tries all
    with each."""
    assert sum(1 for _ in interleavings()) == 252
    first = A2A.index((a2a, mode)) % 4
    assert pools(2).run(all_orders, a2a, mode, "cpu", 4, first) == [[], []]


@pytest.mark.slow
@each_a2a
def test_all_orders(a2a: str, mode: str, pools: Callable[[int], LocalRanks]):
    assert pools(2).run(all_orders, a2a, mode) == [[], []]


def own_order(generator: random.Random, fused: bool) -> Order:
    """What ranks may do in different orders: all have begun both lanes before any of them waits for
    one, and have given both results before any waits for one. A fused function waits itself, so
    that those of both lanes come in one order."""

    def shuffled(*operations: str) -> Order:
        lanes = [0, 1]
        generator.shuffle(lanes)
        if generator.random() < 0.5:
            return [(lane, operation) for lane in lanes for operation in operations]
        return [(lane, operation) for operation in operations for lane in lanes]

    if fused:
        runs = [(lane, "run") for lane in (0, 1)]
        begin = [*shuffled("dispatch_a"), *shuffled("dispatch_b")]
        return [*begin, *runs, *shuffled("combine_a", "combine_b")]
    middle = shuffled("dispatch_b", "run", "combine_a")
    return [*shuffled("dispatch_a"), *middle, *shuffled("combine_b")]


def rounds(group: RankGroup, a2a: str, mode: str, count: int, device: str = "cpu") -> float:
    """Each rank in an order of its own, with naps; the largest error."""
    experts = Experts.random(EXPERTS, HIDDEN, INNER)
    layer = make_layer(group, a2a, mode, experts, device)
    generator = random.Random(group.rank)
    worst = 0.0
    for number in range(count):
        seeds = [1000 * number + 10 * group.rank + lane for lane in (0, 1)]
        batches = [batch(generator.choice((0, 1, 2, 9)), seed) for seed in seeds]
        flight = Flight(layer, batches)
        for lane, operation in own_order(generator, a2a == "ascend_fuseep"):
            if generator.random() < 0.2:
                time.sleep(generator.random() * 0.003)
            flight.do(lane, operation)
        for (x_TH, topk), y_TH in zip(batches, flight.values, strict=True):
            error = (y_TH.double() - reference(experts, x_TH, topk)).abs()
            worst = max(worst, float(error.max()) if len(error) else 0.0)
    return worst


@each_a2a
def test_ranks_complete_in_orders_of_their_own(
    a2a: str, mode: str, pools: Callable[[int], LocalRanks]
):
    """Sums of 32 products of numbers around one in float32, three times over: errors stay below 100
    of its steps; a row of somebody else would be off by about one."""
    assert max(pools(3).run(rounds, a2a, mode, 30)) < 100 * 2.0**-23


@pytest.mark.slow
@each_a2a
def test_a_thousand_rounds(a2a: str, mode: str, pools: Callable[[int], LocalRanks]):
    assert max(pools(3).run(rounds, a2a, mode, 1000)) < 100 * 2.0**-23


def third(group: RankGroup, a2a: str, mode: str, device: str = "cpu") -> tuple[str, str, bool]:
    """Both lanes are busy: a third batch is refused, and the two go on as if nothing happened."""
    layer = make_layer(group, a2a, mode, Experts.random(EXPERTS, HIDDEN, INNER), device)
    batches = [batch(4, group.rank), batch(3, group.rank + 5)]
    wanted = alone(layer, batches)
    flight = Flight(layer, batches)
    for operation in ("dispatch_a", "dispatch_b", "run"):
        flight.do(0, operation)
        flight.do(1, operation)
    told = []
    for lane in (1, 2):
        try:
            layer.dispatcher.dispatch_a(*batches[0], step_of(lane))
        except (RuntimeError, ValueError) as error:
            told.append(str(error))
    for operation in ("combine_a", "combine_b"):
        flight.do(1, operation)
        flight.do(0, operation)
    same = all(torch.equal(a, b) for a, b in zip(flight.values, wanted, strict=True))
    return told[0], told[1], same


@each_a2a
def test_a_busy_lane_is_refused(a2a: str, mode: str, pools: Callable[[int], LocalRanks]):
    for busy, unknown, same in pools(2).run(third, a2a, mode):
        assert "dispatch, layer 0: lane 1 is still in flight since" in busy
        assert "combine it first, use the other lane" in busy
        assert unknown == "lane 2: there are 2, numbered from 0"
        assert same


def hooked(group: RankGroup, a2a: str, mode: str) -> list[str]:
    """The calls of hooks in the order in which they came, over three steps."""
    layer = make_layer(group, a2a, mode, Experts.random(EXPERTS, HIDDEN, INNER))
    dispatcher = layer.dispatcher
    x_TH, topk = batch(6, group.rank)
    plain = layer(x_TH, topk)
    calls: list[str] = []

    def note(name: str) -> Callable[[BaseDispatcher, Any], None]:
        def hook(of: BaseDispatcher, value: Any) -> None:
            assert of is dispatcher
            calls.append(f"{name} {type(value).__name__}")

        return hook

    points = ("post_combine", "pre_combine", "post_dispatch", "pre_dispatch")
    handles = [dispatcher.register_hook(point, note(point)) for point in points]
    assert torch.equal(layer(x_TH, topk), plain)
    double = dispatcher.register_hook("pre_dispatch", lambda _, value: (value[0] * 2, value[1]))
    back = dispatcher.register_hook("pre_dispatch", lambda _, value: (value[0] / 2, value[1]))
    negate = dispatcher.register_hook("post_combine", lambda _, y: -y)
    assert torch.equal(layer(x_TH, topk), -plain)
    for handle in (double, back, negate, *handles):
        handle.remove()
        handle.remove()
    assert torch.equal(layer(x_TH, topk), plain)
    return calls


def named_hooks(group: RankGroup) -> list[str]:
    """The registrations that have a method each; those between the halves see rows on their way."""
    layer = make_layer(group, "deepep", "normal", Experts.random(EXPERTS, HIDDEN, INNER))
    dispatcher, calls = layer.dispatcher, list[str]()
    x_TH, topk = batch(6, group.rank)
    plain = layer(x_TH, topk)

    def negate(of: BaseDispatcher, x_TH: Tensor, topk: TopKOutput) -> tuple[Tensor, TopKOutput]:
        assert of is dispatcher
        return -x_TH, topk

    handles = [
        dispatcher.register_pre_dispatch_hook(negate),
        dispatcher.register_pre_dispatch_hook(negate),
        dispatcher.register_pre_dispatch_hook(lambda of, x, topk: calls.append("pre")),
        dispatcher.register_mid_dispatch_hook(lambda of: calls.append(f"mid {of is dispatcher}")),
        dispatcher.register_post_dispatch_hook(lambda of, out: calls.append(out.format)),
        dispatcher.register_pre_combine_hook(lambda of, given: calls.append(given.format)),
        dispatcher.register_mid_combine_hook(lambda of: "what it returns is not used"),
        dispatcher.register_post_combine_hook(lambda of, y_TH: 2 * y_TH),
    ]
    assert torch.equal(layer(x_TH, topk), 2 * plain)
    for handle in handles:
        handle.remove()
    assert torch.equal(layer(x_TH, topk), plain)
    return calls


def test_hooks_by_name(pools: Callable[[int], LocalRanks]):
    assert pools(2).run(named_hooks) == [["pre", "mid True", "deepep_normal", "rows"]] * 2


@each_a2a
def test_hooks(a2a: str, mode: str, pools: Callable[[int], LocalRanks]):
    for calls in pools(2).run(hooked, a2a, mode):
        points = [call.split()[0] for call in calls]
        assert points == ["pre_dispatch", "post_dispatch", "pre_combine", "post_combine"] * 2
        kinds = [call.split()[1] for call in calls[:4]]
        assert kinds[0] == "tuple" and kinds[3] == "Tensor"
        assert kinds[1].endswith("DispatchOutput") and kinds[2].endswith("CombineInput")


def test_unknown_hook_is_refused():
    layer = make_layer(RankGroup.alone(), "none", "normal", Experts.random(EXPERTS, HIDDEN, INNER))
    with pytest.raises(
        ValueError, match="no hook 'dispatch': choose one of pre_dispatch, mid_dispatch, post_d"
    ):
        layer.dispatcher.register_hook("dispatch", lambda *_: None)
