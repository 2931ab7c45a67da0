"""Prefill: many queries of each sequence over its cached tokens, its new ones among them.

A program takes one key/value head and a tile of rows: some positions, each with the heads that
share it. Blocks of keys begin at multiples of their size, and a block that a row does not see
leaves it as it is: so the bits of a row depend on its sequence alone, not on its tile.

That takes for granted that a block gets the same instructions with a mask and without one, which
two loops of a kernel need not, and two kernels even less. `invariant_attention` is therefore one
loop with masks, of one tile, whatever the number of queries; and it takes sequences of no tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.attention import LayerPages, PrefillRows, Queries, Softmax
from moesaic.kernels.triton import attention_hopper
from moesaic.kernels.triton.attention_blocks import (
    LOG2_E,
    LOWEST,
    AttentionTile,
    channels,
    finish,
    load_rows,
    meet_block,
    padded,
    pages_at,
    slots_at,
    store_rows,
    strides,
    two_parts,
)
from moesaic.kernels.triton.launch import await_inputs, dependent_launch, release_next

# By the bytes of a token's keys of one head, the first that holds them.
CONFIGS = (
    (128, AttentionTile(128, 64, 4, 3)),
    (256, AttentionTile(128, 64, 8, 3)),
    (512, AttentionTile(128, 64, 8, 2)),
    (1 << 30, AttentionTile(32, 32, 8, 2)),
)


# With a window of up to so many tokens, small tiles: of large ones most is seen by nobody.
NARROW = 512
NARROW_CONFIGS = (
    (256, AttentionTile(64, 32, 4, 3)),
    *CONFIGS[2:],
)


# Of deterministic mode. Also a single query takes a whole tile: so these are not large.
INVARIANT = (
    (256, AttentionTile(64, 64, 4, 3)),
    (512, AttentionTile(64, 64, 8, 2)),
    CONFIGS[-1],
)


def is_narrow(window: int | None) -> bool:
    return window is not None and 0 < window <= NARROW


def choose_config(key_bytes: int, window: int | None) -> AttentionTile:
    table = NARROW_CONFIGS if is_narrow(window) else CONFIGS
    return next(config for size, config in table if key_bytes <= size)


def prefill_attention(
    q: Queries, cache: LayerPages, batch: PrefillRows, softmax: Softmax, out_TNV: Tensor
) -> Tensor:
    if not len(batch.starts_B):
        return out_TNV
    q = two_parts(q)
    if not is_narrow(softmax.window) and attention_hopper.can_run(q, cache, out_TNV):
        attention_hopper.launch(q, cache, batch, softmax, out_TNV)
    else:
        launch(q, cache, batch, softmax, out_TNV)
    return out_TNV


def invariant_attention(
    q: Queries, cache: LayerPages, batch: PrefillRows, softmax: Softmax, out_TNV: Tensor
) -> Tensor:
    if len(batch.starts_B):
        launch(two_parts(q), cache, batch, softmax, out_TNV, invariant=True)
    return out_TNV


def invariant_config(key_bytes: int) -> AttentionTile:
    return next(config for size, config in INVARIANT if key_bytes <= size)


def launch(
    q: Queries,
    cache: LayerPages,
    batch: PrefillRows,
    softmax: Softmax,
    out_TNV: Tensor,
    invariant: bool = False,
) -> None:
    """On any GPU. `q`: in its two parts."""
    kv_heads = cache.keys.shape[2]
    per_kv = q.values.shape[1] // kv_heads
    key_bytes = cache.keys.shape[-1] * q.values.element_size()
    config = choose_config(key_bytes, softmax.window)
    config = invariant_config(key_bytes) if invariant else config
    per_tile = min(per_kv, config.rows)
    parts = kv_heads * -(-per_kv // per_tile)
    tiles_X2 = batch.tiles(config.rows // per_tile)
    rest = q.values if q.rest is None else q.rest
    values = cache.keys if cache.values is None else cache.values
    pdl = dependent_launch(out_TNV)
    prefill_kernel[(len(tiles_X2) * parts,)](
        q.values,
        rest,
        cache.keys,
        values,
        out_TNV,
        softmax.sinks_N,
        tiles_X2,
        batch.starts_B,
        batch.lengths_B,
        batch.kv_lens_B,
        batch.first_B,
        batch.pages,
        *strides(q.values),
        *strides(rest),
        *strides(cache.keys),
        *strides(values),
        *strides(out_TNV),
        parts,
        softmax.scale * cache.k_scale * LOG2_E,
        cache.v_scale if cache.values is not None else cache.k_scale,
        GROUP=per_kv,
        PER_TILE=per_tile,
        ROWS=config.rows,
        **channels(q),
        V=cache.value_dim,
        VP=padded(cache.value_dim),
        PAGE=cache.page_size,
        BLOCK_N=config.block,
        SHARED=cache.values is None,
        SINKS=softmax.sinks_N is not None,
        WINDOW=softmax.window or 0,
        PLAIN=not invariant,
        PDL=pdl.on,
        num_warps=config.warps,
        num_stages=config.stages,
        **pdl.options,
    )


# Views of one packed tensor: as they happen to lie, they would be as many kernels.
@triton.jit(
    do_not_specialize=["parts"],
    do_not_specialize_on_alignment=["tiles", "starts", "lengths", "kv_lens", "first_p", "pages_p"],
)
def prefill_kernel(
    q1_p,
    q2_p,
    keys,
    values,
    out,
    sinks,
    tiles,
    starts,
    lengths,
    kv_lens,
    first_p,
    pages_p,
    q1_row,
    q1_head,
    q2_row,
    q2_head,
    k_slot,
    k_head,
    v_slot,
    v_head,
    out_row,
    out_head,
    parts,
    scale,
    v_scale,
    GROUP: tl.constexpr,
    PER_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    D1: tl.constexpr,
    D1P: tl.constexpr,
    D2: tl.constexpr,
    D2P: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHARED: tl.constexpr,
    SINKS: tl.constexpr,
    WINDOW: tl.constexpr,
    PLAIN: tl.constexpr,
    PDL: tl.constexpr,
):
    """`PLAIN`: blocks that all rows see are met without masks."""
    POSITIONS: tl.constexpr = ROWS // PER_TILE
    BLOCKS: tl.constexpr = (GROUP + PER_TILE - 1) // PER_TILE
    tile = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    kv_head = (part // BLOCKS).to(tl.int64)
    await_inputs(PDL)
    release_next(PDL)
    seq, offset = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    length, kv_len = tl.load(lengths + seq), tl.load(kv_lens + seq)
    pages = pages_p + tl.load(first_p + seq)
    query = offset + tl.arange(0, ROWS) // PER_TILE
    member = part % BLOCKS * PER_TILE + tl.arange(0, ROWS) % PER_TILE
    valid = (tl.arange(0, ROWS) < POSITIONS * PER_TILE) & (query < length) & (member < GROUP)
    row = (tl.load(starts + seq) + query).to(tl.int64)
    heads = kv_head * GROUP + member
    q1 = load_rows(q1_p, row * q1_row + heads * q1_head, valid, D1, D1P, True)
    q2 = q1
    if D2 > 0:
        q2 = load_rows(q2_p, row * q2_row + heads * q2_head, valid, D2, D2P, True)
    keys += kv_head * k_head
    values += kv_head * v_head
    acc = tl.zeros((ROWS, VP), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    top = tl.full((ROWS,), LOWEST, tl.float32)
    offs_n = tl.arange(0, BLOCK_N)
    oldest = kv_len - length + offset
    position = kv_len - length + query
    high = tl.minimum(oldest + POSITIONS, kv_len)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(oldest - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    elif PLAIN:
        low = (oldest + 1) // BLOCK_N * BLOCK_N
        page = pages_at(pages, 0, offs_n, kv_len, PAGE, BLOCK_N)
        for start in range(0, low, BLOCK_N):
            slots = slots_at(page, start, offs_n, PAGE, BLOCK_N)
            page = pages_at(pages, start + BLOCK_N, offs_n, kv_len, PAGE, BLOCK_N)
            every = offs_n >= 0
            acc, total, top = meet_block(
                acc, total, top, q1, q2, keys, values, slots, every, every, scale, k_slot, v_slot,
                D1, D1P, D2, D2P, V, VP, SHARED, False,
            )  # fmt: skip
    page = pages_at(pages, low, offs_n, kv_len, PAGE, BLOCK_N)
    for start in range(low, high, BLOCK_N):
        slots = slots_at(page, start, offs_n, PAGE, BLOCK_N)
        page = pages_at(pages, start + BLOCK_N, offs_n, kv_len, PAGE, BLOCK_N)
        n = start + offs_n
        seen = n[None, :] <= position[:, None]
        if WINDOW > 0:
            seen &= n[None, :] > position[:, None] - WINDOW
        acc, total, top = meet_block(
            acc, total, top, q1, q2, keys, values, slots, n < kv_len, seen, scale, k_slot, v_slot,
            D1, D1P, D2, D2P, V, VP, SHARED, True,
        )  # fmt: skip
    x = finish(acc, total, top, sinks, heads, valid, v_scale, SINKS)
    store_rows(out, row * out_row + heads * out_head, x.to(out.dtype.element_ty), valid, V, VP)
