"""Qwen3-MoE: normalised queries and keys, no shared expert."""

from __future__ import annotations

from moesaic.models.blocks import CausalLM, grouped_query_model
from moesaic.models.config import BuildContext, RawConfig, common_config
from moesaic.models.qwen2_moe import mlp_maker


def build(raw: RawConfig, context: BuildContext) -> CausalLM:
    config = common_config(raw, context, eps=1e-6)
    bias = raw.flag("attention_bias", False)
    slides = raw.flag("use_sliding_window", False)
    attention = config.attention(
        raw,
        kv_heads=4,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm_eps=config.rms_norm_eps,
        window=raw.integer("sliding_window", 4096) if slides else None,
    )
    make_mlp = mlp_maker(raw, config, shared=False)
    return grouped_query_model(config, attention, raw.rope(attention.head_dim), make_mlp)
