"""Deterministic mode: the same bits whatever the ranks, the placement and who else is there.

T tokens · K chosen · H hidden.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import pytest
import torch
from torch import Tensor

from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.launch.local_ranks import LocalRanks
from moesaic.core.step import Step
from moesaic.moe.context import MoeContext
from moesaic.moe.formats import TopKOutput
from moesaic.moe.layer import FusedMoE
from moesaic.moe.placement import Placement
from moesaic.moe.quant.weights import WEIGHT_FORMATS
from moesaic.moe.registry import MoeProblem
from moesaic.moe.runner.base import Workspace
from tests.distributed.moe_ranks import A2A as EVERY_A2A
from tests.distributed.moe_ranks import DTYPES, slots_of
from tests.moe_oracle import Experts, config_of, random_topk

EXPERTS, HIDDEN, INNER, TOP_K, TOKENS, MOST = 24, 128, 128, 4, 75, 160
A2A = tuple(a2a for a2a in EVERY_A2A if a2a != ("none", "replicated"))
RUNNERS = ("triton", "deep_gemm", "cutlass", "triton_kernel", "flashinfer_cutlass")


@dataclass(frozen=True)
class Scenario:
    """`split`: how many of the tokens each rank brings, `extra`: how many others besides, in front
    of and behind them. `copies`: redundant slots of each rank, among which `algorithm` chooses."""

    a2a: str = "none"
    mode: str = "normal"
    runner: str = "triton"
    dtype: str = "bf16"
    weights: str = ""
    ep: int = 1
    split: tuple[int, ...] = (TOKENS,)
    shuffled: bool = False
    copies: int = 0
    algorithm: str = "dynamic"
    extra: int = 0
    deterministic: bool = True
    device: str = "cpu"

    def placement(self) -> Placement:
        generator = random.Random(self.ep + self.copies)
        slots = [*range(EXPERTS), *generator.choices(range(EXPERTS), k=self.copies * self.ep)]
        if self.shuffled:
            generator.shuffle(slots)
        return Placement(EXPERTS, tuple(slots))

    def layer(self, group: RankGroup) -> FusedMoE:
        weights = self.weights or self.dtype
        problem = MoeProblem(
            a2a=self.a2a,
            mode=self.mode,
            runner=self.runner,
            payload=self.dtype,
            weights=WEIGHT_FORMATS[weights],
            dtype=self.dtype,
            ep=self.ep,
            tp=self.ep,
            phases=("decode",),
            device=self.device,
        )
        context = MoeContext.make(
            problem,
            DTYPES[self.dtype],
            group,
            timeout=30.0,
            max_tokens=MOST,
            max_decode_tokens=MOST,
            deterministic=self.deterministic,
            dispatch_algorithm=self.algorithm,
        )
        experts = experts_of_all()
        context = replace(context, workspace=Workspace())
        layer = FusedMoE(config_of(experts, TOP_K), context, placement=self.placement())
        experts.fill(layer)
        return layer


@lru_cache
def experts_of_all() -> Experts:
    return Experts.random(EXPERTS, HIDDEN, INNER, seed=3)


def tokens(count: int, dtype: str, seed: int) -> tuple[Tensor, TopKOutput]:
    """Logical experts; some are masked, and expert 2 is popular: it has more than one tile."""
    x_TH = torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))
    topk = random_topk(count, EXPERTS, TOP_K, seed)
    ids_TK = topk.ids_TK
    ids_TK[(ids_TK == 2).any(1) == 0, 1] = 2
    ids_TK[3::11, 2] = -1
    return x_TH.to(DTYPES[dtype]), TopKOutput(ids_TK, topk.weights_TK)


def run_on(group: RankGroup, scenario: Scenario) -> Tensor:
    """The results of this rank's share of the tokens."""
    layer = scenario.layer(group)
    x_TH, topk = tokens(TOKENS, scenario.dtype, seed=1)
    start = sum(scenario.split[: group.rank])
    share = slice(start, start + scenario.split[group.rank])
    others, other_topk = tokens(scenario.extra, scenario.dtype, seed=50 + group.rank)
    front = scenario.extra // 2
    x = torch.cat((others[:front], x_TH[share], others[front:]))
    ids, weights = (
        torch.cat((other[:front], own[share], other[front:]))
        for other, own in (
            (other_topk.ids_TK, topk.ids_TK),
            (other_topk.weights_TK, topk.weights_TK),
        )
    )
    step = Step(scenario.ep % 2 == 0, 0, rows=MOST)
    y = layer(x, TopKOutput(slots_of(layer, ids, step), weights), step)
    return y[front : front + scenario.split[group.rank]]


def run_all(group: RankGroup, scenarios: list[Scenario]) -> list[Tensor]:
    return [run_on(group, scenario) for scenario in scenarios]


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@lru_cache
def bits(dtype: str, weights: str = "", device: str = "cpu") -> Tensor:
    """One rank, one thread, the plainest backend."""
    with threads(1):
        scenario = Scenario(runner="triton_kernel", dtype=dtype, weights=weights, device=device)
        return run_on(RankGroup.alone(), scenario)


def split_of(ep: int, seed: int) -> tuple[int, ...]:
    """The tokens dealt to ranks unevenly; the second of three or more has none."""
    generator = random.Random(seed)
    cuts = sorted(generator.randrange(TOKENS + 1) for _ in range(ep - 1))
    shares = [b - a for a, b in zip([0, *cuts], [*cuts, TOKENS], strict=True)]
    if ep > 2:
        shares[0], shares[1] = shares[0] + shares[1], 0
    return tuple(shares)


def scenarios_for(ep: int, dtype: str) -> list[Scenario]:
    """Every a2a backend, with runners, placements, splits and company in turn."""
    found = []
    for number, (a2a, mode) in enumerate(A2A):
        for variant in range(3):
            which = 3 * number + variant
            found.append(
                Scenario(
                    a2a=a2a,
                    mode=mode,
                    runner=RUNNERS[which % len(RUNNERS)],
                    dtype=dtype,
                    ep=ep,
                    split=split_of(ep, which),
                    shuffled=variant != 0,
                    copies=(0, 0, 2)[variant],
                    algorithm=("lp", "static", "dynamic")[number % 3],
                    extra=(0, 37, 6)[variant],
                )
            )
    return found


def differing(pool: LocalRanks, scenarios: list[Scenario]) -> list[str]:
    by_rank = pool.run(run_all, scenarios)
    found = []
    for number, scenario in enumerate(scenarios):
        y_TH = torch.cat([results[number] for results in by_rank])
        wanted = bits(scenario.dtype, scenario.weights, scenario.device)
        if not torch.equal(y_TH, wanted):
            tokens_off = int((y_TH != wanted).any(1).sum())
            found.append(f"{tokens_off} tokens differ: {scenario}")
    return found


# Most numbers of ranks in one type.
SLOW = {(2, "bf16"), (3, "fp32"), (8, "bf16"), (8, "fp32")}


@pytest.mark.parametrize(
    ("ep", "dtype"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case in SLOW))
        for case in product((1, 2, 3, 4, 8), ("bf16", "fp32"))
    ],
)
def test_bits_do_not_depend_on_ranks(ep: int, dtype: str, pools: Callable[[int], LocalRanks]):
    assert bits(dtype).isfinite().all()
    assert differing(pools(ep), scenarios_for(ep, dtype)) == []


@pytest.mark.parametrize("weights", ["fp8_block", "int8_w8a8", "mxfp4"])
def test_bits_with_quantised_weights(weights: str, pools: Callable[[int], LocalRanks]):
    runner = {"fp8_block": "deep_gemm", "int8_w8a8": "triton", "mxfp4": "triton_kernel"}[weights]
    scenarios = [
        replace(scenario, runner=runner, weights=weights)
        for scenario in scenarios_for(4, "bf16")[1::3]
    ]
    assert differing(pools(4), scenarios) == []


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("runner", RUNNERS)
def test_bits_do_not_depend_on_threads(dtype: str, runner: str):
    for count in (1, 2):
        with threads(count):
            y_TH = run_on(RankGroup.alone(), Scenario(dtype=dtype, runner=runner))
        assert torch.equal(y_TH, bits(dtype)), f"{count} threads"


def test_a_token_alone_has_the_same_bits():
    """Each of some tokens by itself, in a layer of its own batch of one."""
    layer = Scenario().layer(RankGroup.alone())
    x_TH, topk = tokens(TOKENS, "bf16", seed=1)
    with threads(1):
        for row in range(0, TOKENS, 9):
            one = slice(row, row + 1)
            y = layer(x_TH[one], TopKOutput(topk.ids_TK[one], topk.weights_TK[one]))
            assert torch.equal(y, bits("bf16")[one])


def test_without_the_mode_bits_depend_on_ranks(pools: Callable[[int], LocalRanks]):
    """So that the tests above can fail."""
    scenarios = [replace(s, deterministic=False) for s in scenarios_for(4, "bf16")]
    assert len(differing(pools(4), scenarios)) > len(scenarios) // 2
