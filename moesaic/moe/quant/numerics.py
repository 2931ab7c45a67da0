"""Number formats: from float tensors to values with scales, and back.

N rows · K columns · any number of dimensions before them.
Encoders compute in float32. Decoders compute in float32, round once to the type of `out` (float32
where there is none) and may be given a part of a larger tensor. A block of zeros has scale 1. A
block that holds a NaN or an infinity has scale NaN: all of it decodes to NaN, its neighbours do not
notice. Pairs share a byte with the even column in the low half.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.kernels.formats import FP4_GRID as FP4_GRID
from moesaic.kernels.formats import FP4_MAX as FP4_MAX
from moesaic.kernels.formats import NVFP4_GROUP as NVFP4_GROUP
from moesaic.kernels.payloads import MXFP4_GROUP as MXFP4_GROUP
from moesaic.kernels.payloads import encode_fp4 as encode_fp4
from moesaic.kernels.payloads import encode_mxfp4 as encode_mxfp4
from moesaic.kernels.payloads import encode_nvfp4 as encode_nvfp4
from moesaic.kernels.payloads import in_groups, pack_pairs
from moesaic.kernels.payloads import mxfp4_scales as mxfp4_scales
from moesaic.kernels.quantise import FP8_MAX as FP8_MAX
from moesaic.kernels.quantise import TINY as TINY
from moesaic.kernels.quantise import absmax_scales as absmax_scales

FP8 = torch.float8_e4m3fn
INT8_MAX = 127.0
INT4_MAX = 15.0
INT4_ZERO = 8


def encode_fp8(w_NK: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    """e4m3 values [N, K] and one float32 scale per block of (rows, cols).

    The last blocks may be smaller. Example with blocks of (1, 2): [[448, 1, -4]] -> values
    [[448, 1, -448]] (bytes 7E 38 FE), scales [[1, 4 / 448]].
    """
    size_N, size_K = w_NK.shape[-2:]
    padding = (0, -size_K % cols, 0, -size_N % rows)
    padded = F.pad(w_NK.float(), padding) if any(padding) else w_NK.float()
    blocks = _blocks(padded, rows, cols)
    scales = absmax_scales(blocks.abs().amax((-3, -1)), FP8_MAX)
    scaled = blocks / scales[..., :, None, :, None]
    scaled = scaled.flatten(-2, -1).flatten(-3, -2)[..., :size_N, :size_K]
    return _to_fp8(scaled.contiguous()), scales


def decode_fp8(
    values: Tensor, scales: Tensor, rows: int, cols: int, out: Tensor | None = None
) -> Tensor:
    size_N, size_K = values.shape[-2:]

    def fill(work: Tensor) -> None:
        _fp8_to_float(values, work)
        if size_N % rows or size_K % cols:
            work.mul_(spread(scales, rows, cols, size_N, size_K))
        else:
            _blocks(work, rows, cols).mul_(scales[..., :, None, :, None])

    return _decoded(values.shape, values.device, out, fill)


def encode_int8(w_NK: Tensor) -> tuple[Tensor, Tensor]:
    """int8 values [N, K] in -127..127 and one float32 scale per row [N, 1]."""
    w_NK = w_NK.float()
    scales = absmax_scales(w_NK.abs().amax(-1, keepdim=True), INT8_MAX)
    scaled = (w_NK / scales).round_().clamp_(-INT8_MAX, INT8_MAX)
    return scaled.nan_to_num_(0).to(torch.int8), scales


def decode_int8(values: Tensor, scales: Tensor, out: Tensor | None = None) -> Tensor:
    return _decoded(values.shape, values.device, out, lambda work: work.copy_(values).mul_(scales))


def encode_int4(w_NK: Tensor, group: int, symmetric: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Bytes [N, K / 2], float32 scales and uint8 zeros [N, K / group]: w = (q - zero) * scale.

    Symmetric groups have zero 8 and use q in 1..15; the others stretch from the smallest to the
    largest value (or to zero, which is always exact) over q in 0..15.
    Example with groups of 4: [[-7, 7, 1, 0]] -> q [1, 15, 9, 8], bytes F1 89, scale 1, zero 8.
    """
    grouped = in_groups(w_NK.float(), group)
    if symmetric:
        scales = absmax_scales(grouped.abs().amax(-1), INT4_MAX - INT4_ZERO)
        zeros = torch.full_like(scales, INT4_ZERO)
    else:
        low, high = grouped.amin(-1).clamp_(max=0), grouped.amax(-1).clamp_(min=0)
        # Halved first: the difference of two huge numbers may be infinite.
        scales = absmax_scales(high * 0.5 - low * 0.5, INT4_MAX / 2)
        zeros = (-low / scales).round_().clamp_(0, INT4_MAX).nan_to_num_(0)
    q = (grouped / scales.unsqueeze(-1)).round_().add_(zeros.unsqueeze(-1)).clamp_(0, INT4_MAX)
    return pack_pairs(q.nan_to_num_(0).to(torch.uint8).flatten(-2)), scales, zeros.to(torch.uint8)


def decode_int4(packed: Tensor, scales: Tensor, zeros: Tensor, out: Tensor | None = None) -> Tensor:
    nibbles = unpack(packed)
    group = nibbles.shape[-1] // scales.shape[-1]
    # Differences are taken as bytes, a quarter of the traffic of floats.
    offsets = in_groups(nibbles.view(torch.int8), group).sub_(zeros.view(torch.int8).unsqueeze(-1))

    def fill(work: Tensor) -> None:
        in_groups(work, group).copy_(offsets).mul_(scales.unsqueeze(-1))

    return _decoded(nibbles.shape, packed.device, out, fill)


def decode_fp4(packed: Tensor, out: Tensor | None = None) -> Tensor:
    shape = torch.Size((*packed.shape[:-1], packed.shape[-1] * 2))
    return _decoded(shape, packed.device, out, lambda work: _fp4_to_float(packed, work))


def decode_nvfp4(
    packed: Tensor, scales: Tensor, global_scale: Tensor | float, out: Tensor | None = None
) -> Tensor:
    return _decode_scaled_fp4(packed, nvfp4_scales(scales, global_scale), out)


def nvfp4_scales(scales: Tensor, global_scale: Tensor | float) -> Tensor:
    """What fp4 numbers are multiplied with, in float32: both scales in one, rounded."""
    floats = torch.empty(scales.shape, dtype=torch.float32, device=scales.device)
    return _fp8_to_float(scales, floats).mul_(global_scale)


def decode_mxfp4(packed: Tensor, scales: Tensor, out: Tensor | None = None) -> Tensor:
    return _decode_scaled_fp4(packed, mxfp4_scales(scales), out)


def spread(scales: Tensor, rows: int, cols: int, size_N: int, size_K: int) -> Tensor:
    """One scale per block of (rows, cols) -> one per element [N, K]."""
    by_row = scales.repeat_interleave(rows, -2)[..., :size_N, :]
    return by_row.repeat_interleave(cols, -1)[..., :size_K]


def unpack(packed: Tensor) -> Tensor:
    """Bytes [N, K / 2] -> nibbles [N, K] as uint8, through 16 bits that hold both."""
    pairs = packed.contiguous().to(torch.int16)
    pairs.bitwise_or_(pairs * 16).bitwise_and_(0x0F0F)
    return pairs.view(torch.uint8)


def _blocks(w_NK: Tensor, rows: int, cols: int) -> Tensor:
    """[N, K] -> [N / rows, rows, K / cols, cols]."""
    return in_groups(w_NK, cols).unflatten(-3, (w_NK.shape[-2] // rows, rows))


def _decoded(
    shape: torch.Size, device: torch.device, out: Tensor | None, fill: Callable[[Tensor], object]
) -> Tensor:
    """`fill` gets a contiguous float32 tensor: `out` itself where it is one."""
    assert out is None or out.shape == shape, f"out is {tuple(out.shape)}, not {tuple(shape)}"
    if out is not None and out.dtype == torch.float32 and out.is_contiguous():
        fill(out)
        return out
    work = torch.empty(shape, dtype=torch.float32, device=device)
    fill(work)
    return work if out is None else out.copy_(work)


def _decode_scaled_fp4(packed: Tensor, scales: Tensor, out: Tensor | None) -> Tensor:
    shape = torch.Size((*packed.shape[:-1], packed.shape[-1] * 2))

    def fill(work: Tensor) -> None:
        _fp4_to_float(packed, work)
        in_groups(work, shape[-1] // scales.shape[-1]).mul_(scales.unsqueeze(-1))

    return _decoded(shape, packed.device, out, fill)


def _to_fp8(x: Tensor) -> Tensor:
    """Clamped first: what torch does beyond 448 depends on its version and device."""
    return x.clamp_(-FP8_MAX, FP8_MAX).to(FP8)


def _fp8_to_float(values: Tensor, out: Tensor) -> Tensor:
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


def _fp4_to_float(packed: Tensor, out: Tensor) -> Tensor:
    """`out` is contiguous float32. A byte's two numbers are looked up as one int64."""
    table = _fp4_pair_table(packed.device)
    index = packed.flatten().int()
    torch.index_select(table, 0, index, out=out.flatten().view(torch.int64))
    return out


@cache
def _fp8_table() -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(FP8).float()


@cache
def _fp8_pair_table() -> Tensor:
    pairs = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
    return pairs.view(FP8).float().view(torch.int64)


@cache
def _fp4_pair_table(device: torch.device) -> Tensor:
    numbers = torch.tensor(FP4_GRID + tuple(-x for x in FP4_GRID))
    byte = torch.arange(256)
    pairs = torch.stack((numbers[byte % 16], numbers[byte // 16]), -1)
    return pairs.view(torch.int64).flatten().to(device)
