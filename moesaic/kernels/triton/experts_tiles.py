"""One tile of an expert's two products: few rows by some columns.

M rows of a tile · N columns of a tile (rows of weights) · L = 2 * N lines of gate and up · K
channels of a step. H, I as in moesaic.kernels.experts.

Products are transposed, w · xᵀ: Hopper's matrix units need at least 64 lines on the side of the
weights, but only 8 on the side of the rows. Gate and up are one product over 2 * N lines.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from moesaic.kernels.triton.launch import prefetch_lines
from moesaic.kernels.triton.quantise import fp8_scales, to_fp8


@dataclass(frozen=True)
class TileConstants:
    """Compile-time constants `P` of one product."""

    HIDDEN: int
    INNER: int
    BM: int
    BN: int
    BK: int
    PRECISION: str
    BLOCK_SCALES: bool
    TOP_K: int
    LIMITED: bool


@triton.jit
def tile_rows(expert, begin, order, first, count, BM: tl.constexpr):
    """A tile's places and pairs, and which of them are valid; without lists, only the first. They
    stay in 32 bits until they become addresses, as they may occupy registers during a product."""
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
    """Loads [BK, M] of a group of columns. Without `row_M`, `x` points to the rows in memory that
    other ranks write; these loads bypass the L1 cache, which does not see their writes."""
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
    """Loads [L, BK]."""
    column_K = group * BK + tl.arange(0, BK)
    at = line_L[:, None] * K + column_K[None, :]
    if K % BK == 0:
        return tl.load(w + at)
    else:
        return tl.load(w + at, mask=column_K[None, :] < K, other=0.0)


@triton.jit
def _quantised(value_KM):
    """Quantises each column, a group of 128 channels of a row, to float8_e4m3fn with a scale."""
    scale_M = fp8_scales(tl.max(tl.abs(value_KM), 0), 1)
    return to_fp8(value_KM, scale_M[None, :]), scale_M


@triton.jit
def product(
    x, x_scales, row_M, valid_M, w, w_scales, line_L, scale_line_L,
    K: tl.constexpr, BL: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """w · xᵀ [L, M] in float32. With fp8 weights each group of 128 columns has its own scale.
    Without `row_M`, `x` and `x_scales` point to each row. Both operands reach the matrix units
    unchanged: computing one on the way would delay the copies behind it."""
    acc_LM = tl.full([BL, P.BM], 0.0, tl.float32)
    groups: tl.constexpr = (K + P.BK - 1) // P.BK
    if w_scales is None:
        for group in range(groups):
            w_LK = _lines_of_w(w, line_L, group, K, P.BK)
            x_KM = _rows_of_x(x, row_M, valid_M, group, K, P.BK)
            acc_LM = tl.dot(w_LK, x_KM, acc_LM, input_precision=P.PRECISION)
    else:
        # Scales are loaded one step ahead to hide their latency. Invalid rows are zeros, so any
        # scale will do: skipping the mask and staying in 32 bits saves many registers.
        if row_M is None:
            at_M = tl.full([P.BM], 0, tl.int32)
        else:
            at_M = tl.where(valid_M, row_M, tl.min(row_M, 0)) * groups
        x_scale_M = tl.load(x_scales + at_M)
        if P.BLOCK_SCALES:
            w_scale_L = tl.load(w_scales + scale_line_L * groups)
        for group in range(groups):
            w_LK = _lines_of_w(w, line_L, group, K, P.BK)
            x_KM = _rows_of_x(x, row_M, valid_M, group, K, P.BK)
            ahead = tl.minimum(group + 1, groups - 1)
            next_x_M = tl.load(x_scales + (at_M + ahead))
            part_LM = tl.dot(w_LK, x_KM)
            if P.BLOCK_SCALES:
                next_w_L = tl.load(w_scales + scale_line_L * groups + ahead)
                acc_LM += part_LM * (w_scale_L[:, None] * x_scale_M[None, :])
                w_scale_L = next_w_L
            else:
                acc_LM += part_LM * x_scale_M[None, :]
            x_scale_M = next_x_M
        if not P.BLOCK_SCALES:
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
def _store_inner(value_NM, column, place_M, valid_M, h, h_scales, P: tl.constexpr):
    """Stores h at its places; with scales it quantises, where a tile is one group of 128."""
    column_N = column * P.BN + tl.arange(0, P.BN)
    at = place_M[None, :].to(tl.int64) * P.INNER + column_N[:, None]
    mask = valid_M[None, :] & (column_N[:, None] < P.INNER)
    if h_scales is not None:
        tl.static_assert(P.BN == 128, "a group of 128 channels is one tile")
        value_NM, scale_M = _quantised(value_NM)
        at_M = place_M.to(tl.int64) * (P.INNER // P.BN) + column
        tl.store(h_scales + at_M, scale_M, mask=valid_M)
    tl.store(h + at, value_NM.to(h.dtype.element_ty), mask=mask)


@triton.jit
def gate_up_tile(
    expert, begin, column, x, x_scales, w, w_scales, bias, h, h_scales,
    order, first, count, x_scale, alpha, limit, P: tl.constexpr,
):  # fmt: skip
    place_M, pair_M, valid_M = tile_rows(expert, begin, order, first, count, P.BM)
    line_L, scale_line_L = gate_up_lines(expert, column, P)
    acc_LM = product(
        x, x_scales, pair_M // P.TOP_K, valid_M, w, w_scales, line_L, scale_line_L,
        P.HIDDEN, 2 * P.BN, P,
    )  # fmt: skip
    finish_gate_up(
        acc_LM, expert, begin, column, line_L, place_M, valid_M, bias, h, h_scales,
        order, first, count, x_scale, alpha, limit, P,
    )  # fmt: skip


@triton.jit
def gate_up_lines(expert, column, P: tl.constexpr):
    """Lines of the weights and of their scales: those of gate, then those of up."""
    index_L = tl.arange(0, 2 * P.BN)
    # Lines past the end repeat the last one; their sums are not stored.
    inner_L = tl.minimum(column * P.BN + index_L % P.BN, P.INNER - 1)
    line_L = expert * (2 * P.INNER) + index_L // P.BN * P.INNER + inner_L
    if P.BLOCK_SCALES:
        scale_lines: tl.constexpr = (P.INNER + 127) // 128
        scale_line_L = expert * (2 * scale_lines) + index_L // P.BN * scale_lines + inner_L // 128
    else:
        scale_line_L = line_L
    return line_L, scale_line_L


@triton.jit
def finish_gate_up(
    acc_LM, expert, begin, column, line_L, place_M, valid_M, bias, h, h_scales,
    order, first, count, x_scale, alpha, limit, P: tl.constexpr,
):  # fmt: skip
    """Computes h from the products of gate and up."""
    if P.BM > 16:
        # Loaded again rather than kept in registers during the product.
        place_M, _, valid_M = tile_rows(expert, begin, order, first, count, P.BM)
    acc_LM *= x_scale
    if bias is not None:
        acc_LM += tl.load(bias + line_L).to(tl.float32)[:, None]
    gate_NM, up_NM = tl.split(tl.permute(tl.reshape(acc_LM, [2, P.BN, P.BM]), [1, 2, 0]))
    value_NM = activate(gate_NM, up_NM, alpha, limit, P.LIMITED)
    _store_inner(value_NM, column, place_M, valid_M, h, h_scales, P)


@triton.jit
def down_tile(
    expert, begin, column, h, h_scales, w, w_scales, bias, weights, y,
    order, first, count, h_scale, P: tl.constexpr,
):  # fmt: skip
    place_M, pair_M, valid_M = tile_rows(expert, begin, order, first, count, P.BM)
    column_N = column * P.BN + tl.arange(0, P.BN)
    inner_N = tl.minimum(column_N, P.HIDDEN - 1)
    line_N = expert * P.HIDDEN + inner_N
    if P.BLOCK_SCALES:
        scale_line_N = expert * ((P.HIDDEN + 127) // 128) + inner_N // 128
    else:
        scale_line_N = line_N
    acc_NM = product(
        h, h_scales, place_M, valid_M, w, w_scales, line_N, scale_line_N, P.INNER, P.BN, P
    )
    if P.BM > 16:
        # Loaded again rather than kept in registers during the product.
        place_M, pair_M, valid_M = tile_rows(expert, begin, order, first, count, P.BM)
    acc_NM *= h_scale
    if bias is not None:
        acc_NM += tl.load(bias + line_N).to(tl.float32)[:, None]
    if weights is not None:
        acc_NM *= tl.load(weights + pair_M, mask=valid_M, other=0.0)[None, :]
    at = pair_M[None, :].to(tl.int64) * P.HIDDEN + column_N[:, None]
    mask = valid_M[None, :] & (column_N[:, None] < P.HIDDEN)
    tl.store(y + at, acc_NM.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _prefetch(w, line, WIDTH: tl.constexpr, PREFETCH: tl.constexpr):
    """Prefetches PREFETCH lines of 128 bytes from each of a tile's rows of weights."""
    step: tl.constexpr = 1024 // w.dtype.element_ty.primitive_bitwidth
    column_X = tl.arange(0, PREFETCH) * step
    prefetch_lines(w + line[:, None] * WIDTH + column_X[None, :])


@triton.jit
def prefetch_gate_up(expert, column, w, P: tl.constexpr, PREFETCH: tl.constexpr):
    line_L, _ = gate_up_lines(expert, column, P)
    _prefetch(w, line_L, P.HIDDEN, PREFETCH)


@triton.jit
def prefetch_down(expert, column, w, P: tl.constexpr, PREFETCH: tl.constexpr, ON: tl.constexpr):
    if ON and PREFETCH:
        line_N = expert * P.HIDDEN + tl.minimum(column * P.BN + tl.arange(0, P.BN), P.HIDDEN - 1)
        _prefetch(w, line_N, P.INNER, PREFETCH)
