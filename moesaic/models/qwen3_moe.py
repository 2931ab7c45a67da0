"""Qwen3-MoE: normalised queries and keys, no shared expert."""

from __future__ import annotations

from moesaic.layers.module import Module
from moesaic.models.blocks import CausalLM, Router, SparseBlock, dense_mlp, grouped_query_model
from moesaic.models.config import BuildContext, RawConfig, common_config
from moesaic.models.qwen2_moe import expert_config, is_sparse, topk_of
from moesaic.moe.layer import FusedMoE


def build(raw: RawConfig, context: BuildContext) -> CausalLM:
    config = common_config(raw, context, eps=1e-6)
    bias = raw.flag("attention_bias", False)
    slides = raw.flag("use_sliding_window", False)
    window = raw.integer("sliding_window", 4096) if slides else None
    attention = config.attention(
        raw,
        kv_heads=4,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm_eps=config.rms_norm_eps,
        window=window,
    )
    moe, topk = expert_config(raw, config), topk_of(raw)

    def make_mlp(layer: int) -> Module:
        if not is_sparse(raw, layer):
            return dense_mlp(config, layer, raw.integer("intermediate_size"))
        gate, experts = Router(config.linear(moe.num_experts)), FusedMoE(moe, config.moe, layer)
        return SparseBlock(gate, topk, experts, config.parallel)

    rope = raw.rope(attention.head_dim)
    return grouped_query_model(config, attention, rope, make_mlp)
