"""Qwen2-MoE: a gated shared expert beside the routed ones, biases on queries, keys and values."""

from __future__ import annotations

from functools import partial
from types import MappingProxyType

from moesaic.layers.linear import Linear
from moesaic.layers.module import Module
from moesaic.models.blocks import (
    CausalLM,
    Router,
    SparseBlock,
    dense_mlp,
    grouped_query_model,
    moe_config,
)
from moesaic.models.config import BuildContext, ModelConfig, RawConfig, common_config
from moesaic.moe.layer import FusedMoE, MoeConfig
from moesaic.moe.topk import TopK, TopKConfig


class Qwen2SparseBlock(SparseBlock):
    renamed = MappingProxyType({"shared_experts": "shared_expert"})


def expert_config(raw: RawConfig, config: ModelConfig) -> MoeConfig:
    experts = "num_experts" if raw.has("num_experts") else "num_local_experts"
    return moe_config(raw, config, experts, "moe_intermediate_size")


def topk_of(raw: RawConfig) -> TopK:
    renormalize = raw.flag("norm_topk_prob", False)
    return TopK(TopKConfig(raw.integer("num_experts_per_tok"), renormalize=renormalize))


def is_sparse(raw: RawConfig, layer: int) -> bool:
    """Layers are dense if they are listed or if the step skips them."""
    step = raw.integer("decoder_sparse_step", 1)
    return layer not in raw.list_of("mlp_only_layers", int) and (layer + 1) % step == 0


def _window(raw: RawConfig, layer: int) -> int | None:
    if not raw.flag("use_sliding_window", False):
        return None
    default = layer % 2 == 0 and layer < raw.integer("max_window_layers", 28, minimum=0)
    return raw.integer("sliding_window", 4096) if raw.slides(layer, default) else None


def build(raw: RawConfig, context: BuildContext) -> CausalLM:
    config = common_config(raw, context, eps=1e-6)
    attention = config.attention(raw, qkv_bias=raw.flag("qkv_bias", True))
    rope, moe, topk = raw.rope(attention.head_dim), expert_config(raw, config), topk_of(raw)

    def make_mlp(layer: int) -> Module:
        if not is_sparse(raw, layer):
            return dense_mlp(config, layer, raw.integer("intermediate_size"))
        gate, experts = Router(config.linear(moe.num_experts)), FusedMoE(moe, config.moe, layer)
        inner = raw.integer("shared_expert_intermediate_size")
        shared = dense_mlp(config, layer, inner, name="shared expert")
        shared_gate = Linear(config.linear(1))
        return Qwen2SparseBlock(gate, topk, experts, config.parallel, shared, shared_gate)

    return grouped_query_model(config, attention, rope, make_mlp, partial(_window, raw))
