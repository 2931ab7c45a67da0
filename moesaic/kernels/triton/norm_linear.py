"""The norm of one row and the following product in one kernel; the twin is in kernels/linear.py.

I inputs · O outputs. As in `_one_row` of linear.py, every program has few outputs and all inputs,
and loads its weights before the row is available. It norms the row itself, which takes less time
than another launch. The bits are those of `add_rms_norm` and `_one_row` with the same tile, which
handle all other cases.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.experts import PairSum
from moesaic.kernels.norm import SumToNorm
from moesaic.kernels.triton.launch import (
    await_inputs,
    dependent_launch,
    prefetch_lines,
    release_next,
)
from moesaic.kernels.triton.linear import LinearTile, filled, linear, matrix_rows, store_tile
from moesaic.kernels.triton.norm import add_rms_norm, tiling

# By the padded inputs; others use two kernels. Tiles hold whole matrix rows; wider ones norm the
# row fewer times.
TILES = {2048: LinearTile(1, 8, 2048, 4, registers=96)}
# Channels that a warp of `_norm_kernel` sums: 8 a thread.
WARP_CHANNELS = tl.constexpr(256)


@triton.jit
def _sum_of_squares(x_I, INPUTS: tl.constexpr, WARPS: tl.constexpr):
    """Adds in the order of `_norm_kernel`, which has more warps: 8 in a thread, 32 threads, then
    the warps of the upper half to those of the lower one."""
    squares = tl.reshape(x_I * x_I, [INPUTS // 8, 8])
    sums = tl.sum(tl.reshape(tl.sum(squares, 1), [INPUTS // WARP_CHANNELS, 32]), 1)
    HALVES: tl.constexpr = INPUTS // WARP_CHANNELS // WARPS
    tl.static_assert(HALVES <= 4)
    if HALVES == 4:
        sums = tl.sum(tl.reshape(sums, [2, 2 * WARPS]), 0)
    if HALVES >= 2:
        sums = tl.sum(tl.reshape(sums, [2, WARPS]), 0)
    return tl.sum(sums, 0)


@triton.jit
def _prefetch_norm(norm, tile, H: tl.constexpr, BLOCK_I: tl.constexpr, PDL: tl.constexpr):
    """One program prefetches the norm's weights: registers do not suffice to load them early."""
    if PDL and tile == 0:
        LINE: tl.constexpr = 1024 // norm.dtype.element_ty.primitive_bitwidth
        prefetch_lines(norm + tl.minimum(tl.arange(0, BLOCK_I // LINE) * LINE, H - 1))


@triton.jit
def _normed(
    x, residual, norm, sums, eps, keep,
    H: tl.constexpr, BLOCK_I: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Norms the row's sum with the residual as `_norm_kernel` does; `keep`: stores the sum."""
    TYPE: tl.constexpr = sums.dtype.element_ty
    i = tl.arange(0, BLOCK_I)
    inside = i < H
    norm_I = tl.load(norm + i, inside, 0.0)
    before = tl.load(residual + i, inside, 0.0)
    x_I = tl.load(x + i, inside, 0.0)
    sum_I = (before.to(tl.float32) + x_I.to(tl.float32)).to(TYPE)
    tl.store(sums + i, sum_I, inside & keep)
    x_I = sum_I.to(tl.float32)
    mean = _sum_of_squares(x_I, BLOCK_I, WARPS) / H
    return (x_I * tl.math.rsqrt(mean + eps) * norm_I.to(tl.float32)).to(TYPE).to(tl.float32)


@triton.jit
def _norm_product(
    x, residual, norm, eps, w, bias, y, sums, num_outputs,
    H: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
    WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    row_O = matrix_rows(tile * BLOCK_O, num_outputs, BLOCK_O, False)
    i = tl.arange(0, BLOCK_I)
    w_at = w + row_O.to(tl.int64)[:, None] * H + i[None, :]
    release_next(PDL)
    if H == BLOCK_I:
        w_OI = tl.load(w_at)
    else:
        w_OI = tl.load(w_at, mask=(i < H)[None, :], other=0.0)
    _prefetch_norm(norm, tile, H, BLOCK_I, PDL)
    await_inputs(PDL)
    x_I = _normed(x, residual, norm, sums, eps, tile == 0, H, BLOCK_I, WARPS)
    acc_1O = tl.sum(w_OI.to(tl.float32) * x_I[None, :], 1)[None, :]
    store_tile(y, bias, acc_1O, tile, 1, num_outputs, 1, BLOCK_O, False)


def norm_linear(
    rows: SumToNorm, weight_OI: Tensor, bias_O: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    tile = tile_for(rows, weight_OI)
    if tile is None:
        normed_TH, sum_TH = add_rms_norm(rows.values, rows.residual_TH, rows.weight_H, rows.eps)
        return linear(normed_TH, weight_OI, bias_O), sum_TH
    return multiply(rows, weight_OI, bias_O, tile)


def tile_for(rows: SumToNorm, weight_OI: Tensor) -> LinearTile | None:
    """None: use two kernels."""
    inputs, dtype = weight_OI.shape[1], rows.residual_TH.dtype
    one = len(rows.residual_TH) == 1 and not isinstance(rows.values, PairSum)
    if not one or dtype.itemsize != 2 or weight_OI.dtype != dtype or not filled(inputs):
        return None
    return TILES.get(triton.next_power_of_2(inputs))


def multiply(
    rows: SumToNorm, weight_OI: Tensor, bias_O: Tensor | None, tile: LinearTile
) -> tuple[Tensor, Tensor]:
    """Multiplies one row; a tile holds whole matrix rows."""
    (outputs, inputs), x_1H, residual_1H = weight_OI.shape, rows.values, rows.residual_TH
    assert isinstance(x_1H, Tensor) and x_1H.dtype == residual_1H.dtype and len(residual_1H) == 1
    assert x_1H.is_contiguous() and residual_1H.stride(1) == 1 and weight_OI.is_contiguous()
    assert inputs <= tile.inputs and tile.inputs == tiling(inputs)["BLOCK_H"], (tile, inputs)
    # Not in place: other programs still read the residual.
    y_1O, sum_1H = residual_1H.new_empty(1, outputs), torch.empty_like(residual_1H)
    pdl = dependent_launch(x_1H)
    _norm_product[(-(-outputs // tile.outputs),)](
        x_1H, residual_1H, rows.weight_H, rows.eps, weight_OI, bias_O, y_1O, sum_1H, outputs,
        H=inputs, BLOCK_O=tile.outputs, BLOCK_I=tile.inputs, WARPS=tile.warps, PDL=pdl.on,
        num_warps=tile.warps, maxnreg=tile.registers, **pdl.options,
    )  # fmt: skip
    return y_1O, sum_1H
