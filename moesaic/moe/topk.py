"""Routing: from router logits to the experts of each token.

T tokens · E experts · K chosen · Z groups of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moesaic.kernels.routing import RouteSpec, route
from moesaic.layers.invariant import sigmoid
from moesaic.moe.formats import TopKOutput
from moesaic.moe.placement import SlotMap


@dataclass(frozen=True, slots=True)
class TopKConfig:
    """`routed_scaling_factor` is applied here and nowhere else.

    With groups, only experts of the `topk_groups` best groups may be chosen; a group is worth its
    best expert, or the sum of its two best.
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = False
    routed_scaling_factor: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    custom: Callable[[Tensor, int], tuple[Tensor, Tensor]] | None = None
    """Takes the place of all of the above but scaling: logits and K to ids and weights, [T, K]."""

    @property
    def spec(self) -> RouteSpec | None:
        """For the kernels; None where they cannot help."""
        if self.custom is not None:
            return None
        return RouteSpec(
            self.top_k,
            self.scoring,
            self.renormalize,
            self.routed_scaling_factor,
            self.num_groups,
            self.topk_groups,
            self.group_score,
        )

    def check(self, num_experts: int) -> None:
        """Refuses what cannot be chosen from so many experts."""
        allowed = num_experts // self.num_groups * self.topk_groups
        if num_experts % self.num_groups or self.topk_groups > self.num_groups:
            raise ValueError(
                f"n_group {self.num_groups} and topk_group {self.topk_groups} do not fit "
                f"{num_experts} experts: groups must be of one size, and no more chosen than exist"
            )
        if self.top_k > allowed:
            raise ValueError(
                f"num_experts_per_tok {self.top_k} is more than the {allowed} experts on offer"
            )
        if self.group_score == "top2" and self.num_groups > 1 and num_experts < 2 * self.num_groups:
            raise ValueError(
                f"n_group {self.num_groups} leaves fewer than two of {num_experts} experts a group"
            )


class TopK:
    def __init__(self, config: TopKConfig) -> None:
        self.config, self.spec = config, config.spec

    def __call__(
        self,
        logits_TE: Tensor,
        bias_E: Tensor | None = None,
        slot_map: SlotMap | None = None,
        num_tokens: int | Tensor | None = None,
    ) -> TopKOutput:
        """`bias_E` shifts which experts are chosen, not their weights. `slot_map` turns experts
        into the slots that hold them. Rows from `num_tokens` on are padding: they choose nothing;
        on a GPU it is a tensor there.
        """
        if logits_TE.is_cuda and self.spec is not None:
            assert num_tokens is None or isinstance(num_tokens, Tensor), "it would be waited for"
            slots = None if slot_map is None else slot_map.table_on(logits_TE.device)
            return TopKOutput(*route(logits_TE, self.spec, bias_E, num_tokens, slots))
        ids_TK, weights_TK = self._choose(logits_TE.float(), bias_E)
        weights_TK = weights_TK * self.config.routed_scaling_factor
        if num_tokens is not None:
            padding_T1 = (torch.arange(len(ids_TK), device=ids_TK.device) >= num_tokens)[:, None]
            ids_TK = ids_TK.masked_fill(padding_T1, -1)
            weights_TK = weights_TK.masked_fill(padding_T1, 0.0)
        return TopKOutput(ids_TK if slot_map is None else slot_map(ids_TK), weights_TK)

    def _choose(self, logits_TE: Tensor, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
        cfg = self.config
        if cfg.custom is not None:
            return cfg.custom(logits_TE, cfg.top_k)
        scores_TE = sigmoid(logits_TE) if cfg.scoring == "sigmoid" else logits_TE.softmax(-1)
        choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
        if cfg.topk_groups < cfg.num_groups:
            choice_TE = self._limit_to_groups(choice_TE)
        ids_TK = choice_TE.topk(cfg.top_k, dim=-1).indices
        weights_TK = scores_TE.gather(1, ids_TK)
        if cfg.renormalize:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        return ids_TK, weights_TK

    def _limit_to_groups(self, choice_TE: Tensor) -> Tensor:
        cfg = self.config
        grouped_TZe = choice_TE.unflatten(1, (cfg.num_groups, -1))
        best = 2 if cfg.group_score == "top2" else 1
        group_scores_TZ = grouped_TZe.topk(best, dim=-1).values.sum(-1)
        chosen = group_scores_TZ.topk(cfg.topk_groups, dim=-1).indices
        dropped_TZ = torch.ones_like(group_scores_TZ, dtype=torch.bool).scatter_(1, chosen, False)
        return grouped_TZe.masked_fill(dropped_TZ.unsqueeze(-1), -torch.inf).flatten(1)
