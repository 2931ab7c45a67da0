"""Qwen2-MoE: a gated shared expert beside the routed ones, biases on queries, keys and values."""

from __future__ import annotations

from collections.abc import Callable
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
from moesaic.moe.layer import FusedMoE
from moesaic.moe.topk import TopK, TopKConfig


class QwenSparseBlock(SparseBlock):
    renamed = MappingProxyType({"shared_experts": "shared_expert"})


def mlp_maker(raw: RawConfig, config: ModelConfig, shared: bool) -> Callable[[int], Module]:
    """Makes the MLP of a layer by its number. Layers are dense if they are listed or if the step
    skips them; `shared`: sparse ones have a shared expert."""
    step, dense = raw.integer("decoder_sparse_step", 1), raw.list_of("mlp_only_layers", int)
    count = "num_experts" if raw.has("num_experts") else "num_local_experts"
    moe = moe_config(raw, config, count, "moe_intermediate_size")
    topk = TopK(TopKConfig(moe.top_k, renormalize=raw.flag("norm_topk_prob", False)))

    def make(layer: int) -> Module:
        if layer in dense or (layer + 1) % step:
            return dense_mlp(config, layer, raw.integer("intermediate_size"))
        gate = Router(config.linear(moe.num_experts))
        if not shared:
            return QwenSparseBlock(gate, topk, FusedMoE(moe, config.moe, layer), config.parallel)
        inner, expert, experts = raw.integer("shared_expert_intermediate_size"), None, moe
        if config.moe.waterfill:
            experts = moe.with_shared(inner, "shared_expert")
        else:
            expert = dense_mlp(config, layer, inner, name="shared expert")
        routed, expert_gate = FusedMoE(experts, config.moe, layer), Linear(config.linear(1))
        return QwenSparseBlock(gate, topk, routed, config.parallel, expert, expert_gate)

    return make


def _window(raw: RawConfig, layer: int) -> int | None:
    if not raw.flag("use_sliding_window", False):
        return None
    default = layer % 2 == 0 and layer < raw.integer("max_window_layers", 28, minimum=0)
    return raw.integer("sliding_window", 4096) if raw.slides(layer, default) else None


def build(raw: RawConfig, context: BuildContext) -> CausalLM:
    config = common_config(raw, context, eps=1e-6)
    attention = config.attention(raw, qkv_bias=raw.flag("qkv_bias", True))
    make_mlp, window = mlp_maker(raw, config, shared=True), partial(_window, raw)
    return grouped_query_model(config, attention, raw.rope(attention.head_dim), make_mlp, window)
