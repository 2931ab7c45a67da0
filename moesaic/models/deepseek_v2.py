"""DeepSeek-V2 and -Lite: MLA, a few dense layers first, shared experts, group-limited routing."""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.layers.attention import LatentAttention, LatentAttentionConfig
from moesaic.layers.context import CacheSpec
from moesaic.layers.module import Module
from moesaic.layers.rotary import RopeConfig, RotaryTable, yarn_mscale
from moesaic.models.blocks import CausalLM, DecoderLayer, Router, SparseBlock, dense_mlp, moe_config
from moesaic.models.config import BuildContext, ModelConfig, RawConfig, common_config
from moesaic.moe.layer import FusedMoE
from moesaic.moe.topk import TopK, TopKConfig


@dataclass(frozen=True, slots=True)
class Variant:
    """The differences between V2 and V3."""

    topk: TopKConfig
    correction_bias: bool
    rope: RopeConfig
    mlp_bias: bool


@dataclass(frozen=True)
class LayerParts:
    """Makes the parts of a decoder layer by its number."""

    raw: RawConfig
    config: ModelConfig
    variant: Variant
    rope: RotaryTable

    def attention(self, layer: int) -> LatentAttention:
        raw, rope, nope_dim = self.raw, self.variant.rope, self.raw.integer("qk_nope_head_dim")
        scale = (nope_dim + rope.dim) ** -0.5
        if rope.type != "default" and rope.mscale_all_dim:
            scale *= yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2
        config = LatentAttentionConfig(
            hidden_size=self.config.hidden_size,
            num_heads=raw.integer("num_attention_heads"),
            q_rank=raw.optional_int("q_lora_rank"),
            kv_rank=raw.integer("kv_lora_rank"),
            nope_dim=nope_dim,
            rope_dim=rope.dim,
            value_dim=raw.integer("v_head_dim"),
            scale=scale,
            bias=raw.flag("attention_bias", False),
        )
        return LatentAttention(config, layer, self.rope, self.config.dtype, self.config.parallel)

    def mlp(self, layer: int) -> Module:
        """Behind the first dense layers, every `moe_layer_freq`-th layer has experts."""
        first = self.raw.integer("first_k_dense_replace", 0, minimum=0)
        if layer >= first and layer % self.raw.integer("moe_layer_freq", 1) == 0:
            return self._sparse_block(layer)
        inner = self.raw.integer("intermediate_size")
        return dense_mlp(self.config, layer, inner, self.variant.mlp_bias)

    def _sparse_block(self, layer: int) -> SparseBlock:
        config, variant, shared = self.config, self.variant, None
        bias = variant.correction_bias
        moe = moe_config(self.raw, config, "n_routed_experts", "moe_intermediate_size")
        gate = Router(config.linear(moe.num_experts), float32=True, correction_bias=bias)
        inner = moe.intermediate_size * self.raw.integer("n_shared_experts", 0, minimum=0)
        if inner and config.moe.waterfill and not variant.mlp_bias:
            moe = moe.with_shared(inner, "shared_experts")
        elif inner:
            shared = dense_mlp(config, layer, inner, variant.mlp_bias, "shared experts")
        experts = FusedMoE(moe, config.moe, layer)
        return SparseBlock(gate, TopK(variant.topk), experts, config.parallel, shared)

    def cache(self) -> CacheSpec:
        latent = self.raw.integer("kv_lora_rank") + self.variant.rope.dim
        return CacheSpec(len(self.config.layers), 1, latent, 0)


def build_variant(raw: RawConfig, config: ModelConfig, variant: Variant) -> CausalLM:
    rope = RotaryTable(variant.rope, config.positions)
    parts = LayerParts(raw, config, variant, rope)

    def make_layer(layer: int) -> DecoderLayer:
        return DecoderLayer(config, parts.attention(layer), parts.mlp(layer))

    return CausalLM(config, parts.cache(), rope, make_layer)


def _topk(raw: RawConfig) -> TopKConfig:
    raw.one_of("scoring_func", ["softmax", None])
    method = raw.one_of("topk_method", ["greedy", "group_limited_greedy"], "greedy")
    grouped = method == "group_limited_greedy"
    return TopKConfig(
        top_k=raw.integer("num_experts_per_tok"),
        routed_scaling_factor=raw.number("routed_scaling_factor", 1.0),
        num_groups=raw.integer("n_group") if grouped else 1,
        topk_groups=raw.integer("topk_group") if grouped else 1,
    )


def build(raw: RawConfig, context: BuildContext) -> CausalLM:
    rope = raw.rope(raw.integer("qk_rope_head_dim"), interleaved=True)
    variant = Variant(_topk(raw), False, rope, raw.flag("mlp_bias", False))
    return build_variant(raw, common_config(raw, context, eps=1e-6), variant)
