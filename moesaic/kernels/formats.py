"""Four-bit weights and nvfp4 activations, as the experts' kernels compute them.

E experts · N rows · K columns of a matrix · T rows of activations · G groups of a row. Two columns
share a byte, the even one in the low half.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moesaic.kernels.native import native
from moesaic.kernels.quantise import FP8_MAX

FORMATS = "moesaic.kernels.triton.grid"
NVFP4_GROUP = 16
FP4_MAX = 6.0
FP4_GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP8_TINY = 2.0**-9


@native(FORMATS)
def nvfp4_grid(x_TK: Tensor, scale: float) -> Tensor:
    """Rounds x / scale to nvfp4 and returns it in the type of x: e2m1 times an e4m3 scale for each
    16 columns. The result has six bits of mantissa: exact in bfloat16 and float16.

    [24, -11, 7, 1, 0, …] with scale 1: the largest is 24 = 6 * 4, so the group's scale is 4: [24,
    -12, 8, 0, 0, …] (-2.75 -> -3, 1.75 -> 2, .25 -> 0). A group of zeros stays zero; one with a NaN
    or an infinity becomes NaN.
    """
    grouped = x_TK.float().unflatten(-1, (-1, NVFP4_GROUP))
    amax_TG = grouped.abs().amax(-1)
    by = torch.full_like(amax_TG, scale)  # CUDA multiplies by the reciprocal of a plain number
    wanted = (amax_TG / (by * FP4_MAX)).clamp(FP8_TINY, FP8_MAX)
    wanted = wanted.masked_fill(amax_TG == 0, 1.0).masked_fill(~amax_TG.isfinite(), torch.nan)
    scales_TG1 = wanted.to(torch.float8_e4m3fn).float().unsqueeze(-1)
    rounded = _round_fp4(grouped / (scales_TG1 * scale))
    return (rounded * scales_TG1).flatten(-2).to(x_TK.dtype)


def _round_fp4(x: Tensor) -> Tensor:
    """Rounds to the nearest of ±0, .5, 1, 1.5, 2, 3, 4, 6; ties go to the even code."""
    size = x.abs()
    by_half = (size * 2).round() / 2
    by_one = size.round()
    by_two = (size / 2).round() * 2
    rounded = torch.where(size < 2, by_half, torch.where(size < 4, by_one, by_two))
    return rounded.clamp(max=FP4_MAX).copysign(x)


def unpack(packed: Tensor) -> Tensor:
    """Bytes [N, K / 2] -> nibbles [N, K]: 21 83 -> 1, 2, 3, 8."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def spread_groups(scales: Tensor, columns: int) -> Tensor:
    """Repeats each group's scale for all its columns."""
    return scales.repeat_interleave(columns // scales.shape[-1], -1)


def _fp4(packed: Tensor) -> Tensor:
    table = torch.tensor(FP4_GRID + tuple(-x for x in FP4_GRID), device=packed.device)
    return table[unpack(packed).long()]


def dense_int4(planes: dict[str, Tensor]) -> Tensor:
    q = unpack(planes["values"]).float()
    columns = q.shape[-1]
    zeros = spread_groups(planes["zeros"].float(), columns)
    return (q - zeros) * spread_groups(planes["scales"], columns)


def dense_mxfp4(planes: dict[str, Tensor]) -> Tensor:
    values = _fp4(planes["values"])
    exponents = planes["scales"]
    scales = torch.exp2(exponents.double() - 127).float().masked_fill(exponents == 255, torch.nan)
    return values * spread_groups(scales, values.shape[-1])


def dense_nvfp4(planes: dict[str, Tensor]) -> Tensor:
    values = _fp4(planes["values"])
    scales = planes["scales"].float() * planes["global"]
    return values * spread_groups(scales, values.shape[-1])


FOUR_BITS: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {
    "int4_w4a16": dense_int4,
    "mxfp4": dense_mxfp4,
    "nvfp4": dense_nvfp4,
}
"""Decoders of an expert's planes [parts, N, …] to float32 [parts, N, K]."""
