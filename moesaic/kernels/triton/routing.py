"""Routing; twins in kernels/routing.py.

Scores are compared as integers that order like them: a maximum of int32 over a warp is a single
instruction on a GPU, so choosing K of E experts takes K short steps without shared memory.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.experts import finished
from moesaic.kernels.norm import SumToNorm
from moesaic.kernels.routing import MAX_ROWS, RouterWeights, SlotTable, TopKConfig
from moesaic.kernels.triton.launch import await_inputs, dependent_launch, release_next

# Below the key of any number, -inf included.
LEAST = tl.constexpr(-(2**31))
INFINITY_KEY = tl.constexpr(0x7F800000)
# Experts and channels of a program of `route_rows`, which computes without matrix units.
ROUTER_TILE = (8, 256)


@triton.jit
def _key(x):
    """Orders like the numbers: zeros are equal, NaN is infinite."""
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
def _drop_groups(
    keys,
    expert,
    E: tl.constexpr,
    GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    BLOCK_Z: tl.constexpr,
):
    """Keys of experts outside of the best groups become LEAST."""
    group = expert // (E // GROUPS)
    numbers = tl.arange(0, BLOCK_Z)[None, :]
    worth = tl.full((keys.shape[0], BLOCK_Z), LEAST, tl.int32)
    for z in tl.static_range(GROUPS):
        inside = tl.where(group == z, keys, LEAST)
        best, at = _highest(inside, expert)
        if TOP2:
            second = tl.max(tl.where(expert == at, LEAST, inside), 1)[:, None]
            best = _key(_number(best) + _number(second))
        worth = tl.where(numbers == z, best, worth)
    kept = expert < 0
    for _ in tl.static_range(TOPK_GROUPS):
        best, at = _highest(worth, numbers)
        kept = kept | (group == at)
        worth = tl.where(numbers == at, LEAST, worth)
    return tl.where(kept, keys, LEAST)


@triton.jit
def _choose(
    logits,
    expert,
    bias_ptr,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    BIASED: tl.constexpr,
    BY_LOGITS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    BLOCK_Z: tl.constexpr,
):
    """Experts and weights [rows, BLOCK_K] from float32 logits [rows, BLOCK_E]."""
    valid = expert < E
    if SIGMOID:
        scores = 1 / (1 + tl.exp(-logits))
    else:
        shares = tl.exp(logits - tl.max(tl.where(valid, logits, -float("inf")), 1)[:, None])
        scores = shares / tl.sum(tl.where(valid, shares, 0.0), 1)[:, None]
    choice = logits if BY_LOGITS else scores
    if BIASED:
        choice += tl.load(bias_ptr + expert, valid, 0.0).to(tl.float32)
    keys = tl.where(valid, _key(choice), LEAST)
    if TOPK_GROUPS < GROUPS:
        keys = _drop_groups(keys, expert, E, GROUPS, TOPK_GROUPS, TOP2, BLOCK_Z)
    # Scores are not negative: their bits order like them, and one maximum picks one out.
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
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, 1)[:, None] + 1e-20)
    return ids, weights


@triton.jit
def _store(
    ids,
    weights,
    row,
    num_rows,
    num_tokens_ptr,
    slots_ptr,
    count_ptr,
    ids_ptr,
    weights_ptr,
    scale,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MAPPED: tl.constexpr,
    REPLICAS: tl.constexpr,
    PADDED: tl.constexpr,
):
    place = tl.arange(0, BLOCK_K)[None, :]
    mask = (row < num_rows) & (place < K)
    if MAPPED:
        count = tl.load(count_ptr + ids, mask, 1)
        ids = tl.load(slots_ptr + ids * REPLICAS + (row % count).to(tl.int32), mask, -1)
    weights = weights * scale
    if PADDED:
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
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    BIASED: tl.constexpr,
    BY_LOGITS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    BLOCK_Z: tl.constexpr,
    MAPPED: tl.constexpr,
    REPLICAS: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """A warp a row: all that it does stays in its registers."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    expert = tl.arange(0, BLOCK_E)[None, :]
    release_next(PDL)
    await_inputs(PDL)
    mask = (row < num_rows) & (expert < E)
    logits = tl.load(logits_ptr + row * stride + expert, mask, 0.0).to(tl.float32)
    ids, weights = _choose(
        logits, expert, bias_ptr, E, K, BLOCK_K, SIGMOID, BIASED, BY_LOGITS, RENORMALIZE,
        GROUPS, TOPK_GROUPS, TOP2, BLOCK_Z,
    )  # fmt: skip
    _store(
        ids, weights, row, num_rows, num_tokens_ptr, slots_ptr, count_ptr, ids_ptr, weights_ptr,
        scale, K, BLOCK_K, MAPPED, REPLICAS, PADDED,
    )  # fmt: skip


@triton.jit
def _norm_row(
    x,
    weight,
    x_ptr,
    residual_ptr,
    normed_ptr,
    sum_ptr,
    channel,
    inside,
    eps,
    keep,
    H: tl.constexpr,
):
    """Of a row's sum with its residual: some channels normed, whose `x` and norm's `weight` are
    given. Who shall `keep` them stores them and their sums."""
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
    H: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_X: tl.constexpr,
    ROUTER_BIAS: tl.constexpr,
    ROUNDS: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    BIASED: tl.constexpr,
    BY_LOGITS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    BLOCK_Z: tl.constexpr,
    MAPPED: tl.constexpr,
    REPLICAS: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (i, s): products of BLOCK_X experts over BLOCK_H channels, for all rows. The one that
    comes last adds them up, always in the same order, and routes. With a residual the rows are what
    `_norm_row` gives."""
    some = tl.program_id(0) * BLOCK_X + tl.arange(0, BLOCK_X)
    split = tl.program_id(1)
    channel = split * BLOCK_H + tl.arange(0, BLOCK_H)
    at = some.to(tl.int64)[:, None] * H + channel[None, :]
    weight = tl.load(weight_ptr + at, (some < E)[:, None] & (channel < H)[None, :], 0.0)
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
    tl.debug_barrier()  # all threads' products are written before one thread says so
    programs = tl.num_programs(0) * tl.num_programs(1)
    if tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == programs - 1:
        tl.store(counter_ptr, 0)
        row = tl.arange(0, ROWS)[:, None]
        expert = tl.arange(0, BLOCK_E)[None, :]
        logits = tl.zeros((ROWS, BLOCK_E), tl.float32)
        for s in range(SPLITS):
            part_ptr = partial_ptr + (s * ROWS + row) * BLOCK_E + expert
            logits += tl.load(part_ptr, cache_modifier=".cg")
        if ROUTER_BIAS:
            logits += tl.load(router_bias_ptr + expert, expert < E, 0.0).to(tl.float32)
        if ROUNDS:
            logits = logits.to(x_ptr.dtype.element_ty).to(tl.float32)
        ids, weights = _choose(
            logits, expert, bias_ptr, E, K, BLOCK_K, SIGMOID, BIASED, BY_LOGITS, RENORMALIZE,
            GROUPS, TOPK_GROUPS, TOP2, BLOCK_Z,
        )  # fmt: skip
        _store(
            ids, weights, row, num_rows, num_tokens_ptr, slots_ptr, count_ptr, ids_ptr,
            weights_ptr, scale, K, BLOCK_K, MAPPED, REPLICAS, PADDED,
        )  # fmt: skip


def route(
    logits_TE: Tensor,
    spec: TopKConfig,
    bias_E: Tensor | None = None,
    num_tokens_1: Tensor | None = None,
    slots: SlotTable | None = None,
) -> tuple[Tensor, Tensor]:
    rows, experts = logits_TE.shape
    ids_TK, weights_TK = _outputs(rows, spec.top_k, logits_TE.device)
    if not rows:
        return ids_TK, weights_TK
    logits_TE = logits_TE if logits_TE.stride(1) == 1 else logits_TE.contiguous()
    pdl = dependent_launch(logits_TE)
    _route_kernel[(rows,)](
        logits_TE,
        bias_E,
        num_tokens_1,
        *_planes(slots),
        ids_TK,
        weights_TK,
        rows,
        logits_TE.stride(0),
        spec.routed_scaling_factor,
        ROWS=1,
        num_warps=1,
        **constants(experts, spec, bias_E, num_tokens_1, slots),
        PDL=pdl.on,
        **pdl.options,
    )
    return ids_TK, weights_TK


def route_rows(
    x_TH: Tensor,
    router: RouterWeights,
    spec: TopKConfig,
    bias_E: Tensor | None = None,
    num_tokens_1: Tensor | None = None,
    slots: SlotTable | None = None,
) -> tuple[Tensor, Tensor]:
    fixed = constants(len(router.weight_EH), spec, bias_E, num_tokens_1, slots)
    ids_TK, weights_TK = _outputs(len(x_TH), spec.top_k, x_TH.device)
    lists = (bias_E, num_tokens_1, *_planes(slots), ids_TK, weights_TK)
    _run_router(x_TH, (None, None, None, None, 0, 0.0), router, lists, spec, fixed)
    return ids_TK, weights_TK


def norm_route_rows(
    rows: SumToNorm,
    router: RouterWeights,
    spec: TopKConfig,
    bias_E: Tensor | None = None,
    num_tokens_1: Tensor | None = None,
    slots: SlotTable | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x_TH, residual_TH = finished(rows.values), rows.residual_TH
    assert residual_TH.stride(1) == 1 and x_TH.stride(1) == 1, (x_TH.stride(), residual_TH.stride())
    normed_TH, sum_TH = torch.empty_like(residual_TH), torch.empty_like(residual_TH)
    fixed = constants(len(router.weight_EH), spec, bias_E, num_tokens_1, slots)
    ids_TK, weights_TK = _outputs(len(x_TH), spec.top_k, x_TH.device)
    lists = (bias_E, num_tokens_1, *_planes(slots), ids_TK, weights_TK)
    norm = (residual_TH, rows.weight_H, normed_TH, sum_TH, residual_TH.stride(0), rows.eps)
    _run_router(x_TH, norm, router, lists, spec, fixed)
    return normed_TH, sum_TH, ids_TK, weights_TK


def _run_router(
    x_TH: Tensor,
    norm: tuple[Any, ...],
    router: RouterWeights,
    lists: tuple[Tensor | None, ...],
    spec: TopKConfig,
    fixed: dict[str, Any],
) -> None:
    rows, hidden = x_TH.shape
    assert rows <= MAX_ROWS and router.weight_EH.is_contiguous(), (rows, router.weight_EH.stride())
    if not rows:
        return
    x_TH = x_TH if x_TH.stride(1) == 1 else x_TH.contiguous()
    tile = triton.next_power_of_2(rows)
    experts, channels = ROUTER_TILE
    splits = triton.cdiv(hidden, channels)
    partial = torch.empty(splits, tile, fixed["BLOCK_E"], device=x_TH.device)
    pdl = dependent_launch(x_TH)
    *planes, residual_stride, eps = norm
    _router_kernel[(fixed["BLOCK_E"] // experts, splits)](
        x_TH, *planes, router.weight_EH, router.bias_E, partial, router.counter_1, *lists,
        rows, x_TH.stride(0), residual_stride, eps, spec.routed_scaling_factor,
        H=hidden, SPLITS=splits, BLOCK_H=channels, BLOCK_X=experts,
        ROUTER_BIAS=router.bias_E is not None, ROUNDS=router.rounds, ROWS=tile, num_warps=tile,
        **fixed, PDL=pdl.on, **pdl.options,
    )  # fmt: skip


def _planes(slots: SlotTable | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if slots is None else (slots.slots_EX, slots.count_E)


def constants(
    experts: int,
    spec: TopKConfig,
    bias_E: Tensor | None,
    num_tokens_1: Tensor | None,
    slots: SlotTable | None,
) -> dict[str, Any]:
    return {
        **_sizes(experts, spec),
        "BIASED": bias_E is not None,
        "BY_LOGITS": spec.by_logits(bias_E),
        "MAPPED": slots is not None,
        "REPLICAS": 1 if slots is None else slots.slots_EX.shape[1],
        "PADDED": num_tokens_1 is not None,
    }


@cache
def _sizes(experts: int, spec: TopKConfig) -> dict[str, object]:
    return {
        "E": experts,
        "BLOCK_E": max(32, triton.next_power_of_2(experts)),
        "K": spec.top_k,
        "BLOCK_K": triton.next_power_of_2(spec.top_k),
        "SIGMOID": spec.scoring == "sigmoid",
        "RENORMALIZE": spec.renormalize,
        "GROUPS": spec.num_groups,
        "TOPK_GROUPS": spec.topk_groups,
        "TOP2": spec.group_score == "top2",
        "BLOCK_Z": triton.next_power_of_2(spec.num_groups),
    }


def _outputs(rows: int, top_k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    ids_TK = torch.empty(rows, top_k, dtype=torch.int32, device=device)
    return ids_TK, torch.empty(rows, top_k, dtype=torch.float32, device=device)
