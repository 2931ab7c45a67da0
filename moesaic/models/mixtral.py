"""Mixtral."""

from __future__ import annotations

from moesaic.layers.attention import Attention
from moesaic.layers.rotary import RotaryTable
from moesaic.models.blocks import CausalLM, DecoderLayer, Router, SparseBlock, kv_cache
from moesaic.models.config import (
    BuildContext,
    RawConfig,
    attention_config,
    common_config,
    rope_config,
)
from moesaic.moe.layer import FusedMoE, MoeConfig
from moesaic.moe.topk import TopK, TopKConfig


def build(raw: RawConfig, context: BuildContext) -> CausalLM:
    config = common_config(raw, context, eps=1e-5)
    attention = attention_config(raw, config, window=raw.optional_int("sliding_window"))
    moe = MoeConfig(
        num_experts=raw.integer("num_local_experts"),
        hidden_size=config.hidden_size,
        intermediate_size=raw.integer("intermediate_size"),
        top_k=raw.integer("num_experts_per_tok"),
        names=("w1", "w3", "w2"),
    )
    topk = TopK(TopKConfig(moe.top_k, renormalize=True))
    rope = RotaryTable(rope_config(raw, attention.head_dim, theta=1e6), context.positions)

    def make_layer(layer: int) -> DecoderLayer:
        gate = Router.of(config, moe.num_experts)
        return DecoderLayer(
            config,
            Attention(attention, layer, rope, config.dtype, config.parallel),
            SparseBlock(gate, topk, FusedMoE(moe, config.moe, layer), config.parallel),
            mlp_name="block_sparse_moe",
        )

    return CausalLM(config, kv_cache(config, attention), rope, make_layer)
