"""The experts' products with weights of eight or four bits, decoded in registers.

P places · K columns of a product · N rows of a matrix · BM places, BN rows and BK columns of a
tile. Columns that share a byte are not interleaved: even columns of x are multiplied with the low
halves, odd ones with the high halves, so no data moves between threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.cpu.experts import SwigluSpec
from moesaic.kernels.experts import Groups, Matrices, Rows
from moesaic.kernels.quantise import FP8_GROUP
from moesaic.kernels.triton.experts_tiles import activate
from moesaic.kernels.triton.launch import await_inputs, dependent_launch, release_next
from moesaic.kernels.triton.nibbles import (
    RAISED,
    decode_pairs,
    halves,
    load_codes,
    scale_of,
    spread_codes,
)
from moesaic.kernels.tuning import BLOCK_SCALED, FP8_FORMATS, FP8_WEIGHT_ONLY

PACKED = ("int4_w4a16", "mxfp4", "nvfp4")
GROUPED = (*BLOCK_SCALED, "int4_w4a16", "mxfp4")
"""Formats without scales of whole rows."""
FLOATS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True, slots=True)
class FormatTile:
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# By block of places. Few rows: bytes in flight matter; many: registers, half of which hold the
# two sums of the first product.
EIGHT_BITS = {
    16: FormatTile(block_n=64, block_k=128, num_warps=4, num_stages=4),
    32: FormatTile(block_n=64, block_k=128, num_warps=4, num_stages=4),
    64: FormatTile(block_n=128, block_k=64, num_warps=8, num_stages=3),
    128: FormatTile(block_n=128, block_k=64, num_warps=8, num_stages=3),
}
# Each step's sum is scaled, in as many registers as the sums have.
BLOCKS = EIGHT_BITS | {128: FormatTile(block_n=64, block_k=64, num_warps=8, num_stages=3)}
FOUR_BITS = {
    16: FormatTile(block_n=64, block_k=128, num_warps=4, num_stages=4),
    32: FormatTile(block_n=64, block_k=128, num_warps=4, num_stages=3),
    64: FormatTile(block_n=64, block_k=128, num_warps=4, num_stages=3),
    128: FormatTile(block_n=128, block_k=64, num_warps=8, num_stages=3),
}


def config_for(format: str, block: int) -> FormatTile:
    if format in BLOCK_SCALED:
        return BLOCKS[block]
    return (FOUR_BITS if format in PACKED else EIGHT_BITS)[block]


@triton.jit
def _load_columns(pointers, at, columns, rows_ok, EVEN: tl.constexpr):
    """Loads a tile [rows, columns], given the address of each row."""
    ok = rows_ok[:, None]
    if not EVEN:
        ok = ok & (at < columns)[None, :]
    return tl.load(pointers[:, None] + at[None, :], mask=ok, other=0)


@triton.jit
def _add_packed(
    acc, x0, x1, w_rows, s_rows, z_rows, n_ok, k, K,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """acc += x · wᵀ over BK columns from k on; x0 are its even columns, x1 its odd ones.

    Scales are not prefetched: a sector that one tile loads serves the next ones too, and registers
    in the product's layout save more than the latency costs."""
    codes = load_codes(s_rows, n_ok, k, K, GROUP, BK)
    w = _load_columns(w_rows, k // 2 + tl.arange(0, BK // 2), K // 2, n_ok, EVEN)
    if FORMAT == "int4_w4a16":
        zeros = spread_codes(load_codes(z_rows, n_ok, k, K, GROUP, BK), GROUP, BK)
        low, high = decode_pairs(w, zeros, FORMAT, x0.dtype, ASM)
        wide: tl.constexpr = tl.float32
    else:
        # Products of fp4 and its scales are exact in bfloat16; float16 lacks the range of mxfp4.
        wide: tl.constexpr = tl.bfloat16 if x0.dtype == tl.bfloat16 else tl.float32
        low, high = decode_pairs(w, w, FORMAT, wide, ASM)
    scale = spread_codes(scale_of(codes, FORMAT, wide, ASM), GROUP, BK)
    if FORMAT == "int4_w4a16" and GROUP % BK == 0 and acc.shape[0] < 64:
        # x · (q - zero) is exact, and scaling so few sums is cheaper than scaling the weights.
        part = tl.dot(x0, low.T, input_precision="ieee")
        part = tl.dot(x1, high.T, part, input_precision="ieee")
        acc += part * scale.T
    else:
        low, high = (low * scale).to(x0.dtype), (high * scale).to(x0.dtype)
        acc = tl.dot(x0, low.T, acc, input_precision="ieee")
        acc = tl.dot(x1, high.T, acc, input_precision="ieee")
    return acc


@triton.jit
def _add_bytes(
    acc, x0, w_rows, s_rows, n_ok, k, K,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """acc += x · wᵀ over BK columns from k on. With a GROUP, these share one scale."""
    w = _load_columns(w_rows, k + tl.arange(0, BK), K, n_ok, EVEN)
    if FORMAT == "fp8":
        w = w.to(tl.float8e4nv, bitcast=True)
    if GROUP:
        tl.static_assert(GROUP % BK == 0, "the columns of a step have one scale")
        part = tl.dot(x0, w.to(x0.dtype).T, input_precision="ieee")
        acc += part * tl.load(s_rows + k // GROUP, mask=n_ok, other=0.0)[None, :]
    else:
        acc = tl.dot(x0, w.to(x0.dtype).T, acc, input_precision="ieee", out_dtype=acc.dtype)
    return acc


@triton.jit
def _x_pairs(
    x_rows, rows_ok, k, K,
    PAIRED: tl.constexpr, DTYPE: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Loads the even and the odd columns; 16-bit numbers come in pairs."""
    if PAIRED:
        pair_at = k // 2 + tl.arange(0, BK // 2)
        x0, x1 = halves(_load_columns(x_rows, pair_at, K // 2, rows_ok, EVEN), DTYPE)
    else:
        even_at = k + 2 * tl.arange(0, BK // 2)
        x0 = _load_columns(x_rows, even_at, K, rows_ok, EVEN)
        x1 = _load_columns(x_rows, even_at + 1, K, rows_ok, EVEN)
    return x0, x1


@triton.jit
def _sums(
    x_rows, rows_ok, w, scales, zeros, matrix, N, n, n_ok, K, width,
    FORMAT: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, PAIRED: tl.constexpr,
    DTYPE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Multiplies BM rows of x with rows n of one part of a matrix, or of both. `width`: elements of
    a stored row; a separate argument, so that its alignment is known."""
    PACKED: tl.constexpr = FORMAT == "int4_w4a16" or FORMAT == "mxfp4" or FORMAT == "nvfp4"
    acc_type: tl.constexpr = tl.int32 if FORMAT == "int8_w8a8" else tl.float32
    row0 = matrix * PARTS * N + n
    row1 = row0 + N if PARTS == 2 else row0
    w0, w1 = w + row0 * width, w + row1 * width
    acc0 = tl.zeros((BM, BN), acc_type)
    acc1 = tl.zeros((BM, BN), acc_type)
    if PACKED:
        groups = K // GROUP
        s0, s1 = scales + row0 * groups, scales + row1 * groups
        z0, z1 = s0, s1
        if zeros is not None:
            z0, z1 = zeros + row0 * groups, zeros + row1 * groups
        for k in tl.range(0, K, BK):
            x0, x1 = _x_pairs(x_rows, rows_ok, k, K, PAIRED, DTYPE, BK, EVEN)
            acc0 = _add_packed(acc0, x0, x1, w0, s0, z0, n_ok, k, K, FORMAT, GROUP, BK, EVEN, ASM)
            if PARTS == 2:
                acc1 = _add_packed(
                    acc1, x0, x1, w1, s1, z1, n_ok, k, K, FORMAT, GROUP, BK, EVEN, ASM
                )
    else:
        s0, s1 = scales, scales
        if GROUP:
            # GROUP rows share a scale, too; each part begins a new group.
            lines = tl.cdiv(N, GROUP)
            across = tl.cdiv(K, GROUP)
            s0 = scales + (matrix * PARTS * lines + n // GROUP) * across
            s1 = s0 + lines * across if PARTS == 2 else s0
        for k in tl.range(0, K, BK):
            x0 = _load_columns(x_rows, k + tl.arange(0, BK), K, rows_ok, EVEN)
            acc0 = _add_bytes(acc0, x0, w0, s0, n_ok, k, K, FORMAT, GROUP, BK, EVEN)
            if PARTS == 2:
                acc1 = _add_bytes(acc1, x0, w1, s1, n_ok, k, K, FORMAT, GROUP, BK, EVEN)
    return acc0, acc1


@triton.jit
def _finish(acc, row_scale, of_rows, bias, matrix, part, N, PARTS, n, n_ok):
    """Applies the scales of whole rows, on either side, and the bias. `of_rows`: a scale for each
    row of a matrix, those of eight bits or the global scale of nvfp4."""
    out = acc.to(tl.float32) * row_scale[:, None]
    row = (matrix * PARTS + part) * N + n
    if of_rows is not None:
        out *= tl.load(of_rows + row, mask=n_ok, other=0.0)[None, :]
    if bias is not None:
        out += tl.load(bias + row, mask=n_ok, other=0.0).to(tl.float32)[None, :]
    return out


@triton.jit
def _tile_rows(tile, order, first, count, tile_expert, tile_place, BM: tl.constexpr):
    """The expert of a tile, its places, which of them are valid, and their pairs."""
    expert = tl.load(tile_expert + tile)
    place = tl.load(tile_place + tile) + tl.arange(0, BM)
    ok = place < tl.load(first + expert) + tl.load(count + expert)
    pair = place
    if order is not None:
        pair = tl.load(order + place, mask=ok, other=0)
    return expert.to(tl.int64), place.to(tl.int64), ok, pair.to(tl.int64)


@triton.jit
def _row_scales(scales, row, ok, scale, BM: tl.constexpr):
    if scales is not None:
        found = tl.load(scales + row, mask=ok, other=0.0) * scale
    else:
        found = tl.zeros((BM,), tl.float32) + scale
    return found


@triton.jit
def gate_up_kernel(
    x, x_scales, w, w_scales, w_zeros, w_rows, bias,
    order, first, count, tile_expert, tile_place, num_tiles,
    scale, K, N, width, x_width, h, alpha, limit,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, TOP_K: tl.constexpr, LIMITED: tl.constexpr,
    PAIRED: tl.constexpr, DTYPE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """h[place, n] = activation of x · gate row n and x · up row n, for BM places and BN of N."""
    release_next(PDL)
    await_inputs(PDL)
    tile = tl.program_id(0)
    if tile >= tl.load(num_tiles):
        return
    matrix, place, ok, pair = _tile_rows(tile, order, first, count, tile_expert, tile_place, BM)
    row = pair // TOP_K
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    n_ok = n < N
    gate, up = _sums(
        x + row * x_width, ok, w, w_scales, w_zeros, matrix, N, n, n_ok, K, width,
        FORMAT, 2, GROUP, PAIRED, DTYPE, BM, BN, BK, EVEN, ASM,
    )  # fmt: skip
    row_scale = _row_scales(x_scales, row, ok, scale, BM)
    gate = _finish(gate, row_scale, w_rows, bias, matrix, 0, N, 2, n, n_ok)
    up = _finish(up, row_scale, w_rows, bias, matrix, 1, N, 2, n, n_ok)
    value = activate(gate, up, alpha, limit, LIMITED)
    out = h + place[:, None] * N + n[None, :]
    tl.store(out, value.to(h.dtype.element_ty), mask=ok[:, None] & n_ok[None, :])


@triton.jit
def down_kernel(
    x, x_scales, w, w_scales, w_zeros, w_rows, bias,
    order, first, count, tile_expert, tile_place, num_tiles,
    scale, K, N, width, x_width, y, weights,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, PAIRED: tl.constexpr, DTYPE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[pair, n] = weight * (h[place] · row n + bias), for BM places and BN of N."""
    release_next(PDL)
    await_inputs(PDL)
    tile = tl.program_id(0)
    if tile >= tl.load(num_tiles):
        return
    matrix, place, ok, pair = _tile_rows(tile, order, first, count, tile_expert, tile_place, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    n_ok = n < N
    sums, _ = _sums(
        x + place * x_width, ok, w, w_scales, w_zeros, matrix, N, n, n_ok, K, width,
        FORMAT, 1, GROUP, PAIRED, DTYPE, BM, BN, BK, EVEN, ASM,
    )  # fmt: skip
    row_scale = _row_scales(x_scales, place, ok, scale, BM)
    out = _finish(sums, row_scale, w_rows, bias, matrix, 0, N, 1, n, n_ok)
    if weights is not None:
        out *= tl.load(weights + pair, mask=ok, other=0.0)[:, None]
    at = y + pair[:, None] * N + n[None, :]
    tl.store(at, out.to(y.dtype.element_ty), mask=ok[:, None] & n_ok[None, :])


def gate_up_formats(
    x: Rows, w13: Matrices, groups: Groups, activation: SwigluSpec, h: Rows
) -> Rows:
    """`gate_up` with weights in int8, int4, mxfp4 or nvfp4, or in fp8 with unquantised rows."""
    assert h.scales is None, "h is quantised after it is written"
    others = {"h": h.values, "alpha": activation.alpha, "limit": activation.limit or 0.0}
    constants = {"LIMITED": activation.limit is not None, "TOP_K": groups.top_k}
    _launch(gate_up_kernel, x, w13, groups, others | constants)
    return h


def down_formats(
    h: Rows, w2: Matrices, groups: Groups, weights_RK: Tensor | None, y: Tensor
) -> Tensor:
    """`down` for the same formats."""
    _launch(down_kernel, h, w2, groups, {"y": y, "weights": weights_RK})
    return y


def _launch(
    kernel: Any, x: Rows, matrices: Matrices, groups: Groups, others: dict[str, Any]
) -> None:
    """`others`: arguments of this kernel alone."""
    format, planes, values = matrices.format, matrices.planes, x.values
    rows, columns = matrices.shape[1] // matrices.parts, matrices.shape[2]
    assert values.is_contiguous() and values.shape[-1] == columns
    quantised = x.scales is not None
    assert quantised == (format == "int8_w8a8"), f"{format} weights with {values.dtype} rows"
    assert format not in FP8_FORMATS, f"other kernels quantise {format} rows"
    config, pdl = config_for(format, groups.block), dependent_launch(values)
    paired = format in PACKED and values.element_size() == 2
    fp8 = format in FP8_WEIGHT_ONLY.values()
    scales, stored = planes["scales"], planes["values"]
    scales = scales.view(torch.uint8) if format == "nvfp4" else scales
    asm = values.is_cuda and values.dtype == torch.bfloat16
    raised = asm and format in ("mxfp4", "nvfp4")
    kernel[(len(groups.tile_expert_X), triton.cdiv(rows, config.block_n))](
        values.view(torch.int32) if paired else values,
        x.scales,
        stored.view(torch.uint8) if fp8 else stored,
        scales,
        planes.get("zeros"),
        None if format in GROUPED else planes.get("global", scales),
        matrices.bias_EN,
        *groups.lists,
        x.scale * RAISED if raised else x.scale,
        columns,
        rows,
        stored.shape[-1],
        columns // 2 if paired else columns,
        FORMAT="fp8" if fp8 else format,
        GROUP=FP8_GROUP if format in BLOCK_SCALED else matrices.group,
        PAIRED=paired,
        DTYPE=FLOATS.get(values.dtype, tl.int8),
        BM=groups.block,
        BN=config.block_n,
        BK=config.block_k,
        EVEN=columns % config.block_k == 0,
        ASM=asm,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        PDL=pdl.on,
        **pdl.options,
        **others,
    )
