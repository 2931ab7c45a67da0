"""Shared by the attention kernels: one tile of query rows attends one block of keys and values."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.attention import LayerPages, PrefillRows, Queries, Softmax

Config = TypeVar("Config")
LOG2_E = math.log2(math.e)
# The largest logit of a row that has seen none yet; finite, as a difference of two must not be NaN.
LOWEST = tl.constexpr(-1.0e38)
# Views of one packed tensor, whose alignment varies: specialising on it would recompile kernels.
PACKED = ["tiles", "starts", "lengths", "rows_p", "kv_lens", "first_p", "pages_p", "slots_p"]


@triton.constexpr_function
def tile_width(size: int) -> int:
    """Width of a tile that holds `size` channels."""
    return max(16, triton.next_power_of_2(size))


# For the host: the uncached function takes microseconds.
padded = cache(tile_width)


def two_parts(q: Queries) -> Queries:
    """Splits channels whose number is no power of two into two tiles, whose widths must be."""
    size = q.values.shape[-1]
    if q.rest is not None or size <= 16 or padded(size) == size:
        return q
    main = padded(size) // 2
    return Queries(q.values[..., :main], q.values[..., main:])


def channels(q: Queries) -> dict[str, int]:
    """Kernel constants: channels of the two parts of queries and keys."""
    return {"D1": q.values.shape[-1], "D2": 0 if q.rest is None else q.rest.shape[-1]}


def first_fitting(table: Iterable[tuple[int, Config]], size: int) -> Config:
    """The first entry whose limit is at least `size`."""
    return next(config for limit, config in table if size <= limit)


def strides(x: Tensor) -> tuple[int, int]:
    """Row and head strides of [T, N, D]; slot and head strides of [P, page, M, D]."""
    assert x.stride(-1) == 1, f"channels of {tuple(x.shape)} must be contiguous: {x.stride()}"
    return x.stride(-3), x.stride(-2)


def prefill_arguments(
    q: Queries,
    cache: LayerPages,
    batch: PrefillRows,
    softmax: Softmax,
    out_TNV: Tensor,
    tiles_X2: Tensor,
) -> tuple[Any, ...]:
    """The tensors of a prefill kernel, in the order of its parameters, and their strides."""
    rest = q.values if q.rest is None else q.rest
    values = cache.keys if cache.values is None else cache.values
    strided = (q.values, rest, cache.keys, values, out_TNV)
    tables = (batch.starts_B, batch.lengths_B, batch.kv_lens_B, batch.first_B, batch.pages)
    sizes = (stride for x in strided for stride in strides(x))
    return *strided, softmax.sinks_N, tiles_X2, *tables, *sizes


@dataclass(frozen=True, slots=True)
class AttentionTile:
    rows: int
    """Query heads of a tile in decoding, rows of one in prefill."""
    block: int
    """Keys of a block."""
    warps: int
    stages: int
    merged: int = 64
    """Numbers of other splits that a thread loads at once to merge them."""


@triton.jit
def pages_at(pages, start, offs_n, kv_len, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pages of tokens start + offs_n; one for all if a page holds whole blocks. `start` is a
    multiple of BLOCK_N. Loops load those of the next block, so that no load waits for another (and
    the compiler spends no pipeline stage on them)."""
    if PAGE % BLOCK_N == 0:
        return tl.load(pages + start // PAGE, mask=start < kv_len, other=0)
    else:
        n = start + offs_n
        return tl.load(pages + n // PAGE, mask=n < kv_len, other=0)


@triton.jit
def slots_at(page, start, offs_n, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Slots of tokens start + offs_n, given their pages."""
    if PAGE % BLOCK_N == 0:
        return page.to(tl.int64) * PAGE + start % PAGE + offs_n
    else:
        return page.to(tl.int64) * PAGE + (start + offs_n) % PAGE


@triton.jit
def load_rows(base, offsets, kept, SIZE: tl.constexpr, MASKED: tl.constexpr):
    """[len(offsets), tile_width(SIZE)]; zeros from channel SIZE on."""
    TILE: tl.constexpr = tile_width(SIZE)
    d = tl.arange(0, TILE)
    pointers = base + offsets[:, None] + d[None, :]
    if SIZE != TILE:
        return tl.load(pointers, mask=kept[:, None] & (d[None, :] < SIZE), other=0.0)
    if MASKED:
        return tl.load(pointers, mask=kept[:, None], other=0.0)
    return tl.load(pointers)


@triton.jit
def store_rows(base, offsets, x, kept, SIZE: tl.constexpr):
    d = tl.arange(0, tile_width(SIZE))
    pointers = base + offsets[:, None] + d[None, :]
    tl.store(pointers, x, mask=kept[:, None] & (d[None, :] < SIZE))


@triton.jit
def attend_block(
    state,
    q,
    cache,
    slots,
    kept,
    seen,
    scale,
    D1: tl.constexpr,
    D2: tl.constexpr,
    V: tl.constexpr,
    SHARED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One step of the online softmax. `kept`: tokens that exist; `seen`: those that each row sees,
    only used if MASKED. `top`: the largest logit so far, in powers of two. `total`: the sum of each
    row, or of each row and column, which the caller then reduces."""
    acc, total, top = state
    q1, q2 = q
    keys, values, k_slot, v_slot = cache
    k1 = load_rows(keys, slots * k_slot, kept, D1, MASKED).to(q1.dtype)
    s = tl.dot(q1, tl.trans(k1), input_precision="ieee")
    if D2 > 0:
        k2 = load_rows(keys + D1, slots * k_slot, kept, D2, MASKED).to(q1.dtype)
        s = tl.dot(q2, tl.trans(k2), s, input_precision="ieee")
    if MASKED:
        s = tl.where(seen, s, float("-inf"))
    acc, total, new_top, p = weigh(acc, total, top, s, scale)
    if SHARED:
        acc = tl.dot(p.to(q1.dtype), k1, acc, input_precision="ieee")
    else:
        v = load_rows(values, slots * v_slot, kept, V, MASKED).to(q1.dtype)
        acc = tl.dot(p.to(q1.dtype), v, acc, input_precision="ieee")
    return acc, total, new_top


@triton.jit
def weigh(acc, total, top, s, scale):
    """Weights of logits `s`; rescales the earlier results to them."""
    new_top = tl.maximum(top, tl.max(s, 1) * scale)
    p = tl.exp2(s * scale - new_top[:, None])
    kept_share = tl.exp2(top - new_top)
    if len(total.shape) == 1:
        total = total * kept_share + tl.sum(p, 1)
    else:
        total = total * kept_share[:, None] + p
    return acc * kept_share[:, None], total, new_top, p


@triton.jit
def finish(acc, total, top, sinks, heads, valid, v_scale):
    """Normalises the mixed values; rows that saw nothing get zeros."""
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=valid, other=0.0).to(tl.float32) * 1.4426950408889634
        new_top = tl.maximum(top, sink)
        share = tl.exp2(top - new_top)
        total = total * share + tl.exp2(sink - new_top)
        acc = acc * share[:, None]
    return acc * (v_scale / tl.where(total > 0, total, 1.0))[:, None]
