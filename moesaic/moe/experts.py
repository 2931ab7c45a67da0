"""The experts' feed-forward networks as grouped matrix products.

T tokens · H hidden · I intermediate · J = 2 * I · E experts · K chosen · R = T * K pairs ·
C rows of an expert · Y rows of all experts.
Weights stand on the left of the products and activations are transposed ([H, C]): in that order
oneDNN reads the weights as they lie, without repacking them.
"""

from __future__ import annotations

from collections.abc import Callable
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
    """Where the R = T * K pairs of token and expert are computed, as Y rows grouped by expert.

    First come the experts with few rows ("small", at most SMALL_ROWS), padded to `padded` rows
    each; a run is a stretch of neighbours among them, one batched product, as their weights lie
    together. Then the others, one by one, with their number of rows. `tokens_Y` is each row's token
    (0 for padding, which nobody reads), `rows_R` where each pair is computed.

    Numbers of rows and lengths of runs are rounded so that few shapes occur: oneDNN compiles a
    kernel for every new one, which takes longer than the product itself.
    """

    tokens_Y: Tensor
    rows_R: Tensor
    padded: int
    runs: list[range]
    large: list[tuple[int, int]]


def make_plan(topk: TopKOutput, num_experts: int) -> Plan:
    """Example: ids [[0, 2], [0, 1]] of three experts: order [0, 2, 3, 1], counts [2, 1, 1]; all are
    small, so padded 2, runs 0..1 and 2, tokens_Y [0, 1, 1, 0, 0, 0] (rows 3 and 5 are padding) and
    rows_R [0, 4, 1, 2]."""
    top_k = topk.ids_TK.shape[1]
    flat_R = topk.ids_TK.flatten()
    order_R = flat_R.argsort(stable=True)
    counts_E = torch.bincount(flat_R, minlength=num_experts)
    counts: list[int] = counts_E.tolist()
    small = [expert for expert, count in enumerate(counts) if 0 < count <= SMALL_ROWS]
    large = [(e, _round_up(count)) for e, count in enumerate(counts) if count > SMALL_ROWS]
    padded = _round_up(max((counts[expert] for expert in small), default=0))

    bases = [0] * num_experts
    total = 0
    for expert, rows in [*((expert, padded) for expert in small), *large]:
        bases[expert] = total
        total += rows
    starts_E = counts_E.cumsum(0) - counts_E
    sorted_R = flat_R[order_R]
    slots_R = torch.arange(len(flat_R)) + (torch.tensor(bases) - starts_E)[sorted_R]
    return Plan(
        tokens_Y=torch.zeros(total, dtype=torch.int64).index_copy_(0, slots_R, order_R // top_k),
        rows_R=torch.empty_like(slots_R).index_copy_(0, order_R, slots_R),
        padded=padded,
        runs=_runs(small),
        large=large,
    )


def _round_up(rows: int) -> int:
    """To a power of two, or from SMALL_ROWS on to a multiple of it."""
    if rows > SMALL_ROWS:
        return -(-rows // SMALL_ROWS) * SMALL_ROWS
    return 1 << (rows - 1).bit_length() if rows else 0


def _runs(experts: list[int]) -> list[range]:
    """Neighbours together, in powers of two: [1, 2, 3, 7, 8] -> [1..2, 3..3, 7..8]."""
    runs: list[range] = []
    start = 0
    for stop in range(1, len(experts) + 1):
        if stop < len(experts) and experts[stop] == experts[stop - 1] + 1:
            continue
        while start < stop:
            length = 1 << ((stop - start).bit_length() - 1)
            runs.append(range(experts[start], experts[start] + length))
            start += length
    return runs


def run_experts(x_TH: Tensor, topk: TopKOutput, weights: ExpertWeights) -> Tensor:
    """sum over k of weight * expert(x), in float32, in top-k order."""
    if len(x_TH) == 0:
        return torch.empty_like(x_TH)
    plan = make_plan(topk, weights.w13_EJH.shape[0])
    x_YH = x_TH.index_select(0, plan.tokens_Y)
    y_YH = torch.empty_like(x_YH)
    start = 0
    for run in plan.runs:
        stop = start + len(run) * plan.padded
        x_eHC, y_eCH = (z[start:stop].unflatten(0, (len(run), -1)) for z in (x_YH, y_YH))
        out_eHC = _mlp(torch.bmm, slice(run.start, run.stop), x_eHC.transpose(1, 2), weights)
        y_eCH.copy_(out_eHC.transpose(1, 2))
        start = stop
    for expert, count in plan.large:
        rows = slice(start, start + count)
        y_YH[rows] = _mlp(torch.mm, expert, x_YH[rows].t(), weights).t()
        start = rows.stop
    return weighted_sum(y_YH, plan.rows_R.view_as(topk.ids_TK), topk.weights_TK)


def weighted_sum(y_YH: Tensor, rows_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """out[t] = sum over k of weights[t, k] * y[rows[t, k]], added up in float32.

    The kernel wants weights in the type of y: what rounding takes from them is added as a second
    term each, so that they keep the precision of 16 bits more.
    """
    high_TK = weights_TK.to(y_YH.dtype)
    if high_TK.dtype != weights_TK.dtype:
        low_TK = (weights_TK - high_TK).to(y_YH.dtype)
        rows_TK, high_TK = torch.cat((rows_TK, rows_TK), 1), torch.cat((high_TK, low_TK), 1)
    return F.embedding_bag(rows_TK, y_YH, per_sample_weights=high_TK, mode="sum")


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
