"""Every combination that the matrix allows against the float64 oracle, on 1, 2, 3 and 4 ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.launch.local_ranks import LocalRanks
from moesaic.moe.formats import TopKOutput
from moesaic.moe.registry import A2A_REGISTRY, RUNNER_REGISTRY, combinations_of
from tests.distributed.conformance import (
    QUICK_SPLITS,
    SPLITS,
    Split,
    Verdict,
    allowed,
    check_all,
    complaints,
    covering,
    everything,
    pairs_of,
    truth,
    values_of,
)
from tests.distributed.moe_ranks import DTYPES, TOP_K, Combination, cases_for, experts_for
from tests.moe_bounds import expected, held, whole
from tests.moe_oracle import Experts, config_of, reference

RANKS = (1, 2, 3, 4)
PARTS = 24
Outcomes = dict[Combination, list[Verdict]]


@pytest.fixture(scope="module")
def outcomes(pools: Callable[[int], LocalRanks]) -> Callable[[int], Outcomes]:
    """All chosen combinations of a number of ranks, in one run."""
    found: dict[int, Outcomes] = {}

    def of(tp: int) -> Outcomes:
        if tp not in found:
            chosen = [c for c in covering(QUICK_SPLITS) if c.tp == tp]
            by_rank = pools(tp).run(check_all, chosen)
            found[tp] = dict(zip(chosen, map(list, zip(*by_rank, strict=True)), strict=True))
        return found[tp]

    return of


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tp", RANKS)
def test_combinations(tp: int, outcomes: Callable[[int], Outcomes]):
    check_outcomes(outcomes(tp))


def test_bounds_are_close(outcomes: Callable[[int], Outcomes]):
    """Errors are nearly as large as they may be: a bound far above them would test nothing. Only
    float32 sums are much better than the bound."""
    for tp in RANKS:
        for combination, verdicts in outcomes(tp).items():
            ratio = max(verdict.ratio for verdict in verdicts)
            least = 0.02 if combination.dtype == "fp32" else 0.1
            assert ratio > least, f"{combination}: errors are {ratio:.3f} of what is allowed"


@pytest.mark.parametrize(
    "splits",
    [
        pytest.param(QUICK_SPLITS, id="quick"),
        pytest.param(SPLITS, id="all", marks=pytest.mark.slow),
    ],
)
def test_chosen_combinations_cover_every_pair(splits: tuple[Split, ...]):
    chosen, product = covering(splits), everything(splits=splits)
    covered = {pair for combination in chosen for pair in pairs_of(combination)}
    assert covered == {pair for combination in product for pair in pairs_of(combination)}
    assert all(allowed(combination) for combination in chosen)
    seen = {value for combination in chosen for value in values_of(combination)}
    assert {value for name, value in seen if name == "split"} == set(splits)
    assert {value for name, value in seen if name == "runner"} == set(RUNNER_REGISTRY)
    assert {value[0] for name, value in seen if name == "a2a"} == set(A2A_REGISTRY)
    assert len(chosen) < 150


def test_the_product_is_that_of_the_matrix():
    """Nothing that the matrix allows is left out, but for modes that are the same thing."""
    for dtype in DTYPES:
        options = {"phases": ("decode",), "dtype": dtype, "tp": 4, "ep": 2}
        ok = [problem for problem, support in combinations_of(**options) if support.ok]
        wanted = {
            (p.a2a, A2A_REGISTRY[p.a2a].formats[p.mode], p.runner, p.payload, p.weights.name)
            for p in ok
        }
        here = {
            (c.a2a, A2A_REGISTRY[c.a2a].formats[c.mode], c.runner, c.payload, c.weights)
            for c in everything()
            if (c.dtype, c.tp, c.ep) == (dtype, 4, 2) and c.mode not in ("auto", "replicated")
        }
        assert here == wanted


def whole_product(dtype: str, tp: int) -> list[Combination]:
    """All of bf16, and of the other types what is computed in a hybrid of ep and tp. Deterministic
    or not in turn. Neighbours compute with the same formats: the oracle is asked once for many."""
    chosen = [c for c in everything() if (c.dtype, c.tp) == (dtype, tp)]
    if dtype != "bf16":
        chosen = [c for c in chosen if (c.tp, c.ep) == (4, 2)]
    chosen = [c for i, c in enumerate(chosen) if c.deterministic == (i // 2 % 2 == 0)]
    return sorted(chosen, key=lambda c: (c.ep, c.weights, c.payload, c.replicated))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize(
    ("dtype", "tp"), [*(("bf16", tp) for tp in RANKS), ("fp16", 4), ("fp32", 4)]
)
def test_whole_product(dtype: str, tp: int, part: int, pools: Callable[[int], LocalRanks]):
    chosen = whole_product(dtype, tp)
    begin, end = (len(chosen) * place // PARTS for place in (part, part + 1))
    check_on_ranks(chosen[begin:end], pools(tp))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("tp", RANKS)
def test_every_split(tp: int, pools: Callable[[int], LocalRanks]):
    check_on_ranks([c for c in covering() if c.tp == tp], pools(tp))


def check_on_ranks(chosen: list[Combination], ranks: LocalRanks) -> None:
    by_rank = ranks.run(check_all, chosen)
    check_outcomes(dict(zip(chosen, map(list, zip(*by_rank, strict=True)), strict=True)))


def check_outcomes(outcomes: Outcomes) -> None:
    told = [
        f"{combination}, rank {rank}: {text}"
        for combination, verdicts in outcomes.items()
        for rank, verdict in enumerate(verdicts)
        for text in verdict.complaints
    ]
    assert not told, "\n".join(told)


FORMATS = [
    *((weights, "bf16", "bf16") for weights in ("bf16", "int4_w4a16", "mxfp4")),
    ("fp16", "fp16", "fp16"),
    ("fp32", "fp32", "fp32"),
    ("fp32", "fp8", "fp32"),
    ("fp8_block", "fp8", "bf16"),
    ("int8_w8a8", "int8", "bf16"),
    ("nvfp4", "nvfp4", "bf16"),
]


@pytest.mark.parametrize("moe_tp", [1, 2])
@pytest.mark.parametrize(("weights", "payload", "dtype"), FORMATS)
def test_the_two_oracles_agree(weights: str, payload: str, dtype: str, moe_tp: int):
    """The one that carries bounds along, and the plain einsum of all experts."""
    numerics = Combination("none", "normal", "triton", payload, weights, dtype, moe_tp, 1).numerics
    shards = held(experts_for(moe_tp), numerics)
    case = next(case for case in cases_for(1, 1) if case.masked)
    x_TH, topk = case.tokens(0, DTYPES[dtype])
    ours = expected(shards, x_TH, topk, numerics)
    torch.testing.assert_close(
        ours.exact, reference(whole(shards), x_TH, topk), rtol=1e-12, atol=1e-12
    )


def broken_layer(
    combination: Combination, fault: str, group: RankGroup
) -> tuple[torch.Tensor, TopKOutput, torch.Tensor]:
    """A layer with something wrong, and what it makes of 257 tokens."""
    case = cases_for(1, 1)[0]
    x_TH, topk = case.tokens(0, DTYPES[combination.dtype])
    layer = combination.layer(group)
    experts = experts_for(1)
    given = topk
    if fault == "a weight is dropped":
        given = TopKOutput(topk.ids_TK.clone(), topk.weights_TK)
        given.ids_TK[5, 0] = -1
    if fault == "weights are swapped":
        weights = topk.weights_TK.clone()
        weights[:, :2] = weights[:, :2].flip(1)
        given = TopKOutput(topk.ids_TK, weights)
    if fault == "weights are applied twice":
        given = TopKOutput(topk.ids_TK, topk.weights_TK**2)
    if fault == "an expert is twice as large":
        down = experts.down_EHI.clone()
        down[3] *= 2
        replace(experts, down_EHI=down).fill(layer)
    if fault == "gate and up are swapped":
        Experts(experts.up_EIH, experts.gate_EIH, experts.down_EHI).fill(layer)
    if fault == "a scale of a row is off by two":
        x_TH = x_TH.clone()
        x_TH[7] *= 2
    assert layer.config == config_of(experts, TOP_K)
    return x_TH, given, layer(x_TH, given, case.step)


FAULTS = (
    "a weight is dropped",
    "weights are swapped",
    "weights are applied twice",
    "an expert is twice as large",
    "gate and up are swapped",
    "a scale of a row is off by two",
)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("weights", "payload", "dtype"), FORMATS)
def test_a_fault_is_found(weights: str, payload: str, dtype: str, fault: str):
    runner = "flashinfer_cutlass" if weights == "nvfp4" else "triton_kernel"
    combination = Combination("none", "normal", runner, payload, weights, dtype, 1, 1)
    wanted = truth(combination.numerics, 1, 0, False)[0]
    _, _, good_TH = broken_layer(combination, "", RankGroup.alone())
    assert complaints(good_TH, wanted) == []
    _, _, y_TH = broken_layer(combination, fault, RankGroup.alone())
    assert complaints(y_TH, wanted) != []
