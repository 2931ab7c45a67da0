"""Writes the trained model as a Hugging Face folder, with the names that DeepSeek-V3 has there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from examples.train.model import Model, Shape


def hf_config(shape: Shape, bos: int, eos: int, pad: int) -> dict[str, object]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.dense_inner,
        "moe_intermediate_size": shape.expert_inner,
        "num_hidden_layers": shape.layers,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "n_routed_experts": shape.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": shape.top_k,
        "n_group": shape.groups,
        "topk_group": shape.top_groups,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": shape.scale,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "q_lora_rank": shape.q_rank,
        "kv_lora_rank": shape.kv_rank,
        "qk_nope_head_dim": shape.nope,
        "qk_rope_head_dim": shape.rope,
        "v_head_dim": shape.value,
        "rope_theta": shape.theta,
        "rope_scaling": None,
        "rope_interleave": True,
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": shape.eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "torch_dtype": "bfloat16",
    }


def tensors(model: Model) -> Iterator[tuple[str, Tensor]]:
    """The MTP layer stands behind the last one; its embedding and head are the main model's, and
    are not stored again."""
    behind = f"model.layers.{model.shape.layers}."
    for name, value in model.state_dict().items():
        if name == "lm_head.weight":
            yield name, value
        elif name.startswith("nextn.layer."):
            yield from _named(behind + name.removeprefix("nextn.layer."), value)
        elif name == "nextn.norm.weight":
            yield behind + "shared_head.norm.weight", value
        elif name.startswith("nextn."):
            yield behind + name.removeprefix("nextn."), value
        else:
            yield from _named("model." + name, value)


def _named(name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    base, _, last = name.rpartition(".")
    if last == "gate_up":
        for expert, (gate, up) in enumerate(value):
            yield f"{base}.experts.{expert}.gate_proj.weight", gate
            yield f"{base}.experts.{expert}.up_proj.weight", up
    elif last == "down":
        for expert, down in enumerate(value):
            yield f"{base}.experts.{expert}.down_proj.weight", down
    elif name.endswith("gate.bias"):
        yield f"{base}.e_score_correction_bias", value
    else:
        yield name, value


def load_exported(model: Model, folder: Path) -> None:
    """The weights of a finished model, to train it on."""
    stored = load_file(folder / "model.safetensors")
    with torch.no_grad():
        for name, value in tensors(model):
            value.copy_(stored[name])


def export(model: Model, folder: Path, bos: int, eos: int, pad: int) -> int:
    """Rounds to bfloat16 all but the correction bias, as DeepSeek does. Gives the file's bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {}
    for name, value in tensors(model):
        dtype = torch.float32 if name.endswith("correction_bias") else torch.bfloat16
        stored[name] = value.detach().to("cpu", dtype).contiguous().clone()
    file = folder / "model.safetensors"
    save_file(stored, file, metadata={"format": "pt"})
    file.chmod(0o644)
    config = hf_config(model.shape, bos, eos, pad)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    return file.stat().st_size
