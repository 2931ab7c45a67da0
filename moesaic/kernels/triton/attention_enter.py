"""Norms and rotates a new token inside the decoding kernel: its queries stay in registers, its key
and value go to the cache. The bits are those of the kernels in rotary.py."""

from __future__ import annotations

import triton
import triton.language as tl

from moesaic.kernels.triton.rotary import encode, load_halves


@triton.jit
def load_norms(q_norm, k_norm, GROUP: tl.constexpr, ENTRY_ROWS: tl.constexpr, D: tl.constexpr):
    """Both halves of each row's norm weights: GROUP rows of queries, then the key."""
    if q_norm is None:
        return 1.0, 1.0
    else:
        member = tl.arange(0, ENTRY_ROWS)
        weight = tl.where(member < GROUP, q_norm, k_norm)
        start = tl.zeros((ENTRY_ROWS,), tl.int64)
        return load_halves(weight[:, None], start, member <= GROUP, D, False)


@triton.jit
def enter_row(
    qkv,
    target,
    cos,
    sin,
    norms,
    eps,
    kv_head,
    kv_heads,
    stored,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    ENTRY_ROWS: tl.constexpr,
    D: tl.constexpr,
    NORM: tl.constexpr,
):
    """Normed and rotated halves [ROWS, D / 2] of the queries of one key/value head. If `stored`,
    writes the new key and value. The key is a row of the queries' tile, behind them, and so costs
    no extra time: a tile of ENTRY_ROWS rows holds GROUP queries and one key."""
    keys, values, k_factor, v_factor = target
    member = tl.arange(0, ENTRY_ROWS)
    h, d = tl.arange(0, D // 2), tl.arange(0, D)
    key = GROUP * kv_heads + kv_head
    is_k = (member == GROUP) & stored
    there = (member < GROUP) | is_k
    at = tl.where(member < GROUP, kv_head * GROUP + member, key) * D
    a, b = load_halves(qkv, at, there, D, False)
    same = tl.zeros((ENTRY_ROWS,), tl.int64)
    angle = same[:, None] + h[None, :]
    c = tl.load(cos + angle, mask=there[:, None], other=0.0)
    s = tl.load(sin + angle, mask=there[:, None], other=0.0)
    v = tl.load(qkv + (key + kv_heads) * D + d, mask=stored, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        factor = tl.rsqrt(squares / D + eps)[:, None]
        a, b = a * factor * norms[0], b * factor * norms[1]
    x, y = a * c - b * s, b * c + a * s
    at_k = keys + angle
    tl.store(at_k, encode(x * k_factor, keys), mask=is_k[:, None])
    tl.store(at_k + D // 2, encode(y * k_factor, keys), mask=is_k[:, None])
    tl.store(values + d, encode(v * v_factor, values), mask=stored)
    kind: tl.constexpr = qkv.dtype.element_ty
    return first_rows(x.to(kind), ROWS), first_rows(y.to(kind), ROWS)


@triton.jit
def first_rows(x, ROWS: tl.constexpr):
    """`x` has ROWS or 2 * ROWS rows."""
    if x.shape[0] == ROWS:
        return x
    else:
        first, _ = tl.split(tl.permute(tl.reshape(x, (2, ROWS, x.shape[1])), (1, 2, 0)))
        return first
