"""Routing: from router logits to the experts of each token.

T tokens · E experts · K chosen · S shared experts · Z groups of experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.kernels.routing import TopKConfig as TopKConfig
from moesaic.kernels.routing import TopKInputs, fake_logits, route
from moesaic.layers.invariant import sigmoid
from moesaic.moe.formats import TopKOutput
from moesaic.moe.placement import SlotMap


class TopK:
    def __init__(self, config: TopKConfig) -> None:
        self.config = config
        self.spec = None if config.custom is not None else config
        """For the kernels, which cannot call a custom function."""

    def __call__(
        self,
        logits_TE: Tensor,
        bias_E: Tensor | None = None,
        slot_map: SlotMap | None = None,
        num_tokens: int | Tensor | None = None,
    ) -> TopKOutput:
        """`bias_E` shifts the choice of experts, not their weights. `slot_map` turns experts into
        slots. Rows from `num_tokens` on (on a GPU a tensor) are padding and choose nothing."""
        if logits_TE.is_cuda and self.spec is not None:
            assert num_tokens is None or isinstance(num_tokens, Tensor), (
                "an int would wait for the device"
            )
            slots = None if slot_map is None else slot_map.table_on(logits_TE.device)
            return TopKOutput(*route(logits_TE, TopKInputs(self.spec, bias_E, num_tokens, slots)))
        logits_TE = logits_TE.float()
        if self.config.fake:
            logits_TE, bias_E = fake_logits(logits_TE), None
        ids_TK, weights_TK = self._choose(logits_TE, bias_E)
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


def with_shared_experts(
    chosen: TopKOutput, experts: range, weights_T1: Tensor | None, slot_map: SlotMap | None
) -> TopKOutput:
    """Adds experts that every token takes, with the weight 1 or the one that is given. Padding
    still chooses nothing.

    Ids [[3, 0], [-1, -1]] and the expert 4: [[3, 0, 4], [-1, -1, -1]].
    """
    ids_TK, weights_TK = chosen.ids_TK, chosen.weights_TK
    real_T1 = ids_TK[:, :1] >= 0
    more_S = torch.arange(experts.start, experts.stop, device=ids_TK.device, dtype=ids_TK.dtype)
    more_TS = torch.where(real_T1, more_S, -1)
    weight_T1 = real_T1.to(weights_TK.dtype)
    if weights_T1 is not None:
        weight_T1 = torch.where(real_T1, weights_T1.to(weights_TK.dtype), 0)
    return TopKOutput(
        torch.cat((ids_TK, more_TS if slot_map is None else slot_map(more_TS)), dim=1),
        torch.cat((weights_TK, weight_T1.expand(-1, len(experts))), dim=1),
    )
