"""Where the lowest score that top-p keeps lies, found by all of the GPU; see sampling.py.

R rows · V vocabulary · C chunks · P blocks · B buckets.

The scores that can be it are cut into B buckets, whose masses all chunks add up; then one of these
again. What is left is a list of a few tokens, and the weight of all above. A bucket is a stretch of
the order of scores because `_bucket` never falls as scores rise; masses are integers in float64,
the same in whatever order they are added.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.sampling import SampleParams
from moesaic.kernels.triton.launch import Launch, await_inputs, release_next
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

BUCKETS = tl.constexpr(16)
# Tokens of a list; a row that has more is searched in all its blocks.
HELD = tl.constexpr(4096)
WARPS = 8


@dataclass(frozen=True, slots=True)
class Narrowed:
    """Of each row: tokens left [R, at least HELD], how many there are (above HELD they are not
    listed), the weight of all that are higher, and of those in each block (with min-p)."""

    list: Tensor
    count_R: Tensor
    above_R: Tensor
    kept_RP: Tensor


def narrow(
    logits_RV: Tensor,
    params: SampleParams,
    best: tuple[Tensor, Tensor],
    sums_RP: Tensor,
    sizes: tuple[int, int, int, float],
    reach: float,
    pdl: Launch,
) -> Narrowed:
    """`best`, `sums_RP`: of chunks and blocks, as the kernels before give them."""
    (rows, blocks), chunks, device = sums_RP.shape, sizes[2], logits_RV.device
    out = Narrowed(
        torch.empty(rows, max(blocks, HELD.value), dtype=torch.int32, device=device),
        torch.empty(rows, dtype=torch.int32, device=device),
        torch.empty(rows, dtype=torch.float64, device=device),
        torch.empty_like(sums_RP),
    )
    if not params.any_top_p:
        out.count_R.fill_(HELD.value + 1)
        return out
    masses = torch.empty(rows, 2, chunks, BUCKETS.value, dtype=torch.float64, device=device)
    ranges_R4 = torch.empty(rows, 4, device=device)
    inputs = (logits_RV, params.values, *best, sums_RP, ranges_R4, masses, out.count_R)
    fixed = {
        "BLOCK_C": triton.next_power_of_2(chunks), "BLOCK_N": triton.next_power_of_2(blocks),
        "PDL": pdl.on, "num_warps": WARPS, **pdl.options,
    }  # fmt: skip
    for level in range(2):
        _masses_kernel[(rows, chunks)](*inputs, *sizes, reach, LEVEL=level, **fixed)
    _list_kernel[(rows, chunks)](
        *inputs, out.above_R, out.kept_RP, out.list, *sizes, out.list.shape[1], **fixed
    )
    return out


@triton.jit
def _bucket(x, low, inverse):
    share = tl.minimum(tl.maximum((x - low) * inverse, 0.0), BUCKETS - 1.0)
    return share.to(tl.int32)


@triton.jit
def _target(params_ptr, sums_ptr, blocks, BLOCK_N: tl.constexpr):
    """The weight that top-p asks for, and that of all tokens."""
    every = tl.arange(0, BLOCK_N)
    total = tl.sum(tl.load(sums_ptr + every, every < blocks, 0.0), 0)
    return float64_at(params_ptr + 2) * total, total


@triton.jit
def _find_bucket(masses_ptr, target, chunks, BLOCK_C: tl.constexpr):
    """The highest bucket that reaches the target with those above it, and the mass of these."""
    bucket = tl.arange(0, BUCKETS)
    at = tl.arange(0, BLOCK_C)[:, None] * BUCKETS + bucket[None, :]
    masses = tl.sum(tl.load(masses_ptr + at, at < chunks * BUCKETS, 0.0), 0)
    reaching = tl.sum(masses, 0) - tl.cumsum(masses, 0) + masses >= target
    found = tl.max(tl.where(reaching, bucket, 0), 0)
    return found, tl.sum(tl.where(bucket > found, masses, 0.0), 0)


@triton.jit
def _first_range(params_ptr, best, total, V, scale, reach):
    """Tokens that weigh less than this share of the mean are together less than top-p drops."""
    temperature = float64_at(params_ptr).to(tl.float32)
    dropped = (1.0 - float64_at(params_ptr + 2)) * total / (V.to(tl.float64) * scale)
    span = tl.minimum(0.1 - tl.log(tl.maximum(dropped.to(tl.float32), 1e-30)), reach)
    return best - temperature * span, 1.0 / (temperature * span) * BUCKETS


@triton.jit
def _masses_kernel(
    logits_ptr, params_ptr, best_ptr, token_ptr, sums_ptr, ranges_ptr, masses_ptr, count_ptr,
    V, stride, chunks, scale, reach,
    LEVEL: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The mass of each bucket in a chunk; of the lowest, which holds the rest, it may lack some."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    await_inputs(PDL)
    release_next(PDL)
    params_ptr += row * COLUMNS
    if _is_narrowed(params_ptr, V):
        ranges_ptr += row * 4
        masses_ptr += row * 2 * chunks * BUCKETS
        best, _ = best_of(best_ptr, token_ptr, row, chunks, BLOCK_C)
        blocks = chunks * BLOCKS
        target, total = _target(params_ptr, sums_ptr + row * blocks, blocks, BLOCK_N)
        if LEVEL == 0:
            low, inverse = _first_range(params_ptr, best, total, V, scale, reach)
            if chunk == 0:
                tl.store(count_ptr + row, 0)
        else:
            low1, inverse1 = tl.load(ranges_ptr), tl.load(ranges_ptr + 1)
            first, _ = _find_bucket(masses_ptr, target, chunks, BLOCK_C)
            low, inverse = low1 + first.to(tl.float32) / inverse1, inverse1 * BUCKETS
            masses_ptr += chunks * BUCKETS
        if chunk == 0:
            tl.store(ranges_ptr + 2 * LEVEL, low)
            tl.store(ranges_ptr + 2 * LEVEL + 1, inverse)
        bucket = tl.arange(0, BUCKETS)
        masses = tl.zeros((BUCKETS,), tl.float64)
        if tl.load(best_ptr + row * chunks + chunk) >= low:
            token = chunk * BLOCKS * WIDTH + tl.arange(0, BLOCKS * WIDTH)
            x = tl.load(logits_ptr + row * stride + token, token < V, -float("inf"))
            x = x.to(tl.float32)
            temperature = float64_at(params_ptr).to(tl.float32)
            weights = token_weights(x, best, temperature, 0.0, scale)
            found = _bucket(x, low, inverse)
            if LEVEL == 1:
                found = tl.where(_bucket(x, low1, inverse1) == first, found, -1)
            for one in tl.static_range(BUCKETS):
                mass = tl.sum(tl.where(found == one, weights, 0.0), 0)
                masses = tl.where(bucket == one, mass, masses)
        tl.store(masses_ptr + chunk * BUCKETS + bucket, masses)


@triton.jit
def _is_narrowed(params_ptr, V):
    with_p = float64_at(params_ptr + 2) < 1
    return with_p & (top_k_of(params_ptr, V) == -1) & (is_greedy(params_ptr) == 0)


@triton.jit
def _list_kernel(
    logits_ptr, params_ptr, best_ptr, token_ptr, sums_ptr, ranges_ptr, masses_ptr, count_ptr,
    above_ptr, kept_ptr, list_ptr, V, stride, chunks, scale, length,
    BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    await_inputs(PDL)
    release_next(PDL)
    params_ptr += row * COLUMNS
    if _is_narrowed(params_ptr, V):
        ranges_ptr += row * 4
        masses_ptr += row * 2 * chunks * BUCKETS
        best, _ = best_of(best_ptr, token_ptr, row, chunks, BLOCK_C)
        blocks = chunks * BLOCKS
        target, _ = _target(params_ptr, sums_ptr + row * blocks, blocks, BLOCK_N)
        first, above1 = _find_bucket(masses_ptr, target, chunks, BLOCK_C)
        rest_ptr = masses_ptr + chunks * BUCKETS
        second, above2 = _find_bucket(rest_ptr, target - above1, chunks, BLOCK_C)
        if chunk == 0:
            tl.store(above_ptr + row, above1 + above2)
        block = chunk * BLOCKS + tl.arange(0, BLOCKS)
        kept = tl.zeros((BLOCKS,), tl.float64)
        low, inverse = tl.load(ranges_ptr), tl.load(ranges_ptr + 1)
        peak = tl.load(best_ptr + row * chunks + chunk)
        if _bucket(peak, low, inverse) >= first:
            token = block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
            x = tl.load(logits_ptr + row * stride + token, token < V, -float("inf")).to(tl.float32)
            coarse = _bucket(x, low, inverse)
            fine = _bucket(x, tl.load(ranges_ptr + 2), tl.load(ranges_ptr + 3))
            higher = (coarse > first) | ((coarse == first) & (fine > second))
            temperature = float64_at(params_ptr).to(tl.float32)
            min_p = float64_at(params_ptr + 3).to(tl.float32)
            weights = token_weights(x, best, temperature, min_p, scale)
            kept = tl.sum(tl.where(higher, weights, 0.0), 1)
            here = (coarse == first) & (fine == second) & (token < V)
            flags = tl.reshape(here.to(tl.int32), (BLOCKS * WIDTH,))
            count = tl.sum(flags, 0)
            if count > 0:
                start = tl.atomic_add(count_ptr + row, count)
                place = start + tl.cumsum(flags, 0) - 1
                mask = (flags != 0) & (place < HELD)
                tokens = tl.reshape(token, (BLOCKS * WIDTH,))
                tl.store(list_ptr + row * length + place, tokens, mask)
        tl.store(kept_ptr + row * blocks + block, kept)
