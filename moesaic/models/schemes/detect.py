"""Detects how a checkpoint stores its matrices, from its config and its tensors."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from pathlib import Path

from moesaic.models.checkpoint import Checkpoint
from moesaic.models.config import INNER_SIZES, RawConfig
from moesaic.models.folder import brief, read_object
from moesaic.models.schemes.compressed import compressed_tensors, unmet_activation
from moesaic.models.schemes.floats import BLOCK, Mxfp4Stack, StoredFp8Matrix, StoredNvfp4Matrix
from moesaic.models.schemes.integers import AwqMatrix, GptqMatrix
from moesaic.models.schemes.scheme import Scheme
from moesaic.models.schemes.storage import Storage
from moesaic.moe.quant.weights import WeightFormat

EXPERT = re.compile(r"model\.layers\.(\d+)\..*\.experts\.")


@dataclass(frozen=True)
class QuantizationConfig:
    """The quantisation that a checkpoint declares, with its model config and tensors."""

    config: RawConfig
    model: RawConfig
    checkpoint: Checkpoint | None

    def group(self, key: str = "group_size") -> int | None:
        """Columns per scale; None (-1 in the file) for whole rows."""
        size = self.config.integer(key, 128, minimum=-1)
        return None if size == -1 else size

    @property
    def row_group(self) -> int:
        """A group size that divides the rows of all experts, to keep whole-row scales in."""
        sizes = ("hidden_size", *INNER_SIZES)
        return gcd(128, *(self.model.integer(size) for size in sizes if self.model.has(size)))

    def has_tensor(self, suffix: str, dims: int | None = None) -> bool:
        if self.checkpoint is None:
            return False
        names = (name for name in self.checkpoint.location if name.endswith(suffix))
        return any(dims is None or len(self.checkpoint.shape(name)) == dims for name in names)


def detect_scheme(raw: RawConfig, folder: Path) -> Scheme:
    """Reads the headers of the checkpoint's files, if any (not with `--load-format dummy`)."""
    config = _declaration(raw, folder)
    if config is None:
        return Scheme(num_experts=raw.num_experts())
    if not any(folder.glob("*.safetensors")):
        return _scheme(QuantizationConfig(config, raw, None))
    with Checkpoint(folder) as checkpoint:
        return _scheme(QuantizationConfig(config, raw, checkpoint))


def _scheme(declared: QuantizationConfig) -> Scheme:
    method = str(declared.config.data.get("quant_method", "?")).lower()
    if method not in METHODS:
        raise ValueError(
            f"{declared.config.source}: quant_method {brief(method)} is not supported, only "
            f"{', '.join(METHODS)}"
        )
    storage = METHODS[method](declared)
    format, note = _expert_format(declared, storage)
    notes = "; ".join(filter(None, (note, unmet_activation(declared.config, storage))))
    return Scheme(method, storage, format, declared.model.num_experts(), notes)


def _declaration(raw: RawConfig, folder: Path) -> RawConfig | None:
    """From config.json, or from a separate file of older producers."""
    if raw.has("quantization_config"):
        given = raw.mapping("quantization_config")
        return RawConfig(given, f"{raw.source}: quantization_config")
    for name, method, key in (
        ("hf_quant_config.json", "modelopt", "quantization"),
        ("quantize_config.json", "gptq", None),
    ):
        path = folder / name
        if path.is_file():
            data = RawConfig(read_object(path), str(path))
            given = data.data if key is None else data.mapping(key)
            return RawConfig({"quant_method": method, **given}, str(path))
    return None


def _expert_format(
    declared: QuantizationConfig, storage: Storage
) -> tuple[WeightFormat | None, str]:
    """The format of the served experts, without layers behind the last one, and a note."""
    if storage.format is None:
        return None, (
            "experts are decoded to the model's type at load, since their form has no counterpart "
            "in memory (column order of GPTQ, or eight bits with groups or zero points)"
        )
    if declared.checkpoint is None:
        return storage.format, ""
    layers = declared.model.integer("num_hidden_layers")
    names = [
        name
        for name in declared.checkpoint.location
        if (found := EXPERT.match(name)) and int(found[1]) < layers
    ]
    suffix = _quantised_suffix(storage)
    matrices = {_stem(name, suffix) for name in names if not name.endswith("bias")}
    quantised = sum(name.endswith(suffix) for name in names)
    if not quantised:
        return None, ""
    note = (
        f"{len(matrices) - quantised} of {len(matrices)} expert matrices are unquantised in the "
        f"checkpoint; they are encoded as {storage.format.name} at load like the others"
    )
    return storage.format, note if quantised < len(matrices) else ""


def _quantised_suffix(storage: Storage) -> str:
    """The suffix of tensors that only quantised matrices have."""
    if isinstance(storage, StoredFp8Matrix):
        return f".{storage.scale}"
    if isinstance(storage, Mxfp4Stack):
        return "_scales"
    return ".scales" if isinstance(storage, AwqMatrix | GptqMatrix) else ".weight_scale"


def _stem(name: str, suffix: str) -> str:
    if suffix == "_scales":
        return name.removesuffix("_scales").removesuffix("_blocks")
    return name.rpartition(".")[0]


def _fp8(declared: QuantizationConfig) -> Storage:
    config = declared.config
    config.one_of("fmt", ("e4m3", None), None)
    config.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
    block = config.data.get("weight_block_size")
    if "weight_block_size" not in config.data and declared.has_tensor(".weight_scale_inv", dims=2):
        block = [BLOCK, BLOCK]  # the default in transformers
    if block is None:
        inverse = declared.has_tensor(".weight_scale_inv")
        return StoredFp8Matrix("tensor", "weight_scale_inv" if inverse else "weight_scale")
    config.one_of("weight_block_size", [[BLOCK, BLOCK]], block)
    return StoredFp8Matrix("block", "weight_scale_inv")


def _awq(declared: QuantizationConfig) -> Storage:
    keys = ("bits", "group_size") if declared.config.has("bits") else ("w_bit", "q_group_size")
    declared.config.one_of(keys[0], (4,), 4)
    declared.config.one_of("zero_point", (True,), True)
    version = declared.config.data.get("version", "gemm")
    if str(version).lower() != "gemm":
        raise ValueError(
            f"{declared.config.source}: version {brief(version)} is not supported, only 'gemm': "
            "the others pack their words in another order"
        )
    group = declared.group(keys[1])
    return AwqMatrix(4, group, symmetric=False, kept_group=group or declared.row_group)


def _gptq(declared: QuantizationConfig) -> Storage:
    bits = declared.config.one_of("bits", (4, 8), None)
    form = declared.config.one_of("checkpoint_format", ("gptq", "gptq_v2", None), None)
    dynamic = declared.config.mapping("dynamic")
    overrides = [rule for rule in dynamic if not rule.startswith("-:")]
    if overrides:
        raise ValueError(
            f"{declared.config.source}: dynamic {brief(overrides[0])} gives some modules other "
            "parameters, which is not supported; only '-:' rules are"
        )
    group = declared.group()
    return GptqMatrix(
        bits,
        group,
        symmetric=declared.config.flag("sym", True),
        kept_group=group or declared.row_group,
        plus_one=form != "gptq_v2",
        act_order=declared.config.flag("desc_act", False) and group is not None,
    )


def _modelopt(declared: QuantizationConfig) -> Storage:
    algorithm = declared.config.one_of("quant_algo", ("NVFP4", "FP8"), None)
    if algorithm == "FP8":
        return StoredFp8Matrix("tensor")
    declared.config.one_of("group_size", (16, None), 16)
    return StoredNvfp4Matrix()


METHODS: dict[str, Callable[[QuantizationConfig], Storage]] = {
    "fp8": _fp8,
    "compressed-tensors": lambda given: compressed_tensors(given.config, given.row_group),
    "awq": _awq,
    "gptq": _gptq,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "mxfp4": lambda _: Mxfp4Stack(),
}
