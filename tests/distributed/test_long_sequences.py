"""Long sequences in rounds: the same results with smaller buffers.

T tokens · K chosen · H hidden.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.launch.local_ranks import LocalRanks
from moesaic.core.step import Step
from moesaic.moe.context import MoeContext
from moesaic.moe.dispatch.base import DispatchConfig
from moesaic.moe.dispatch.host.rows import Rounds, RowsDispatcher
from moesaic.moe.dispatch.long_sequences import (
    BUFFSIZE,
    COMBINE,
    MIB,
    PER_ROUND,
    ROUNDS,
    buffer_bytes,
    formula_mib,
    rounds_from_environment,
    summarise,
)
from moesaic.moe.formats import TopKOutput
from moesaic.moe.layer import FusedMoE
from moesaic.moe.placement import EpLayout
from moesaic.moe.quant.payload import PAYLOAD_FORMATS
from moesaic.moe.quant.weights import WEIGHT_FORMATS
from moesaic.moe.registry import MoeProblem
from tests.moe_oracle import Experts, config_of, random_topk, reference

EXPERTS, HIDDEN, INNER, TOP_K, MOST = 12, 64, 32, 3, 70
COUNTS = ((23, 0, 64, 1), (0, 0, 7, 0), (0, 0, 0, 0), (70, 70, 70, 70), (7, 14, 21, 8))
Environment = dict[str, str]


def environment(per_round: int, rounds: int, combine: int = 0) -> Environment:
    return {PER_ROUND: str(per_round), ROUNDS: str(rounds), COMBINE: str(combine)}


@contextmanager
def set_in(variables: Mapping[str, str]) -> Iterator[None]:
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def make_layer(
    group: RankGroup, a2a: str, deterministic: bool, payload: str = "fp32", ep: int | None = None
) -> FusedMoE:
    problem = MoeProblem(
        a2a=a2a,
        mode="normal",
        payload=payload,
        weights=WEIGHT_FORMATS["fp32"],
        dtype="fp32",
        tp=group.size,
        ep=ep or group.size,
    )
    context = MoeContext.make(
        problem,
        torch.float32,
        group,
        timeout=20.0,
        max_tokens=MOST,
        deterministic=deterministic,
    )
    experts = Experts.random(EXPERTS, HIDDEN, INNER)
    layer = FusedMoE(config_of(experts, TOP_K), context)
    experts.fill(layer)
    return layer


def batch(count: int, seed: int) -> tuple[Tensor, TopKOutput]:
    x_TH = torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))
    topk = random_topk(count, EXPERTS, TOP_K, seed)
    topk.ids_TK[::4, 0] = -1
    return x_TH, topk


def outputs(layer: FusedMoE, rank: int) -> list[Tensor]:
    return [
        layer(*batch(counts[rank], 10 * number + rank), Step(True, number % 2))
        for number, counts in enumerate(COUNTS)
    ]


def in_rounds(
    group: RankGroup, a2a: str, payload: str, ep: int, variables: list[Environment]
) -> list[str]:
    """What differs from one round: nothing in deterministic mode, rounding in the other."""
    wrong = []
    for deterministic in (True, False):
        wanted = outputs(make_layer(group, a2a, deterministic, payload, ep), group.rank)
        for number, chosen in enumerate(variables):
            with set_in(chosen):
                layer = make_layer(group, a2a, deterministic, payload, ep)
            assert isinstance(layer.dispatcher, RowsDispatcher)
            asked = Rounds(int(chosen[PER_ROUND]), int(chosen[ROUNDS]), chosen[COMBINE] == "1")
            assert layer.dispatcher.rounds == asked
            for ours, theirs in zip(outputs(layer, group.rank), wanted, strict=True):
                off = float((ours - theirs).abs().max()) if len(ours) else 0.0
                if off > (0.0 if deterministic else 1e-5):
                    wrong.append(f"{variables[number]}, deterministic {deterministic}: {off}")
    return wrong


VARIANTS = [
    environment(7, 10),
    environment(7, 10, 1),
    environment(1, 70, 1),
    environment(64, 2, 1),
    environment(70, 1),
    environment(70, 1, 1),
    environment(69, 2),
]


@pytest.mark.parametrize(
    ("a2a", "payload", "ep"),
    [
        ("deepep", "fp8", 2),
        ("mori", "int8", 4),
        pytest.param("deepep", "fp32", 4, marks=pytest.mark.slow),
    ],
)
def test_rounds_give_the_same_results(
    a2a: str, payload: str, ep: int, pools: Callable[[int], LocalRanks]
):
    assert pools(4).run(in_rounds, a2a, payload, ep, VARIANTS) == [[]] * 4


def against_oracle(group: RankGroup) -> float:
    with set_in(environment(5, 14, 1)):
        layer = make_layer(group, "deepep", False)
    experts = Experts.random(EXPERTS, HIDDEN, INNER)
    worst = 0.0
    for number, y_TH in enumerate(outputs(layer, group.rank)):
        x_TH, topk = batch(COUNTS[number][group.rank], 10 * number + group.rank)
        error = (y_TH.double() - reference(experts, x_TH, topk)).abs()
        worst = max(worst, float(error.max()) if len(error) else 0.0)
    return worst


def test_rounds_against_the_oracle(pools: Callable[[int], LocalRanks]):
    assert max(pools(3).run(against_oracle)) < 1e-5


def limited(group: RankGroup) -> tuple[Rounds, int, list[float]]:
    """By HCCL_BUFFSIZE alone: rounds, bytes of this rank's planes, and errors."""
    wanted = outputs(make_layer(group, "deepep", True), group.rank)
    with set_in({BUFFSIZE: "1"}):
        context = make_layer(group, "deepep", True).context
        layer = FusedMoE(config_of(Experts.random(EXPERTS, 4 * HIDDEN, INNER), TOP_K), context)
        same = make_layer(group, "deepep", True)
    dispatcher = layer.dispatcher
    assert isinstance(dispatcher, RowsDispatcher)
    window = dispatcher.exchange.window
    taken = sum(window.plane(name).nbytes for name in window._own)
    off = [
        float((a - b).abs().max()) if len(a) else 0.0
        for a, b in zip(outputs(same, group.rank), wanted, strict=True)
    ]
    return dispatcher.rounds, taken, off


def test_buffers_fit_what_is_given(pools: Callable[[int], LocalRanks]):
    for rounds, taken, off in pools(4).run(limited):
        assert taken <= MIB
        assert rounds.most > 1 and rounds.combine and rounds.tokens * rounds.most >= MOST
        assert off == [0.0] * len(COUNTS)


def too_many(group: RankGroup) -> str:
    with set_in(environment(7, 10)):
        layer = make_layer(group, "deepep", False)
    try:
        layer(*batch(71, group.rank))
    except ValueError as error:
        return str(error)
    return ""


def test_too_many_tokens_are_refused(pools: Callable[[int], LocalRanks]):
    for text in pools(2).run(too_many):
        assert text.startswith(
            "deepep_normal dispatch, layer 0: 71 tokens are more than the 70 that"
        )
        assert "DEEPEP_NORMAL_LONG_SEQ_ROUND" in text


def config(
    hidden: int = 7168, size: int = 16, tokens: int = 65536, deterministic: bool = False
) -> DispatchConfig:
    return DispatchConfig(
        layout=EpLayout(256, size),
        top_k=8,
        hidden_size=hidden,
        dtype=torch.bfloat16,
        payload=PAYLOAD_FORMATS["bf16"],
        max_tokens=tokens,
        max_decode_tokens=128,
        deterministic=deterministic,
    )


def test_formula():
    """By hand for a hidden size of 7168 and 8 experts a token: 2 * (102 + 4 + T * W * 8 / 2 ** 20)
    + 20, where W is 2 * 7168 for a whole sequence and 3 * 7168 for a round."""
    assert formula_mib(4096, 7168, 8, in_rounds=False) == 2 * (106 + 448) + 20
    assert formula_mib(8192, 7168, 8, in_rounds=True) == 2 * (106 + 1344) + 20
    assert formula_mib(0, 7168, 8, in_rounds=True) == 232


def test_buffers_are_bounded_by_the_round():
    """Two lanes of tokens, ids and weights, and of results from all tokens of all ranks."""
    row = 7168 * 2
    for tokens, most in ((512, 1), (512, 16)):
        for combine in (False, True):
            spec = RowsDispatcher.buffer_spec(config(), Rounds(tokens, most, combine))
            planes = {plane.name: plane.nbytes for plane in spec.planes()}
            assert planes["values"] == 2 * tokens * row
            assert planes["ids"] == planes["weights"] == 2 * tokens * 8 * 4
            assert planes["results"] == 2 * 16 * tokens * (1 if combine else most) * row
    whole = buffer_bytes(config(), Rounds(8192))
    assert buffer_bytes(config(), Rounds(512, 16, True)) < whole / 15
    assert buffer_bytes(config(), Rounds(512, 16)) > whole * 0.9


def test_variables_of_rounds():
    assert rounds_from_environment(config(tokens=99), {}) == Rounds(99)
    # Rounds that no step can need take no room, and 8192 is the default of a round.
    assert rounds_from_environment(config(), {ROUNDS: "16"}) == Rounds(8192, 8)
    assert rounds_from_environment(config(tokens=300), {PER_ROUND: "512"}) == Rounds(300)
    assert rounds_from_environment(config(), environment(512, 128, 1)) == Rounds(512, 128, True)
    # The combine variable alone means one round.
    assert rounds_from_environment(config(tokens=99), {COMBINE: "1"}) == Rounds(99, 1, True)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (environment(512, 8), "8 of DEEPEP_NORMAL_LONG_SEQ_PER_ROUND_TOKENS 512 hold 4096 tokens"),
        ({ROUNDS: "4"}, "hold 32768 tokens, but a step may have 65536"),
        ({PER_ROUND: "512"}, "set DEEPEP_NORMAL_LONG_SEQ_ROUND=128, or lower --chunked-prefill"),
    ],
)
def test_rounds_that_cannot_hold_a_step_are_refused(variables: Environment, words: str):
    with pytest.raises(ValueError, match=words):
        rounds_from_environment(config(), variables)


def test_rounds_are_made_smaller_until_they_fit():
    fitted = rounds_from_environment(config(), {BUFFSIZE: "1024"})
    assert fitted.combine and fitted.tokens * fitted.most >= 65536
    assert buffer_bytes(config(), fitted) <= 1024 * MIB
    twice = Rounds(fitted.tokens * 2, fitted.most // 2, True)
    assert buffer_bytes(config(), twice) > 1024 * MIB
    small = config(hidden=64, tokens=128)
    assert rounds_from_environment(small, {BUFFSIZE: "1024"}) == Rounds(128)
    with pytest.raises(ValueError, match=r"HCCL_BUFFSIZE is 1: rounds of one token .* raise it"):
        rounds_from_environment(config(size=64, deterministic=True), {BUFFSIZE: "1"})


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        (PER_ROUND, "0", "a whole number from 1 on"),
        (PER_ROUND, "-8", "a whole number from 1 on"),
        (PER_ROUND, "8k", "a whole number from 1 on"),
        (PER_ROUND, "", "a whole number from 1 on"),
        (ROUNDS, "1.5", "a whole number from 1 on"),
        (ROUNDS, "0", "a whole number from 1 on"),
        (COMBINE, "2", "0 or 1"),
        (COMBINE, "yes", "0 or 1"),
        (BUFFSIZE, "0", "a whole number from 1 on"),
        (BUFFSIZE, "1G", "a whole number from 1 on"),
        (ROUNDS, "²", "a whole number from 1 on"),
    ],
)
def test_bad_values_are_refused(variable: str, value: str, words: str):
    with pytest.raises(ValueError) as refusal:
        rounds_from_environment(config(), {variable: value})
    assert words in str(refusal.value) and variable in str(refusal.value)


def test_formula_and_bytes_are_told():
    """What is logged at start, as a warning where HCCL_BUFFSIZE is less than the formula."""
    summary = summarise(config(tokens=8192), environment(512, 16, 1) | {BUFFSIZE: "2000"})
    taken = buffer_bytes(config(), Rounds(512, 16, True)) / MIB
    needed = formula_mib(512, 7168, 8, in_rounds=True)
    assert summary is not None and summary.formula == needed and not summary.short
    for words in (
        "up to 16 rounds of 512 tokens a rank, results in rounds",
        f"{taken:.1f} MiB a rank",
        f"ask for {needed:.0f} MiB, HCCL_BUFFSIZE is 2000",
    ):
        assert words in summary.text, summary.text
    whole = summarise(config(tokens=4096), {BUFFSIZE: "100000"})
    assert whole is not None and not whole.short
    assert "up to 1 rounds of 4096 tokens a rank, results at once" in whole.text
    assert "ask for 1128 MiB" in whole.text
    small = summarise(config(tokens=4096), {BUFFSIZE: "1127"})
    assert small is not None and small.short
    assert summarise(config(), {}) is None
