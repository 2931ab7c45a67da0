"""Sampling; the twins are in kernels/sampling.py.

R rows · V vocabulary · N blocks of 128 tokens · C chunks of 32 blocks · P = C * 32 blocks.

    _peaks_kernel    the highest score of each block and chunk: sufficient for greedy rows
    _sums_kernel     the weight of each block, for rows without top-k
    narrow           for top-p alone: a few tokens that include the lowest one kept
    _draw_kernel     one program a row: applies top-k and top-p, and draws, or takes a draft

With top-k only blocks whose peak reaches the lowest score that may be kept are read again. The
search for the lowest score kept cuts its range in four: nearly always among tokens in registers, if
these are too many in all such blocks. Scores are compared as integers that sort in the same order,
so that the search terminates.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.sampling import OfferedDrafts, SampleParams, weight_scale
from moesaic.kernels.triton.launch import await_inputs, dependent_launch, release_next
from moesaic.kernels.triton.sampling_narrow import HELD, narrow
from moesaic.kernels.triton.sampling_parts import (
    BLOCKS,
    COLUMNS,
    WIDTH,
    best_of,
    float64_at,
    is_greedy,
    sort_key,
    token_weights,
    top_k_of,
    uniform_at,
)

# Blocks that are gathered at once; with more, the sums of a search exceed the registers.
GATHER = tl.constexpr(8)
# Tokens held in registers with top-k.
HELD_K = tl.constexpr(4096)
LEAST = tl.constexpr(-(2**31))
# The key of -inf.
BOTTOM = tl.constexpr(-2139095041)
# Cuts of a range by score before it is cut by integer; each leaves a quarter.
SCORE_CUTS = tl.constexpr(3)
DRAW_WARPS = 16


@triton.jit
def _peaks_kernel(logits_ptr, peaks_ptr, best_ptr, token_ptr, V, stride, chunks, PDL: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    block = chunk * BLOCKS + tl.arange(0, BLOCKS)
    token = block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    await_inputs(PDL)
    release_next(PDL)
    x = tl.load(logits_ptr + row * stride + token, token < V, -float("inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))
    peaks = tl.max(x, 1)
    best = tl.max(peaks, 0)
    if peaks_ptr is not None:
        tl.store(peaks_ptr + row * chunks * BLOCKS + block, peaks)
    first = tl.min(tl.min(tl.where((x == best) & (token < V), token, 0x7FFFFFFF), 1), 0)
    tl.store(best_ptr + row * chunks + chunk, best)
    tl.store(token_ptr + row * chunks + chunk, first)


@triton.jit(do_not_specialize=["rows"])
def _greedy_kernel(
    best_ptr, token_ptr, drawn_ptr, rows, chunks, BLOCK_C: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    await_inputs(PDL)
    release_next(PDL)
    best, token = best_of(best_ptr, token_ptr, row, chunks, BLOCK_C)
    tl.store(drawn_ptr + row, token.to(tl.int64))
    tl.store(drawn_ptr + rows + row, (tl.abs(best) == float("inf")).to(tl.int64))


@triton.jit
def _sums_kernel(
    logits_ptr,
    params_ptr,
    best_ptr,
    token_ptr,
    sums_ptr,
    V,
    stride,
    chunks,
    scale,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    await_inputs(PDL)
    release_next(PDL)
    params_ptr += row * COLUMNS
    if not is_greedy(params_ptr) and top_k_of(params_ptr, V) == -1:
        temperature = float64_at(params_ptr).to(tl.float32)
        # With top-p, the total includes all tokens.
        min_p = tl.where(float64_at(params_ptr + 2) < 1, 0.0, float64_at(params_ptr + 3))
        best, _ = best_of(best_ptr, token_ptr, row, chunks, BLOCK_C)
        block = chunk * BLOCKS + tl.arange(0, BLOCKS)
        token = block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        x = tl.load(logits_ptr + row * stride + token, token < V, -float("inf")).to(tl.float32)
        weights = token_weights(x, (best, temperature, scale), min_p.to(tl.float32))
        tl.store(sums_ptr + row * chunks * BLOCKS + block, tl.sum(weights, 1))


@triton.jit
def _peak_keys(peaks_ptr, blocks, BLOCK_N: tl.constexpr):
    every = tl.arange(0, BLOCK_N)
    peaks = tl.load(peaks_ptr + every, every < blocks, 0.0)
    return tl.where(every < blocks, sort_key(peaks), LEAST)


@triton.jit
def _list_blocks(peaks_ptr, list_ptr, least, blocks, BLOCK_N: tl.constexpr):
    """Lists the blocks that have a score of `least` or above, in order; returns their number."""
    tl.debug_barrier()  # All threads have read the previous list.
    wanted = (_peak_keys(peaks_ptr, blocks, BLOCK_N) >= least.to(tl.int32)).to(tl.int32)
    place = tl.cumsum(wanted, 0) - 1
    tl.store(list_ptr + place, tl.arange(0, BLOCK_N), wanted != 0)
    tl.debug_barrier()
    return tl.sum(wanted, 0)


@triton.jit
def _load_blocks(logits_ptr, list_ptr, start, count, V):
    """Listed blocks from `start` on, and their scores [GATHER, 128]; -inf past the last."""
    place = start + tl.arange(0, GATHER)
    block = tl.load(list_ptr + place, place < count, 0)
    token = block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    mask = (place < count)[:, None] & (token < V)
    return block, tl.load(logits_ptr + token, mask, -float("inf")).to(tl.float32)


@triton.jit
def _search(inputs, low, high, target, scaling, COUNT: tl.constexpr, BLOCK_N: tl.constexpr):
    """The highest key in [low, high) such that the tokens from it on weigh at least `target`; with
    COUNT, a key that keeps exactly `target` tokens is enough."""
    logits_ptr, list_ptr, peaks_ptr, blocks, V = inputs
    cuts = 0
    have = tl.full((), float("inf"), tl.float64)
    enough = target if COUNT else tl.full((), -1.0, tl.float64)
    while (high - low > 1) & (have > enough):
        lowest, span = _number(low), _number(high - 1) - _number(low)
        step = tl.maximum((high - low) // 4, 1)
        first, second = low + step, tl.minimum(low + 2 * step, high - 1)
        third = tl.minimum(low + 3 * step, high - 1)
        if (cuts < SCORE_CUTS) & (span < 1e30):
            first = _key_between(lowest + span * 0.25, low, high)
            second = _key_between(lowest + span * 0.5, low, high)
            third = _key_between(lowest + span * 0.75, low, high)
        above1 = tl.zeros((GATHER, WIDTH), tl.float64)
        above2 = tl.zeros((GATHER, WIDTH), tl.float64)
        above3 = tl.zeros((GATHER, WIDTH), tl.float64)
        count = _list_blocks(peaks_ptr, list_ptr, low, blocks, BLOCK_N)
        for start in range(0, count, GATHER):
            _, x = _load_blocks(logits_ptr, list_ptr, start, count, V)
            if COUNT:
                weights = tl.full((GATHER, WIDTH), 1.0, tl.float64)
            else:
                weights = token_weights(x, scaling, 0.0)
            key = sort_key(x)
            above1 += tl.where(key >= first.to(tl.int32), weights, 0.0)
            above2 += tl.where(key >= second.to(tl.int32), weights, 0.0)
            above3 += tl.where(key >= third.to(tl.int32), weights, 0.0)
        sum1, sum2, sum3 = _total(above1), _total(above2), _total(above3)
        in3, in2, in1 = sum3 >= target, sum2 >= target, sum1 >= target
        high = tl.where(in3, high, tl.where(in2, third, tl.where(in1, second, first)))
        low = tl.where(in3, third, tl.where(in2, second, tl.where(in1, first, low)))
        have = tl.where(in3, sum3, tl.where(in2, sum2, tl.where(in1, sum1, have)))
        cuts += 1
    return low


@triton.jit
def _number(key):
    key = key.to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _key_between(x, low, high):
    return tl.minimum(tl.maximum(sort_key(x).to(tl.int64), low + 1), high - 1)


@triton.jit
def _total(x):
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def _kth_peak(peaks, k, low, high):
    """The k-th highest peak, a lower bound of the k-th highest score; or `low`."""
    while high - low > 1:
        middle = low + (high - low) // 2
        reached = tl.sum((peaks >= middle.to(tl.int32)).to(tl.int32), 0) >= k
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    return low


@triton.jit
def _sum_blocks(inputs, sums_ptr, floor, scaling, min_p, BLOCK_N: tl.constexpr):
    """Stores the weight of each block's kept tokens; returns that of all blocks."""
    logits_ptr, list_ptr, peaks_ptr, blocks, V = inputs
    every = tl.arange(0, BLOCK_N)
    tl.store(sums_ptr + every, tl.zeros((BLOCK_N,), tl.float64), every < blocks)
    count = _list_blocks(peaks_ptr, list_ptr, floor, blocks, BLOCK_N)
    total = tl.zeros((GATHER,), tl.float64)
    for start in range(0, count, GATHER):
        block, x = _load_blocks(logits_ptr, list_ptr, start, count, V)
        weights = token_weights(x, scaling, min_p)
        kept = tl.sum(tl.where(sort_key(x) >= floor.to(tl.int32), weights, 0.0), 1)
        total += kept
        tl.store(sums_ptr + block, kept, start + tl.arange(0, GATHER) < count)
    tl.debug_barrier()
    return tl.sum(total, 0)


@triton.jit
def _take_draft(
    inputs, sums_ptr, floor, scaling, min_p, drafts, thresholds_ptr, number, BLOCK_N: tl.constexpr
):
    """The place of the draft that the row takes, or the number of drafts if there is none; then
    their weights are taken from those of their blocks."""
    logits_ptr, blocks = inputs[0], inputs[3]
    every, place = tl.arange(0, BLOCK_N), tl.arange(0, drafts.shape[0])
    total = tl.sum(tl.load(sums_ptr + every, every < blocks, 0.0, cache_modifier=".cg"), 0)
    x = tl.load(logits_ptr + drafts, drafts >= 0, -float("inf")).to(tl.float32)
    weights = token_weights(x, scaling, min_p)
    weights = tl.where((drafts >= 0) & (sort_key(x) >= floor.to(tl.int32)), weights, 0.0)
    single, acc = tl.load(thresholds_ptr), tl.load(thresholds_ptr + 1)
    reached = tl.cumsum(weights, 0) > number * total * acc
    takes = (weights > 0) & (reached | (weights >= single * total))
    tl.debug_barrier()  # All threads have read the weights of blocks.
    tl.atomic_add(sums_ptr + drafts // WIDTH, -weights, weights > 0, sem="relaxed")
    tl.debug_barrier()
    return tl.min(tl.where(takes, place, drafts.shape[0]), 0)


@triton.jit
def _draw_token(inputs, sums_ptr, floor, scaling, min_p, number, drafts, BLOCK_N: tl.constexpr):
    """The token at which the sum of weights, in vocabulary order, passes the share `number`; none
    of the drafts, whose weights are no part of the sums."""
    logits_ptr, _, _, blocks, V = inputs
    every = tl.arange(0, BLOCK_N)
    # Bypasses the L1 cache, which atomic additions do not update.
    sums = tl.load(sums_ptr + every, every < blocks, 0.0, cache_modifier=".cg")
    total = tl.sum(sums, 0)
    mark = tl.minimum((number * total).to(tl.int64).to(tl.float64), total - 1)
    block = tl.sum((tl.cumsum(sums, 0) <= mark).to(tl.int32), 0)
    block = tl.minimum(block, blocks - 1)
    mark -= tl.sum(tl.where(every < block, sums, 0.0), 0)
    token = block * WIDTH + tl.arange(0, WIDTH)
    x = tl.load(logits_ptr + token, token < V, -float("inf")).to(tl.float32)
    weights = token_weights(x, scaling, min_p)
    if drafts is not None:
        is_draft = tl.max((token[:, None] == drafts[None, :]).to(tl.int32), 1) > 0
        weights = tl.where(is_draft, 0.0, weights)
    ends = tl.cumsum(tl.where(sort_key(x) >= floor.to(tl.int32), weights, 0.0), 0)
    offset = tl.minimum(tl.sum((ends <= mark).to(tl.int32), 0), WIDTH - 1)
    return tl.minimum(block * WIDTH + offset, V - 1)


@triton.jit
def _search_held(key, amount, low, high, target):
    """`_search` over keys in registers; `amount` is what each of them adds."""
    while high - low > 1:
        step = tl.maximum((high - low) // 4, 1)
        first, second = low + step, tl.minimum(low + 2 * step, high - 1)
        third = tl.minimum(low + 3 * step, high - 1)
        in1 = tl.sum(tl.where(key >= first.to(tl.int32), amount, 0.0), 0) >= target
        in2 = tl.sum(tl.where(key >= second.to(tl.int32), amount, 0.0), 0) >= target
        in3 = tl.sum(tl.where(key >= third.to(tl.int32), amount, 0.0), 0) >= target
        high = tl.where(in3, high, tl.where(in2, third, tl.where(in1, second, first)))
        low = tl.where(in3, third, tl.where(in2, second, tl.where(in1, first, low)))
    return low


@triton.jit
def _floor_of_held(
    inputs, kept_ptr, count, limits, target, scaling,
    SIZE: tl.constexpr, WITH_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The lowest key kept, of SIZE listed tokens that must weigh `target`, or WITH_K of the tokens
    of listed blocks; adds their weights to those of their blocks."""
    logits_ptr, list_ptr, _, blocks, V = inputs
    top_k, top_p, min_p = limits
    every, place = tl.arange(0, BLOCK_N), tl.arange(0, SIZE)
    listed = place // WIDTH if WITH_K else place
    token = tl.load(list_ptr + listed, listed < count, 0)
    if WITH_K:
        token = token * WIDTH + place % WIDTH
    mask = (listed < count) & (token < V)
    x = tl.load(logits_ptr + token, mask, -float("inf")).to(tl.float32)
    key = tl.where(mask, sort_key(x), LEAST)
    weights = tl.where(mask, token_weights(x, scaling, 0.0), 0.0)
    low = tl.min(tl.where(mask, key, 0x7FFFFFFF), 0).to(tl.int64)
    high = tl.max(key, 0).to(tl.int64) + 1
    if WITH_K:
        tl.store(kept_ptr + every, tl.zeros((BLOCK_N,), tl.float64), every < blocks)
        low = _search_held(key, mask.to(tl.float64), low, high, top_k.to(tl.float64))
        target = top_p * tl.sum(tl.where(key >= low.to(tl.int32), weights, 0.0), 0)
    if top_p < 1:
        low = _search_held(key, weights, low, high, target)
    tl.debug_barrier()
    weights = token_weights(x, scaling, min_p)
    kept = mask & (key >= low.to(tl.int32)) & (weights > 0)
    tl.atomic_add(kept_ptr + token // WIDTH, weights, kept, sem="relaxed")
    tl.debug_barrier()
    return low


@triton.jit
def _floor_of_all(inputs, sums_ptr, low, top, limits, scaling, reach, BLOCK_N: tl.constexpr):
    """The lowest key kept, searched in all blocks. `low`: a key that top-k keeps."""
    blocks = inputs[3]
    top_k, top_p, min_p = limits
    best, temperature, _ = scaling
    total = tl.full((), 0.0, tl.float64)
    floor = low
    if top_k != -1:
        floor = _search(inputs, low, top, top_k.to(tl.float64), scaling, True, BLOCK_N)
    if top_p < 1:
        if top_k == -1:
            every = tl.arange(0, BLOCK_N)
            total = tl.sum(tl.load(sums_ptr + every, every < blocks, 0.0), 0)
        else:
            total = _sum_blocks(inputs, sums_ptr, floor, scaling, 0.0, BLOCK_N)
        least = tl.maximum(floor, sort_key(best - temperature * reach).to(tl.int64))
        floor = _search(inputs, least, top, top_p * total, scaling, False, BLOCK_N)
    _sum_blocks(inputs, sums_ptr, floor, scaling, min_p, BLOCK_N)
    return floor


@triton.jit(do_not_specialize=["rows"])
def _draw_kernel(
    logits_ptr, params_ptr, peaks_ptr, best_ptr, token_ptr, sums_ptr, list_ptr, count_ptr,
    above_ptr, kept_ptr, drawn_ptr, drafts_ptr, thresholds_ptr, rows, V, stride, chunks, scale,
    reach, length,
    BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, DRAFTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`reach`: distance below the best at which a score has no weight at temperature 1."""
    row = tl.program_id(0).to(tl.int64)
    await_inputs(PDL)
    release_next(PDL)
    blocks = chunks * BLOCKS
    logits_ptr += row * stride
    params_ptr += row * COLUMNS
    peaks_ptr += row * blocks
    sums_ptr += row * blocks
    kept_ptr += row * blocks
    above_ptr += row * 2 * chunks
    list_ptr += row * length
    best, token = best_of(best_ptr, token_ptr, row, chunks, BLOCK_C)
    broken = tl.abs(best) == float("inf")
    if not (broken | is_greedy(params_ptr)):
        temperature = float64_at(params_ptr).to(tl.float32)
        top_k, top_p = top_k_of(params_ptr, V), float64_at(params_ptr + 2)
        min_p = float64_at(params_ptr + 3).to(tl.float32)
        inputs = (logits_ptr, list_ptr, peaks_ptr, blocks, V)
        limits, scaling = (top_k, top_p, min_p), (best, temperature, scale)
        floor = tl.full((), BOTTOM, tl.int64)
        from_ptr = sums_ptr
        if (top_k != -1) | (top_p < 1):
            top = sort_key(best).to(tl.int64) + 1
            few = False
            from_ptr = kept_ptr
            if top_k != -1:
                peaks = _peak_keys(peaks_ptr, blocks, BLOCK_N)
                floor = _kth_peak(peaks, top_k, floor, top)
                count = _list_blocks(peaks_ptr, list_ptr, floor, blocks, BLOCK_N)
                few = count * WIDTH <= HELD_K
                if few:
                    floor = _floor_of_held(
                        inputs, kept_ptr, count, limits, 0.0, scaling, HELD_K, True, BLOCK_N
                    )
            else:
                every, chunk = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_C)
                target = top_p * tl.sum(tl.load(sums_ptr + every, every < blocks, 0.0), 0)
                above = tl.sum(tl.load(above_ptr + chunk, chunk < chunks, 0.0), 0)
                within = tl.sum(tl.load(above_ptr + chunks + chunk, chunk < chunks, 0.0), 0)
                count = tl.load(count_ptr + row)
                few = (count <= HELD) & (above < target) & (within >= target)
                if few:
                    rest = target - above
                    floor = _floor_of_held(
                        inputs, kept_ptr, count, limits, rest, scaling, HELD, False, BLOCK_N
                    )
            if not few:
                floor = _floor_of_all(inputs, sums_ptr, floor, top, limits, scaling, reach, BLOCK_N)
                from_ptr = sums_ptr
        seed, position = tl.load(params_ptr + 4), tl.load(params_ptr + 5)
        number = uniform_at(seed.to(tl.uint64, bitcast=True), position)
        if DRAFTS:
            drafts = tl.load(drafts_ptr + row * DRAFTS + tl.arange(0, DRAFTS))
            taken = _take_draft(
                inputs, from_ptr, floor, scaling, min_p, drafts, thresholds_ptr, number, BLOCK_N
            )
            second = uniform_at((~seed).to(tl.uint64, bitcast=True), position)
            number = tl.where(tl.max(drafts, 0) >= 0, second, number)
            token = _draw_token(inputs, from_ptr, floor, scaling, min_p, number, drafts, BLOCK_N)
            place = tl.arange(0, DRAFTS)
            draft = tl.sum(tl.where(place == taken, drafts, 0), 0)
            token = tl.where(taken < DRAFTS, draft.to(tl.int32), token)
        else:
            token = _draw_token(inputs, from_ptr, floor, scaling, min_p, number, None, BLOCK_N)
    tl.store(drawn_ptr + row, token.to(tl.int64))
    tl.store(drawn_ptr + rows + row, broken.to(tl.int64))


def greedy_rows(logits_RV: Tensor) -> Tensor:
    rows = len(logits_RV)
    drawn_2R = torch.empty(2, rows, dtype=torch.int64, device=logits_RV.device)
    if rows:
        pdl = dependent_launch(logits_RV)
        best_RC, token_RC = _peaks(logits_RV, None)
        chunks = best_RC.shape[1]
        _greedy_kernel[(rows,)](
            best_RC, token_RC, drawn_2R, rows, chunks, BLOCK_C=triton.next_power_of_2(chunks),
            num_warps=1, PDL=pdl.on, **pdl.options,
        )  # fmt: skip
    return drawn_2R


def sample_rows(
    logits_RV: Tensor, params: SampleParams, offered: OfferedDrafts | None = None
) -> Tensor:
    rows, vocab = logits_RV.shape
    device, pdl = logits_RV.device, dependent_launch(logits_RV)
    drawn_2R = torch.empty(2, rows, dtype=torch.int64, device=device)
    if not rows:
        return drawn_2R
    assert params.values.shape == (rows, COLUMNS.value) and params.values.is_contiguous(), rows
    chunks = triton.cdiv(vocab, WIDTH.value * BLOCKS.value)
    blocks = chunks * BLOCKS.value
    peaks_RP = torch.empty(rows, blocks, device=device)
    sums_RP = torch.empty(rows, blocks, dtype=torch.float64, device=device)
    best = _peaks(logits_RV, peaks_RP)
    scale = weight_scale(vocab)
    sizes = (vocab, logits_RV.stride(0), chunks, scale)
    fixed = {"BLOCK_C": triton.next_power_of_2(chunks), "PDL": pdl.on, **pdl.options}
    _sums_kernel[(rows, chunks)](logits_RV, params.values, *best, sums_RP, *sizes, **fixed)
    reach = math.log(scale) + 2
    drafts = (None, None, 0)
    if offered is not None:
        assert len(offered.tokens_RD) == rows and offered.tokens_RD.is_contiguous(), rows
        drafts = (offered.tokens_RD, offered.thresholds_2, offered.tokens_RD.shape[1])
    narrowed = narrow(logits_RV, params, best, sums_RP, sizes, reach)
    _draw_kernel[(rows,)](
        logits_RV, params.values, peaks_RP, *best, sums_RP, narrowed.list, narrowed.count_R,
        narrowed.above_R2C, narrowed.kept_RP, drawn_2R, *drafts[:2], rows, *sizes, reach,
        narrowed.list.shape[1], BLOCK_N=triton.next_power_of_2(blocks), DRAFTS=drafts[2],
        num_warps=DRAW_WARPS, **fixed,
    )  # fmt: skip
    return drawn_2R


def _peaks(logits_RV: Tensor, peaks_RP: Tensor | None) -> tuple[Tensor, Tensor]:
    rows, vocab = logits_RV.shape
    assert logits_RV.stride(1) == 1, logits_RV.stride()
    chunks, pdl = triton.cdiv(vocab, WIDTH.value * BLOCKS.value), dependent_launch(logits_RV)
    best_RC = torch.empty(rows, chunks, device=logits_RV.device)
    token_RC = torch.empty(rows, chunks, dtype=torch.int32, device=logits_RV.device)
    _peaks_kernel[(rows, chunks)](
        logits_RV,
        peaks_RP,
        best_RC,
        token_RC,
        vocab,
        logits_RV.stride(0),
        chunks,
        PDL=pdl.on,
        **pdl.options,
    )
    return best_RC, token_RC
