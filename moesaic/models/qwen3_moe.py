"""Qwen3-MoE: normalised queries and keys, no shared expert."""

from __future__ import annotations

from moesaic.layers.attention import Attention
from moesaic.layers.module import Module
from moesaic.layers.rotary import RotaryTable
from moesaic.models.blocks import CausalLM, DecoderLayer, Router, SparseBlock, dense_mlp, kv_cache
from moesaic.models.config import (
    BuildContext,
    RawConfig,
    attention_config,
    common_config,
    rope_config,
)
from moesaic.models.qwen2_moe import is_sparse, moe_config, topk_of
from moesaic.moe.layer import FusedMoE


def build(raw: RawConfig, context: BuildContext) -> CausalLM:
    config = common_config(raw, context, eps=1e-6)
    bias = raw.flag("attention_bias", False)
    slides = raw.flag("use_sliding_window", False)
    window = raw.integer("sliding_window", 4096) if slides else None
    attention = attention_config(
        raw,
        config,
        kv_heads=4,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm_eps=config.rms_norm_eps,
        window=window,
    )
    moe, topk = moe_config(raw, config), topk_of(raw)
    rope = RotaryTable(rope_config(raw, attention.head_dim), context.positions)

    def make_layer(layer: int) -> DecoderLayer:
        mlp: Module
        if is_sparse(raw, layer):
            gate, experts = Router.of(config, moe.num_experts), FusedMoE(moe, config.moe, layer)
            mlp = SparseBlock(gate, topk, experts, config.parallel)
        else:
            mlp = dense_mlp(config, layer, raw.integer("intermediate_size"))
        attend = Attention(attention, layer, rope, config.dtype, config.parallel)
        return DecoderLayer(config, attend, mlp)

    return CausalLM(config, kv_cache(config, attention), rope, make_layer)
