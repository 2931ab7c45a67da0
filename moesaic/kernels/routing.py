"""Routing: from a router's logits, or from its input rows, to the slots of each token.

T tokens · H hidden · E experts · K chosen · X replicas of an expert at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.kernels.native import native
from moesaic.kernels.norm import SumToNorm, add_rms_norm

ROUTING = "moesaic.kernels.triton.routing"
GOLDEN = 0x9E3779B1
"""2**32 over the golden ratio: multiples of it, modulo 2**32, are spread evenly."""
MIX = (0x85EBCA6B, 0xC2B2AE35)
"""Factors of a hash (murmur3's last step)."""
LOW_32 = 0xFFFFFFFF
FAKE_LEAST = 5
"""Fake logits are from this to twice this, in steps that float32 has exactly."""
FAKE_BITS = 20


@dataclass(frozen=True, slots=True)
class TopKConfig:
    """How experts are chosen. With groups, only experts of the `topk_groups` best groups qualify;
    a group scores as its best expert, or as the sum of its two best."""

    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = False
    routed_scaling_factor: float = 1.0
    """Applied here and nowhere else."""
    num_groups: int = 1
    topk_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    custom: Callable[[Tensor, int], tuple[Tensor, Tensor]] | None = None
    """Replaces all of the above but scaling: maps logits and K to ids and weights [T, K]."""
    fake: bool = False
    """Chooses experts at random instead, as `fake_logits` says: for benchmarks."""

    def check(self, num_experts: int) -> None:
        allowed = num_experts // self.num_groups * self.topk_groups
        if num_experts % self.num_groups or self.topk_groups > self.num_groups:
            raise ValueError(
                f"n_group {self.num_groups} and topk_group {self.topk_groups} do not fit "
                f"{num_experts} experts: groups must have equal sizes, and topk_group <= n_group"
            )
        if self.top_k > allowed:
            raise ValueError(
                f"num_experts_per_tok {self.top_k} exceeds the {allowed} selectable experts"
            )
        if self.group_score == "top2" and self.num_groups > 1 and num_experts < 2 * self.num_groups:
            raise ValueError(
                f"n_group {self.num_groups} leaves a group fewer than two of {num_experts} experts"
            )

    @property
    def limits_groups(self) -> bool:
        return self.topk_groups < self.num_groups

    def by_logits(self, biased: bool) -> bool:
        """Whether logits choose the same experts as scores; they are exact, scores are rounded."""
        return not biased and not (self.limits_groups and self.group_score == "top2")


@dataclass(frozen=True, slots=True)
class SlotTable:
    """Slots of each expert (int32) and their number; `replica_of_row` tells which one a row
    takes."""

    slots_EX: Tensor
    count_E: Tensor


@dataclass(frozen=True, slots=True)
class RouterWeights:
    weight_EH: Tensor
    bias_E: Tensor | None
    rounds: bool
    """Whether logits are rounded to the type of the rows, as a product in that type would be."""
    counter_1: Tensor
    """A zero (int32) on the device; the kernel resets it."""


@dataclass(frozen=True, slots=True)
class TopKInputs:
    """What `route` reads besides the logits."""

    spec: TopKConfig
    bias_E: Tensor | None = None
    """Affects which experts are chosen, not their weights."""
    num_tokens_1: Tensor | None = None
    """int32 on the device; rows from it on get slots -1 and weights 0."""
    slots: SlotTable | None = None


def replica_of_row(row: Tensor, count: Tensor) -> Tensor:
    """The replica that a row takes, of `count`: floor(count * frac(row / golden ratio)).

    Replicas get even shares of all rows, and also of every second or every k-th one, which often
    are alike (drafts, batches of one prompt). Rows 0..6 of 2 take 0, 1, 0, 1, 0, 0, 1."""
    mixed = (row * GOLDEN) & LOW_32
    return ((mixed >> 16) * count) >> 16


def fake_logits(logits_TE: Tensor) -> Tensor:
    """Uniform in [5, 10), as SGLang's fake dispatch has them, but repeatable: a hash of the row,
    the expert and the bits of the logit. So they differ from step to step without a state, and
    ranks with the same tokens agree."""
    bits_TE = logits_TE.float().view(torch.int32).long() & LOW_32
    row_T1 = torch.arange(len(logits_TE), device=logits_TE.device).unsqueeze(1)
    expert_E = torch.arange(logits_TE.shape[1], device=logits_TE.device)
    mixed_TE = bits_TE ^ (row_T1 * GOLDEN & LOW_32) ^ (expert_E * MIX[0] & LOW_32)
    for shift, factor in zip((16, 13), MIX, strict=True):
        mixed_TE = ((mixed_TE ^ (mixed_TE >> shift)) * factor) & LOW_32
    mixed_TE = (mixed_TE ^ (mixed_TE >> 16)) >> (32 - FAKE_BITS)
    return (FAKE_LEAST * (mixed_TE + (1 << FAKE_BITS))).float() / (1 << FAKE_BITS)


@native(ROUTING)
def route(logits_TE: Tensor, given: TopKInputs) -> tuple[Tensor, Tensor]:
    """Slots [T, K] (int32), best first, and weights (float32). Among equal experts the lowest id
    comes first; NaN counts as the highest logit, and its weight is NaN.

    Logits [[0, ln 3, 0]], top 2, softmax, renormalised: slots [[1, 0]], weights [[0.75, 0.25]].
    """
    logits_TE, spec, bias_E = logits_TE.float(), given.spec, given.bias_E
    if spec.fake:
        logits_TE, bias_E = fake_logits(logits_TE), None
    scores_TE = logits_TE.sigmoid() if spec.scoring == "sigmoid" else logits_TE.softmax(-1)
    choice_TE = logits_TE if spec.by_logits(bias_E is not None) else scores_TE
    if bias_E is not None:
        choice_TE = choice_TE + bias_E.float()
    choice_TE = _nan_highest(choice_TE)
    dropped_TE = torch.zeros_like(choice_TE, dtype=torch.bool)
    if spec.limits_groups:
        grouped = choice_TE.unflatten(1, (spec.num_groups, -1))
        best = 2 if spec.group_score == "top2" else 1
        worth_TZ = _nan_highest(grouped.sort(-1, descending=True).values[..., :best].sum(-1))
        kept_TG = worth_TZ.sort(dim=-1, descending=True, stable=True).indices[:, : spec.topk_groups]
        dropped_TZ = torch.ones_like(worth_TZ, dtype=torch.bool).scatter_(1, kept_TG, False)
        dropped_TE = dropped_TZ.repeat_interleave(grouped.shape[2], 1)
    order_TE = choice_TE.sort(dim=-1, descending=True, stable=True).indices
    behind_TE = dropped_TE.gather(1, order_TE).int().sort(dim=-1, stable=True).indices
    ids_TK = order_TE.gather(1, behind_TE)[:, : spec.top_k]
    weights_TK = scores_TE.gather(1, ids_TK)
    if spec.renormalize:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return _finish(ids_TK, weights_TK * spec.routed_scaling_factor, given)


@native(ROUTING)
def route_rows(x_TH: Tensor, router: RouterWeights, given: TopKInputs) -> tuple[Tensor, Tensor]:
    """`route` of the router's logits x W' + bias, summed in float32. Takes up to MAX_ROWS rows: in
    a small decode step, saving a launch outweighs the slower product.

    x [[1, 0]], W [[0, 5], [2, 0]], top 1, softmax: slots [[1]], weights [[0.8808]].
    """
    logits_TE = F.linear(x_TH.float(), router.weight_EH.float())
    if router.bias_E is not None:
        logits_TE = logits_TE + router.bias_E.float()
    if router.rounds:
        logits_TE = logits_TE.to(x_TH.dtype)
    return route(logits_TE, given)


@native(ROUTING)
def norm_route_rows(
    rows: SumToNorm, router: RouterWeights, given: TopKInputs
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(normed, sum, slots, weights): `add_rms_norm`, and `route_rows` of the normed rows. Takes up
    to MAX_NORM_ROWS rows: every program of the kernel norms all of them.

    values [[1, 0]], residual [[0, 1]], weight [1, 1], eps 0: sum and normed [[1, 1]]; with W
    [[0, 1], [2, 0]], top 1, softmax: slots [[1]], weights [[0.7311]].
    """
    normed_TH, sum_TH = add_rms_norm(rows.values, rows.residual_TH, rows.weight_H, rows.eps)
    return normed_TH, sum_TH, *route_rows(normed_TH, router, given)


MAX_NORM_ROWS = 1
MAX_ROWS = 8
"""With more rows, the last program of `route_rows` would have too much to add."""


def _nan_highest(choice: Tensor) -> Tensor:
    return choice.masked_fill(choice.isnan(), torch.inf)


def _finish(ids_TK: Tensor, weights_TK: Tensor, given: TopKInputs) -> tuple[Tensor, Tensor]:
    """Maps experts to slots, and marks padding."""
    slots, num_tokens_1 = given.slots, given.num_tokens_1
    row_T1 = torch.arange(len(ids_TK), device=ids_TK.device).unsqueeze(1)
    if slots is not None:
        ids_TK = slots.slots_EX[ids_TK, replica_of_row(row_T1, slots.count_E[ids_TK])]
    if num_tokens_1 is not None:
        ids_TK = ids_TK.masked_fill(row_T1 >= num_tokens_1, -1)
        weights_TK = weights_TK.masked_fill(row_T1 >= num_tokens_1, 0.0)
    return ids_TK.int(), weights_TK
