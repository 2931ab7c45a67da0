"""What the kernels of attention share: a block of keys and values, met by a tile of query rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.attention import Queries

LOG2_E = math.log2(math.e)
# The largest logit of a row that has seen none yet. Finite, so that no difference of two is NaN.
LOWEST = tl.constexpr(-1.0e38)


@cache
def padded(size: int) -> int:
    """A tile's width for so many channels."""
    return max(16, triton.next_power_of_2(size))


def two_parts(q: Queries) -> Queries:
    """Tiles are powers of two wide: channels of another number become two of them."""
    size = q.values.shape[-1]
    if q.rest is not None or size <= 16 or padded(size) == size:
        return q
    main = padded(size) // 2
    return Queries(q.values[..., :main], q.values[..., main:])


def channels(q: Queries) -> dict[str, int]:
    """Constants of a kernel: channels of the two parts of queries and keys, and their tiles."""
    main = q.values.shape[-1]
    rest = 0 if q.rest is None else q.rest.shape[-1]
    return {"D1": main, "D1P": padded(main), "D2": rest, "D2P": padded(rest)}


def strides(x: Tensor) -> tuple[int, int]:
    """Of the row and the head of [T, N, D]; or of the slot and the head of [P, page, M, D]."""
    assert x.stride(-1) == 1, f"channels of {tuple(x.shape)} must lie side by side: {x.stride()}"
    return x.stride(-3), x.stride(-2)


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """`rows`: query heads of a tile when decoding, query tokens of one in a prefill; `block`: keys
    met at once. `merged`: numbers of other splits that a thread loads at once to merge them."""

    rows: int
    block: int
    warps: int
    stages: int
    merged: int = 64


@triton.jit
def pages_at(pages, start, offs_n, kv_len, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pages of tokens start + offs_n, one for all where a page holds whole blocks; `start` is a
    multiple of BLOCK_N. Loops ask for those of the next block, so that no load waits for another
    (and the compiler does not spend a stage of its pipeline on them)."""
    if PAGE % BLOCK_N == 0:
        return tl.load(pages + start // PAGE, mask=start < kv_len, other=0)
    else:
        n = start + offs_n
        return tl.load(pages + n // PAGE, mask=n < kv_len, other=0)


@triton.jit
def slots_at(page, start, offs_n, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where tokens start + offs_n lie, given their pages."""
    if PAGE % BLOCK_N == 0:
        return page.to(tl.int64) * PAGE + start % PAGE + offs_n
    else:
        return page.to(tl.int64) * PAGE + (start + offs_n) % PAGE


@triton.jit
def load_rows(base, offsets, kept, SIZE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr):
    """[len(offsets), TILE] of which SIZE channels are real, zeros elsewhere."""
    d = tl.arange(0, TILE)
    pointers = base + offsets[:, None] + d[None, :]
    if SIZE != TILE:
        return tl.load(pointers, mask=kept[:, None] & (d[None, :] < SIZE), other=0.0)
    if MASKED:
        return tl.load(pointers, mask=kept[:, None], other=0.0)
    return tl.load(pointers)


@triton.jit
def store_rows(base, offsets, x, kept, SIZE: tl.constexpr, TILE: tl.constexpr):
    d = tl.arange(0, TILE)
    pointers = base + offsets[:, None] + d[None, :]
    tl.store(pointers, x, mask=kept[:, None] & (d[None, :] < SIZE))


@triton.jit
def meet_block(
    acc,
    total,
    top,
    q1,
    q2,
    keys,
    values,
    slots,
    kept,
    seen,
    scale,
    k_slot,
    v_slot,
    D1: tl.constexpr,
    D1P: tl.constexpr,
    D2: tl.constexpr,
    D2P: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    SHARED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One step of the online softmax. `kept`: tokens that are there; `seen`: what rows see of them,
    only looked at if MASKED. `top` is the largest logit so far, in powers of two. `total` is that
    of rows, or of rows and columns: then the caller adds up columns in the end."""
    k1 = load_rows(keys, slots * k_slot, kept, D1, D1P, MASKED).to(q1.dtype)
    s = tl.dot(q1, tl.trans(k1), input_precision="ieee")
    if D2 > 0:
        k2 = load_rows(keys + D1, slots * k_slot, kept, D2, D2P, MASKED).to(q1.dtype)
        s = tl.dot(q2, tl.trans(k2), s, input_precision="ieee")
    if MASKED:
        s = tl.where(seen, s, float("-inf"))
    acc, total, new_top, p = weigh(acc, total, top, s, scale)
    if SHARED:
        acc = tl.dot(p.to(q1.dtype), k1, acc, input_precision="ieee")
    else:
        v = load_rows(values, slots * v_slot, kept, V, VP, MASKED).to(q1.dtype)
        acc = tl.dot(p.to(q1.dtype), v, acc, input_precision="ieee")
    return acc, total, new_top


@triton.jit
def weigh(acc, total, top, s, scale):
    """Weights of logits `s`, and what was found before in proportion to them."""
    new_top = tl.maximum(top, tl.max(s, 1) * scale)
    p = tl.exp2(s * scale - new_top[:, None])
    kept_share = tl.exp2(top - new_top)
    if len(total.shape) == 1:
        total = total * kept_share + tl.sum(p, 1)
    else:
        total = total * kept_share[:, None] + p
    return acc * kept_share[:, None], total, new_top, p


@triton.jit
def finish(acc, total, top, sinks, heads, valid, v_scale, SINKS: tl.constexpr):
    """The mixed values; zeros for rows that saw nothing."""
    if SINKS:
        sink = tl.load(sinks + heads, mask=valid, other=0.0).to(tl.float32) * 1.4426950408889634
        new_top = tl.maximum(top, sink)
        share = tl.exp2(top - new_top)
        total = total * share + tl.exp2(sink - new_top)
        acc = acc * share[:, None]
    return acc * (v_scale / tl.where(total > 0, total, 1.0))[:, None]
