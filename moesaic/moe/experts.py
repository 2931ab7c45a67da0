"""The experts' feed-forward networks as grouped matrix products.

T tokens · H hidden · I intermediate · J = 2 * I · E experts · K chosen · R = T * K pairs ·
C rows of an expert.
Weights stand on the left of the products and activations are transposed ([H, C]): in that order
oneDNN reads the weights as they lie, without repacking them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.moe.formats import TopKOutput

# Up to about this many rows a product takes as long as reading its weights: padding is free.
SMALL_ROWS = 32

Activation = Callable[[Tensor, Tensor], Tensor]


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate).mul_(up)


def clamped_swiglu(alpha: float, limit: float) -> Activation:
    """gpt-oss: the gate is clamped from above, the linear part on both sides and shifted by one."""

    def activate(gate: Tensor, up: Tensor) -> Tensor:
        gate = gate.clamp(max=limit)
        return gate.mul(torch.sigmoid(alpha * gate)).mul_(up.clamp(-limit, limit).add_(1))

    return activate


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Gate rows before up rows in `w13`."""

    w13_EJH: Tensor
    w2_EHI: Tensor
    b13_EJ: Tensor | None
    b2_EH: Tensor | None
    activation: Activation


@dataclass(frozen=True, slots=True)
class Plan:
    """Where the R = T * K pairs of token and expert are computed.

    Experts with few rows ("small", at most SMALL_ROWS) go together, padded to C rows each: n * C
    rows, of which `small_tokens` says the token. Experts with many rows follow one by one. A run is
    a stretch of neighbouring small experts: one batched product, as their weights lie together.
    `rows_R` finds each pair's result, in the order of the pairs.
    """

    small_tokens: Tensor
    padded: int
    runs: list[range]
    large: list[tuple[int, Tensor]]
    rows_R: Tensor


def make_plan(topk: TopKOutput, num_experts: int) -> Plan:
    """Example: ids [[0, 2], [0, 1]] of three experts: order [0, 2, 3, 1], counts [2, 1, 1]; all are
    small, so C = 2, one run 0..2, small_tokens [0, 1, 1, 0, 0, 0] (row 3 and 5 are padding) and
    rows_R [0, 4, 1, 2]."""
    top_k = topk.ids_TK.shape[1]
    flat_R = topk.ids_TK.flatten()
    order_R = flat_R.argsort(stable=True)
    counts_E = torch.bincount(flat_R, minlength=num_experts)
    counts: list[int] = counts_E.tolist()
    small = [expert for expert, count in enumerate(counts) if 0 < count <= SMALL_ROWS]
    large = [expert for expert, count in enumerate(counts) if count > SMALL_ROWS]
    padded = max((counts[expert] for expert in small), default=0)

    bases = [0] * num_experts
    for number, expert in enumerate(small):
        bases[expert] = number * padded
    following = len(small) * padded
    for expert in large:
        bases[expert] = following
        following += counts[expert]
    starts_E = counts_E.cumsum(0) - counts_E
    sorted_R = flat_R[order_R]
    slots_R = torch.arange(len(flat_R)) + (torch.tensor(bases) - starts_E)[sorted_R]
    tokens = torch.zeros(following, dtype=torch.int64).index_copy_(0, slots_R, order_R // top_k)
    return Plan(
        small_tokens=tokens[: len(small) * padded],
        padded=padded,
        runs=_runs(small),
        large=[(e, tokens[bases[e] : bases[e] + counts[e]]) for e in large],
        rows_R=torch.empty_like(slots_R).index_copy_(0, order_R, slots_R),
    )


def _runs(experts: list[int]) -> list[range]:
    """[1, 2, 3, 7, 8] -> [range(1, 4), range(7, 9)]"""
    runs: list[range] = []
    for expert in experts:
        if runs and runs[-1].stop == expert:
            runs[-1] = range(runs[-1].start, expert + 1)
        else:
            runs.append(range(expert, expert + 1))
    return runs


def run_experts(x_TH: Tensor, topk: TopKOutput, weights: ExpertWeights) -> Tensor:
    """sum over k of weight * expert(x), in float32, in top-k order."""
    num_tokens, top_k = topk.ids_TK.shape
    if num_tokens == 0:
        return torch.empty_like(x_TH)
    plan = make_plan(topk, weights.w13_EJH.shape[0])
    results = [*_run_small(x_TH, plan, weights), *_run_large(x_TH, plan, weights)]
    y_RH = torch.cat(results).index_select(0, plan.rows_R)
    y_TKH = y_RH.view(num_tokens, top_k, -1).float()
    return torch.bmm(topk.weights_TK.unsqueeze(1), y_TKH).squeeze(1).to(x_TH.dtype)


def _run_small(x_TH: Tensor, plan: Plan, weights: ExpertWeights) -> Iterator[Tensor]:
    x_nCH = x_TH.index_select(0, plan.small_tokens).view(-1, plan.padded or 1, x_TH.shape[1])
    start = 0
    for run in plan.runs:
        experts = slice(run.start, run.stop)
        x_eHC = x_nCH[start : start + len(run)].transpose(1, 2)
        yield _mlp(torch.bmm, experts, x_eHC, weights).transpose(1, 2).flatten(0, 1)
        start += len(run)


def _run_large(x_TH: Tensor, plan: Plan, weights: ExpertWeights) -> Iterator[Tensor]:
    for expert, tokens in plan.large:
        yield _mlp(torch.mm, expert, x_TH.index_select(0, tokens).t(), weights).t()


def _mlp(
    product: Callable[[Tensor, Tensor], Tensor],
    which: int | slice,
    x: Tensor,
    weights: ExpertWeights,
) -> Tensor:
    """One expert ([H, C] -> [H, C]) or several neighbours ([e, H, C] -> [e, H, C])."""
    gate_up = product(weights.w13_EJH[which], x)
    if weights.b13_EJ is not None:
        gate_up += weights.b13_EJ[which].unsqueeze(-1)
    y = product(weights.w2_EHI[which], weights.activation(*gate_up.chunk(2, dim=-2)))
    if weights.b2_EH is not None:
        y += weights.b2_EH[which].unsqueeze(-1)
    return y
