"""8-bit activations with scales; twins in kernels/quantise.py.

Divisions are exact (div_rn): values have the same bits as those of the weight encoders.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.quantise import FP8_GROUP, RowFormat
from moesaic.kernels.triton.launch import (
    INTERPRETED,
    await_inputs,
    dependent_launch,
    release_next,
)


@dataclass(frozen=True, slots=True)
class QuantiseTile:
    """A program's rows and groups of 128 channels, fewer if they do not divide a row evenly."""

    rows: int
    groups: int
    warps: int


# From this many rows on there are enough programs for wider tiles.
MANY_ROWS = 1024
FEW = QuantiseTile(rows=1, groups=16, warps=8)
MANY = QuantiseTile(rows=2, groups=16, warps=4)
TINY = tl.constexpr(1.1754943508222875e-38)
# Adding and subtracting it rounds a float32 below 2**22 to an integer, ties to even.
ROUNDER = tl.constexpr(12582912.0)
# Smaller scales are multiplied by LIFT, so that remainders do not underflow.
SMALL = tl.constexpr(2.0**-60)
LIFT = tl.constexpr(2.0**64)
SILU_CHANNELS = 1024


@triton.jit
def absmax_scales(amax, finite, LARGEST: tl.constexpr):
    """`finite`: 0 if any value is NaN, which a maximum may miss."""
    scales = tl.maximum(tl.math.div_rn(amax, tl.full(amax.shape, LARGEST, tl.float32)), TINY)
    scales = tl.where(amax == 0, 1.0, scales)
    return tl.where((finite != 0) & (amax < float("inf")), scales, float("nan"))


@triton.jit
def fp8_scales(amax, finite):
    return absmax_scales(amax, finite, 448.0)


@triton.jit
def to_fp8(x, scales):
    return as_fp8(divide(x, scales))


@triton.jit
def divide(x, scales):
    """Rounds like a division of normal numbers, but with one reciprocal for each scale: a first
    quotient, corrected by its remainder. The remainder is exact in float32 unless it underflows,
    which LIFT prevents. A zero loses its sign."""
    if INTERPRETED:
        # The interpreter rounds the product inside an fma.
        return tl.math.div_rn(x, tl.broadcast_to(scales, x.shape))
    else:
        lift = tl.where(scales < SMALL, LIFT, 1.0)
        x, scales = x * lift, scales * lift
        inverse = tl.math.div_rn(tl.full(scales.shape, 1.0, tl.float32), scales)
        inverse = tl.broadcast_to(inverse, x.shape)
        first = x * inverse
        rest = tl.fma(first, tl.broadcast_to(-scales, x.shape), x)
        return tl.fma(rest, inverse, first)


@triton.jit
def as_fp8(scaled):
    """Keeps NaN."""
    limited = tl.clamp(scaled, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    if INTERPRETED:
        limited = _round_to_e4m3(limited)
    return limited.to(tl.float8e4nv)


@triton.jit
def _round_to_e4m3(x):
    """Rounds to nearest, ties to even; the interpreter's conversion does not."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    small = (x + 24576.0) - 24576.0  # steps of 2**-9
    rounded = tl.where(tl.abs(x) < 0.015625, small, bits.to(tl.float32, bitcast=True))
    return tl.where(x == x, rounded, x)


@triton.jit
def to_int8(x, scales):
    """Maps NaN to 0."""
    scaled = tl.math.div_rn(x, tl.broadcast_to(scales, x.shape))
    rounded = (tl.where(scaled == scaled, scaled, 0.0) + ROUNDER) - ROUNDER
    return tl.minimum(tl.maximum(rounded, -127.0), 127.0).to(tl.int8)


@triton.jit
def silu_times(gate, up, DTYPE: tl.constexpr):
    """Rounds to DTYPE, as storing a tensor of that type does."""
    gate = gate.to(tl.float32)
    return (gate / (1 + tl.exp(-gate)) * up.to(tl.float32)).to(DTYPE)


@triton.jit
def _fp8_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    stride,
    rows,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantises ROWS rows of GROUPS groups; neighbouring programs share a row."""
    ALL: tl.constexpr = (SIZE + 127) // 128
    ACROSS: tl.constexpr = (ALL + GROUPS - 1) // GROUPS
    place = tl.arange(0, ROWS * GROUPS)
    row = tl.program_id(0) // ACROSS * ROWS + place // GROUPS
    group = tl.program_id(0) % ACROSS * GROUPS + place % GROUPS
    channel = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    mask = (row < rows)[:, None] & (channel < SIZE)
    # Waits first: as soon as it is released, `gate_up` reads the experts' lists, which the kernel
    # before this one writes.
    await_inputs(PDL)
    release_next(PDL)
    row = row.to(tl.int64)
    x = tl.load(x_ptr + (row * stride)[:, None] + channel, mask, 0.0).to(tl.float32)
    # As an integer, NaN is the largest value.
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    scales = fp8_scales(bits.to(tl.float32, bitcast=True), 1)
    spot = group.to(tl.int64) * rows + row if BY_COLUMN else row * ALL + group
    tl.store(scales_ptr + spot, scales, (row < rows) & (group < ALL))
    tl.store(values_ptr + (row * SIZE)[:, None] + channel, to_fp8(x, scales[:, None]), mask)


@triton.jit
def _int8_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    mask = channel < SIZE
    await_inputs(PDL)
    release_next(PDL)
    x = tl.load(x_ptr + row * stride + channel, mask, 0.0).to(tl.float32)
    scale = absmax_scales(tl.max(tl.abs(x), 0), tl.min(tl.where(x == x, 1, 0), 0), 127.0)
    tl.store(scales_ptr + row, scale)
    tl.store(values_ptr + row * SIZE + channel, to_int8(x, scale), mask)


@triton.jit
def _silu_mul_kernel(
    x_ptr, out_ptr, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < SIZE
    await_inputs(PDL)
    release_next(PDL)
    gate = tl.load(x_ptr + row * stride + channel, mask, 0.0)
    up = tl.load(x_ptr + row * stride + SIZE + channel, mask, 0.0)
    y = silu_times(gate, up, x_ptr.dtype.element_ty)
    tl.store(out_ptr + row * SIZE + channel, y, mask)


def silu_mul(gate_up_TJ: Tensor) -> Tensor:
    rows, size = len(gate_up_TJ), gate_up_TJ.shape[1] // 2
    out_TI = torch.empty(rows, size, dtype=gate_up_TJ.dtype, device=gate_up_TJ.device)
    if not rows:
        return out_TI
    x_TJ, pdl = _row_contiguous(gate_up_TJ), dependent_launch(gate_up_TJ)
    block = min(SILU_CHANNELS, triton.next_power_of_2(size))
    _silu_mul_kernel[(rows, triton.cdiv(size, block))](
        x_TJ, out_TI, x_TJ.stride(0), SIZE=size, BLOCK=block, PDL=pdl.on, **pdl.options
    )
    return out_TI


def quantise_rows(
    x_TH: Tensor, format: RowFormat, by_column: bool = False
) -> tuple[Tensor, Tensor]:
    (rows, size), device, pdl = x_TH.shape, x_TH.device, dependent_launch(x_TH)
    x = _row_contiguous(x_TH)
    fixed = {"SIZE": size, "PDL": pdl.on, **pdl.options}
    if format == "int8":
        values = torch.empty(rows, size, dtype=torch.int8, device=device)
        scales = torch.empty(rows, 1, device=device)
        if rows:
            block = triton.next_power_of_2(size)
            warps = min(16, max(1, block // 256))
            grid = (rows,)
            _int8_kernel[grid](
                x, values, scales, x.stride(0), BLOCK=block, num_warps=warps, **fixed
            )
        return values, scales
    groups = triton.cdiv(size, FP8_GROUP)
    values = torch.empty(rows, size, dtype=torch.float8_e4m3fn, device=device)
    shape = (groups, rows) if by_column else (rows, groups)
    scales = torch.empty(shape, device=device)
    if rows:
        tile = fp8_tile(rows, groups)
        grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(groups, tile.groups),)
        _fp8_kernel[grid](
            x, values, scales, x.stride(0), rows,
            ROWS=tile.rows, GROUPS=tile.groups, BY_COLUMN=by_column, num_warps=tile.warps,
            **fixed,
        )  # fmt: skip
    return values, scales.t() if by_column else scales


def fp8_tile(rows: int, groups: int) -> QuantiseTile:
    """The planned number of elements, with the largest even share of a row's groups, or half."""
    tile = MANY if rows >= MANY_ROWS else FEW
    even = groups & -groups
    across = min(tile.groups, max(even, tile.groups // 2), triton.next_power_of_2(groups))
    down = tile.rows * tile.groups // across if tile is MANY else tile.rows
    warps = max(1, tile.warps * down * across // (tile.rows * tile.groups))
    return QuantiseTile(down, across, warps)


def _row_contiguous(x: Tensor) -> Tensor:
    """Makes the channels of a row contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()
