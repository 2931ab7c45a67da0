"""The formats that `moesaic quantize` writes: tensors, and quantization_config."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from moesaic.models.schemes.floats import (
    BLOCK,
    Mxfp4Stack,
    StoredFp8Matrix,
    StoredMxfp4Matrix,
    StoredNvfp4Matrix,
)
from moesaic.models.schemes.integers import AwqMatrix, CompressedInts, GptqMatrix
from moesaic.models.schemes.storage import Storage
from moesaic.moe.quant.numerics import MXFP4_GROUP, NVFP4_GROUP

Config = dict[str, Any]
NO_GROUP = 0


@dataclass(frozen=True)
class QuantizeFormat:
    """`storage` takes a group size, `config` also the modules that stay unquantised."""

    storage: Callable[[int], Storage]
    config: Callable[[int, Sequence[str]], Config]
    group_size: int = NO_GROUP
    stacked: bool = False


def _numbers(kind: str, bits: int, strategy: str, dynamic: bool = False, group: int = 0) -> Config:
    return {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "group_size": group or None,
        "strategy": strategy,
        "dynamic": dynamic,
    }


def _compressed(
    form: str, kind: str, bits: int, strategy: str, group: int, ignored: Sequence[str]
) -> Config:
    """Packed weights are multiplied with unquantised activations."""
    packed = form.endswith("pack-quantized")
    activations = None if packed else _numbers(kind, bits, "token", dynamic=True)
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": list(ignored),
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": _numbers(kind, bits, strategy, group=group),
                "input_activations": activations,
                "output_activations": None,
            }
        },
    }


def _fp8(group: int, ignored: Sequence[str]) -> Config:
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": list(ignored),
    }


def _awq(group: int, ignored: Sequence[str]) -> Config:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": list(ignored),
    }


def _gptq(bits: int, group: int, ignored: Sequence[str]) -> Config:
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group or -1,
        "desc_act": False,
        "sym": True,
        "checkpoint_format": "gptq",
        "lm_head": False,
        "dynamic": {f"-:{re.escape(name)}$": {} for name in ignored},
    }


def _nvfp4(group: int, ignored: Sequence[str]) -> Config:
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": NVFP4_GROUP}
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "ignore": list(ignored),
        "config_groups": {
            "group_0": {"weights": numbers, "input_activations": numbers, "targets": ["Linear"]}
        },
        "producer": {"name": "moesaic"},
    }


def _mxfp4(group: int, ignored: Sequence[str]) -> Config:
    config = _compressed("mxfp4-pack-quantized", "float", 4, "group", MXFP4_GROUP, ignored)
    config["config_groups"]["group_0"]["weights"]["scale_dtype"] = "torch.uint8"
    return config


def _mxfp4_stacks(group: int, ignored: Sequence[str]) -> Config:
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router"]
    return {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [*skipped, "model.embed_tokens", "lm_head"],
    }


QUANTIZE_FORMATS = {
    "fp8": QuantizeFormat(lambda _: StoredFp8Matrix("block", "weight_scale_inv"), _fp8),
    "fp8_channel": QuantizeFormat(
        lambda _: StoredFp8Matrix("channel"),
        partial(_compressed, "float-quantized", "float", 8, "channel"),
    ),
    "fp8_tensor": QuantizeFormat(
        lambda _: StoredFp8Matrix("tensor"),
        partial(_compressed, "float-quantized", "float", 8, "tensor"),
    ),
    "int8_w8a8": QuantizeFormat(
        lambda _: CompressedInts(8, None, activation=True, packed=False),
        partial(_compressed, "int-quantized", "int", 8, "channel"),
    ),
    "int8_w8a16": QuantizeFormat(
        lambda _: CompressedInts(8, None),
        partial(_compressed, "pack-quantized", "int", 8, "channel"),
    ),
    "int4_w4a16": QuantizeFormat(
        lambda group: CompressedInts(4, group, kept_group=group),
        partial(_compressed, "pack-quantized", "int", 4, "group"),
        group_size=128,
    ),
    "awq": QuantizeFormat(
        lambda group: AwqMatrix(4, group, symmetric=False, kept_group=group), _awq, group_size=128
    ),
    "gptq": QuantizeFormat(
        lambda group: GptqMatrix(4, group, kept_group=group), partial(_gptq, 4), group_size=128
    ),
    "gptq_int8": QuantizeFormat(lambda _: GptqMatrix(8, None), partial(_gptq, 8)),
    "nvfp4": QuantizeFormat(lambda _: StoredNvfp4Matrix(), _nvfp4),
    "mxfp4": QuantizeFormat(lambda _: StoredMxfp4Matrix(), _mxfp4),
}
# For families that store the experts of a layer in stacks (gpt-oss).
STACKED_FORMATS = {"mxfp4": QuantizeFormat(lambda _: Mxfp4Stack(), _mxfp4_stacks, stacked=True)}
