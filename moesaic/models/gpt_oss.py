"""gpt-oss: attention sinks, alternating sliding windows, biases, clamped SwiGLU."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from moesaic.layers.attention import Attention
from moesaic.layers.rotary import RotaryTable
from moesaic.models.blocks import CausalLM, DecoderLayer, Router, SparseBlock, kv_cache
from moesaic.models.config import (
    BuildContext,
    RawConfig,
    attention_config,
    common_config,
    rope_config,
    slides,
)
from moesaic.moe.activations import Swiglu
from moesaic.moe.layer import MoeConfig, StackedMoE
from moesaic.moe.topk import TopK, TopKConfig

# The family's defaults for a config.json without rope settings.
DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class GptOssBlock(SparseBlock):
    renamed = MappingProxyType({"gate": "router"})


def _window(raw: RawConfig, layer: int) -> int | None:
    sliding = slides(raw, layer, default=layer % 2 == 0)
    return raw.integer("sliding_window", 128) if sliding else None


def build(raw: RawConfig, context: BuildContext) -> CausalLM:
    config = common_config(raw, context, eps=1e-5)
    bias = raw.flag("attention_bias", True)
    options = {"qkv_bias": bias, "output_bias": bias, "sinks": True}
    attention = attention_config(raw, config, kv_heads=8, head_dim=64, **options)
    moe = MoeConfig(
        num_experts=raw.integer("num_local_experts"),
        hidden_size=config.hidden_size,
        intermediate_size=raw.integer("intermediate_size"),
        top_k=raw.integer("num_experts_per_tok"),
        bias=True,
        activation=Swiglu(raw.number("swiglu_alpha", 1.702), raw.number("swiglu_limit", 7.0)),
    )
    # A softmax over the chosen logits equals a softmax over all of them, renormalised.
    topk = TopK(TopKConfig(moe.top_k, renormalize=True))
    rotary = rope_config(raw, attention.head_dim, theta=150000.0, default=DEFAULT_ROPE)
    rope = RotaryTable(rotary, context.positions)

    def make_layer(layer: int) -> DecoderLayer:
        gate = Router.of(config, moe.num_experts, bias=True)
        spec = replace(attention, window=_window(raw, layer))
        block = GptOssBlock(gate, topk, StackedMoE(moe, config.moe, layer), config.parallel)
        attend = Attention(spec, layer, rope, config.dtype, config.parallel)
        return DecoderLayer(config, attend, block)

    return CausalLM(config, kv_cache(config, attention), rope, make_layer)
