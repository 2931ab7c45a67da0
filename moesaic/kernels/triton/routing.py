"""Routing; the twins are in kernels/routing.py.

Scores are compared as integers that sort in the same order: the maximum of int32 over a warp is a
single instruction, so choosing K of E experts takes K short steps without shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.experts import summed
from moesaic.kernels.norm import SumToNorm
from moesaic.kernels.routing import (
    FAKE_BITS,
    FAKE_LEAST,
    GOLDEN,
    MAX_ROWS,
    MIX,
    RouterWeights,
    TopKConfig,
    TopKInputs,
)
from moesaic.kernels.triton.launch import await_inputs, dependent_launch, release_next

# Below the key of any number, -inf included.
LEAST = tl.constexpr(-(2**31))
INFINITY_KEY = tl.constexpr(0x7F800000)
GOLDEN_STEP = tl.constexpr(GOLDEN)
MIX_1 = tl.constexpr(MIX[0])
MIX_2 = tl.constexpr(MIX[1])
FAKE_FACTOR = tl.constexpr(FAKE_LEAST)
FAKE_ONE = tl.constexpr(1 << FAKE_BITS)
FAKE_SHIFT = tl.constexpr(32 - FAKE_BITS)
# Experts and channels of a program of `route_rows`, which does not use tensor cores.
ROUTER_TILE = (8, 256)


@dataclass(frozen=True)
class RouteConstants:
    """Compile-time constants `P` of the routing kernels; blocks are padded to powers of two."""

    spec: TopKConfig
    limits_groups: bool
    """A field, as Triton's cache knows fields and not the code of properties."""
    by_logits: bool
    experts: int
    block_e: int
    block_k: int
    block_z: int
    replicas: int
    """Columns of the slot table; 0 without one."""


@triton.jit
def _key(x):
    """Sorts like the numbers; zeros are equal, NaN equals +inf."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), INFINITY_KEY)


@triton.jit
def _number(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _highest(keys, ids):
    """The highest key of each row, and the lowest id that has it."""
    best = tl.max(keys, 1)[:, None]
    return best, tl.min(tl.where(keys == best, ids, 0x7FFFFFFF), 1)[:, None]


@triton.jit
def _drop_groups(keys, expert, P: tl.constexpr):
    """Sets the keys of experts outside the best groups to LEAST."""
    GROUPS: tl.constexpr = P.spec.num_groups
    TOPK_GROUPS: tl.constexpr = P.spec.topk_groups
    BLOCK_Z: tl.constexpr = P.block_z
    group = expert // (P.experts // GROUPS)
    numbers = tl.arange(0, BLOCK_Z)[None, :]
    group_keys = tl.full((keys.shape[0], BLOCK_Z), LEAST, tl.int32)
    for z in tl.static_range(GROUPS):
        inside = tl.where(group == z, keys, LEAST)
        best, at = _highest(inside, expert)
        if P.spec.group_score == "top2":
            second = tl.max(tl.where(expert == at, LEAST, inside), 1)[:, None]
            best = _key(_number(best) + _number(second))
        group_keys = tl.where(numbers == z, best, group_keys)
    kept = expert < 0
    for _ in tl.static_range(TOPK_GROUPS):
        best, at = _highest(group_keys, numbers)
        kept = kept | (group == at)
        group_keys = tl.where(numbers == at, LEAST, group_keys)
    return tl.where(kept, keys, LEAST)


@triton.jit
def replica_of_row(row, count):
    mixed = row.to(tl.uint32) * GOLDEN_STEP
    return (((mixed >> 16) * count.to(tl.uint32)) >> 16).to(tl.int32)


@triton.jit
def _fake_logits(logits, row, expert):
    mixed = logits.to(tl.uint32, bitcast=True)
    mixed ^= row.to(tl.uint32) * GOLDEN_STEP
    mixed ^= expert.to(tl.uint32) * MIX_1
    mixed = (mixed ^ (mixed >> 16)) * MIX_1
    mixed = (mixed ^ (mixed >> 13)) * MIX_2
    mixed = (mixed ^ (mixed >> 16)) >> FAKE_SHIFT
    return ((mixed.to(tl.int32) + FAKE_ONE) * FAKE_FACTOR).to(tl.float32) / FAKE_ONE


@triton.jit
def _choose(logits, expert, bias_ptr, P: tl.constexpr):
    """Experts and weights [rows, block_k] from float32 logits [rows, block_e]."""
    K: tl.constexpr = P.spec.top_k
    BLOCK_K: tl.constexpr = P.block_k
    valid = expert < P.experts
    if P.spec.scoring == "sigmoid":
        scores = 1 / (1 + tl.exp(-logits))
    else:
        shares = tl.exp(logits - tl.max(tl.where(valid, logits, -float("inf")), 1)[:, None])
        scores = shares / tl.sum(tl.where(valid, shares, 0.0), 1)[:, None]
    choice = logits if P.by_logits else scores
    if bias_ptr is not None and not P.spec.fake:
        choice += tl.load(bias_ptr + expert, valid, 0.0).to(tl.float32)
    keys = tl.where(valid, _key(choice), LEAST)
    if P.limits_groups:
        keys = _drop_groups(keys, expert, P)
    # Scores are not negative: their bits sort like them, and one maximum selects one.
    bits = tl.where(scores == scores, scores.to(tl.int32, bitcast=True), 0x7FC00000)
    place = tl.arange(0, BLOCK_K)[None, :]
    ids = tl.zeros((keys.shape[0], BLOCK_K), tl.int32)
    picked = tl.zeros((keys.shape[0], BLOCK_K), tl.int32)
    for k in tl.static_range(K):
        _, at = _highest(keys, expert)
        here = expert == at
        ids = tl.where(place == k, at, ids)
        picked = tl.where(place == k, tl.max(tl.where(here, bits, 0), 1)[:, None], picked)
        keys = tl.where(here, LEAST, keys)
    weights = picked.to(tl.float32, bitcast=True)
    if P.spec.renormalize:
        weights = weights / (tl.sum(weights, 1)[:, None] + 1e-20)
    return ids, weights


@triton.jit
def _route(logits, row, expert, num_rows, lists, scale, P: tl.constexpr):
    """Chooses experts and stores their slots and weights."""
    bias_ptr, num_tokens_ptr, slots_ptr, count_ptr, ids_ptr, weights_ptr = lists
    K: tl.constexpr = P.spec.top_k
    if P.spec.fake:
        logits = _fake_logits(logits, row, expert)
    ids, weights = _choose(logits, expert, bias_ptr, P)
    place = tl.arange(0, P.block_k)[None, :]
    mask = (row < num_rows) & (place < K)
    if P.replicas > 0:
        count = tl.load(count_ptr + ids, mask, 1)
        ids = tl.load(slots_ptr + ids * P.replicas + replica_of_row(row, count), mask, -1)
    weights = weights * scale
    if num_tokens_ptr is not None:
        real = row < tl.load(num_tokens_ptr)
        ids = tl.where(real, ids, -1)
        weights = tl.where(real, weights, 0.0)
    tl.store(ids_ptr + row * K + place, ids, mask)
    tl.store(weights_ptr + row * K + place, weights, mask)


@triton.jit(do_not_specialize=["num_rows"])
def _route_kernel(
    logits_ptr,
    bias_ptr,
    num_tokens_ptr,
    slots_ptr,
    count_ptr,
    ids_ptr,
    weights_ptr,
    num_rows,
    stride,
    scale,
    P: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One warp a row: everything stays in its registers."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    expert = tl.arange(0, P.block_e)[None, :]
    release_next(PDL)
    await_inputs(PDL)
    mask = (row < num_rows) & (expert < P.experts)
    logits = tl.load(logits_ptr + row * stride + expert, mask, 0.0).to(tl.float32)
    lists = (bias_ptr, num_tokens_ptr, slots_ptr, count_ptr, ids_ptr, weights_ptr)
    _route(logits, row, expert, num_rows, lists, scale, P)


@triton.jit
def _norm_row(
    x, weight, x_ptr, residual_ptr, normed_ptr, sum_ptr, channel, inside, eps, keep, H: tl.constexpr
):
    """Norms some channels' sums with the residual; with `keep` also stores both."""
    TYPE: tl.constexpr = sum_ptr.dtype.element_ty
    every = tl.arange(0, triton.next_power_of_2(H))
    whole = tl.load(x_ptr + every, every < H, 0.0).to(tl.float32)
    whole += tl.load(residual_ptr + every, every < H, 0.0).to(tl.float32)
    whole = whole.to(TYPE).to(tl.float32)
    factor = tl.math.rsqrt(tl.sum(whole * whole, 0) / H + eps)
    total = (tl.load(residual_ptr + channel, inside, 0.0).to(tl.float32) + x).to(TYPE)
    normed = (total.to(tl.float32) * factor * weight).to(TYPE)
    tl.store(sum_ptr + channel, total, inside & keep)
    tl.store(normed_ptr + channel, normed, inside & keep)
    return normed.to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def _router_kernel(
    x_ptr,
    residual_ptr,
    norm_ptr,
    normed_ptr,
    sum_ptr,
    weight_ptr,
    router_bias_ptr,
    partial_ptr,
    counter_ptr,
    bias_ptr,
    num_tokens_ptr,
    slots_ptr,
    count_ptr,
    ids_ptr,
    weights_ptr,
    num_rows,
    stride,
    residual_stride,
    eps,
    scale,
    P: tl.constexpr,
    H: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_X: tl.constexpr,
    ROUNDS: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (i, s) multiplies BLOCK_X experts by BLOCK_H channels of all rows. The last one to
    finish adds the products, always in the same order, and routes. With a residual, `_norm_row`
    gives the rows."""
    BLOCK_E: tl.constexpr = P.block_e
    some = tl.program_id(0) * BLOCK_X + tl.arange(0, BLOCK_X)
    split = tl.program_id(1)
    channel = split * BLOCK_H + tl.arange(0, BLOCK_H)
    at = some.to(tl.int64)[:, None] * H + channel[None, :]
    weight = tl.load(weight_ptr + at, (some < P.experts)[:, None] & (channel < H)[None, :], 0.0)
    weight = weight.to(tl.float32)
    if residual_ptr is not None:
        norm = tl.load(norm_ptr + channel, channel < H, 0.0).to(tl.float32)
    release_next(PDL)
    await_inputs(PDL)
    for t in tl.static_range(ROWS):
        inside = (channel < H) & (t < num_rows)
        x = tl.load(x_ptr + t * stride + channel, inside, 0.0).to(tl.float32)
        if residual_ptr is not None:
            at_row = tl.minimum(t, num_rows - 1)
            x = _norm_row(
                x, norm, x_ptr + at_row * stride, residual_ptr + at_row * residual_stride,
                normed_ptr + t * H, sum_ptr + t * H, channel, inside, eps, tl.program_id(0) == 0, H,
            )  # fmt: skip
        product = tl.sum(weight * x[None, :], 1)
        tl.store(partial_ptr + (split * ROWS + t) * BLOCK_E + some, product)
    tl.debug_barrier()  # All threads write their products before one of them counts.
    programs = tl.num_programs(0) * tl.num_programs(1)
    if tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == programs - 1:
        tl.store(counter_ptr, 0)
        row = tl.arange(0, ROWS)[:, None]
        expert = tl.arange(0, BLOCK_E)[None, :]
        logits = tl.zeros((ROWS, BLOCK_E), tl.float32)
        for s in range(SPLITS):
            part_ptr = partial_ptr + (s * ROWS + row) * BLOCK_E + expert
            logits += tl.load(part_ptr, cache_modifier=".cg")
        if router_bias_ptr is not None:
            bias = tl.load(router_bias_ptr + expert, expert < P.experts, 0.0)
            logits += bias.to(tl.float32)
        if ROUNDS:
            logits = logits.to(x_ptr.dtype.element_ty).to(tl.float32)
        lists = (bias_ptr, num_tokens_ptr, slots_ptr, count_ptr, ids_ptr, weights_ptr)
        _route(logits, row, expert, num_rows, lists, scale, P)


def route(logits_TE: Tensor, given: TopKInputs) -> tuple[Tensor, Tensor]:
    rows, experts = logits_TE.shape
    lists, fixed = _arguments(logits_TE, experts, given)
    if rows:
        logits_TE = logits_TE if logits_TE.stride(1) == 1 else logits_TE.contiguous()
        pdl = dependent_launch(logits_TE)
        _route_kernel[(rows,)](
            logits_TE, *lists, rows, logits_TE.stride(0), given.spec.routed_scaling_factor, P=fixed,
            ROWS=1, num_warps=1, PDL=pdl.on, **pdl.options,
        )  # fmt: skip
    return lists[-2:]


def route_rows(x_TH: Tensor, router: RouterWeights, given: TopKInputs) -> tuple[Tensor, Tensor]:
    lists, fixed = _arguments(x_TH, len(router.weight_EH), given)
    _run_router(x_TH, (None, None, None, None, 0, 0.0), router, lists, fixed)
    return lists[-2:]


def norm_route_rows(
    rows: SumToNorm, router: RouterWeights, given: TopKInputs
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x_TH, residual_TH = summed(rows.values), rows.residual_TH
    assert residual_TH.stride(1) == 1 and x_TH.stride(1) == 1, (x_TH.stride(), residual_TH.stride())
    normed_TH, sum_TH = torch.empty_like(residual_TH), torch.empty_like(residual_TH)
    lists, fixed = _arguments(x_TH, len(router.weight_EH), given)
    norm = (residual_TH, rows.weight_H, normed_TH, sum_TH, residual_TH.stride(0), rows.eps)
    _run_router(x_TH, norm, router, lists, fixed)
    return normed_TH, sum_TH, *lists[-2:]


def _run_router(
    x_TH: Tensor,
    norm: tuple[Any, ...],
    router: RouterWeights,
    lists: tuple[Any, ...],
    fixed: RouteConstants,
) -> None:
    rows, hidden = x_TH.shape
    assert rows <= MAX_ROWS and router.weight_EH.is_contiguous(), (rows, router.weight_EH.stride())
    if not rows:
        return
    x_TH = x_TH if x_TH.stride(1) == 1 else x_TH.contiguous()
    tile = triton.next_power_of_2(rows)
    experts, channels = ROUTER_TILE
    splits = triton.cdiv(hidden, channels)
    partial = torch.empty(splits, tile, fixed.block_e, device=x_TH.device)
    pdl = dependent_launch(x_TH)
    *norm_arrays, residual_stride, eps = norm
    _router_kernel[(fixed.block_e // experts, splits)](
        x_TH, *norm_arrays, router.weight_EH, router.bias_E, partial, router.counter_1, *lists,
        rows, x_TH.stride(0), residual_stride, eps, fixed.spec.routed_scaling_factor, P=fixed,
        H=hidden, SPLITS=splits, BLOCK_H=channels, BLOCK_X=experts, ROUNDS=router.rounds,
        ROWS=tile, num_warps=tile, PDL=pdl.on, **pdl.options,
    )  # fmt: skip


@cache
def constants(experts: int, spec: TopKConfig, biased: bool, replicas: int) -> RouteConstants:
    return RouteConstants(
        spec=spec,
        limits_groups=spec.limits_groups,
        by_logits=spec.by_logits(biased),
        experts=experts,
        block_e=max(32, triton.next_power_of_2(experts)),
        block_k=triton.next_power_of_2(spec.top_k),
        block_z=triton.next_power_of_2(spec.num_groups),
        replicas=replicas,
    )


def _arguments(
    x: Tensor, experts: int, given: TopKInputs
) -> tuple[tuple[Any, ...], RouteConstants]:
    """The tensors that `_route` reads, new ones for its results [T, K], and its constants."""
    spec, slots = given.spec, given.slots
    table = (None, None) if slots is None else (slots.slots_EX, slots.count_E)
    ids_TK = torch.empty(len(x), spec.top_k, dtype=torch.int32, device=x.device)
    weights_TK = torch.empty_like(ids_TK, dtype=torch.float32)
    replicas = 0 if slots is None else slots.slots_EX.shape[1]
    biased = given.bias_E is not None and not spec.fake
    fixed = constants(experts, spec, biased, replicas)
    return (given.bias_E, given.num_tokens_1, *table, ids_TK, weights_TK), fixed
