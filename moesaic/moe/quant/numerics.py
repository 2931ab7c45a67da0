"""Number formats: what codecs and checkpoint schemes share.

N rows · K columns · any number of dimensions before them.
Numbers of four bits share a byte in pairs, with the even column in the low half.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from moesaic.kernels.formats import FP4_GRID as FP4_GRID
from moesaic.kernels.formats import FP4_MAX as FP4_MAX
from moesaic.kernels.formats import NVFP4_GROUP as NVFP4_GROUP
from moesaic.kernels.payloads import MXFP4_GROUP as MXFP4_GROUP
from moesaic.kernels.payloads import encode_mxfp4 as encode_mxfp4
from moesaic.kernels.payloads import encode_nvfp4 as encode_nvfp4
from moesaic.kernels.payloads import mxfp4_scales as mxfp4_scales
from moesaic.kernels.quantise import FP8_MAX as FP8_MAX
from moesaic.kernels.quantise import absmax_scales as absmax_scales

FP8 = torch.float8_e4m3fn
INT8_MAX = 127.0
INT4_MAX = 15.0
INT4_ZERO = 8


def spread(scales: Tensor, rows: int, cols: int, like_NK: Tensor) -> Tensor:
    """One scale per block of (rows, cols), or with 0 of all columns -> one per element [N, K]."""
    size_N, size_K = like_NK.shape[-2:]
    by_row = scales.repeat_interleave(rows, -2)[..., :size_N, :]
    return by_row.repeat_interleave(cols or size_K, -1)[..., :size_K]


def unpack(packed: Tensor) -> Tensor:
    """Bytes [N, K / 2] -> nibbles [N, K] as uint8, through 16 bits that hold both."""
    pairs = packed.contiguous().to(torch.int16)
    pairs.bitwise_or_(pairs * 16).bitwise_and_(0x0F0F)
    return pairs.view(torch.uint8)


def fp8_to_float(values: Tensor, out: Tensor) -> Tensor:
    """`out` is contiguous float32.

    On CPU torch converts float8 element by element, five times slower than looking up two at once.
    """
    if not values.is_cpu:
        return out.copy_(values)
    flat = values.contiguous().flatten()
    if len(flat) % 2 or flat.storage_offset() % 2:
        index = flat.view(torch.uint8).int()
        torch.index_select(_fp8_table(), 0, index, out=out.flatten())
    else:
        index = flat.view(torch.uint16).int()
        torch.index_select(_fp8_pair_table(), 0, index, out=out.flatten().view(torch.int64))
    return out


def fp4_to_float(packed: Tensor, out: Tensor) -> Tensor:
    """`out` is contiguous float32. A byte's two numbers are looked up as one int64."""
    table = _fp4_pair_table(packed.device)
    index = packed.flatten().int()
    torch.index_select(table, 0, index, out=out.flatten().view(torch.int64))
    return out


@cache
def _fp8_table() -> Tensor:
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(FP8).float()


@cache
def _fp8_pair_table() -> Tensor:
    pairs = torch.arange(65536, dtype=torch.int32, device="cpu").to(torch.uint16)
    return pairs.view(FP8).float().view(torch.int64)


@cache
def _fp4_pair_table(device: torch.device) -> Tensor:
    numbers = torch.tensor(FP4_GRID + tuple(-x for x in FP4_GRID), device="cpu")
    byte = torch.arange(256, device="cpu")
    pairs = torch.stack((numbers[byte % 16], numbers[byte // 16]), -1)
    return pairs.view(torch.int64).flatten().to(device)
