"""How a token enters attention inside the decoding kernel: its queries become a tile of registers,
its key and value go into the cache. The bits are those of rotary.py's own kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from moesaic.kernels.triton.rotary import encode, load_halves


@triton.jit
def load_norms(q_norm, k_norm, GROUP: tl.constexpr, TALL: tl.constexpr, D: tl.constexpr):
    """The two halves of each row's norm weights: GROUP rows of queries, then one of the key."""
    if q_norm is None:
        return 1.0, 1.0
    else:
        member = tl.arange(0, TALL)
        weight = tl.where(member < GROUP, q_norm, k_norm)
        start = tl.zeros((TALL,), tl.int64)
        return load_halves(weight[:, None], start, member <= GROUP, D, D, False)


@triton.jit
def enter_row(
    qkv,
    keys,
    values,
    cos,
    sin,
    norms,
    eps,
    kv_head,
    kv_heads,
    stored,
    k_factor,
    v_factor,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TALL: tl.constexpr,
    D: tl.constexpr,
    NORM: tl.constexpr,
):
    """Halves [ROWS, D / 2] of the queries of one key/value head, from a row of query, key and value
    heads, normed where there are norms, and rotated. If `stored`, the new key and value go to
    `keys` and `values`. The key is a row of the queries' tile, behind them, so that it takes no
    time of its own: the tile is TALL enough to hold GROUP rows and one."""
    FP8: tl.constexpr = keys.dtype.element_ty.primitive_bitwidth == 8
    member = tl.arange(0, TALL)
    h, d = tl.arange(0, D // 2), tl.arange(0, D)
    key = GROUP * kv_heads + kv_head
    is_k = (member == GROUP) & stored
    there = (member < GROUP) | is_k
    at = tl.where(member < GROUP, kv_head * GROUP + member, key) * D
    a, b = load_halves(qkv, at, there, D, D, False)
    same = tl.zeros((TALL,), tl.int64)
    angle = same[:, None] + h[None, :]
    c = tl.load(cos + angle, mask=there[:, None], other=0.0)
    s = tl.load(sin + angle, mask=there[:, None], other=0.0)
    v = tl.load(qkv + (key + kv_heads) * D + d, mask=stored, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        factor = tl.rsqrt(squares / D + eps)[:, None]
        a, b = a * factor * norms[0], b * factor * norms[1]
    x, y = a * c - b * s, b * c + a * s
    to = keys + angle
    tl.store(to, encode(x * k_factor, keys, FP8), mask=is_k[:, None])
    tl.store(to + D // 2, encode(y * k_factor, keys, FP8), mask=is_k[:, None])
    tl.store(values + d, encode(v * v_factor, values, FP8), mask=stored)
    kind: tl.constexpr = qkv.dtype.element_ty
    return first_rows(x.to(kind), ROWS), first_rows(y.to(kind), ROWS)


@triton.jit
def first_rows(x, ROWS: tl.constexpr):
    """Of as many or twice as many."""
    if x.shape[0] == ROWS:
        return x
    else:
        first, _ = tl.split(tl.permute(tl.reshape(x, (2, ROWS, x.shape[1])), (1, 2, 0)))
        return first
