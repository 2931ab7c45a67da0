"""One tile of an expert's two products: few rows by some columns.

M rows of a tile · N columns of a tile (rows of weights) · L = 2 * N lines of gate and up · K
channels of a step. H, I as in moesaic.kernels.experts.

Products are turned round, w · xᵀ: weights are the side of which Hopper's matrix units want 64 and
more, rows the side that may be as narrow as 8. Gate and up are one product over 2 * N lines.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moesaic.kernels.triton.launch import prefetch_lines
from moesaic.kernels.triton.quantise import fp8_scales, to_fp8


@triton.jit
def tile_rows(expert, begin, order, first, count, BM: tl.constexpr):
    """A tile's places and pairs, and which of them are somebody's: without lists, the first. In 32
    bits until they become addresses: they may live in registers all through a product."""
    place_M = begin + tl.arange(0, BM)
    if first is None:
        valid_M = tl.arange(0, BM) == 0
    else:
        valid_M = place_M < tl.load(first + expert) + tl.load(count + expert)
    if order is None:
        pair_M = place_M
    else:
        pair_M = tl.load(order + place_M, mask=valid_M, other=0)
    return place_M, pair_M, valid_M


@triton.jit
def _rows_of_x(x, row_M, valid_M, group, K: tl.constexpr, BK: tl.constexpr):
    """[BK, M] of a group of columns. Without `row_M`, `x` points to where rows begin, in memory
    that others write: read past the first cache, which does not know."""
    column_K = group * BK + tl.arange(0, BK)
    if K % BK == 0:
        mask = valid_M[None, :]
    else:
        mask = valid_M[None, :] & (column_K[:, None] < K)
    if row_M is None:
        return tl.load(x[None, :] + column_K[:, None], mask, 0.0, cache_modifier=".cg")
    else:
        at = row_M[None, :].to(tl.int64) * K + column_K[:, None]
        return tl.load(x + at, mask=mask, other=0.0)


@triton.jit
def _lines_of_w(w, line_L, group, K: tl.constexpr, BK: tl.constexpr):
    """[L, BK]."""
    column_K = group * BK + tl.arange(0, BK)
    at = line_L[:, None] * K + column_K[None, :]
    if K % BK == 0:
        return tl.load(w + at)
    else:
        return tl.load(w + at, mask=column_K[None, :] < K, other=0.0)


@triton.jit
def _quantised(value_KM):
    """Each column, a group of 128 channels of a row, as float8_e4m3fn with a scale."""
    scale_M = fp8_scales(tl.max(tl.abs(value_KM), 0), 1)
    return to_fp8(value_KM, scale_M[None, :]), scale_M


@triton.jit
def product(
    x, x_scales, row_M, valid_M, w, w_scales, line_L, scale_line_L,
    K: tl.constexpr, BL: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_SCALES: tl.constexpr,
):  # fmt: skip
    """w · xᵀ [L, M] in float32. With fp8 weights each group of 128 columns has a scale of its own.
    Without `row_M`, `x` and `x_scales` point to where each row begins.
    Both sides go from memory to the matrix units as they are: one that were computed on the way
    would hold up the copies behind it."""
    acc_LM = tl.zeros([BL, BM], dtype=tl.float32)
    groups: tl.constexpr = (K + BK - 1) // BK
    if w_scales is None:
        for group in range(groups):
            w_LK = _lines_of_w(w, line_L, group, K, BK)
            x_KM = _rows_of_x(x, row_M, valid_M, group, K, BK)
            acc_LM = tl.dot(w_LK, x_KM, acc_LM, input_precision=PRECISION)
    else:
        # Scales are fetched one turn ahead: nothing else hides their latency. Nobody's rows
        # are zeros, any scale will do for them: no mask, and 32 bits, save many registers.
        if row_M is None:
            at_M = tl.zeros([BM], dtype=tl.int32)
        else:
            at_M = tl.where(valid_M, row_M, tl.min(row_M, 0)) * groups
        x_scale_M = tl.load(x_scales + at_M)
        if BLOCK_SCALES:
            w_scale_L = tl.load(w_scales + scale_line_L * groups)
        for group in range(groups):
            w_LK = _lines_of_w(w, line_L, group, K, BK)
            x_KM = _rows_of_x(x, row_M, valid_M, group, K, BK)
            ahead = tl.minimum(group + 1, groups - 1)
            next_x_M = tl.load(x_scales + (at_M + ahead))
            part_LM = tl.dot(w_LK, x_KM)
            if BLOCK_SCALES:
                next_w_L = tl.load(w_scales + scale_line_L * groups + ahead)
                acc_LM += part_LM * (w_scale_L[:, None] * x_scale_M[None, :])
                w_scale_L = next_w_L
            else:
                acc_LM += part_LM * x_scale_M[None, :]
            x_scale_M = next_x_M
        if not BLOCK_SCALES:
            acc_LM *= tl.load(w_scales + scale_line_L)[:, None]
    return acc_LM


@triton.jit
def activate(gate, up, alpha, limit, LIMITED: tl.constexpr):
    if LIMITED:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL) + 1.0
        return gate * tl.sigmoid(alpha * gate) * up
    else:
        return gate * tl.sigmoid(gate) * up


@triton.jit
def _store_inner(
    value_NM, column, place_M, valid_M, h, h_scales, INNER: tl.constexpr, BN: tl.constexpr
):
    """h at its places; quantised if there are scales, where the tile is one group of 128."""
    column_N = column * BN + tl.arange(0, BN)
    at = place_M[None, :].to(tl.int64) * INNER + column_N[:, None]
    mask = valid_M[None, :] & (column_N[:, None] < INNER)
    if h_scales is not None:
        tl.static_assert(BN == 128, "a group of 128 channels is one tile")
        value_NM, scale_M = _quantised(value_NM)
        tl.store(h_scales + place_M.to(tl.int64) * (INNER // BN) + column, scale_M, mask=valid_M)
    tl.store(h + at, value_NM.to(h.dtype.element_ty), mask=mask)


@triton.jit
def gate_up_tile(
    expert, begin, column, x, x_scales, w, w_scales, bias, h, h_scales,
    order, first, count, x_scale, alpha, limit,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, LIMITED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_SCALES: tl.constexpr,
):  # fmt: skip
    place_M, pair_M, valid_M = tile_rows(expert, begin, order, first, count, BM)
    line_L, scale_line_L = gate_up_lines(expert, column, INNER, BN, BLOCK_SCALES)
    acc_LM = product(
        x, x_scales, pair_M // TOP_K, valid_M, w, w_scales, line_L, scale_line_L,
        HIDDEN, 2 * BN, BM, BK, PRECISION, BLOCK_SCALES,
    )  # fmt: skip
    finish_gate_up(
        acc_LM, expert, begin, column, line_L, place_M, valid_M, bias, h, h_scales,
        order, first, count, x_scale, alpha, limit, INNER, LIMITED, BM, BN,
    )  # fmt: skip


@triton.jit
def gate_up_lines(
    expert, column, INNER: tl.constexpr, BN: tl.constexpr, BLOCK_SCALES: tl.constexpr
):
    """Of weights, and of their scales: those of gate, then those of up."""
    index_L = tl.arange(0, 2 * BN)
    # Lines past the end repeat the last one; what comes of them is not stored.
    inner_L = tl.minimum(column * BN + index_L % BN, INNER - 1)
    line_L = expert * (2 * INNER) + index_L // BN * INNER + inner_L
    if BLOCK_SCALES:
        scale_lines: tl.constexpr = (INNER + 127) // 128
        scale_line_L = expert * (2 * scale_lines) + index_L // BN * scale_lines + inner_L // 128
    else:
        scale_line_L = line_L
    return line_L, scale_line_L


@triton.jit
def finish_gate_up(
    acc_LM, expert, begin, column, line_L, place_M, valid_M, bias, h, h_scales,
    order, first, count, x_scale, alpha, limit,
    INNER: tl.constexpr, LIMITED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """From the products of gate and up to h."""
    if BM > 16:
        # Looked up again rather than kept in registers all the while.
        place_M, _, valid_M = tile_rows(expert, begin, order, first, count, BM)
    acc_LM *= x_scale
    if bias is not None:
        acc_LM += tl.load(bias + line_L).to(tl.float32)[:, None]
    gate_NM, up_NM = tl.split(tl.permute(tl.reshape(acc_LM, [2, BN, BM]), [1, 2, 0]))
    value_NM = activate(gate_NM, up_NM, alpha, limit, LIMITED)
    _store_inner(value_NM, column, place_M, valid_M, h, h_scales, INNER, BN)


@triton.jit
def down_tile(
    expert, begin, column, h, h_scales, w, w_scales, bias, weights, y,
    order, first, count, h_scale,
    HIDDEN: tl.constexpr, INNER: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_SCALES: tl.constexpr,
):  # fmt: skip
    place_M, pair_M, valid_M = tile_rows(expert, begin, order, first, count, BM)
    column_N = column * BN + tl.arange(0, BN)
    inner_N = tl.minimum(column_N, HIDDEN - 1)
    line_N = expert * HIDDEN + inner_N
    if BLOCK_SCALES:
        scale_line_N = expert * ((HIDDEN + 127) // 128) + inner_N // 128
    else:
        scale_line_N = line_N
    acc_NM = product(
        h, h_scales, place_M, valid_M, w, w_scales, line_N, scale_line_N,
        INNER, BN, BM, BK, PRECISION, BLOCK_SCALES,
    )  # fmt: skip
    if BM > 16:
        # Looked up again rather than kept in registers all the while.
        place_M, pair_M, valid_M = tile_rows(expert, begin, order, first, count, BM)
    acc_NM *= h_scale
    if bias is not None:
        acc_NM += tl.load(bias + line_N).to(tl.float32)[:, None]
    if weights is not None:
        acc_NM *= tl.load(weights + pair_M, mask=valid_M, other=0.0)[None, :]
    at = pair_M[None, :].to(tl.int64) * HIDDEN + column_N[:, None]
    mask = valid_M[None, :] & (column_N[:, None] < HIDDEN)
    tl.store(y + at, acc_NM.to(y.dtype.element_ty), mask=mask)


@triton.jit
def prefetch_gate_up(
    expert, column, w, HIDDEN: tl.constexpr, INNER: tl.constexpr,
    BN: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """PREFETCH lines of 128 bytes from each of a tile's rows of weights."""
    index_L = tl.arange(0, 2 * BN)
    inner_L = tl.minimum(column * BN + index_L % BN, INNER - 1)
    line_L = expert * (2 * INNER) + index_L // BN * INNER + inner_L
    step: tl.constexpr = 1024 // w.dtype.element_ty.primitive_bitwidth
    column_X = tl.arange(0, PREFETCH) * step
    prefetch_lines(w + line_L[:, None] * HIDDEN + column_X[None, :])


@triton.jit
def prefetch_down(
    expert, column, w, HIDDEN: tl.constexpr, INNER: tl.constexpr,
    BN: tl.constexpr, PREFETCH: tl.constexpr, ON: tl.constexpr,
):  # fmt: skip
    """PREFETCH lines of 128 bytes from each of a tile's rows of weights."""
    if ON and PREFETCH:
        line_N = expert * HIDDEN + tl.minimum(column * BN + tl.arange(0, BN), HIDDEN - 1)
        step: tl.constexpr = 1024 // w.dtype.element_ty.primitive_bitwidth
        column_X = tl.arange(0, PREFETCH) * step
        prefetch_lines(w + line_N[:, None] * INNER + column_X[None, :])
