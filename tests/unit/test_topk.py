"""Routing against its definition; experts in slots; padding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moesaic.moe.placement import Placement, SlotMap
from moesaic.moe.topk import TopK, TopKConfig


def softmax_topk(logits: Tensor, cfg: TopKConfig) -> tuple[list[list[int]], Tensor]:
    """Routes by the definition, one token at a time in float64."""
    all_ids, all_weights = [], []
    for row in logits.double():
        scores = row.sigmoid() if cfg.scoring == "sigmoid" else row.softmax(-1)
        groups = scores.view(cfg.num_groups, -1).sort(descending=True).values
        worth = groups[:, :2].sum(-1) if cfg.group_score == "top2" else groups[:, 0]
        allowed = worth.argsort(descending=True)[: cfg.topk_groups].tolist()
        size = len(row) // cfg.num_groups
        ranked = [i for i in scores.argsort(descending=True).tolist() if i // size in allowed]
        ids = ranked[: cfg.top_k]
        weights = scores[ids]
        if cfg.renormalize:
            weights = weights / weights.sum()
        all_ids.append(sorted(ids))
        all_weights.append((weights * cfg.routed_scaling_factor).sort().values)
    return all_ids, torch.stack(all_weights)


@pytest.mark.parametrize(
    "cfg",
    [
        TopKConfig(3),
        TopKConfig(12),
        TopKConfig(1, renormalize=True),
        TopKConfig(4, renormalize=True, routed_scaling_factor=2.5),
        TopKConfig(3, num_groups=4, topk_groups=2),
        TopKConfig(4, "sigmoid", True, 2.5, num_groups=3, topk_groups=2, group_score="top2"),
        TopKConfig(2, "sigmoid", False, 0.5, num_groups=6, topk_groups=1, group_score="top2"),
    ],
)
def test_topk_equals_its_definition(cfg: TopKConfig) -> None:
    torch.manual_seed(1)
    logits = torch.randn(50, 12)
    out = TopK(cfg)(logits)
    ids, weights = softmax_topk(logits, cfg)
    assert [sorted(row) for row in out.ids_TK.tolist()] == ids
    torch.testing.assert_close(out.weights_TK.sort().values.double(), weights, atol=1e-6, rtol=1e-5)


def test_correction_bias_moves_the_choice_but_not_the_weights() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    bias = torch.tensor([-10.0, 0.0, 0.0, 5.0])
    out = TopK(TopKConfig(2, "sigmoid"))(logits, bias)
    assert sorted(out.ids_TK[0].tolist()) == [1, 3]
    torch.testing.assert_close(out.weights_TK, logits.sigmoid().gather(1, out.ids_TK))


def last_ones(logits_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Chooses the last experts, all with the same weight."""
    num_tokens, num_experts = logits_TE.shape
    ids_TK = torch.arange(num_experts - top_k, num_experts).repeat(num_tokens, 1)
    return ids_TK, torch.full((num_tokens, top_k), 0.25)


def test_custom_function_takes_the_place_of_all_but_scaling() -> None:
    cfg = TopKConfig(2, renormalize=True, routed_scaling_factor=4.0, custom=last_ones)
    out = TopK(cfg)(torch.randn(3, 5), bias_E=torch.full((5,), torch.nan))
    assert out.ids_TK.tolist() == [[3, 4]] * 3
    assert out.weights_TK.tolist() == [[1.0, 1.0]] * 3


@pytest.mark.parametrize(
    "cfg",
    [TopKConfig(2), TopKConfig(2, num_groups=2, topk_groups=1), TopKConfig(2, custom=last_ones)],
)
@pytest.mark.parametrize("slot_map", [None, SlotMap(Placement(4, (3, 2, 1, 0, 3)))])
@pytest.mark.parametrize("num_tokens", [None, 0])
def test_no_tokens(cfg: TopKConfig, slot_map: SlotMap | None, num_tokens: int | None) -> None:
    out = TopK(cfg)(torch.empty(0, 4), None, slot_map, num_tokens)
    assert out.ids_TK.shape == (0, 2) and out.weights_TK.shape == (0, 2)
    assert (out.ids_TK.dtype, out.weights_TK.dtype) == (torch.int64, torch.float32)


def test_weights_are_float32_whatever_the_logits() -> None:
    out = TopK(TopKConfig(2, renormalize=True))(torch.randn(3, 8, dtype=torch.bfloat16))
    assert out.weights_TK.dtype == torch.float32
    torch.testing.assert_close(out.weights_TK.sum(1), torch.ones(3))


def test_experts_become_the_slots_that_hold_them() -> None:
    """Slots 1 and 4 hold expert 0, slot 0 expert 1, slots 2, 3 and 5 expert 2."""
    slot_map = SlotMap(Placement(3, (1, 0, 2, 2, 0, 2)))
    logits = torch.tensor([[9.0, 1.0, 5.0]] * 4)
    plain = TopK(TopKConfig(2))(logits)
    out = TopK(TopKConfig(2))(logits, slot_map=slot_map)
    assert plain.ids_TK.tolist() == [[0, 2]] * 4
    assert out.ids_TK.tolist() == [[1, 2], [4, 3], [1, 2], [4, 5]]
    assert torch.equal(out.weights_TK, plain.weights_TK)


@pytest.mark.parametrize("slot_map", [None, SlotMap(Placement(4, (3, 2, 1, 0, 0)))])
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 5])
def test_padding_chooses_nothing(num_tokens: int, slot_map: SlotMap | None) -> None:
    """Padding may have any logits; it does not change the tokens before it."""
    torch.manual_seed(2)
    logits = torch.randn(5, 4)
    router = TopK(TopKConfig(2, renormalize=True))
    alone = router(logits[:num_tokens], slot_map=slot_map)
    logits[num_tokens:] = torch.nan
    out = router(logits, slot_map=slot_map, num_tokens=num_tokens)
    assert torch.equal(out.ids_TK[:num_tokens], alone.ids_TK)
    assert torch.equal(out.weights_TK[:num_tokens], alone.weights_TK)
    assert out.ids_TK[num_tokens:].eq(-1).all() and out.weights_TK[num_tokens:].eq(0).all()
    assert out.ids_TK.shape == (5, 2)


@pytest.mark.parametrize(
    ("cfg", "experts", "message"),
    [
        (TopKConfig(5), 4, "num_experts_per_tok 5 exceeds the 4 selectable experts"),
        (TopKConfig(3, num_groups=4, topk_groups=1), 8, "exceeds the 2 selectable experts"),
        (TopKConfig(1, num_groups=3), 8, "n_group 3 and topk_group 1 do not fit 8 experts"),
        (TopKConfig(1, num_groups=2, topk_groups=3), 8, "topk_group 3 do not fit 8 experts"),
        (
            TopKConfig(1, num_groups=4, topk_groups=2, group_score="top2"),
            4,
            "n_group 4 leaves a group fewer than two of 4 experts",
        ),
    ],
)
def test_what_cannot_be_chosen_is_refused(cfg: TopKConfig, experts: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cfg.check(experts)
