"""Checkpoint tensors written number by number, as the formats' documents say, with what they mean.

No number comes from the package: loops, and integers that are put together bit by bit.
N rows (outputs) · K columns (inputs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moesaic.models.checkpoint import Checkpoint

STEM = "model.layers.0.mlp.experts.0.gate_proj"
STACK = "model.layers.0.mlp.experts.gate_up_proj"
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
AWQ_COLUMN_OF_NIBBLE = [0, 2, 4, 6, 1, 3, 5, 7]
Array = np.ndarray
Tensors = dict[str, Tensor]
Made = tuple[Tensors, Array]


class CountingCheckpoint(Checkpoint):
    """Counts the bytes that are read."""

    bytes_read = 0

    def read(self, name: str, *cut: int | slice | range) -> Tensor:
        tensor = super().read(name, *cut)
        self.bytes_read += tensor.nbytes
        return tensor


def e4m3(byte: int) -> float:
    sign, exponent, mantissa = -1.0 if byte & 128 else 1.0, byte >> 3 & 15, byte & 7
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def random_e4m3(rng: np.random.Generator, shape: Sequence[int], positive: bool = False) -> Array:
    """Random bytes except 127 and 255, which are NaN."""
    codes = rng.integers(1 if positive else 0, 127, shape)
    return codes if positive else codes + 128 * rng.integers(0, 2, shape)


def floats8(codes: Array) -> Array:
    return np.vectorize(e4m3)(codes)


def as_fp8(codes: Array) -> Tensor:
    return torch.from_numpy(codes.astype(np.uint8)).view(torch.float8_e4m3fn)


def words(numbers: Array, bits: int) -> Tensor:
    """Rows of small numbers to rows of 32-bit words, the first number in the lowest bits."""
    each = 32 // bits
    out = np.zeros((numbers.shape[0], ceil(numbers.shape[1] / each)), np.uint32)
    for row in range(numbers.shape[0]):
        for column in range(numbers.shape[1]):
            shift = bits * (column % each)
            out[row, column // each] |= np.uint32(int(numbers[row, column]) << shift)
    return torch.from_numpy(out.view(np.int32))


def pairs(codes: Array) -> Tensor:
    """Even columns in the low half of a byte."""
    out = np.zeros((*codes.shape[:-1], codes.shape[-1] // 2), np.uint8)
    for place in np.ndindex(*out.shape):
        *front, column = place
        low, high = codes[(*front, 2 * column)], codes[(*front, 2 * column + 1)]
        out[place] = int(low) | int(high) << 4
    return torch.from_numpy(out)


def spread(x: Array, group: int, size: int) -> Array:
    return np.stack([x[:, column // group] for column in range(size)], 1)


def scales16(rng: np.random.Generator, shape: Sequence[int]) -> Array:
    return rng.uniform(0.001, 0.1, shape).astype(np.float16).astype(np.float64)


@dataclass(frozen=True)
class DiskFormat:
    """`kept`: the weight format of experts; None: the model's own type."""

    config: dict[str, Any]
    make: Callable[[np.random.Generator, int, int], Made]
    kept: str | None
    shape: tuple[int, int] = (48, 96)
    cut: tuple[slice, slice] = (slice(16, 40), slice(32, 96))
    activation: str | None = None


def fp8_block(rng: np.random.Generator, size_N: int, size_K: int) -> Made:
    codes = random_e4m3(rng, (size_N, size_K))
    scale = rng.uniform(0.001, 0.1, (ceil(size_N / 128), ceil(size_K / 128))).astype(np.float32)
    values = floats8(codes)
    for n, k in np.ndindex(size_N, size_K):
        values[n, k] = np.float32(values[n, k]) * scale[n // 128, k // 128]
    tensors = {"weight": as_fp8(codes), "weight_scale_inv": torch.from_numpy(scale)}
    return tensors, values


def fp8_scaled(
    scale_name: str, per_row: bool, shape: Callable[[Tensor], Tensor]
) -> Callable[[np.random.Generator, int, int], Made]:
    def make(rng: np.random.Generator, size_N: int, size_K: int) -> Made:
        codes = random_e4m3(rng, (size_N, size_K))
        scale = rng.uniform(0.001, 0.1, (size_N if per_row else 1, 1)).astype(np.float32)
        tensors = {"weight": as_fp8(codes), scale_name: shape(torch.from_numpy(scale))}
        if not per_row:
            tensors["input_scale"] = torch.tensor(0.5)
        return tensors, floats8(codes).astype(np.float32) * scale

    return make


def int8(rng: np.random.Generator, size_N: int, size_K: int) -> Made:
    q = rng.integers(-128, 128, (size_N, size_K))
    scale = scales16(rng, (size_N, 1))
    weight = torch.from_numpy(q.astype(np.int8))
    return {"weight": weight, "weight_scale": torch.from_numpy(scale).bfloat16().float()}, (
        q * torch.from_numpy(scale).bfloat16().double().numpy()
    )


def packed(
    bits: int, group: int | None, symmetric: bool
) -> Callable[[np.random.Generator, int, int], Made]:
    """compressed-tensors: numbers along K and zero points along N, both plus half the range."""

    def make(rng: np.random.Generator, size_N: int, size_K: int) -> Made:
        half, width = 1 << bits - 1, group or size_K
        groups = ceil(size_K / width)
        q = rng.integers(-half, half, (size_N, size_K))
        z = np.zeros((size_N, groups), int)
        if not symmetric:
            z = rng.integers(-half, half, (size_N, groups))
        scale = scales16(rng, (size_N, groups))
        tensors = {
            "weight_packed": words(q + half, bits),
            "weight_scale": torch.from_numpy(scale).half(),
            "weight_shape": torch.tensor([size_N, size_K]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words((z + half).T, bits).t().contiguous()
        return tensors, (q - spread(z, width, size_K)) * spread(scale, width, size_K)

    return make


def int4_bytes(symmetric: bool) -> Callable[[np.random.Generator, int, int], Made]:
    """compressed-tensors stores weights for rounded activations this way: a signed byte per number
    and per zero point."""

    def make(rng: np.random.Generator, size_N: int, size_K: int) -> Made:
        q, z = rng.integers(-8, 8, (size_N, size_K)), np.zeros((size_N, size_K // 32), int)
        scale = scales16(rng, z.shape)
        tensors = {
            "weight": torch.from_numpy(q.astype(np.int8)),
            "weight_scale": torch.from_numpy(scale).half(),
        }
        if not symmetric:
            z = rng.integers(-8, 8, z.shape)
            tensors["weight_zero_point"] = torch.from_numpy(z.astype(np.int8))
        return tensors, (q - spread(z, 32, size_K)) * spread(scale, 32, size_K)

    return make


def awq(group: int | None) -> Callable[[np.random.Generator, int, int], Made]:
    def shuffled(numbers: Array) -> Tensor:
        order = [
            8 * (column // 8) + AWQ_COLUMN_OF_NIBBLE[column % 8]
            for column in range(numbers.shape[1])
        ]
        return words(numbers[:, order], 4)

    def make(rng: np.random.Generator, size_N: int, size_K: int) -> Made:
        width = group or size_K
        q, z = rng.integers(0, 16, (size_N, size_K)), rng.integers(0, 16, (size_N, size_K // width))
        scale = scales16(rng, (size_N, size_K // width))
        tensors = {
            "qweight": shuffled(q.T),
            "qzeros": shuffled(z.T),
            "scales": torch.from_numpy(scale.T.copy()).half(),
        }
        return tensors, (q - spread(z, width, size_K)) * spread(scale, width, size_K)

    return make


def gptq(
    bits: int, group: int | None, less: int, symmetric: bool, act_order: bool = False
) -> Callable[[np.random.Generator, int, int], Made]:
    """`less`: the number by which stored zero points are too small."""

    def make(rng: np.random.Generator, size_N: int, size_K: int) -> Made:
        width, top = group or size_K, 1 << bits
        groups = size_K // width
        index = np.arange(size_K) // width
        if act_order:
            rng.shuffle(index)
        q = rng.integers(0, top, (size_N, size_K))
        z = np.full((size_N, groups), top // 2)
        if not symmetric:
            z = rng.integers(less, top, (size_N, groups))
        scale = scales16(rng, (size_N, groups))
        tensors = {
            "qweight": words(q, bits).t().contiguous(),
            "qzeros": words(z.T - less, bits),
            "scales": torch.from_numpy(scale.T.copy()).half(),
            "g_idx": torch.from_numpy(index.astype(np.int32)),
        }
        return tensors, (q - z[:, index]) * scale[:, index]

    return make


def nvfp4(compressed: bool) -> Callable[[np.random.Generator, int, int], Made]:
    def make(rng: np.random.Generator, size_N: int, size_K: int) -> Made:
        codes = rng.integers(0, 16, (size_N, size_K))
        blocks = random_e4m3(rng, (size_N, size_K // 16), positive=True)
        # A power of two has an exact reciprocal.
        whole = np.float32(2.0**-12)
        factor = floats8(blocks) * whole
        values = np.array(E2M1)[codes] * spread(factor, 16, size_K)
        if compressed:
            return {
                "weight_packed": pairs(codes),
                "weight_scale": as_fp8(blocks),
                "weight_global_scale": torch.tensor([1 / whole]),
                "input_global_scale": torch.tensor([8.0]),
            }, values
        return {
            "weight": pairs(codes),
            "weight_scale": as_fp8(blocks),
            "weight_scale_2": torch.tensor(whole),
            "input_scale": torch.tensor(0.125),
        }, values

    return make


def mxfp4(rng: np.random.Generator, size_N: int, size_K: int) -> Made:
    """compressed-tensors: a byte holds two columns, a scale is an exponent plus 127."""
    codes = rng.integers(0, 16, (size_N, size_K))
    exponents = rng.integers(100, 140, (size_N, size_K // 32))
    values = np.zeros((size_N, size_K))
    for n, k in np.ndindex(size_N, size_K):
        values[n, k] = E2M1[codes[n, k]] * 2.0 ** (int(exponents[n, k // 32]) - 127)
    scale = torch.from_numpy(exponents.astype(np.uint8))
    return {"weight_packed": pairs(codes), "weight_scale": scale}, values


def mxfp4_stack(rng: np.random.Generator, experts: int, rows: int, cols: int) -> Made:
    """The X_blocks and X_scales of a whole stack."""
    codes = rng.integers(0, 16, (experts, rows, cols // 32, 32))
    exponents = rng.integers(100, 140, (experts, rows, cols // 32))
    values = np.array(E2M1)[codes] * np.exp2(exponents - 127.0)[..., None]
    tensors = {"blocks": pairs(codes), "scales": torch.from_numpy(exponents.astype(np.uint8))}
    return tensors, values.reshape(experts, rows, cols)


def compressed(format: str, kind: str, bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True}
    weights |= {key: value for key, value in more.items() if key != "acts"}
    acts = {"num_bits": bits, "type": kind, "dynamic": True} if more.get("acts") else None
    group = {"targets": ["Linear"], "weights": weights, "input_activations": acts}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
    }


def _gptq_config(bits: int, group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, **more}


FP8_DYNAMIC = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
PACK, FLOAT, INT = "pack-quantized", "float-quantized", "int-quantized"
AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "GEMM"}
MXFP4_PACK = "mxfp4-pack-quantized"
MXFP4 = compressed(MXFP4_PACK, "float", 4, "group", group_size=32, scale_dtype="torch.uint8")
MXFP4_GROUP = MXFP4["config_groups"]["group_0"]
RAGGED = {"shape": (200, 300), "cut": (slice(128, 200), slice(128, 256))}

FORMATS = {
    "fp8 block": DiskFormat(
        FP8_DYNAMIC | {"weight_block_size": [128, 128]}, fp8_block, "fp8_block", **RAGGED
    ),
    "fp8 block by default": DiskFormat(FP8_DYNAMIC, fp8_block, "fp8_block", **RAGGED),
    "fp8 tensor": DiskFormat(
        {"quant_method": "fp8", "activation_scheme": "static"},
        fp8_scaled("weight_scale", False, lambda scale: scale.view(())),
        "fp8_tensor",
    ),
    "fp8 tensor of transformers": DiskFormat(
        FP8_DYNAMIC | {"weight_block_size": None},
        fp8_scaled("weight_scale_inv", False, lambda scale: scale.view(1)),
        "fp8_tensor",
    ),
    "modelopt fp8": DiskFormat(
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        fp8_scaled("weight_scale", False, lambda scale: scale.view(())),
        "fp8_tensor",
    ),
    "ct fp8 channel": DiskFormat(
        compressed(FLOAT, "float", 8, "channel", acts=True),
        fp8_scaled("weight_scale", True, lambda scale: scale),
        "fp8_channel",
    ),
    "ct fp8 weight only": DiskFormat(
        compressed("naive-quantized", "float", 8, "tensor"),
        fp8_scaled("weight_scale", False, lambda scale: scale.view(1)),
        "fp8_tensor",
    ),
    "ct int8 w8a8": DiskFormat(compressed(INT, "int", 8, "channel", acts=True), int8, "int8_w8a8"),
    "ct int8 w8a16": DiskFormat(
        compressed(PACK, "int", 8, "channel"), packed(8, None, True), "int8_w8a16"
    ),
    "ct int8 groups": DiskFormat(
        compressed(PACK, "int", 8, "group", group_size=32), packed(8, 32, True), None
    ),
    "ct int8 zeros": DiskFormat(
        compressed(PACK, "int", 8, "channel", symmetric=False), packed(8, None, False), None
    ),
    "ct int4": DiskFormat(
        compressed(PACK, "int", 4, "group", group_size=32), packed(4, 32, True), "int4_w4a16"
    ),
    "ct int4 zeros": DiskFormat(
        compressed(PACK, "int", 4, "group", group_size=32, symmetric=False),
        packed(4, 32, False),
        "int4_w4a16",
        cut=(slice(4, 20), slice(32, 64)),
    ),
    "ct int4 channel": DiskFormat(
        compressed(PACK, "int", 4, "channel"), packed(4, None, True), "int4_w4a16"
    ),
    "ct int4 in bytes": DiskFormat(
        compressed(INT, "int", 4, "group", group_size=32), int4_bytes(True), "int4_w4a16"
    ),
    "ct int4 zeros in bytes": DiskFormat(
        compressed(INT, "int", 4, "group", group_size=32, symmetric=False),
        int4_bytes(False),
        "int4_w4a16",
    ),
    "awq": DiskFormat(
        AWQ | {"group_size": 32}, awq(32), "int4_w4a16", cut=(slice(4, 20), slice(32, 64))
    ),
    "awq whole rows": DiskFormat(AWQ | {"group_size": -1}, awq(None), "int4_w4a16"),
    "gptq": DiskFormat(_gptq_config(4, 32, desc_act=False), gptq(4, 32, 1, True), "int4_w4a16"),
    "gptq v1 zeros": DiskFormat(
        _gptq_config(4, 32, sym=False, checkpoint_format="gptq"),
        gptq(4, 32, 1, False),
        "int4_w4a16",
        cut=(slice(4, 20), slice(32, 64)),
    ),
    "gptq v2 zeros": DiskFormat(
        _gptq_config(4, 32, sym=False, checkpoint_format="gptq_v2"),
        gptq(4, 32, 0, False),
        "int4_w4a16",
    ),
    "gptq whole rows": DiskFormat(_gptq_config(4, -1), gptq(4, None, 1, True), "int4_w4a16"),
    "gptq order": DiskFormat(
        _gptq_config(4, 32, desc_act=True), gptq(4, 32, 1, True, act_order=True), None
    ),
    "gptq int8": DiskFormat(_gptq_config(8, -1), gptq(8, None, 1, True), "int8_w8a16"),
    "gptq int8 groups": DiskFormat(_gptq_config(8, 32), gptq(8, 32, 1, True), None),
    "gptq int8 order": DiskFormat(
        _gptq_config(8, 32, desc_act=True, sym=False, checkpoint_format="gptq_v2"),
        gptq(8, 32, 0, False, act_order=True),
        None,
    ),
    "modelopt nvfp4": DiskFormat(
        {"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4(False), "nvfp4"
    ),
    "ct nvfp4": DiskFormat(
        compressed("nvfp4-pack-quantized", "float", 4, "tensor_group", group_size=16, acts=True),
        nvfp4(True),
        "nvfp4",
    ),
    "ct mxfp4": DiskFormat(MXFP4, mxfp4, "mxfp4"),
    "ct mxfp4 of a group": DiskFormat(
        MXFP4 | {"format": None, "config_groups": {"all": MXFP4_GROUP | {"format": MXFP4_PACK}}},
        mxfp4,
        "mxfp4",
        cut=(slice(5, 48), slice(64, 96)),
    ),
}
