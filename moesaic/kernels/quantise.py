"""8-bit activations with scales, and the gated activation that precedes them.

T tokens · H channels · J = 2 * I channels of gate and up side by side · G groups of 128 channels.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.kernels.native import native

QUANTISE = "moesaic.kernels.triton.quantise"
FP8_GROUP = 128
FP8_MAX = 448.0
INT8_MAX = 127.0
TINY = torch.finfo(torch.float32).tiny

RowFormat = Literal["fp8", "int8"]


@native(QUANTISE)
def quantise_rows(
    x_TH: Tensor, format: RowFormat, by_column: bool = False
) -> tuple[Tensor, Tensor]:
    """Values [T, H] and float32 scales: [T, G] by 128 channels for fp8 (e4m3; the last group may be
    smaller), [T, 1] by row for int8.

    The largest value of a group becomes 448 or 127. A group of zeros has scale 1, one with a NaN or
    an infinity scale NaN. int8 of [[1, -0.5, 0.25]]: [[127, -64, 32]], scale 1 / 127.

    `by_column`: fp8 scales are stored by column, [T, G] with strides (1, T), for other kernels than
    ours.
    """
    x_TH = x_TH.float()
    if format == "int8":
        scales_T1 = absmax_scales(x_TH.abs().amax(-1, keepdim=True), INT8_MAX)
        scaled_TH = (x_TH / scales_T1).round_().clamp_(-INT8_MAX, INT8_MAX)
        return scaled_TH.nan_to_num_(0).to(torch.int8), scales_T1
    size = x_TH.shape[-1]
    grouped = F.pad(x_TH, (0, -size % FP8_GROUP)).unflatten(-1, (-1, FP8_GROUP))
    scales_TG = absmax_scales(grouped.abs().amax(-1), FP8_MAX)
    scaled = (grouped / scales_TG.unsqueeze(-1)).clamp_(-FP8_MAX, FP8_MAX)
    if by_column:
        scales_TG = scales_TG.t().contiguous().t()
    return scaled.flatten(-2)[:, :size].to(torch.float8_e4m3fn).contiguous(), scales_TG


@native(QUANTISE)
def silu_mul(gate_up_TJ: Tensor) -> Tensor:
    """silu of the first half of the channels, times the second half: [T, I].

    [0, 1, 5, 2]: silu(0) * 5 = 0, silu(1) * 2 = 1.4621.
    """
    return silu_and_mul(*gate_up_TJ.chunk(2, dim=-1))


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Computes every element alike; F.silu treats a float32 tensor's last elements differently."""
    silu = gate / (1 + torch.exp(-gate)) if gate.dtype == torch.float32 else F.silu(gate)
    return silu * up


def absmax_scales(amax: Tensor, largest: float) -> Tensor:
    """Scales that map `amax` to `largest`; 1 for zeros, NaN if `amax` is not finite.

    Clamped to the smallest normal number, whose reciprocal and products are exact enough. The
    divisor is a tensor, as CUDA multiplies by the reciprocal of a plain number, which changes bits.
    """
    scales = (amax / torch.full_like(amax, largest)).clamp_(min=TINY)
    return scales.masked_fill_(amax == 0, 1.0).masked_fill_(~amax.isfinite(), torch.nan)
