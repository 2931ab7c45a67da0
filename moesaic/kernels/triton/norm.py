"""Root-mean-square normalisation; the twins are in kernels/norm.py."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.experts import PairSum, Rows
from moesaic.kernels.quantise import FP8_GROUP
from moesaic.kernels.triton.launch import await_inputs, dependent_launch, release_next
from moesaic.kernels.triton.quantise import fp8_scales, to_fp8
from moesaic.kernels.triton.sort import sum_few_pairs

# Channels of a thread: 16 bytes of a 16-bit type.
THREAD_CHANNELS = 8
MAX_WARPS = 16
# A program handles several short rows (heads).
TILE_CHANNELS = 1024


@triton.jit(do_not_specialize=["rows"])
def _norm_kernel(
    x_ptr,
    ids_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    sum_ptr,
    values_ptr,
    scales_ptr,
    rows,
    inner,
    stride_outer,
    stride_inner,
    stride_residual,
    eps,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    PDL: tl.constexpr,
):
    """A row of x starts at (row // inner) * stride_outer + row % inner * stride_inner. With K, x
    holds K pairs of each row, which are added as by `sum_pairs`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    channel = tl.arange(0, BLOCK_H)[None, :]
    mask = (row < rows) & (channel < H)
    weight = tl.load(weight_ptr + channel, channel < H, 0.0).to(tl.float32)
    release_next(PDL)
    await_inputs(PDL)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * stride_residual + channel, mask, 0.0)
    if K == 0:
        start = row // inner * stride_outer + row % inner * stride_inner
        x = tl.load(x_ptr + start + channel, mask, 0.0)
    else:
        x = sum_few_pairs(x_ptr, ids_ptr, row, channel, row < rows, mask, H, K)
        x = x.to(x_ptr.dtype.element_ty)
    out = row * H + channel
    if residual_ptr is not None:
        x = (residual.to(tl.float32) + x.to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + out, x, mask)
    x = x.to(tl.float32)
    mean = tl.sum(x * x, 1)[:, None] / H
    normed = x * tl.math.rsqrt(mean + eps) * weight
    normed = normed.to(x_ptr.dtype.element_ty)
    if normed_ptr is not None:
        tl.store(normed_ptr + out, normed, mask)
    else:
        GROUPS: tl.constexpr = BLOCK_H // 128
        grouped = tl.reshape(normed.to(tl.float32), (ROWS, GROUPS, 128))
        # As an integer, NaN is the largest number.
        bits = tl.max(grouped.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2)
        scales = fp8_scales(bits.to(tl.float32, bitcast=True), 1)
        group = tl.arange(0, GROUPS)[None, :]
        spot = group.to(tl.int64) * rows + row if BY_COLUMN else row * tl.cdiv(H, 128) + group
        tl.store(scales_ptr + spot, scales, (row < rows) & (group * 128 < H))
        values = tl.reshape(to_fp8(grouped, scales[:, :, None]), (ROWS, BLOCK_H))
        tl.store(values_ptr + out, values, mask)


def rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _run(x, None, weight_H, eps, (normed, None, None, None))
    return normed


def add_rms_norm(
    x_TH: Tensor | PairSum, residual_TH: Tensor, weight_H: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    normed_TH, sum_TH = torch.empty_like(residual_TH), torch.empty_like(residual_TH)
    _run(x_TH, residual_TH, weight_H, eps, (normed_TH, sum_TH, None, None))
    return normed_TH, sum_TH


def add_rms_norm_fp8(
    x_TH: Tensor | PairSum,
    residual_TH: Tensor,
    weight_H: Tensor,
    eps: float,
    by_column: bool = False,
) -> tuple[Rows, Tensor]:
    rows, size = residual_TH.shape
    shape = (rows, -(-size // FP8_GROUP))
    sum_TH = residual_TH.new_empty(rows, size)
    values_TH = residual_TH.new_empty(rows, size, dtype=torch.float8_e4m3fn)
    scales = torch.empty(shape[::-1] if by_column else shape, device=residual_TH.device)
    _run(x_TH, residual_TH, weight_H, eps, (None, sum_TH, values_TH, scales), by_column)
    return Rows(values_TH, scales.t() if by_column else scales), sum_TH


@cache
def tiling(size: int) -> dict[str, int]:
    """Does not depend on the number of rows, and so neither does a row's sum."""
    block = max(FP8_GROUP, triton.next_power_of_2(size))
    tile = max(1, TILE_CHANNELS // block)
    warps = min(MAX_WARPS, max(1, tile * block // (32 * THREAD_CHANNELS)))
    return {"BLOCK_H": block, "ROWS": tile, "num_warps": warps}


def _run(
    rows_of_x: Tensor | PairSum,
    residual_TH: Tensor | None,
    weight_H: Tensor,
    eps: float,
    outputs: tuple[Tensor | None, ...],
    by_column: bool = False,
) -> None:
    """`outputs`: normed rows, sums, float8 values and their scales; None for what is not needed."""
    ids_RK, x = None, rows_of_x
    if isinstance(rows_of_x, PairSum):
        ids_RK, x = rows_of_x.ids_RK, rows_of_x.values
        assert x.is_contiguous() and ids_RK.is_contiguous(), (x.stride(), ids_RK.stride())
    size = weight_H.shape[0]
    # [rows, H] or [rows, heads, H] with contiguous channels need no copy.
    x = x if x.dim() in (2, 3) and x.stride(-1) == 1 else x.reshape(-1, size)
    top_k = 0 if ids_RK is None else ids_RK.shape[1]
    rows = x.numel() // size // max(1, top_k)
    if rows == 0:
        return
    assert residual_TH is None or residual_TH.stride(-1) == 1, "channels must be contiguous"
    tile, pdl = tiling(size), dependent_launch(x)
    _norm_kernel[(-(-rows // tile["ROWS"]),)](
        x,
        ids_RK,
        residual_TH,
        weight_H,
        *outputs,
        rows,
        1 if x.dim() == 2 else x.shape[1],
        x.stride(0),
        x.stride(-2),
        0 if residual_TH is None else residual_TH.stride(0),
        eps,
        H=size,
        K=top_k,
        BY_COLUMN=by_column,
        **tile,
        PDL=pdl.on,
        **pdl.options,
    )
