"""Generates tiny random checkpoints, for a first try and for tests without a download."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from moesaic.config.resolve import SHAPE_PREFIX
from moesaic.layers.module import MatrixSlot, TensorSlot
from moesaic.models.config import BuildContext, RawConfig
from moesaic.models.generated import cached_folder, parse_model_name, with_changes
from moesaic.models.nextn import OwnWeights, build_nextn
from moesaic.models.registry import ARCHITECTURES, build_model
from moesaic.models.shapes import shape_folder
from moesaic.models.tiny_chat import EOS, OTHER_EOS, TURN, chat_template

logger = logging.getLogger(__name__)

PREFIX = "tiny:"
MIN_VOCAB = 258
# 4 GiB, which are generated in memory and stored in the user's cache.
MAX_PARAMETERS = 1 << 30
_COMMON: dict[str, Any] = {
    "vocab_size": MIN_VOCAB,
    "eos_token_id": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
}
_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
_QWEN = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DEEPSEEK = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
_SETTINGS: dict[str, dict[str, Any]] = {
    "mixtral": _EXPERTS,
    "qwen2_moe": {"shared_expert_intermediate_size": 64, **_QWEN},
    "qwen3_moe": {"norm_topk_prob": True, **_QWEN},
    "deepseek_v2": {"topk_method": "group_limited_greedy", **_DEEPSEEK},
    "deepseek_v3": {"num_nextn_predict_layers": 0, **_DEEPSEEK},
    "gpt_oss": {"head_dim": 16, "sliding_window": 32, **_EXPERTS},
}
FAMILIES = {
    family: {"architectures": [architecture], **_SETTINGS[family]}
    for architecture, family in ARCHITECTURES.items()
    if family in _SETTINGS
}


def make_tiny_checkpoint(
    family: str, folder: Path, seed: int = 0, changes: Mapping[str, int] | None = None
) -> Path:
    """Writes a whole Hugging Face folder; the same seed gives the same bytes. `changes` replace
    integers in config.json."""
    config = _config(family, changes or {})
    folder.mkdir(parents=True, exist_ok=True)
    raw = RawConfig(config, family)
    with torch.device("meta"):
        model = build_model(raw, BuildContext.single(torch.float32, 1))
        slots = list(model.checkpoint_slots())
        if config.get("num_nextn_predict_layers"):
            slots += build_nextn(raw, model, OwnWeights()).checkpoint_slots()
    shapes = {slot.name: _stored_shape(slot, config) for slot in slots}
    if (size := sum(map(math.prod, shapes.values()))) > MAX_PARAMETERS:
        raise ValueError(
            f"a tiny {family} of {size} numbers: at most {MAX_PARAMETERS} are made and stored, "
            "give smaller sizes, or take a shape (shape:NAME) with --load-format dummy"
        )
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: _random(name, shape, generator) for name, shape in sorted(shapes.items())}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    _save_tokenizer(folder, OTHER_EOS.get(family, EOS))
    return folder


def _config(family: str, changes: Mapping[str, int]) -> dict[str, Any]:
    if family not in FAMILIES:
        raise ValueError(f"unknown tiny model {family!r}; known are {', '.join(FAMILIES)}")
    config = {**_COMMON, **FAMILIES[family], "model_type": family}
    config = with_changes(config, changes, f"tiny {family}", ["head_dim"])
    if changes.get("vocab_size", MIN_VOCAB) < MIN_VOCAB:
        raise ValueError(
            f"vocab_size={changes['vocab_size']}: a tiny model needs at least {MIN_VOCAB}, "
            "all bytes and two special tokens"
        )
    return config


def _stored_shape(slot: TensorSlot | MatrixSlot, config: dict[str, Any]) -> tuple[int, ...]:
    """Stacked matrices have inputs first."""
    if isinstance(slot, TensorSlot) or slot.index is None:
        return slot.shape
    rows, cols = slot.shape
    return config["num_local_experts"], cols, rows * (1 if slot.interleaved is None else 2)


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return 1 + 0.1 * noise
    return noise * (0.1 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5)


def _save_tokenizer(folder: Path, eos: str) -> None:
    """One token per byte, and the two special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: number for number, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([eos, TURN])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": eos, "chat_template": chat_template(eos)}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def materialise(model_path: str) -> str:
    """The folder of a `tiny:FAMILY` checkpoint, of `tiny:FAMILY,KEY=INTEGER,…` with other sizes, or
    of a shape (shapes.py); any other path is returned unchanged."""
    if model_path.startswith(SHAPE_PREFIX):
        return shape_folder(model_path)
    if not model_path.startswith(PREFIX):
        return model_path
    family, changes = parse_model_name(model_path, PREFIX, "tiny:mixtral,num_hidden_layers=4")
    if not family.isidentifier():
        raise ValueError(f"{model_path!r} is not tiny:FAMILY: give a family, as in tiny:qwen3_moe")

    def make(folder: Path) -> Path:
        return make_tiny_checkpoint(family, folder, changes=changes)

    # The key covers this file, so a changed generator never finds an old checkpoint.
    made_of = Path(__file__).read_bytes() + repr(sorted(changes.items())).encode()
    folder = cached_folder(f"tiny-{family}", made_of, make)
    logger.info("%s has random weights, so its text is noise (%s)", model_path, folder)
    return str(folder)
