"""Which architectures are served, and by which file."""

from __future__ import annotations

from importlib import import_module

import torch

from moesaic.models.blocks import CausalLM
from moesaic.models.config import RawConfig

ARCHITECTURES = {
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "GptOssForCausalLM": "gpt_oss",
}


def build_model(raw: RawConfig, dtype: torch.dtype, positions: int) -> CausalLM:
    """The model with its weights still unset."""
    names = raw.items("architectures")
    known = [name for name in names if name in ARCHITECTURES]
    if not known:
        raise ValueError(
            f"{raw.source}: architectures {names} are not served; known are "
            f"{', '.join(ARCHITECTURES)}"
        )
    if raw.has("quantization_config"):
        method = raw.mapping("quantization_config").get("quant_method", "?")
        raise ValueError(
            f"{raw.source}: quantization_config (quant_method {method!r}) is not built yet; "
            "use a checkpoint in bfloat16, float16 or float32"
        )
    family = import_module(f"moesaic.models.{ARCHITECTURES[known[0]]}")
    model: CausalLM = family.build(raw, dtype, positions)
    return model.eval()
