"""Experts with few rows each: reading the weights takes the time, so these kernels keep many bytes
in flight.

The products of a tile are in experts_tiles.py. The kernels of one product have a program for each
column of a tile; in the kernel of both, programs claim columns dynamically.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.cpu.experts import SwigluSpec
from moesaic.kernels.experts import FeedForward, Groups, Matrices, Rows, operand
from moesaic.kernels.quantise import FP8_GROUP
from moesaic.kernels.triton.experts_tiles import (
    TileConstants,
    down_tile,
    gate_up_tile,
    prefetch_down,
    prefetch_gate_up,
)
from moesaic.kernels.triton.launch import await_inputs, dependent_launch, release_next
from moesaic.kernels.triton.sort import row_arguments, sort_row
from moesaic.kernels.tuning import BLOCK_SCALED, ExpertsPlan, TileConfig, device_facts

PROGRAMS = 3
"""Programs of each processor that share all tiles; those without room start when others end."""


def gate_up_small(
    x: Rows, w13: Matrices, groups: Groups, activation: SwigluSpec, h: Rows, config: TileConfig
) -> Rows:
    config, given, x = fitting(config, h), x, operand(x, w13)
    # Weights can be prefetched if quantising runs between the choice of experts and this kernel.
    prefetch = config.prefetch if x is not given and len(x.values) else 0
    inner = w13.shape[1] // 2
    tiles = _slots(groups) * triton.cdiv(inner, config.block_n) + (groups.ids_K is not None)
    pdl = dependent_launch(x.values)
    _gate_up_kernel[(tiles,)](
        _checked(x), x.scales, *planes_of(w13), h.values, h.scales, *groups.lists,
        x.scale, activation.alpha, activation.limit or 0.0,
        P=constants_of(config, groups, w13, activation),
        **row_arguments(groups), PREFETCH=prefetch, PDL=pdl.on,
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
    plan: ExpertsPlan,
) -> Tensor:
    """Both products in one launch: every program has the resources of the larger one."""
    gate_up, down = fitting(plan.gate_up, h), plan.down
    w13, w2, activation = experts.w13, experts.w2, experts.activation
    _, hidden, inner = w2.shape
    assert groups.counters is not None and groups.ids_K is None, "pairs must be sorted"
    assert h.scales is not None or "scales" not in w2.planes, "h must be quantised by gate_up"
    x = operand(x, w13)
    columns = triton.cdiv(inner, gate_up.block_n) + triton.cdiv(hidden, down.block_n)
    slots = groups.tile_expert_X.numel()
    programs = min(slots * columns, PROGRAMS * device_facts(y.device).processors)
    pdl = dependent_launch(y)
    _gate_up_down_kernel[(programs,)](
        _checked(x), x.scales, *planes_of(w13), h.values, h.scales, *planes_of(w2), weights_RK, y,
        *groups.lists, groups.counters, slots, x.scale, h.scale,
        activation.alpha, activation.limit or 0.0,
        P=constants_of(gate_up, groups, w13, activation), DOWN=constants_of(down, groups, w2),
        PREFETCH=down.prefetch, PDL=pdl.on,
        num_warps=max(gate_up.num_warps, down.num_warps),
        num_stages=min(gate_up.num_stages, down.num_stages), **pdl.options,
    )  # fmt: skip
    return y


def down_small(
    h: Rows, w2: Matrices, groups: Groups, weights_RK: Tensor | None, y: Tensor, config: TileConfig
) -> Tensor:
    """Runs after `gate_up_small` of the same groups, never directly after the sorting: with
    dependent launches it reads the tiles before its predecessor ends, but after that one has seen
    the sorting end."""
    h = operand(h, w2)
    assert y.is_contiguous() and (weights_RK is None or weights_RK.is_contiguous())
    tiles = _slots(groups) * triton.cdiv(w2.shape[1], config.block_n)
    pdl = dependent_launch(y)
    _down_kernel[(tiles,)](
        _checked(h), h.scales, *planes_of(w2), weights_RK, y,
        *(groups.lists if groups.ids_K is None else (None,) * 6), groups.ids_K, h.scale,
        P=constants_of(config, groups, w2), PREFETCH=config.prefetch, PDL=pdl.on,
        num_warps=config.num_warps, num_stages=config.num_stages, **pdl.options,
    )  # fmt: skip
    return y


def fitting(config: TileConfig, h: Rows) -> TileConfig:
    """Channels with a common scale must be one tile."""
    inner = h.values.shape[1]
    if h.scales is not None and inner % FP8_GROUP:
        raise ValueError(
            f"h of {inner} channels cannot be quantised by {FP8_GROUP}: pass it without scales, "
            "and `down` quantises it"
        )
    if h.scales is None or config.block_n == FP8_GROUP:
        return config
    stages = max(2, config.num_stages * config.block_n // FP8_GROUP)
    return replace(config, block_n=FP8_GROUP, num_stages=stages)


def _slots(groups: Groups) -> int:
    """Most tiles; for one row every pair may be one."""
    return groups.tile_expert_X.numel() if groups.ids_K is None else groups.num_places


def _checked(rows: Rows) -> Tensor:
    assert rows.values.is_contiguous()
    assert rows.scales is None or rows.scales.is_contiguous()
    return rows.values


def planes_of(matrices: Matrices) -> tuple[Tensor | None, ...]:
    planes = (matrices.planes["values"], matrices.planes.get("scales"), matrices.bias_EN)
    assert all(plane is None or plane.is_contiguous() for plane in planes)
    return planes


def constants_of(
    config: TileConfig, groups: Groups, matrices: Matrices, activation: SwigluSpec | None = None
) -> TileConstants:
    gates = matrices.parts == 2
    assert "scales" not in matrices.planes or config.block_k == FP8_GROUP, config
    return _constants(
        config,
        tuple(matrices.shape[1:]),
        gates,
        (groups.block, groups.top_k if gates else 1),
        (matrices.planes["values"].dtype == torch.float32, matrices.format in BLOCK_SCALED),
        activation is not None and activation.limit is not None,
    )


@cache
def _constants(
    config: TileConfig,
    shape: tuple[int, int],
    gates: bool,
    rows: tuple[int, int],
    kind: tuple[bool, bool],
    limited: bool,
) -> TileConstants:
    """One object for all launches with the same constants: making one takes microseconds."""
    (block, top_k), (ieee, block_scales) = rows, kind
    return TileConstants(
        HIDDEN=shape[1] if gates else shape[0],
        INNER=shape[0] // 2 if gates else shape[1],
        BM=block,
        BN=config.block_n,
        BK=config.block_k,
        PRECISION="ieee" if ieee else "tf32",
        BLOCK_SCALES=block_scales,
        TOP_K=top_k,
        LIMITED=limited,
    )


@triton.jit
def _gate_up_kernel(
    x, x_scales, w, w_scales, bias, h, h_scales,
    order, first, count, tile_expert, tile_place, num_tiles, x_scale, alpha, limit,
    ids, counters, load, num_pairs, num_counters,
    P: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, NP: tl.constexpr,
    PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """With `ids` of one row its pairs are the tiles, and one more program writes the lists.

    PREFETCH requires a predecessor that waits before it releases this kernel: then the lists exist,
    and weights load into the cache while it runs.
    """
    columns: tl.constexpr = (P.INNER + P.BN - 1) // P.BN
    tile, column = tl.program_id(0) // columns, tl.program_id(0) % columns
    if PDL and PREFETCH:
        if ids is None:
            chosen = tl.load(tile_expert + tile, cache_modifier=".cg").to(tl.int64)
            there = tile < tl.load(num_tiles, cache_modifier=".cg")
        else:
            chosen = tl.load(ids + tile, mask=tile < num_pairs, other=-1, cache_modifier=".cg")
            chosen = chosen.to(tl.int64)
            there = chosen >= 0
        if there:
            prefetch_gate_up(chosen, column, w, P, PREFETCH)
    # Waits first: `_down_kernel` reads the tiles as soon as this kernel releases it.
    await_inputs(PDL)
    release_next(PDL)
    if ids is None:
        used = tl.load(num_tiles)
        # Undefined for unused tiles; loaded here, it arrives together with `used`.
        expert, begin = tl.load(tile_expert + tile).to(tl.int64), tl.load(tile_place + tile)
        if tile < used:
            gate_up_tile(
                expert, begin, column, x, x_scales, w, w_scales, bias, h, h_scales,
                order, first, count, x_scale, alpha, limit, P,
            )  # fmt: skip
    elif tile == num_pairs:
        sort_row(
            ids, order, first, count, tile_expert, tile_place, num_tiles, counters, load,
            num_pairs, num_counters, E, EP, P.BM, NP,
        )  # fmt: skip
    else:
        expert = tl.load(ids + tile).to(tl.int64)
        if expert >= 0:
            gate_up_tile(
                expert, tile, column, x, x_scales, w, w_scales, bias, h, h_scales,
                None, None, None, x_scale, alpha, limit, P,
            )  # fmt: skip


@triton.jit
def _down_kernel(
    h, h_scales, w, w_scales, bias, weights, y,
    order, first, count, tile_expert, tile_place, num_tiles, ids, h_scale,
    P: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    columns: tl.constexpr = (P.HIDDEN + P.BN - 1) // P.BN
    tile, column = tl.program_id(0) // columns, tl.program_id(0) % columns
    # Loaded before the wait, and past the L1 cache, where an earlier layer may have left these
    # addresses.
    if ids is None:
        used = tile < tl.load(num_tiles, cache_modifier=".cg")
        expert = tl.load(tile_expert + tile, cache_modifier=".cg").to(tl.int64)
        begin = tl.load(tile_place + tile, cache_modifier=".cg")
    else:
        expert, begin = tl.load(ids + tile, cache_modifier=".cg").to(tl.int64), tile
        used = expert >= 0
    if used:
        # Loads weights into the cache while gate_up still runs.
        prefetch_down(expert, column, w, P, PREFETCH, PDL)
        await_inputs(PDL)
        release_next(PDL)
        down_tile(
            expert, begin, column, h, h_scales, w, w_scales, bias, weights, y,
            order, first, count, h_scale, P,
        )  # fmt: skip
    else:
        await_inputs(PDL)


@triton.jit
def _gate_up_down_kernel(
    x, x_scales, w13, w13_scales, b13, h, h_scales, w2, w2_scales, b2, weights, y,
    order, first, count, tile_expert, tile_place, num_tiles, counters, num_slots,
    x_scale, h_scale, alpha, limit,
    P: tl.constexpr, DOWN: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs claim tasks in order: every column of gate and up of every tile, then of down. A
    column of down waits until its tile's gate and up are complete. Running programs that never wait
    claimed those before, so no number of programs can deadlock.

    `counters`: finished columns of each tile, claims, finished programs.
    """
    inner_columns: tl.constexpr = (P.INNER + P.BN - 1) // P.BN
    outer_columns: tl.constexpr = (P.HIDDEN + DOWN.BN - 1) // DOWN.BN
    claims = counters + num_slots
    await_inputs(PDL)
    release_next(PDL)
    inner_tasks = tl.load(num_tiles) * inner_columns
    tasks = inner_tasks + tl.load(num_tiles) * outer_columns
    task = tl.atomic_add(claims, 1, sem="relaxed")
    while task < tasks:
        # Claimed one task ahead, to hide the latency.
        following = tl.atomic_add(claims, 1, sem="relaxed")
        if task < inner_tasks:
            tile, column = task // inner_columns, task % inner_columns
            expert, begin = tl.load(tile_expert + tile).to(tl.int64), tl.load(tile_place + tile)
            gate_up_tile(
                expert, begin, column, x, x_scales, w13, w13_scales, b13, h, h_scales,
                order, first, count, x_scale, alpha, limit, P,
            )  # fmt: skip
            tl.debug_barrier()  # all threads have stored before one of them counts the column
            tl.atomic_add(counters + tile, 1, sem="release")
        else:
            tile = (task - inner_tasks) // outer_columns
            column = (task - inner_tasks) % outer_columns
            expert, begin = tl.load(tile_expert + tile).to(tl.int64), tl.load(tile_place + tile)
            prefetch_down(expert, column, w2, DOWN, PREFETCH, PDL)
            finished = tl.atomic_add(counters + tile, 0, sem="acquire")
            while finished < inner_columns:
                finished = tl.atomic_add(counters + tile, 0, sem="acquire")
            tl.debug_barrier()
            down_tile(
                expert, begin, column, h, h_scales, w2, w2_scales, b2, weights, y,
                order, first, count, h_scale, DOWN,
            )  # fmt: skip
        task = following
    ended = tl.atomic_add(claims + 1, 1, sem="acq_rel")
    if ended == tl.num_programs(0) - 1:
        for start in range(0, num_slots + 2, 128):
            place = start + tl.arange(0, 128)
            tl.store(counters + place, tl.zeros_like(place), mask=place < num_slots + 2)
