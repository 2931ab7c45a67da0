"""Ranks that are not where the others are, and input that would hurt them, are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.lifecycle import Membership
from moesaic.core.step import DECODE
from moesaic.moe.context import MoeContext
from moesaic.moe.formats import TopKOutput
from moesaic.moe.layer import FusedMoE
from moesaic.moe.quant.weights import WEIGHT_FORMATS
from moesaic.moe.registry import MoeProblem
from tests.moe_oracle import Experts, config_of, random_topk, reference

MODES = [
    ("none", "auto"),
    ("deepep", "normal"),
    ("deepep", "low_latency"),
    ("mooncake", "auto"),
    ("mori", "auto"),
    ("flashinfer", "auto"),
    ("ascend_fuseep", "auto"),
]
EXPERTS = Experts.random(6, 32, 32)


def make_layers(group: RankGroup, a2a: str, mode: str, count: int = 1) -> list[FusedMoE]:
    problem = MoeProblem(
        a2a=a2a,
        mode=mode,
        weights=WEIGHT_FORMATS["fp32"],
        dtype="fp32",
        ep=group.size,
        tp=group.size,
        phases=("decode",),
    )
    context = MoeContext.make(
        problem, torch.float32, group, timeout=8.0, max_tokens=16, max_decode_tokens=16
    )
    layers = [FusedMoE(config_of(EXPERTS, 3), context, layer) for layer in range(count)]
    for layer in layers:
        EXPERTS.fill(layer)
    return layers


def tokens_of(rank: int) -> tuple[torch.Tensor, TopKOutput]:
    x = torch.randn(5 + rank, 32, generator=torch.Generator().manual_seed(rank))
    return x, random_topk(len(x), 6, 3, seed=rank)


def error_of(layer: FusedMoE, rank: int) -> float:
    x, topk = tokens_of(rank)
    return float((layer(x, topk, DECODE).double() - reference(EXPERTS, x, topk)).abs().max())


def in_different_layers(group: RankGroup, a2a: str, mode: str) -> str:
    layers = make_layers(group, a2a, mode, count=2)
    x, topk = tokens_of(group.rank)
    try:
        layers[group.rank % 2](x, topk, DECODE)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("a2a, mode", MODES)
def test_ranks_in_different_layers_are_told(pools: Any, a2a: str, mode: str) -> None:
    messages = pools(2).run(in_different_layers, a2a, mode)
    assert messages[0].startswith("OutOfStep: ")
    assert "rank 1 is in layer 1, this rank in layer 0" in messages[0]
    assert "rank 0 is in layer 0, this rank in layer 1" in messages[1]


def with_wrong_topk(group: RankGroup, a2a: str, mode: str, kind: str) -> list[str]:
    """All ranks bring the same wrong thing; then, restarted, the right one."""
    (layer,) = make_layers(group, a2a, mode)
    x, topk = tokens_of(group.rank)
    ids, weights = topk.ids_TK.clone(), topk.weights_TK
    if kind == "beyond":
        ids[0, 1] = 6
    elif kind == "below":
        ids[0, 1] = -2
    elif kind == "shape":
        ids = ids[:, :2]
    else:
        weights = weights.double()
    try:
        layer(x, TopKOutput(ids, weights), DECODE)
        first = "no error"
    except ValueError as error:
        first = str(error)
    return [first, str(error_of(layer, group.rank) < 1e-5)]


@pytest.mark.parametrize(
    "kind, message",
    [
        ("beyond", "a token names slot 6: slots are 0..5, and -1 for none"),
        ("below", "a token names slot -2"),
        ("shape", "ids [5, 2]"),
        ("type", "torch.float64 weights"),
    ],
)
@pytest.mark.parametrize("a2a, mode", MODES)
def test_wrong_choices_are_refused_before_they_travel(
    pools: Any, a2a: str, mode: str, kind: str, message: str
) -> None:
    results = pools(2).run(with_wrong_topk, a2a, mode, kind)
    assert message in results[0][0]
    assert [right for _, right in results] == ["True", "True"]


def with_a_slot_named_twice(group: RankGroup) -> str:
    (layer,) = make_layers(group, "deepep", "low_latency")
    x = torch.randn(16, 32)
    ids = torch.tensor([[0, 0, 0]]).repeat(16, 1)
    try:
        layer(x, TopKOutput(ids, torch.rand(16, 3)), DECODE)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_slot_named_twice_does_not_spill_into_the_next(pools: Any) -> None:
    messages = pools(2).run(with_a_slot_named_twice)
    assert all("a token names a slot twice" in message for message in messages)


def after_a_failed_step(group: RankGroup, a2a: str, mode: str) -> list[str]:
    (layer,) = make_layers(group, a2a, mode)
    handle = layer.dispatcher.register_hook("post_dispatch", _fail)
    told = []
    for _ in range(2):
        try:
            error_of(layer, group.rank)
        except RuntimeError as error:
            told.append(str(error))
    handle.remove()
    group.barrier("all have failed")
    group.lifecycle.restart()
    return [*told, str(error_of(layer, group.rank) < 1e-5)]


def _fail(*_: object) -> None:
    raise RuntimeError("the hook failed")


@pytest.mark.parametrize("a2a, mode", MODES)
def test_ranks_can_restart_after_a_failed_step(pools: Any, a2a: str, mode: str) -> None:
    for told in pools(2).run(after_a_failed_step, a2a, mode):
        assert told[0] == "the hook failed"
        assert "lane 0 is still in flight" in told[1]
        assert told[2] == "True"


def left_behind(group: RankGroup) -> str:
    """Rank 2 sleeps in the middle of a step; the others go on without it."""
    (layer,) = make_layers(group, "mooncake", "auto")
    x, topk = tokens_of(group.rank)
    pending = layer.dispatcher.dispatch_a(x, topk, DECODE)
    if group.rank == 2:
        group.barrier("the others have gone on")
        try:
            rows = layer.dispatcher.dispatch_b(pending)
            results = layer.runner.run(rows, layer.weights, layer.context.workspace)
            layer.dispatcher.combine(results)
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
        return "no error"
    layer.dispatcher.resume([0, 1], generation=1)  # type: ignore[attr-defined]
    for _ in range(20):
        layer(x, topk, DECODE)
    group.barrier("the others have gone on")
    return "went on"


def test_a_rank_that_was_left_behind_is_told(pools: Any) -> None:
    messages = pools(3).run(left_behind)
    assert messages[:2] == ["went on", "went on"]
    assert messages[2].startswith("OutOfStep: ")
    assert "generation 1" in messages[2]


def test_restart_checks_its_arguments() -> None:
    group = RankGroup.alone()
    (layer,) = make_layers(group, "mooncake", "auto")
    group.lifecycle.restart(Membership(3, (0,)))
    with pytest.raises(ValueError, match="generation 3: give one above 3"):
        group.lifecycle.restart(Membership(3, (0,)))
    with pytest.raises(ValueError, match=r"active ranks \[1\]"):
        layer.dispatcher.resume([1], generation=4)  # type: ignore[attr-defined]
