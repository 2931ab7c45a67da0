"""The MoE layer against a float64 einsum; routing against its definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moesaic.moe.experts import (
    ExpertWeights,
    clamped_swiglu,
    make_plan,
    run_experts,
    silu_and_mul,
)
from moesaic.moe.formats import TopKOutput
from moesaic.moe.topk import TopK, TopKConfig

E, H, INNER = 7, 24, 10


def oracle(x: Tensor, topk: TopKOutput, weights: ExpertWeights, clamped: bool) -> Tensor:
    """Every expert on every token in float64, then the weighted choice."""
    x = x.double()
    gate_up = torch.einsum("th,ejh->tej", x, weights.w13_EJH.double())
    if weights.b13_EJ is not None:
        gate_up = gate_up + weights.b13_EJ.double()
    gate, up = gate_up[..., :INNER], gate_up[..., INNER:]
    if clamped:
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1
        hidden = gate * torch.sigmoid(1.702 * gate) * up
    else:
        hidden = gate * torch.sigmoid(gate) * up
    y = torch.einsum("tei,ehi->teh", hidden, weights.w2_EHI.double())
    if weights.b2_EH is not None:
        y = y + weights.b2_EH.double()
    chosen = torch.zeros(len(x), E, dtype=torch.float64)
    chosen.scatter_add_(1, topk.ids_TK, topk.weights_TK.double())
    return torch.einsum("te,teh->th", chosen, y)


def make_weights(dtype: torch.dtype, clamped: bool) -> ExpertWeights:
    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64).to(dtype)

    return ExpertWeights(
        noise(E, 2 * INNER, H) * H**-0.5,
        noise(E, H, INNER) * INNER**-0.5,
        noise(E, 2 * INNER) * 4 if clamped else None,
        noise(E, H) if clamped else None,
        clamped_swiglu(1.702, 7.0) if clamped else silu_and_mul,
    )


def route(tokens: int, top_k: int, how: str) -> TopKOutput:
    scores = torch.rand(tokens, E)
    if how == "one takes all":
        scores[:, 3] = 2.0
    if how == "one takes none":
        scores[:, 0] = -1.0
    ids = scores.topk(top_k).indices
    return TopKOutput(ids, torch.rand(tokens, top_k))


@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize("how", ["spread", "one takes all", "one takes none"])
@pytest.mark.parametrize("top_k", [1, 3, E])
@pytest.mark.parametrize("tokens", [0, 1, 2, 31, 63, 200])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_experts_equal_the_oracle(
    tokens: int, top_k: int, how: str, clamped: bool, dtype: torch.dtype, bound: float
) -> None:
    torch.manual_seed(tokens * 100 + top_k)
    if how == "one takes none" and top_k == E:
        pytest.skip("with all experts chosen nobody is left out")
    weights, topk = make_weights(dtype, clamped), route(tokens, top_k, how)
    x = torch.randn(tokens, H).to(dtype)
    out, expected = run_experts(x, topk, weights), oracle(x, topk, weights, clamped)
    assert out.dtype == dtype and out.shape == (tokens, H)
    scale = expected.abs().max().item() if tokens else 1.0
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=bound * scale)


def test_weights_of_idle_experts_are_not_read() -> None:
    weights = make_weights(torch.float32, clamped=False)
    topk = TopKOutput(torch.tensor([[1, 5], [5, 2]]), torch.rand(2, 2))
    x = torch.randn(2, H)
    expected = oracle(x, topk, weights, clamped=False)
    for idle in (0, 3, 4, 6):
        weights.w13_EJH[idle] = torch.nan
        weights.w2_EHI[idle] = torch.nan
    torch.testing.assert_close(run_experts(x, topk, weights).double(), expected, atol=1e-5, rtol=0)


def test_a_token_that_is_not_finite_spoils_no_other() -> None:
    weights, topk = make_weights(torch.float32, clamped=False), route(40, 2, "one takes all")
    x = torch.randn(40, H)
    clean = run_experts(x, topk, weights)
    x[7] = torch.nan
    dirty = run_experts(x, topk, weights)
    others = torch.arange(40) != 7
    assert dirty[7].isnan().all()
    torch.testing.assert_close(dirty[others], clean[others], atol=0, rtol=0)


def test_plan_of_the_docstring() -> None:
    plan = make_plan(TopKOutput(torch.tensor([[0, 2], [0, 1]]), torch.ones(2, 2)), 3)
    assert plan.tokens_Y.tolist() == [0, 1, 1, 0, 0, 0]
    assert plan.rows_R.tolist() == [0, 4, 1, 2]
    assert (plan.padded, plan.runs, plan.large) == (2, [range(2), range(2, 3)], [])


def test_few_shapes_occur() -> None:
    """Whatever the routing: runs and rows are powers of two, or multiples of 32."""
    torch.manual_seed(0)
    shapes, rows = set(), set()
    for tokens in range(1, 400, 3):
        ids = torch.rand(tokens, 64).topk(4).indices
        plan = make_plan(TopKOutput(ids, torch.ones(tokens, 4)), 64)
        shapes |= {(len(run), plan.padded) for run in plan.runs}
        rows |= {count for _, count in plan.large}
        assert (
            plan.tokens_Y[plan.rows_R].tolist()
            == torch.arange(tokens).repeat_interleave(4).tolist()
        )
        assert len(set(plan.rows_R.tolist())) == tokens * 4
    assert {n & (n - 1) for shape in shapes for n in shape} == {0} and len(shapes) <= 7 * 6
    assert rows == {64}


def softmax_topk(logits: Tensor, cfg: TopKConfig) -> tuple[list[list[int]], Tensor]:
    """Slowly, by the definition, one token at a time in float64."""
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


def test_no_tokens() -> None:
    out = TopK(TopKConfig(2, num_groups=2, topk_groups=1))(torch.empty(0, 4))
    assert out.ids_TK.shape == (0, 2) and out.weights_TK.shape == (0, 2)
