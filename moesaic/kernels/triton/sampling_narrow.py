"""Narrows the range of the lowest score that top-p keeps, with the whole GPU; see sampling.py.

R rows · V vocabulary · C chunks · P blocks.

A sample of each row gives two scores that almost certainly enclose it. All chunks then add up the
weights above exactly, and list the few tokens in between. These sums show whether the range is
right; if not, the row is searched in all its blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.sampling import SampleParams
from moesaic.kernels.triton.launch import await_inputs, dependent_launch, release_next
from moesaic.kernels.triton.sampling_parts import (
    BLOCKS,
    COLUMNS,
    WIDTH,
    best_of,
    float64_at,
    is_greedy,
    token_weights,
    top_k_of,
)

# Tokens of a list; a row with more is searched in all its blocks.
HELD = tl.constexpr(8192)
# Tokens of a sample, in runs of one memory transaction.
SAMPLE = tl.constexpr(16384)
RUN = tl.constexpr(8)
# Standard deviations that the range allows for.
DEVIATIONS = tl.constexpr(4.0)
# Cuts of the range of scores; each leaves a third.
CUTS = tl.constexpr(10)
RANGE_WARPS = 16
LIST_WARPS = 8


@dataclass(frozen=True, slots=True)
class Narrowed:
    list: Tensor
    """Tokens in the range: [R, at least HELD]."""
    count_R: Tensor
    """Their number; above HELD the list is incomplete."""
    above_R2C: Tensor
    """Weights of each chunk: above the range, and from its lower end on."""
    kept_RP: Tensor
    """Weights of each block above the range, with min-p."""


def narrow(
    logits_RV: Tensor,
    params: SampleParams,
    best: tuple[Tensor, Tensor],
    sums_RP: Tensor,
    sizes: tuple[int, int, int, float],
    reach: float,
) -> Narrowed:
    """`best` of the chunks and `sums_RP` of the blocks come from the previous kernels."""
    (rows, blocks), chunks, device = sums_RP.shape, sizes[2], logits_RV.device
    out = Narrowed(
        torch.empty(rows, max(blocks, HELD.value), dtype=torch.int32, device=device),
        torch.empty(rows, dtype=torch.int32, device=device),
        torch.empty(rows, 2, chunks, dtype=torch.float64, device=device),
        torch.empty_like(sums_RP),
    )
    if not params.any_top_p:
        out.count_R.fill_(HELD.value + 1)
        return out
    ranges_R2 = torch.empty(rows, 2, device=device)
    inputs, pdl = (logits_RV, params.values, *best), dependent_launch(logits_RV)
    fixed = {"BLOCK_C": triton.next_power_of_2(chunks), "PDL": pdl.on, **pdl.options}
    _range_kernel[(rows,)](
        *inputs, sums_RP, ranges_R2, out.count_R, *sizes, reach,
        BLOCK_N=triton.next_power_of_2(blocks), num_warps=RANGE_WARPS, **fixed,
    )  # fmt: skip
    _list_kernel[(rows, chunks)](
        *inputs, ranges_R2, out.count_R, out.above_R2C, out.kept_RP, out.list, *sizes,
        out.list.shape[1], num_warps=LIST_WARPS, **fixed,
    )  # fmt: skip
    return out


@triton.jit
def _is_narrowed(params_ptr, V):
    with_p = float64_at(params_ptr + 2) < 1
    return with_p & (top_k_of(params_ptr, V) == -1) & (is_greedy(params_ptr) == 0)


@triton.jit
def _below(x, shares, cut, each):
    """Estimates the weight of all tokens below a score from the sample."""
    return tl.sum(tl.where(x < cut, shares, 0.0), 0) * each


@triton.jit
def _error_bound(cut, best, temperature, variance):
    """Bounds the error of `_below`: no token below the cut weighs more than one at it."""
    return tl.sqrt(variance * tl.exp((cut - best) / temperature))


@triton.jit
def _range_kernel(
    logits_ptr, params_ptr, best_ptr, token_ptr, sums_ptr, ranges_ptr, count_ptr,
    V, stride, chunks, scale, reach,
    BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Finds a score with less weight below it than top-p drops, and one with more."""
    row = tl.program_id(0).to(tl.int64)
    await_inputs(PDL)
    release_next(PDL)
    params_ptr += row * COLUMNS
    if _is_narrowed(params_ptr, V):
        tl.store(count_ptr + row, 0)
        best, _ = best_of(best_ptr, token_ptr, row, chunks, BLOCK_C)
        temperature = float64_at(params_ptr).to(tl.float32)
        every, blocks = tl.arange(0, BLOCK_N), chunks * BLOCKS
        total = tl.sum(tl.load(sums_ptr + row * blocks + every, every < blocks, 0.0), 0)
        dropped = ((1.0 - float64_at(params_ptr + 2)) * total / scale).to(tl.float32)
        # All tokens that weigh less than this share of the mean add up to less than `dropped`.
        span = tl.minimum(0.1 - tl.log(tl.maximum(dropped / V, 1e-30)), reach)
        place = tl.arange(0, SAMPLE)
        step = tl.maximum(V // (SAMPLE // RUN), RUN)
        token = place // RUN * step + place % RUN
        x = tl.load(logits_ptr + row * stride + token, token < V, -float("inf")).to(tl.float32)
        shares = tl.exp((x - best) / temperature)
        each = tl.maximum(V / SAMPLE, 1.0)
        variance = DEVIATIONS * DEVIATIONS * dropped * each
        least = tl.min(tl.where(token < V, x, best), 0)
        low1 = best - temperature * span
        if dropped > _error_bound(least, best, temperature, variance):
            low1 = tl.maximum(low1, least)
        # `low` is in [low1, low2), `high` in (high1, high2].
        low2, high1, high2 = best, low1, best
        for _ in range(CUTS):
            third = (low2 - low1) / 3
            cut1, cut2 = low1 + third, low2 - third
            rest1 = dropped - _error_bound(cut1, best, temperature, variance)
            rest2 = dropped - _error_bound(cut2, best, temperature, variance)
            less1 = _below(x, shares, cut1, each) <= rest1
            less2 = _below(x, shares, cut2, each) <= rest2
            low1 = tl.where(less2, cut2, tl.where(less1, cut1, low1))
            low2 = tl.where(less2, low2, tl.where(less1, cut2, cut1))
            third = (high2 - high1) / 3
            cut1, cut2 = high1 + third, high2 - third
            rest1 = dropped + _error_bound(cut1, best, temperature, variance)
            rest2 = dropped + _error_bound(cut2, best, temperature, variance)
            more1 = _below(x, shares, cut1, each) >= rest1
            more2 = _below(x, shares, cut2, each) >= rest2
            high1 = tl.where(more1, high1, tl.where(more2, cut1, cut2))
            high2 = tl.where(more1, cut1, tl.where(more2, cut2, high2))
        tl.store(ranges_ptr + row * 2, low1)
        tl.store(ranges_ptr + row * 2 + 1, tl.where(high2 < best, high2, float("inf")))


@triton.jit
def _list_kernel(
    logits_ptr, params_ptr, best_ptr, token_ptr, ranges_ptr, count_ptr, above_ptr, kept_ptr,
    list_ptr, V, stride, chunks, scale, length, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    await_inputs(PDL)
    release_next(PDL)
    params_ptr += row * COLUMNS
    if _is_narrowed(params_ptr, V):
        best, _ = best_of(best_ptr, token_ptr, row, chunks, BLOCK_C)
        low, high = tl.load(ranges_ptr + row * 2), tl.load(ranges_ptr + row * 2 + 1)
        block = chunk * BLOCKS + tl.arange(0, BLOCKS)
        kept = tl.zeros((BLOCKS,), tl.float64)
        above = tl.full((), 0.0, tl.float64)
        within = tl.full((), 0.0, tl.float64)
        if tl.load(best_ptr + row * chunks + chunk) >= low:
            token = block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
            x = tl.load(logits_ptr + row * stride + token, token < V, -float("inf")).to(tl.float32)
            temperature = float64_at(params_ptr).to(tl.float32)
            min_p = float64_at(params_ptr + 3).to(tl.float32)
            scaling = (best, temperature, scale)
            weights = token_weights(x, scaling, 0.0)
            kept = tl.sum(tl.where(x >= high, weights, 0.0), 1)
            above = tl.sum(kept, 0)
            within = tl.sum(tl.sum(tl.where(x >= low, weights, 0.0), 1), 0)
            if min_p > 0:
                weights = token_weights(x, scaling, min_p)
                kept = tl.sum(tl.where(x >= high, weights, 0.0), 1)
            here = (x >= low) & (x < high)
            counts = tl.sum(here.to(tl.int32), 1)
            if tl.sum(counts, 0) > 0:
                count_ptrs = count_ptr + row + tl.zeros((BLOCKS,), tl.int32)
                start = tl.atomic_add(count_ptrs, counts, counts > 0, sem="relaxed")
                place = start[:, None] + tl.cumsum(here.to(tl.int32), 1) - 1
                tl.store(list_ptr + row * length + place, token, here & (place < HELD))
        tl.store(above_ptr + row * 2 * chunks + chunk, above)
        tl.store(above_ptr + (row * 2 + 1) * chunks + chunk, within)
        tl.store(kept_ptr + row * chunks * BLOCKS + block, kept)
