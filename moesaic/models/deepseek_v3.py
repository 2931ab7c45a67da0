"""DeepSeek-V3 and R1, and Kimi-K2: V2 with sigmoid scores, a correction bias and grouped top-k."""

from __future__ import annotations

from moesaic.models.blocks import CausalLM
from moesaic.models.config import BuildContext, RawConfig, common_config
from moesaic.models.deepseek_v2 import Variant, build_variant
from moesaic.moe.topk import TopKConfig


def variant_of(raw: RawConfig) -> Variant:
    raw.one_of("scoring_func", ["sigmoid", None])
    raw.one_of("topk_method", ["noaux_tc", None])
    topk = TopKConfig(
        top_k=raw.integer("num_experts_per_tok"),
        scoring="sigmoid",
        renormalize=raw.flag("norm_topk_prob", True),
        routed_scaling_factor=raw.number("routed_scaling_factor", 2.5),
        num_groups=raw.integer("n_group", 1),
        topk_groups=raw.integer("topk_group", 1),
        group_score="top2",
    )
    interleaved = raw.flag("rope_interleave", True)
    rope = raw.rope(raw.integer("qk_rope_head_dim"), interleaved=interleaved)
    return Variant(topk, True, rope, mlp_bias=False)


def build(raw: RawConfig, context: BuildContext) -> CausalLM:
    return build_variant(raw, common_config(raw, context, eps=1e-6), variant_of(raw))
