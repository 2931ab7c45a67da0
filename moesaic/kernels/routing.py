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
    """Slots of each expert (int32) and their number; rows use them in turn, as in SlotMap."""

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


@native(ROUTING)
def route(logits_TE: Tensor, given: TopKInputs) -> tuple[Tensor, Tensor]:
    """Slots [T, K] (int32), best first, and weights (float32). Among equal experts the lowest id
    comes first; NaN counts as the highest logit, and its weight is NaN.

    Logits [[0, ln 3, 0]], top 2, softmax, renormalised: slots [[1, 0]], weights [[0.75, 0.25]].
    """
    logits_TE, spec, bias_E = logits_TE.float(), given.spec, given.bias_E
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
        ids_TK = slots.slots_EX[ids_TK, row_T1 % slots.count_E[ids_TK]]
    if num_tokens_1 is not None:
        ids_TK = ids_TK.masked_fill(row_T1 >= num_tokens_1, -1)
        weights_TK = weights_TK.masked_fill(row_T1 >= num_tokens_1, 0.0)
    return ids_TK.int(), weights_TK
