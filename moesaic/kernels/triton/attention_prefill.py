"""Prefill: many queries of each sequence over its cached tokens, new ones included.

A program handles one key/value head and a tile of rows: some positions, each with the heads that
share it. Blocks of keys begin at multiples of their size, and a block that a row does not see
leaves the row unchanged: the bits of a row depend on its sequence alone, not on its tile.

This requires the same instructions for masked and unmasked blocks, which two loops or two kernels
do not guarantee. `invariant_attention` therefore runs one masked loop over one tile size, whatever
the number of queries; it also accepts sequences without tokens.
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
    PACKED,
    AttentionTile,
    attend_block,
    channels,
    finish,
    first_fitting,
    load_rows,
    pages_at,
    prefill_arguments,
    slots_at,
    store_rows,
    tile_width,
    two_parts,
)
from moesaic.kernels.triton.launch import await_inputs, dependent_launch, release_next

# By the most bytes of a token's keys of one head.
CONFIGS = (
    (128, AttentionTile(128, 64, 4, 3)),
    (256, AttentionTile(128, 64, 8, 3)),
    (512, AttentionTile(128, 64, 8, 2)),
    (1 << 30, AttentionTile(32, 32, 8, 2)),
)
# Windows of up to this many tokens get small tiles: most of a large one would be masked.
NARROW = 512
NARROW_CONFIGS = ((256, AttentionTile(64, 32, 4, 3)), *CONFIGS[2:])
# For deterministic mode. A single query occupies a whole tile, so that these are small.
INVARIANT = ((256, AttentionTile(64, 64, 4, 3)), (512, AttentionTile(64, 64, 8, 2)), CONFIGS[-1])


def is_narrow(window: int | None) -> bool:
    return window is not None and 0 < window <= NARROW


def choose_config(key_bytes: int, window: int | None, invariant: bool = False) -> AttentionTile:
    table = NARROW_CONFIGS if is_narrow(window) else CONFIGS
    return first_fitting(INVARIANT if invariant else table, key_bytes)


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


def launch(
    q: Queries,
    cache: LayerPages,
    batch: PrefillRows,
    softmax: Softmax,
    out_TNV: Tensor,
    invariant: bool = False,
) -> None:
    """Runs on any GPU. `q` comes from `two_parts`."""
    kv_heads = cache.keys.shape[2]
    per_kv = q.values.shape[1] // kv_heads
    key_bytes = cache.keys.shape[-1] * q.values.element_size()
    config = choose_config(key_bytes, softmax.window, invariant)
    per_tile = min(per_kv, config.rows)
    parts = kv_heads * -(-per_kv // per_tile)
    tiles_X2 = batch.tiles(config.rows // per_tile)
    pdl = dependent_launch(out_TNV)
    prefill_kernel[((len(tiles_X2) - 1) * parts,)](
        *prefill_arguments(q, cache, batch, softmax, out_TNV, tiles_X2),
        parts,
        softmax.scale * cache.k_scale * LOG2_E,
        cache.v_scale if cache.values is not None else cache.k_scale,
        GROUP=per_kv,
        PER_TILE=per_tile,
        ROWS=config.rows,
        **channels(q),
        V=cache.value_dim,
        PAGE=cache.page_size,
        BLOCK_N=config.block,
        SHARED=cache.values is None,
        WINDOW=softmax.window or 0,
        PLAIN=not invariant,
        PDL=pdl.on,
        num_warps=config.warps,
        num_stages=config.stages,
        **pdl.options,
    )


@triton.jit(do_not_specialize=["parts"], do_not_specialize_on_alignment=PACKED)
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
    D2: tl.constexpr,
    V: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHARED: tl.constexpr,
    WINDOW: tl.constexpr,
    PLAIN: tl.constexpr,
    PDL: tl.constexpr,
):
    """`PLAIN`: blocks that all rows see are attended without masks."""
    POSITIONS: tl.constexpr = ROWS // PER_TILE
    BLOCKS: tl.constexpr = (GROUP + PER_TILE - 1) // PER_TILE
    tile = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    kv_head = (part // BLOCKS).to(tl.int64)
    await_inputs(PDL)
    release_next(PDL)
    if tile >= tl.load(tiles):
        return
    seq, offset = tl.load(tiles + 2 * tile + 2), tl.load(tiles + 2 * tile + 3)
    length, kv_len = tl.load(lengths + seq), tl.load(kv_lens + seq)
    pages = pages_p + tl.load(first_p + seq)
    query = offset + tl.arange(0, ROWS) // PER_TILE
    member = part % BLOCKS * PER_TILE + tl.arange(0, ROWS) % PER_TILE
    valid = (tl.arange(0, ROWS) < POSITIONS * PER_TILE) & (query < length) & (member < GROUP)
    row = (tl.load(starts + seq) + query).to(tl.int64)
    heads = kv_head * GROUP + member
    q1 = load_rows(q1_p, row * q1_row + heads * q1_head, valid, D1, True)
    q2 = q1
    if D2 > 0:
        q2 = load_rows(q2_p, row * q2_row + heads * q2_head, valid, D2, True)
    cache = (keys + kv_head * k_head, values + kv_head * v_head, k_slot, v_slot)
    acc = tl.zeros((ROWS, tile_width(V)), tl.float32)
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
            acc, total, top = attend_block(
                (acc, total, top), (q1, q2), cache, slots, every, every, scale,
                D1, D2, V, SHARED, False,
            )  # fmt: skip
    page = pages_at(pages, low, offs_n, kv_len, PAGE, BLOCK_N)
    for start in range(low, high, BLOCK_N):
        slots = slots_at(page, start, offs_n, PAGE, BLOCK_N)
        page = pages_at(pages, start + BLOCK_N, offs_n, kv_len, PAGE, BLOCK_N)
        n = start + offs_n
        seen = n[None, :] <= position[:, None]
        if WINDOW > 0:
            seen &= n[None, :] > position[:, None] - WINDOW
        acc, total, top = attend_block(
            (acc, total, top), (q1, q2), cache, slots, n < kv_len, seen, scale,
            D1, D2, V, SHARED, True,
        )  # fmt: skip
    x = finish(acc, total, top, sinks, heads, valid, v_scale)
    store_rows(out, row * out_row + heads * out_head, x.to(out.dtype.element_ty), valid, V)
