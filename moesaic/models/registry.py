"""The served architectures and their modules."""

from __future__ import annotations

from importlib import import_module

from moesaic.models.blocks import CausalLM
from moesaic.models.config import BuildContext, RawConfig

ARCHITECTURES = {
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "GptOssForCausalLM": "gpt_oss",
}


def build_model(raw: RawConfig, context: BuildContext) -> CausalLM:
    """Builds the model; weights are not loaded yet."""
    raw.num_experts()
    names = raw.list_of("architectures", str)
    known = [name for name in names if name in ARCHITECTURES]
    if not known:
        raise ValueError(
            f"{raw.source}: architectures {names} are not supported; known are "
            f"{', '.join(ARCHITECTURES)}"
        )
    family = import_module(f"moesaic.models.{ARCHITECTURES[known[0]]}")
    try:
        model: CausalLM = family.build(raw, context)
    except ValueError as error:  # a layer does not know the config's path
        named = raw.source in str(error)
        raise error if named else ValueError(f"{raw.source}: {error}") from error
    if context.dense is not None:
        context.dense.apply(model)
    return model.eval()
