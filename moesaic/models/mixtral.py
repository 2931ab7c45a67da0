"""Mixtral."""

from __future__ import annotations

from moesaic.models.blocks import CausalLM, Router, SparseBlock, grouped_query_model, moe_config
from moesaic.models.config import BuildContext, RawConfig, common_config
from moesaic.moe.layer import FusedMoE
from moesaic.moe.topk import TopK, TopKConfig


def build(raw: RawConfig, context: BuildContext) -> CausalLM:
    config = common_config(raw, context, eps=1e-5)
    attention = config.attention(raw, window=raw.optional_int("sliding_window"))
    names = ("w1", "w3", "w2")
    moe = moe_config(raw, config, "num_local_experts", "intermediate_size", names=names)
    topk = TopK(TopKConfig(moe.top_k, renormalize=True))
    rope = raw.rope(attention.head_dim, theta=1e6)

    def make_mlp(layer: int) -> SparseBlock:
        gate, experts = Router(config.linear(moe.num_experts)), FusedMoE(moe, config.moe, layer)
        return SparseBlock(gate, topk, experts, config.parallel)

    return grouped_query_model(config, attention, rope, make_mlp, mlp_name="block_sparse_moe")
