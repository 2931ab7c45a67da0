"""gpt-oss: attention sinks, alternating sliding windows, biases, clamped SwiGLU."""

from __future__ import annotations

from functools import partial
from types import MappingProxyType

from moesaic.models.blocks import CausalLM, Router, SparseBlock, grouped_query_model, moe_config
from moesaic.models.config import BuildContext, RawConfig, common_config
from moesaic.moe.activations import Swiglu
from moesaic.moe.layer import StackedMoE
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
    sliding = raw.slides(layer, default=layer % 2 == 0)
    return raw.integer("sliding_window", 128) if sliding else None


def build(raw: RawConfig, context: BuildContext) -> CausalLM:
    config = common_config(raw, context, eps=1e-5)
    bias = raw.flag("attention_bias", True)
    options = {"qkv_bias": bias, "output_bias": bias, "sinks": True}
    attention = config.attention(raw, kv_heads=8, head_dim=64, **options)
    swiglu = Swiglu(raw.number("swiglu_alpha", 1.702), raw.number("swiglu_limit", 7.0))
    keys = ("num_local_experts", "intermediate_size")
    moe = moe_config(raw, config, *keys, bias=True, activation=swiglu)
    # A softmax over the chosen logits equals a softmax over all of them, renormalised.
    topk = TopK(TopKConfig(moe.top_k, renormalize=True))
    rope = raw.rope(attention.head_dim, theta=150000.0, default=DEFAULT_ROPE)

    def make_mlp(layer: int) -> GptOssBlock:
        gate = Router(config.linear(moe.num_experts, bias=True))
        return GptOssBlock(gate, topk, StackedMoE(moe, config.moe, layer), config.parallel)

    return grouped_query_model(config, attention, rope, make_mlp, partial(_window, raw))
