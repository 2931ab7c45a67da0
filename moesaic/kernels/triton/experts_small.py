"""Experts with few rows each: the time is that of reading weights, so these kernels only see to it
that many bytes are always on their way.

M rows of a tile · N columns of a tile (rows of weights) · L = 2 * N lines of gate and up · E, H, I,
P, R, K as in moesaic.kernels.experts.

Products are turned round, w · xᵀ: weights are the side of which Hopper's matrix units want 64 and
more, rows the side that may be as narrow as 8. Gate and up are one product over 2 * N lines.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.cpu.experts import SwigluSpec
from moesaic.kernels.experts import FP8_GROUP, FeedForward, Groups, Matrices, Rows
from moesaic.kernels.triton.launch import (
    INTERPRETED,
    await_inputs,
    dependent_launch,
    prefetch_lines,
    release_next,
)
from moesaic.kernels.triton.sort import row_arguments, sort_row
from moesaic.kernels.tuning import Config, Plan, device_facts

BLOCK_SCALED = ("fp8_block",)
PROGRAMS = 3
"""Of each processor, that share all tiles; those that find no room come when others have ended."""


def gate_up_small(
    x: Rows, w13: Matrices, groups: Groups, activation: SwigluSpec, h: Rows, config: Config
) -> Rows:
    config = _fitting(config, h)
    _, double, hidden = w13.shape
    inner = double // 2
    tiles = _slots(groups) * triton.cdiv(inner, config.block_n) + (groups.ids_K is not None)
    pdl = dependent_launch(x.values)
    _gate_up_kernel[(tiles,)](
        _checked(x), x.scales, *_planes(w13), h.values, h.scales, *_lists(groups),
        x.scale, activation.alpha, activation.limit or 0.0,
        HIDDEN=hidden, INNER=inner, TOP_K=groups.top_k, LIMITED=activation.limit is not None,
        **_constants(config, groups, w13), **row_arguments(groups), PDL=pdl.on,
        num_warps=config.num_warps, num_stages=config.num_stages, **pdl.options,
    )  # fmt: skip
    return h


def gate_up_down_small(
    x: Rows,
    experts: FeedForward,
    groups: Groups,
    weights_RK: Tensor | None,
    h: Rows,
    y: Tensor,
    plan: Plan,
) -> Tensor:
    """Both products in one launch; every program can do either, so it needs the more of the two."""
    gate_up, down = _fitting(plan.gate_up, h), plan.down
    w13, w2, activation = experts.w13, experts.w2, experts.activation
    _, hidden, inner = w2.shape
    assert groups.counters is not None and groups.ids_K is None, "pairs must be sorted for this"
    columns = triton.cdiv(inner, gate_up.block_n) + triton.cdiv(hidden, down.block_n)
    slots = groups.tile_expert_X.numel()
    programs = min(slots * columns, PROGRAMS * device_facts(y.device).processors)
    pdl = dependent_launch(y)
    _gate_up_down_kernel[(programs,)](
        _checked(x), x.scales, *_planes(w13), h.values, h.scales, *_planes(w2), weights_RK, y,
        *_lists(groups), groups.counters, slots, x.scale, h.scale,
        activation.alpha, activation.limit or 0.0,
        HIDDEN=hidden, INNER=inner, TOP_K=groups.top_k, LIMITED=activation.limit is not None,
        **_constants(gate_up, groups, w13),
        DOWN_BN=down.block_n, DOWN_BK=down.block_k, PREFETCH=down.prefetch, PDL=pdl.on,
        num_warps=max(gate_up.num_warps, down.num_warps),
        num_stages=min(gate_up.num_stages, down.num_stages), **pdl.options,
    )  # fmt: skip
    return y


def down_small(
    h: Rows, w2: Matrices, groups: Groups, weights_RK: Tensor | None, y: Tensor, config: Config
) -> Tensor:
    """Behind `gate_up_small` of the same groups: where kernels start early this one reads the tiles
    while that one still runs."""
    _, hidden, inner = w2.shape
    assert y.is_contiguous() and (weights_RK is None or weights_RK.is_contiguous())
    tiles = _slots(groups) * triton.cdiv(hidden, config.block_n)
    pdl = dependent_launch(y)
    _down_kernel[(tiles,)](
        _checked(h), h.scales, *_planes(w2), weights_RK, y,
        *_lists(groups, direct=groups.ids_K is not None), groups.ids_K, h.scale,
        HIDDEN=hidden, INNER=inner,
        **_constants(config, groups, w2), PREFETCH=config.prefetch, PDL=pdl.on,
        num_warps=config.num_warps, num_stages=config.num_stages, **pdl.options,
    )  # fmt: skip
    return y


def _fitting(config: Config, h: Rows) -> Config:
    """A group of channels that get one scale must be one tile."""
    inner = h.values.shape[1]
    if h.scales is not None and inner % FP8_GROUP:
        raise ValueError(
            f"h of {inner} channels cannot be quantised by {FP8_GROUP}: leave out its scales, "
            "then `down` quantises it"
        )
    if h.scales is None or config.block_n == FP8_GROUP:
        return config
    stages = max(2, config.num_stages * config.block_n // FP8_GROUP)
    return replace(config, block_n=FP8_GROUP, num_stages=stages)


def _slots(groups: Groups) -> int:
    """Tiles at most; of one row every pair may be one."""
    return groups.tile_expert_X.numel() if groups.ids_K is None else groups.num_places


def _checked(rows: Rows) -> Tensor:
    assert rows.values.is_contiguous()
    assert rows.scales is None or rows.scales.is_contiguous()
    return rows.values


def _planes(matrices: Matrices) -> tuple[Tensor | None, ...]:
    planes = (matrices.planes["values"], matrices.planes.get("scales"), matrices.bias_EN)
    assert all(plane is None or plane.is_contiguous() for plane in planes)
    return planes


def _lists(groups: Groups, direct: bool = False) -> tuple[Tensor | None, ...]:
    """`direct`: none, for a kernel that only needs a row's ids."""
    if direct:
        return (None,) * 6
    return (
        groups.order_P,
        groups.first_E,
        groups.count_E,
        groups.tile_expert_X,
        groups.tile_place_X,
        groups.num_tiles_1,
    )


def _constants(config: Config, groups: Groups, matrices: Matrices) -> dict[str, Any]:
    exact = matrices.planes["values"].dtype == torch.float32
    assert "scales" not in matrices.planes or config.block_k == FP8_GROUP, config
    return {
        "BM": groups.block,
        "BN": config.block_n,
        "BK": config.block_k,
        "PRECISION": "ieee" if exact else "tf32",
        "BLOCK_SCALES": matrices.format in BLOCK_SCALED,
    }


@triton.jit
def _tile_rows(expert, begin, order, first, count, BM: tl.constexpr):
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
    """[BK, M] of a group of columns."""
    column_K = group * BK + tl.arange(0, BK)
    at = row_M[None, :].to(tl.int64) * K + column_K[:, None]
    if K % BK == 0:
        return tl.load(x + at, mask=valid_M[None, :], other=0.0)
    else:
        return tl.load(x + at, mask=valid_M[None, :] & (column_K[:, None] < K), other=0.0)


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
    largest_M = tl.max(tl.abs(value_KM), 0)
    scale_M = tl.maximum(tl.div_rn(largest_M, 448.0), 1.1754943508222875e-38)
    value_KM = tl.div_rn(value_KM, tl.broadcast_to(scale_M[None, :], value_KM.shape))
    value_KM = tl.clamp(value_KM, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    if INTERPRETED:
        value_KM = _round_to_fp8(value_KM)
    return value_KM.to(tl.float8e4nv), scale_M


@triton.jit
def _round_to_fp8(x):
    """To the nearest, ties to even, as a GPU converts; the interpreter cuts off. Adding and taking
    away a large number rounds to its steps: an eighth of the power of two below x, at least
    2 ** -9."""
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    large = tl.maximum(power, 0.015625) * 1572864.0
    return (x + large) - large


@triton.jit
def _product(
    x, x_scales, row_M, valid_M, w, w_scales, line_L, scale_line_L,
    K: tl.constexpr, BL: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_SCALES: tl.constexpr,
):  # fmt: skip
    """w · xᵀ [L, M] in float32. With fp8 weights each group of 128 columns has a scale of its own;
    rows that are not quantised are, here, before they are multiplied."""
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
        at_M = tl.where(valid_M, row_M, tl.min(row_M, 0)) * groups
        if x_scales is not None:
            x_scale_M = tl.load(x_scales + at_M)
        if BLOCK_SCALES:
            w_scale_L = tl.load(w_scales + scale_line_L * groups)
        for group in range(groups):
            w_LK = _lines_of_w(w, line_L, group, K, BK)
            x_KM = _rows_of_x(x, row_M, valid_M, group, K, BK)
            ahead = tl.minimum(group + 1, groups - 1)
            if x_scales is None:
                x_KM, x_scale_M = _quantised(x_KM.to(tl.float32))
            else:
                next_x_M = tl.load(x_scales + (at_M + ahead))
            part_LM = tl.dot(w_LK, x_KM)
            if BLOCK_SCALES:
                next_w_L = tl.load(w_scales + scale_line_L * groups + ahead)
                acc_LM += part_LM * (w_scale_L[:, None] * x_scale_M[None, :])
                w_scale_L = next_w_L
            else:
                acc_LM += part_LM * x_scale_M[None, :]
            if x_scales is not None:
                x_scale_M = next_x_M
        if not BLOCK_SCALES:
            acc_LM *= tl.load(w_scales + scale_line_L)[:, None]
    return acc_LM


@triton.jit
def _activate(gate, up, alpha, limit, LIMITED: tl.constexpr):
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
def _gate_up_tile(
    expert, begin, column, x, x_scales, w, w_scales, bias, h, h_scales,
    order, first, count, x_scale, alpha, limit,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, LIMITED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_SCALES: tl.constexpr,
):  # fmt: skip
    place_M, pair_M, valid_M = _tile_rows(expert, begin, order, first, count, BM)
    index_L = tl.arange(0, 2 * BN)
    # Lines past the end repeat the last one; what comes of them is not stored.
    inner_L = tl.minimum(column * BN + index_L % BN, INNER - 1)
    line_L = expert * (2 * INNER) + index_L // BN * INNER + inner_L
    if BLOCK_SCALES:
        scale_lines: tl.constexpr = (INNER + 127) // 128
        scale_line_L = expert * (2 * scale_lines) + index_L // BN * scale_lines + inner_L // 128
    else:
        scale_line_L = line_L
    acc_LM = _product(
        x, x_scales, pair_M // TOP_K, valid_M, w, w_scales, line_L, scale_line_L,
        HIDDEN, 2 * BN, BM, BK, PRECISION, BLOCK_SCALES,
    )  # fmt: skip
    if BM > 16:
        # Looked up again rather than kept in registers all the while.
        place_M, pair_M, valid_M = _tile_rows(expert, begin, order, first, count, BM)
    acc_LM *= x_scale
    if bias is not None:
        acc_LM += tl.load(bias + line_L).to(tl.float32)[:, None]
    gate_NM, up_NM = tl.split(tl.permute(tl.reshape(acc_LM, [2, BN, BM]), [1, 2, 0]))
    value_NM = _activate(gate_NM, up_NM, alpha, limit, LIMITED)
    _store_inner(value_NM, column, place_M, valid_M, h, h_scales, INNER, BN)


@triton.jit
def _down_tile(
    expert, begin, column, h, h_scales, w, w_scales, bias, weights, y,
    order, first, count, h_scale,
    HIDDEN: tl.constexpr, INNER: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_SCALES: tl.constexpr,
):  # fmt: skip
    place_M, pair_M, valid_M = _tile_rows(expert, begin, order, first, count, BM)
    column_N = column * BN + tl.arange(0, BN)
    inner_N = tl.minimum(column_N, HIDDEN - 1)
    line_N = expert * HIDDEN + inner_N
    if BLOCK_SCALES:
        scale_line_N = expert * ((HIDDEN + 127) // 128) + inner_N // 128
    else:
        scale_line_N = line_N
    acc_NM = _product(
        h, h_scales, place_M, valid_M, w, w_scales, line_N, scale_line_N,
        INNER, BN, BM, BK, PRECISION, BLOCK_SCALES,
    )  # fmt: skip
    if BM > 16:
        # Looked up again rather than kept in registers all the while.
        place_M, pair_M, valid_M = _tile_rows(expert, begin, order, first, count, BM)
    acc_NM *= h_scale
    if bias is not None:
        acc_NM += tl.load(bias + line_N).to(tl.float32)[:, None]
    if weights is not None:
        acc_NM *= tl.load(weights + pair_M, mask=valid_M, other=0.0)[None, :]
    at = pair_M[None, :].to(tl.int64) * HIDDEN + column_N[:, None]
    mask = valid_M[None, :] & (column_N[:, None] < HIDDEN)
    tl.store(y + at, acc_NM.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _gate_up_kernel(
    x, x_scales, w, w_scales, bias, h, h_scales,
    order, first, count, tile_expert, tile_place, num_tiles, x_scale, alpha, limit,
    ids, counters, num_pairs, num_counters,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, LIMITED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_SCALES: tl.constexpr,
    E: tl.constexpr, EP: tl.constexpr, NP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """With `ids` of one row its pairs are the tiles, and one more program writes the lists."""
    columns: tl.constexpr = (INNER + BN - 1) // BN
    tile, column = tl.program_id(0) // columns, tl.program_id(0) % columns
    # Waiting comes first: `_down_kernel` reads the tiles as soon as this kernel lets it begin.
    await_inputs(PDL)
    release_next(PDL)
    if ids is None:
        used = tl.load(num_tiles)
        # Of a tile that is not used this is garbage; asked for now it comes together with `used`.
        expert, begin = tl.load(tile_expert + tile).to(tl.int64), tl.load(tile_place + tile)
        if tile < used:
            _gate_up_tile(
                expert, begin, column, x, x_scales, w, w_scales, bias, h, h_scales,
                order, first, count, x_scale, alpha, limit,
                HIDDEN, INNER, TOP_K, LIMITED, BM, BN, BK, PRECISION, BLOCK_SCALES,
            )  # fmt: skip
    elif tile == num_pairs:
        sort_row(
            ids, order, first, count, tile_expert, tile_place, num_tiles, counters,
            num_pairs, num_counters, E, EP, BM, NP,
        )  # fmt: skip
    else:
        expert = tl.load(ids + tile).to(tl.int64)
        if expert >= 0:
            _gate_up_tile(
                expert, tile, column, x, x_scales, w, w_scales, bias, h, h_scales,
                None, None, None, x_scale, alpha, limit,
                HIDDEN, INNER, TOP_K, LIMITED, BM, BN, BK, PRECISION, BLOCK_SCALES,
            )  # fmt: skip


@triton.jit
def _prefetch_down(
    expert, column, w, HIDDEN: tl.constexpr, INNER: tl.constexpr,
    BN: tl.constexpr, PREFETCH: tl.constexpr, ON: tl.constexpr,
):  # fmt: skip
    """PREFETCH lines of 128 bytes from each of a tile's rows of weights."""
    if ON and PREFETCH:
        line_N = expert * HIDDEN + tl.minimum(column * BN + tl.arange(0, BN), HIDDEN - 1)
        step: tl.constexpr = 1024 // w.dtype.element_ty.primitive_bitwidth
        column_X = tl.arange(0, PREFETCH) * step
        prefetch_lines(w + line_N[:, None] * INNER + column_X[None, :])


@triton.jit
def _down_kernel(
    h, h_scales, w, w_scales, bias, weights, y,
    order, first, count, tile_expert, tile_place, num_tiles, ids, h_scale,
    HIDDEN: tl.constexpr, INNER: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_SCALES: tl.constexpr,
    PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    columns: tl.constexpr = (HIDDEN + BN - 1) // BN
    tile, column = tl.program_id(0) // columns, tl.program_id(0) % columns
    if ids is None:
        used = tile < tl.load(num_tiles)
        expert, begin = tl.load(tile_expert + tile).to(tl.int64), tl.load(tile_place + tile)
    else:
        expert, begin = tl.load(ids + tile).to(tl.int64), tile
        used = expert >= 0
    if used:
        # While gate_up still runs, weights can come into the cache.
        _prefetch_down(expert, column, w, HIDDEN, INNER, BN, PREFETCH, PDL)
        await_inputs(PDL)
        release_next(PDL)
        _down_tile(
            expert, begin, column, h, h_scales, w, w_scales, bias, weights, y,
            order, first, count, h_scale,
            HIDDEN, INNER, BM, BN, BK, PRECISION, BLOCK_SCALES,
        )  # fmt: skip
    else:
        await_inputs(PDL)


@triton.jit
def _gate_up_down_kernel(
    x, x_scales, w13, w13_scales, b13, h, h_scales, w2, w2_scales, b2, weights, y,
    order, first, count, tile_expert, tile_place, num_tiles, counters, num_slots,
    x_scale, h_scale, alpha, limit,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, LIMITED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    DOWN_BN: tl.constexpr, DOWN_BK: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_SCALES: tl.constexpr,
    PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs claim work in order: every column of gate and up of every tile, then of down. A
    column of down waits until its tile's gate and up are complete. Those are claimed before it, by
    programs that run and wait for nobody, so no number of programs can block each other.

    `counters`: finished columns of each tile, claims, programs that have ended.
    """
    inner_columns: tl.constexpr = (INNER + BN - 1) // BN
    outer_columns: tl.constexpr = (HIDDEN + DOWN_BN - 1) // DOWN_BN
    claims = counters + num_slots
    await_inputs(PDL)
    release_next(PDL)
    inner_tasks = tl.load(num_tiles) * inner_columns
    tasks = inner_tasks + tl.load(num_tiles) * outer_columns
    task = tl.atomic_add(claims, 1, sem="relaxed")
    while task < tasks:
        # Claimed ahead, so that nobody waits for the answer.
        following = tl.atomic_add(claims, 1, sem="relaxed")
        if task < inner_tasks:
            tile, column = task // inner_columns, task % inner_columns
            expert, begin = tl.load(tile_expert + tile).to(tl.int64), tl.load(tile_place + tile)
            _gate_up_tile(
                expert, begin, column, x, x_scales, w13, w13_scales, b13, h, h_scales,
                order, first, count, x_scale, alpha, limit,
                HIDDEN, INNER, TOP_K, LIMITED, BM, BN, BK, PRECISION, BLOCK_SCALES,
            )  # fmt: skip
            tl.debug_barrier()  # all threads have stored before one of them says so
            tl.atomic_add(counters + tile, 1, sem="release")
        else:
            tile = (task - inner_tasks) // outer_columns
            column = (task - inner_tasks) % outer_columns
            expert, begin = tl.load(tile_expert + tile).to(tl.int64), tl.load(tile_place + tile)
            _prefetch_down(expert, column, w2, HIDDEN, INNER, DOWN_BN, PREFETCH, PDL)
            finished = tl.atomic_add(counters + tile, 0, sem="acquire")
            while finished < inner_columns:
                finished = tl.atomic_add(counters + tile, 0, sem="acquire")
            tl.debug_barrier()
            _down_tile(
                expert, begin, column, h, h_scales, w2, w2_scales, b2, weights, y,
                order, first, count, h_scale,
                HIDDEN, INNER, BM, DOWN_BN, DOWN_BK, PRECISION, BLOCK_SCALES,
            )  # fmt: skip
        task = following
    ended = tl.atomic_add(claims + 1, 1, sem="acq_rel")
    if ended == tl.num_programs(0) - 1:
        for start in range(0, num_slots + 2, 128):
            place = start + tl.arange(0, 128)
            tl.store(counters + place, tl.zeros_like(place), mask=place < num_slots + 2)
