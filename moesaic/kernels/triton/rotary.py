"""Between projections and attention, in one kernel: norms and rotates queries and keys, and writes
the new keys and values to the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.attention import HeadEntry, LatentEntry, LayerPages
from moesaic.kernels.triton.attention_blocks import padded, strides, tile_width
from moesaic.kernels.triton.launch import await_inputs, dependent_launch, release_next

WARPS = 4
# Elements of a tile: 16 a thread, loaded 8 at a time.
TILE = WARPS * 32 * 16


def enter_heads(qkv_TX: Tensor, entry: HeadEntry, cache: LayerPages, slots_T: Tensor) -> Tensor:
    kv_heads, dim = cache.keys.shape[-2:]
    num_tokens, heads = len(qkv_TX), entry.num_heads
    q_TND = torch.empty(num_tokens, heads, dim, dtype=qkv_TX.dtype, device=qkv_TX.device)
    if not num_tokens:
        return q_TND
    assert cache.values is not None and qkv_TX.stride(-1) == 1
    num_rows = num_tokens * (heads + 2 * kv_heads)
    rows = max(1, TILE // padded(dim))
    pdl = dependent_launch(qkv_TX)
    enter_heads_kernel[(-(-num_rows // rows),)](
        qkv_TX,
        q_TND,
        cache.keys,
        cache.values,
        slots_T,
        entry.cos_TR,
        entry.sin_TR,
        entry.q_norm_D,
        entry.k_norm_D,
        qkv_TX.stride(0),
        entry.cos_TR.stride(0),
        *strides(cache.keys),
        *strides(cache.values),
        num_rows,
        entry.eps,
        1 / cache.k_scale,
        1 / cache.v_scale,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=dim,
        ROWS=rows,
        INTERLEAVED=entry.interleaved,
        PDL=pdl.on,
        num_warps=WARPS,
        **pdl.options,
    )
    return q_TND


def enter_latent(
    q_TNR: Tensor, latents_TC: Tensor, entry: LatentEntry, cache: LayerPages, slots_T: Tensor
) -> Tensor:
    num_tokens, heads, rope = q_TNR.shape
    out_TNR = torch.empty(num_tokens, heads, rope, dtype=q_TNR.dtype, device=q_TNR.device)
    if not num_tokens:
        return out_TNR
    rows = max(1, TILE // padded(rope))
    pdl = dependent_launch(q_TNR)
    assert latents_TC.stride(-1) == 1
    enter_latent_kernel[(num_tokens + -(-num_tokens * heads // rows),)](
        q_TNR,
        out_TNR,
        latents_TC,
        cache.keys,
        slots_T,
        entry.cos_TR,
        entry.sin_TR,
        entry.norm_D,
        *strides(q_TNR),
        latents_TC.stride(0),
        entry.cos_TR.stride(0),
        cache.keys.stride(1),
        num_tokens,
        entry.eps,
        1 / cache.k_scale,
        HEADS=heads,
        PLAIN=latents_TC.shape[-1] - rope,
        ROPE=rope,
        ROWS=rows,
        INTERLEAVED=entry.interleaved,
        PDL=pdl.on,
        num_warps=WARPS,
        **pdl.options,
    )
    return out_TNR


@triton.jit
def load_halves(x, rows, kept, D: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The two channels of each pair, [len(rows), tile_width(D) / 2] each, in float32."""
    DP: tl.constexpr = tile_width(D)
    if INTERLEAVED:
        d = tl.arange(0, DP)
        both = tl.load(
            x + rows[:, None] + d[None, :], mask=kept[:, None] & (d[None, :] < D), other=0.0
        )
        a, b = tl.split(tl.reshape(both.to(tl.float32), (rows.shape[0], DP // 2, 2)))
        return a, b
    else:
        h = tl.arange(0, DP // 2)
        mask = kept[:, None] & (h[None, :] < D // 2)
        a = tl.load(x + rows[:, None] + h[None, :], mask=mask, other=0.0)
        b = tl.load(x + rows[:, None] + D // 2 + h[None, :], mask=mask, other=0.0)
        return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def rotate(a, b, cos, sin, rows, kept, D: tl.constexpr):
    """`rows`: offsets of the rows of cos and sin."""
    h = tl.arange(0, tile_width(D) // 2)
    mask = kept[:, None] & (h[None, :] < D // 2)
    c = tl.load(cos + rows[:, None] + h[None, :], mask=mask, other=0.0)
    s = tl.load(sin + rows[:, None] + h[None, :], mask=mask, other=0.0)
    return a * c - b * s, b * c + a * s


@triton.jit
def encode(x, into):
    """Converts to the type of the cache; float8 saturates at 448 and keeps NaN."""
    if into.dtype.element_ty.primitive_bitwidth == 8:
        x = tl.maximum(x, -448.0, propagate_nan=tl.PropagateNan.ALL)
        x = tl.minimum(x, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(into.dtype.element_ty)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots"])
def enter_heads_kernel(
    qkv,
    out,
    keys,
    values,
    slots,
    cos,
    sin,
    q_norm,
    k_norm,
    qkv_row,
    cos_row,
    k_slot,
    k_head,
    v_slot,
    v_head,
    num_rows,
    eps,
    k_factor,
    v_factor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PDL: tl.constexpr,
):
    DP: tl.constexpr = tile_width(D)
    ALL: tl.constexpr = HEADS + 2 * KV_HEADS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = row % ALL
    token = (row // ALL).to(tl.int64)
    is_q = (row < num_rows) & (head < HEADS)
    is_k = (row < num_rows) & (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_v = (row < num_rows) & (head >= HEADS + KV_HEADS)
    h = tl.arange(0, DP // 2)
    # Attention has much to load before it needs these results.
    release_next(PDL)
    await_inputs(PDL)
    slot = tl.load(slots + token, mask=row < num_rows, other=-1).to(tl.int64)
    at = token * qkv_row + head * D
    a, b = load_halves(qkv, at, is_q | is_k, D, INTERLEAVED)
    # Loaded together with the others, before the slot is known.
    d = tl.arange(0, DP)
    real_v = is_v[:, None] & (d[None, :] < D)
    v = tl.load(qkv + at[:, None] + d[None, :], mask=real_v, other=0.0).to(tl.float32)
    if q_norm is not None:
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        factor = tl.rsqrt(squares / D + eps)[:, None]
        weight = tl.where(is_q, q_norm, k_norm)
        one = tl.zeros((ROWS,), tl.int64)
        wa, wb = load_halves(weight[:, None], one, is_q | is_k, D, INTERLEAVED)
        a, b = a * factor * wa, b * factor * wb
    x, y = rotate(a, b, cos, sin, token * cos_row, is_q | is_k, D)
    real = h[None, :] < D // 2
    to = out + (token * HEADS + head)[:, None] * D + h[None, :]
    tl.store(to, x.to(out.dtype.element_ty), mask=is_q[:, None] & real)
    tl.store(to + D // 2, y.to(out.dtype.element_ty), mask=is_q[:, None] & real)
    to = keys + (slot * k_slot + (head - HEADS) * k_head)[:, None] + h[None, :]
    kept = (is_k & (slot >= 0))[:, None] & real
    tl.store(to, encode(x * k_factor, keys), mask=kept)
    tl.store(to + D // 2, encode(y * k_factor, keys), mask=kept)
    to = values + (slot * v_slot + (head - HEADS - KV_HEADS) * v_head)[:, None] + d[None, :]
    tl.store(to, encode(v * v_factor, values), mask=real_v & (slot >= 0)[:, None])


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots"])
def enter_latent_kernel(
    q,
    out,
    latents,
    keys,
    slots,
    cos,
    sin,
    norm,
    q_row,
    q_head,
    latent_row,
    cos_row,
    k_slot,
    num_tokens,
    eps,
    k_factor,
    HEADS: tl.constexpr,
    PLAIN: tl.constexpr,
    ROPE: tl.constexpr,
    ROWS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first programs handle one latent each, the others ROWS queries."""
    h = tl.arange(0, tile_width(ROPE) // 2)
    program = tl.program_id(0)
    if program < num_tokens:
        d = tl.arange(0, tile_width(PLAIN))
        weight = tl.load(norm + d, mask=d < PLAIN, other=0.0).to(tl.float32)
        release_next(PDL)
        await_inputs(PDL)
        at = program.to(tl.int64) * latent_row
        slot = tl.load(slots + program).to(tl.int64)
        x = tl.load(latents + at + d, mask=d < PLAIN, other=0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, 0) / PLAIN + eps) * weight
        to = keys + slot * k_slot
        tl.store(to + d, encode(x * k_factor, keys), mask=(d < PLAIN) & (slot >= 0))
        token = program.to(tl.int64) + tl.zeros((1,), tl.int64)
        one = token >= 0
        a, b = load_halves(latents + PLAIN, token * latent_row, one, ROPE, INTERLEAVED)
        x2, y2 = rotate(a, b, cos, sin, token * cos_row, one, ROPE)
        kept = (h[None, :] < ROPE // 2) & (slot >= 0)
        to2 = to + PLAIN + h[None, :]
        tl.store(to2, encode(x2 * k_factor, keys), mask=kept)
        tl.store(to2 + ROPE // 2, encode(y2 * k_factor, keys), mask=kept)
    else:
        row = (program - num_tokens) * ROWS + tl.arange(0, ROWS)
        there = row < num_tokens * HEADS
        token_r = (row // HEADS).to(tl.int64)
        release_next(PDL)
        await_inputs(PDL)
        at_r = token_r * q_row + (row % HEADS) * q_head
        a3, b3 = load_halves(q, at_r, there, ROPE, INTERLEAVED)
        x3, y3 = rotate(a3, b3, cos, sin, token_r * cos_row, there, ROPE)
        to3 = out + row.to(tl.int64)[:, None] * ROPE + h[None, :]
        kept3 = there[:, None] & (h[None, :] < ROPE // 2)
        tl.store(to3, x3.to(out.dtype.element_ty), mask=kept3)
        tl.store(to3 + ROPE // 2, y3.to(out.dtype.element_ty), mask=kept3)
