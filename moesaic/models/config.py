"""Reads config.json, of either generation, into the models' configs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from moesaic.layers.attention import AttentionConfig
from moesaic.layers.embedding import Embedding, LMHead
from moesaic.layers.linear import LinearConfig
from moesaic.layers.norm import RMSNorm
from moesaic.layers.parallel import Parallel
from moesaic.layers.rotary import ROPE_TYPES, RopeConfig
from moesaic.models.dense import DenseWeights
from moesaic.models.folder import brief, read_object
from moesaic.moe.context import MoeContext

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

Item = TypeVar("Item")

EXPERT_COUNTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
INNER_SIZES: Final = ("intermediate_size", "moe_intermediate_size")
HEAD_SIZES: Final = ("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# Added if --json-model-override-args changes num_hidden_layers: what config.json itself says.
CHECKPOINT_LAYERS: Final = "num_checkpoint_layers"
# Upper limits: a larger value is an error, or an attempt to exhaust memory. Published models have
# up to 126 layers, 512 experts, a vocabulary of 262,208 and 10,485,760 positions; float32, in which
# positions are rotated, is exact up to 2^24.
MAX_VALUES: Final = {
    "num_hidden_layers": 1024,
    "num_nextn_predict_layers": 64,
    **dict.fromkeys((*EXPERT_COUNTS, "n_shared_experts", "num_experts_per_tok"), 4096),
    **dict.fromkeys(("hidden_size", "q_lora_rank", "kv_lora_rank"), 1 << 18),
    **dict.fromkeys((*INNER_SIZES, "shared_expert_intermediate_size"), 1 << 22),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", *HEAD_SIZES), 1 << 14),
    **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings"), 1 << 24),
    "vocab_size": 1 << 24,
}
# In all layers together: each expert's name is looked up.
MAX_EXPERTS: Final = 1 << 16
MAX_INTEGER: Final = 2**31 - 1
MAX_NUMBER: Final = 1e12


class RawConfig:
    """config.json with typed access; errors name the key, the value and what is allowed."""

    def __init__(self, data: dict[str, Any], source: str) -> None:
        self.data, self.source = data, source

    @classmethod
    def read(cls, folder: Path, flag: str = "--model-path") -> RawConfig:
        """`flag`: the one that names the folder."""
        path = folder / "config.json"
        if not path.is_file():
            raise ValueError(
                f"{path} does not exist: {flag} must be a Hugging Face folder with "
                "config.json, safetensors and tokenizer.json"
            )
        return cls(read_object(path), str(path))

    def has(self, key: str) -> bool:
        return self.data.get(key) is not None

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        value, most = self._get(key, default), MAX_VALUES.get(key, MAX_INTEGER)
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= most:
            raise self._invalid(key, f"an integer from {minimum} to {most}", value)
        return value

    def number(self, key: str, default: float | None = None, least: float = 0.0) -> float:
        value = self._get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least <= value <= MAX_NUMBER:
            raise self._invalid(key, f"a number from {least:g} to {MAX_NUMBER:g}", value)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._invalid(key, "true or false", value)
        return value

    def list_of(self, key: str, kind: type[Item], length: int | None = None) -> list[Item]:
        """A list of items of one type; empty if the key is missing."""
        value = self._get(key, [])
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            raise self._invalid(key, f"a list of {kind.__name__}", value)
        if length is not None and value and len(value) < length:
            raise ValueError(f"{self.source}: {key} has {len(value)} entries, {length} are needed")
        return value

    def one_of(self, key: str, supported: Sequence[Any], default: Any = None) -> Any:
        value = self.data.get(key, default)
        if value not in supported:
            names = ", ".join(repr(known) for known in supported if known is not None)
            raise ValueError(f"{self.source}: {key} {brief(value)} is not supported, only {names}")
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise self._invalid(key, "an object", value)
        return value

    def num_experts(self) -> int:
        """The number of experts per layer, by the family's name for it; 0 without experts."""
        found = [(key, self.integer(key)) for key in EXPERT_COUNTS if self.has(key)]
        if not found:
            return 0
        key, number = found[0]
        layers = self.integer("num_hidden_layers")
        if number * layers > MAX_EXPERTS:
            raise ValueError(
                f"{self.source}: {key} {number} and num_hidden_layers {layers} are "
                f"{number * layers} experts: no more than {MAX_EXPERTS} are supported"
            )
        return number

    def optional_int(self, key: str) -> int | None:
        return self.integer(key) if self.has(key) else None

    def slides(self, layer: int, default: bool) -> bool:
        """Whether a layer attends to a sliding window; `default`: without `layer_types`."""
        types = self.list_of("layer_types", str, self.integer("num_hidden_layers"))
        return types[layer] == "sliding_attention" if types else default

    def rope(
        self,
        dim: int,
        theta: float = 10000.0,
        interleaved: bool = False,
        default: Mapping[str, Any] | None = None,
    ) -> RopeConfig:
        """Both generations: `rope_parameters`, or `rope_theta` with `rope_scaling`."""
        given = self.mapping("rope_scaling") or self.mapping("rope_parameters")
        given = given or dict(default or {})
        rope = RawConfig(given, f"{self.source}: rope")
        kind = str(given.get("rope_type") or given.get("type") or "default")
        # Dynamic scaling changes nothing up to max_position_embeddings, the longest served context.
        kind = "default" if kind == "dynamic" else kind
        if kind not in ROPE_TYPES:
            raise ValueError(
                f"{self.source}: rope type {brief(kind)} is not supported, only "
                f"{', '.join(ROPE_TYPES)}, dynamic"
            )
        max_positions = self.integer("max_position_embeddings")
        original = self.optional_int("original_max_position_embeddings") or rope.integer(
            "original_max_position_embeddings", max_positions
        )
        factor = 1.0 if kind == "default" else rope.number("factor", max_positions / original, 1e-6)
        keys = (
            "mscale",
            "mscale_all_dim",
            "attention_factor",
            "low_freq_factor",
            "high_freq_factor",
        )
        betas = {key: rope.number(key, 0.0) for key in ("beta_fast", "beta_slow")}
        return RopeConfig(
            dim=dim,
            theta=rope.number("rope_theta", self.number("rope_theta", theta, 2.0), 2.0),
            type=kind,
            factor=factor,
            original_max_positions=original,
            truncate=rope.flag("truncate", True),
            interleaved=interleaved,
            **{key: beta for key, beta in betas.items() if beta},  # 0 stands for the default
            **{key: rope.number(key) for key in keys if rope.has(key)},
        )

    def _invalid(self, key: str, needed: str, value: Any) -> ValueError:
        return ValueError(f"{self.source}: {key} must be {needed}, not {brief(value)}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.data.get(key)
        if value is not None:
            return value
        if default is None:
            raise ValueError(f"{self.source}: {key} is missing")
        return default


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The settings that all families have in common."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    dtype: torch.dtype
    num_nextn_layers: int
    """Multi-token prediction layers behind the last layer (nextn.py)."""
    positions: int
    """Length of the rotary tables: the served context length."""
    moe: MoeContext
    parallel: Parallel

    @property
    def layers(self) -> range:
        """The decoder layers of this stage."""
        layers = self.parallel.layers
        return range(self.num_layers) if layers is None else layers

    def linear(self, outputs: int, bias: bool = False) -> LinearConfig:
        """A projection of hidden states."""
        deterministic = self.parallel.deterministic
        return LinearConfig(self.hidden_size, outputs, self.dtype, bias, deterministic)

    def attention(
        self,
        raw: RawConfig,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        **options: Any,
    ) -> AttentionConfig:
        """`kv_heads`, `head_dim`: the family's defaults, if they do not follow from the heads."""
        heads = raw.integer("num_attention_heads")
        return AttentionConfig(
            hidden_size=self.hidden_size,
            num_heads=heads,
            num_kv_heads=raw.integer("num_key_value_heads", kv_heads or heads),
            head_dim=raw.integer("head_dim", head_dim or self.hidden_size // heads),
            **options,
        )

    def norm(self) -> RMSNorm:
        return RMSNorm(self.hidden_size, self.rms_norm_eps, self.dtype)

    def embedding(self) -> Embedding:
        return Embedding(self.vocab_size, self.hidden_size, self.dtype, self.parallel)

    def head(self, tied: Embedding | None = None) -> LMHead:
        return LMHead(self.vocab_size, self.hidden_size, self.dtype, self.parallel, tied)


@dataclass(frozen=True, slots=True)
class BuildContext:
    """How to build a model, beside its config.json."""

    positions: int
    moe: MoeContext
    parallel: Parallel = field(default_factory=Parallel)
    dense: DenseWeights | None = None
    """Projections that stay quantised; None: all have the model's type."""

    @property
    def dtype(self) -> torch.dtype:
        return self.moe.dtype

    @classmethod
    def single(cls, dtype: torch.dtype, positions: int) -> BuildContext:
        """One rank, unquantised."""
        return cls(positions, MoeContext.single(dtype))


def checkpoint_dtype(raw: RawConfig) -> torch.dtype:
    name = str(raw.data.get("dtype") or raw.data.get("torch_dtype") or "bfloat16")
    name = name.removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"{raw.source}: dtype {brief(name)} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


def common_config(raw: RawConfig, context: BuildContext, eps: float) -> ModelConfig:
    raw.one_of("hidden_act", ["silu"], "silu")
    return ModelConfig(
        vocab_size=raw.integer("vocab_size"),
        hidden_size=raw.integer("hidden_size"),
        num_layers=raw.integer("num_hidden_layers"),
        rms_norm_eps=raw.number("rms_norm_eps", eps),
        tie_word_embeddings=raw.flag("tie_word_embeddings", False),
        dtype=context.dtype,
        num_nextn_layers=raw.integer("num_nextn_predict_layers", 0, minimum=0),
        positions=context.positions,
        moe=context.moe,
        parallel=context.parallel,
    )
