"""Decoding: one query of each sequence over its cached tokens, cut into splits.

A program handles one key/value head of one split; the query heads that share it are the rows of its
tile. Programs of extra splits come first, as these are of the longest sequences. The last program
of a sequence and head to finish, known by a counter, merges the results of all splits, which saves
a second kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.attention import (
    MAX_FUSED_ENTRIES,
    DecodeRows,
    ExtraSplits,
    HeadEntry,
    LayerPages,
    Out,
    Queries,
    Softmax,
    Splits,
)
from moesaic.kernels.experts import Rows
from moesaic.kernels.quantise import FP8_GROUP
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
    padded,
    pages_at,
    slots_at,
    store_rows,
    strides,
    tile_width,
    two_parts,
)
from moesaic.kernels.triton.attention_enter import enter_row, load_norms
from moesaic.kernels.triton.launch import (
    await_inputs,
    dependent_launch,
    prefetch_lines,
    release_next,
)
from moesaic.kernels.triton.quantise import fp8_scales, to_fp8
from moesaic.kernels.triton.rotary import enter_heads

# By the most bytes of a token's keys of one head.
CONFIGS = (
    (128, AttentionTile(16, 128, 4, 3)),
    (256, AttentionTile(16, 64, 4, 3)),
    (512, AttentionTile(16, 64, 4, 2)),
    (1 << 30, AttentionTile(16, 32, 4, 3, 128)),
)
# Many heads over one latent: large tiles for the tensor cores.
MANY_ROWS = AttentionTile(64, 32, 8, 2, 128)
# From this many splits on, the GPU is nearly empty and a program has one or two blocks: the latency
# of the first one dominates.
MANY_SPLITS = 9
SHORT_CONFIGS = ((256, AttentionTile(16, 128, 8, 2)),)
# For the only program of a processor: no other one loads tokens while it computes, so that it needs
# large blocks and several in flight.
LONE_CONFIGS = ((128, AttentionTile(16, 128, 8, 4)), (256, AttentionTile(16, 128, 8, 3)))
# Splits and channels that a merging program loads at once, registers permitting.
MAX_MERGED = 16
MERGED_WIDTH = 128
# Channels of half a head that a thread norms.
THREAD_CHANNELS = 8
EXTRA = ("extra_seqs", "extra_counts", "extra_first")


def choose_config(rows: int, key_bytes: int, splits: Splits) -> AttentionTile:
    if rows > 32 and key_bytes > 512:
        return MANY_ROWS
    short = SHORT_CONFIGS if splits.count >= MANY_SPLITS else ()
    table = (LONE_CONFIGS if splits.lone else short) + CONFIGS
    return first_fitting(table, key_bytes)


def merging(per_kv: int, value_dim: int, config: AttentionTile) -> dict[str, int]:
    """Kernel constants: heads, channels and splits that a program merges at once. Rows that only
    pad a tile are left out."""
    heads = triton.next_power_of_2(min(per_kv, config.rows))
    width = min(padded(value_dim), MERGED_WIDTH)
    merged = max(1, config.merged * 32 * config.warps // (heads * width))
    return {"HEADS": heads, "WIDTH": width, "MERGED": min(merged, MAX_MERGED)}


def decode_attention(
    q: Queries, cache: LayerPages, batch: DecodeRows, softmax: Softmax, out: Out
) -> Out:
    return _decode(two_parts(q), FusedEntry(), cache, batch, softmax, out)


def enter_and_decode(
    qkv_TX: Tensor,
    entry: HeadEntry,
    cache: LayerPages,
    slots_T: Tensor,
    batch: DecodeRows,
    softmax: Softmax,
    out: Out,
) -> Out:
    if not _can_fuse_entry(entry, cache, batch):
        q = Queries(enter_heads(qkv_TX, entry, cache, slots_T))
        return decode_attention(q, cache, batch, softmax, out)
    fused = FusedEntry(entry, slots_T, 1 / cache.k_scale, 1 / cache.v_scale)
    heads_THD = qkv_TX.unflatten(-1, (-1, cache.keys.shape[-1]))
    halves = Queries(*heads_THD[:, : entry.num_heads].chunk(2, dim=-1))
    return _decode(halves, fused, cache, batch, softmax, out)


def _can_fuse_entry(entry: HeadEntry, cache: LayerPages, batch: DecodeRows) -> bool:
    """Whether the decoding kernel can norm and rotate. One program must have all queries of the key
    that it stores, as others cannot see it; halves of heads must fill tiles."""
    kv_heads, dim = cache.keys.shape[-2:]
    few = len(batch.rows_B) <= MAX_FUSED_ENTRIES
    tile = choose_config(entry.num_heads // kv_heads, dim * cache.keys.element_size(), batch.splits)
    whole = entry.num_heads // kv_heads <= tile.rows
    return few and whole and not entry.interleaved and padded(dim // 2) * 2 == dim


@dataclass(frozen=True, slots=True)
class FusedEntry:
    """How the kernel norms and rotates its inputs; does nothing without an entry."""

    entry: HeadEntry | None = None
    slots_T: Tensor | None = None
    """Slots of the newest tokens, written before the step's first kernel."""
    k_factor: float = 1.0
    """Converts real numbers to those of the cache."""
    v_factor: float = 1.0

    def arguments(self) -> dict[str, Any]:
        entry = self.entry
        given = {"slots_p": self.slots_T, "k_factor": self.k_factor, "v_factor": self.v_factor}
        if entry is None:
            tensors = dict.fromkeys(("cos", "sin", "q_norm", "k_norm"))
            return given | tensors | {"cos_row": 0, "eps": 0.0}
        given |= {"cos": entry.cos_TR, "sin": entry.sin_TR, "cos_row": entry.cos_TR.stride(0)}
        return given | {"q_norm": entry.q_norm_D, "k_norm": entry.k_norm_D, "eps": entry.eps}


def entry_rows(per_kv: int, dim: int, config: AttentionTile) -> int:
    """Rows of the tile that holds the queries and the key behind them; enough for each thread to
    sum as many channels as in rotary.py, which gives the same bits."""
    fits = per_kv < config.rows and config.rows * dim >= THREAD_CHANNELS * 64 * config.warps
    return config.rows if fits else 2 * config.rows


def _decode(
    q: Queries, fused: FusedEntry, cache: LayerPages, batch: DecodeRows, softmax: Softmax, out: Out
) -> Out:
    num_seqs, kv_heads = len(batch.rows_B), cache.keys.shape[2]
    if not num_seqs:
        return out
    out_TNV, scales_TG = _output_parts(out, q.values.shape[1], cache.value_dim)
    splits, per_kv = batch.splits, q.values.shape[1] // kv_heads
    key_bytes = cache.keys.shape[-1] * cache.keys.element_size()
    config = choose_config(per_kv, key_bytes, splits)
    tiles = kv_heads * -(-per_kv // config.rows)
    assert batch.counters.numel() >= num_seqs * tiles, (batch.counters.shape, num_seqs, tiles)
    # What a window shows is short.
    extra = None if softmax.window else batch.extra
    room = 0 if extra is None else len(extra.sequences_X)
    places = num_seqs * splits.count + room if room or splits.count > 1 else 0
    partial, sums = _partials((places, kv_heads * per_kv), q, cache.value_dim)
    rest = q.values if q.rest is None else q.rest
    values = cache.keys if cache.values is None else cache.values
    pdl = dependent_launch(out_TNV)
    decode_kernel[(tiles, splits.count, -(-room // splits.count) + num_seqs)](
        q.values, rest, cache.keys, values, out_TNV, scales_TG, softmax.sinks_N, partial, sums,
        batch.counters, batch.rows_B, batch.kv_lens_B, batch.first_B, batch.pages, batch.masks_B,
        *strides(q.values), *strides(rest), *strides(cache.keys), *strides(values),
        *strides(out_TNV), *((0, 0) if scales_TG is None else scales_TG.stride()),
        softmax.scale * cache.k_scale * LOG2_E,
        cache.v_scale if cache.values is not None else cache.k_scale,
        splits.count, -(-splits.chunk // config.block) * config.block, **fused.arguments(),
        **extra_arguments(extra), ROOM=room,
        ENTRY_ROWS=0 if fused.entry is None else entry_rows(per_kv, cache.value_dim, config),
        GROUP=per_kv, ROWS=config.rows, **channels(q), V=cache.value_dim, PAGE=cache.page_size,
        BLOCK_N=config.block, SPLIT=places > 0, **merging(per_kv, cache.value_dim, config),
        SHARED=cache.values is None, WINDOW=softmax.window or 0, PDL=pdl.on,
        num_warps=config.warps, num_stages=config.stages, **pdl.options,
    )  # fmt: skip
    return out


def _output_parts(out: Tensor | Rows, heads: int, value_dim: int) -> tuple[Tensor, Tensor | None]:
    if isinstance(out, Tensor):
        return out, None
    rows, groups = len(out.values), heads * value_dim // FP8_GROUP
    assert value_dim % FP8_GROUP == 0 and out.scale == 1.0, (value_dim, out.scale)
    assert out.scales is not None and out.scales.shape == (rows, groups), out.scales
    return out.values.view(rows, heads, value_dim), out.scales


def extra_arguments(extra: ExtraSplits | None) -> dict[str, Tensor | None]:
    if extra is None:
        return dict.fromkeys(EXTRA)
    return dict(zip(EXTRA, (extra.sequences_X, extra.counts_B, extra.first_B), strict=True))


def _partials(size: tuple[int, int], q: Queries, value_dim: int) -> tuple[Tensor, Tensor]:
    """Buffers for the results of each split and head; single splits need none."""
    if not size[0]:
        return q.values, q.values
    parts = torch.empty(*size, value_dim, dtype=torch.float32, device=q.values.device)
    return parts, torch.empty(size, dtype=torch.float32, device=q.values.device)


@triton.jit(
    do_not_specialize=["scale_row", "scale_group", "num_splits", "least_chunk"],
    do_not_specialize_on_alignment=[*PACKED, "counters", "masks_p", *EXTRA],
)
def decode_kernel(
    q1_p, q2_p, keys, values, out, scales, sinks, partial, sums, counters,
    rows_p, kv_lens, first_p, pages_p, masks_p,
    q1_row, q1_head, q2_row, q2_head, k_slot, k_head, v_slot, v_head, out_row, out_head,
    scale_row, scale_group, scale, v_scale, num_splits, least_chunk,
    slots_p, cos, sin, q_norm, k_norm, cos_row, eps, k_factor, v_factor,
    extra_seqs, extra_counts, extra_first,
    ENTRY_ROWS: tl.constexpr, ROOM: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, V: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, HEADS: tl.constexpr,
    WIDTH: tl.constexpr, MERGED: tl.constexpr, SHARED: tl.constexpr, WINDOW: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    tile, split, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # The host wrote the page tables: loading them need not wait for the previous kernel.
    place, beyond = seq * num_splits + split, 0
    of_seq = num_splits
    if ROOM > 0:
        ahead = tl.cdiv(ROOM, num_splits)
        is_extra, regular = seq < ahead, (tl.num_programs(2) - ahead) * num_splits
        found = tl.load(extra_seqs + place, mask=is_extra & (place < ROOM), other=-1)
        seq = tl.where(is_extra, found, seq - ahead)
        if seq < 0:
            return
        first_extra = tl.load(extra_first + seq)
        split = tl.where(is_extra, num_splits + place - first_extra, split)
        place = tl.where(is_extra, regular + place, seq * num_splits + split)
        beyond = regular + first_extra - (seq + 1) * num_splits
        of_seq += tl.load(extra_counts + seq)
    kv_len = tl.load(kv_lens + seq)
    row = tl.load(rows_p + seq).to(tl.int64)
    pages = pages_p + tl.load(first_p + seq)
    oldest = tl.maximum(kv_len - WINDOW, 0) if WINDOW > 0 else 0
    mask = -1
    if masks_p is not None:
        mask = tl.load(masks_p + seq)
        if WINDOW > 0:
            oldest = tl.maximum(kv_len - WINDOW - count_bits(~mask), 0)
    begin = oldest // BLOCK_N * BLOCK_N
    chunk = tl.cdiv(tl.cdiv(kv_len - begin, of_seq), BLOCK_N) * BLOCK_N
    chunk = tl.maximum(chunk, least_chunk)
    used = tl.cdiv(kv_len - begin, chunk)
    if split >= tl.maximum(used, 1):
        return
    kv_head = (tile // BLOCKS).to(tl.int64)
    keys += kv_head * k_head
    values += kv_head * v_head
    offs_n = tl.arange(0, BLOCK_N)
    low = begin + split * chunk
    high = tl.minimum(low + chunk, kv_len)
    page = pages_at(pages, low, offs_n, high, PAGE, BLOCK_N)
    if PDL:
        slots = slots_at(page, low, offs_n, PAGE, BLOCK_N)
        prefetch_tokens(keys, slots * k_slot, D1)
        if D2 > 0:
            prefetch_tokens(keys + D1, slots * k_slot, D2)
        if not SHARED:
            prefetch_tokens(values, slots * v_slot, V)
    if ENTRY_ROWS > 0:
        slot = tl.load(slots_p + row).to(tl.int64)
        norms = load_norms(q_norm, k_norm, GROUP, ENTRY_ROWS, D1 + D2)
    release_next(PDL)
    await_inputs(PDL)
    # Not earlier: the next kernel waits for this one alone, which must have waited for the others.
    if kv_len < 0:
        return
    member = (tile % BLOCKS) * ROWS + tl.arange(0, ROWS)
    valid = member < GROUP
    heads = kv_head * GROUP + member
    if ENTRY_ROWS > 0:
        stored = (slot >= 0) & (split == tl.maximum(used, 1) - 1)
        q1, q2 = enter_row(
            q1_p + row * q1_row, (keys + slot * k_slot, values + slot * v_slot, k_factor, v_factor),
            cos + row * cos_row, sin + row * cos_row, norms, eps, kv_head, tl.num_programs(0),
            stored, GROUP, ROWS, ENTRY_ROWS, D1 + D2, q_norm is not None,
        )  # fmt: skip
        # All threads store before one of them loads the newest token.
        tl.debug_barrier()
    else:
        q1 = load_rows(q1_p + row * q1_row, heads * q1_head, valid, D1, True)
        q2 = q1
        if D2 > 0:
            q2 = load_rows(q2_p + row * q2_row, heads * q2_head, valid, D2, True)
    acc = tl.zeros((ROWS, tile_width(V)), tl.float32)
    total = zero_totals(keys, ROWS, BLOCK_N)
    top = tl.full((ROWS,), LOWEST, tl.float32)
    for start in range(low, high, BLOCK_N):
        slots = slots_at(page, start, offs_n, PAGE, BLOCK_N)
        page = pages_at(pages, start + BLOCK_N, offs_n, high, PAGE, BLOCK_N)
        kept = start + offs_n < high
        seen = kept
        if WINDOW > 0:
            seen = kept & (start + offs_n >= oldest)
        if masks_p is not None:
            seen &= seen_behind(mask, kv_len - 1 - start - offs_n, WINDOW)
        acc, total, top = attend_block(
            (acc, total, top), (q1, q2), (keys, values, k_slot, v_slot), slots, kept,
            seen[None, :], scale, D1, D2, V, SHARED, True,
        )  # fmt: skip
    if len(total.shape) == 2:
        total = tl.sum(total, 1)
    out += row * out_row
    if scales is not None:
        scales += row * scale_row
    target = (out, scales, out_head, scale_group)
    if (not SPLIT) | (used <= 1):
        x = finish(acc, total, top, sinks, heads, valid, v_scale).to(q1.dtype)
        store_heads(target, x, 0, heads, valid, V, tile_width(V))
    else:
        num_heads = tl.num_programs(0) // BLOCKS * GROUP
        spot = place.to(tl.int64) * num_heads + heads
        # The result of this split alone, and the logarithm of its weight.
        some = total > 0
        store_rows(partial, spot * V, acc / tl.where(some, total, 1.0)[:, None], valid, V)
        tl.store(sums + spot, tl.where(some, top + tl.log2(total), LOWEST), mask=valid)
        # All threads store before one of them counts.
        tl.debug_barrier()
        counter = counters + seq * tl.num_programs(0) + tile
        if tl.atomic_add(counter, 1, sem="acq_rel") == used - 1:
            tl.store(counter, 0)
            real = (tile % BLOCKS) * ROWS + tl.arange(0, HEADS)
            merge_splits(
                (partial, sums, seq * num_splits, num_splits, beyond, num_heads, used), target,
                sinks, kv_head * GROUP + real, real < GROUP, v_scale, q1.dtype, HEADS, V, WIDTH,
                MERGED,
            )  # fmt: skip


@triton.jit
def seen_behind(mask, back, WINDOW: tl.constexpr):
    """Whether the query sees the tokens that are so far behind its own, as in `seen_keys`; a window
    of 64 or more has all that the mask may hide, and ends where the caller says."""
    # In halves, as vectors of 64 bits take too many registers.
    half = tl.where(back < 32, mask.to(tl.int32), (mask >> 32).to(tl.int32))
    seen = (((half >> (back & 31)) & 1) == 1) | (back > 63)
    if WINDOW > 0 and WINDOW < 64:
        bit = tl.minimum(tl.maximum(back, 0), 63).to(tl.int64)
        one = tl.full(back.shape, 1, tl.int64)
        newer = tl.where(back > 63, -one, (one << bit) - 1)
        seen &= back - count_bits(~mask & newer) < WINDOW
    return seen


@triton.jit
def count_bits(x):
    """How many bits of 64 are set: 3 of 11."""
    x = x.to(tl.uint64, bitcast=True)
    x = (x & 0x5555555555555555) + ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x & 0x0F0F0F0F0F0F0F0F) + ((x >> 4) & 0x0F0F0F0F0F0F0F0F)
    x += x >> 8
    x += x >> 16
    x += x >> 32
    return (x & 0x7F).to(tl.int32)


@triton.jit
def zero_totals(keys, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    """A total for each row and column, so that warps reduce once; with a float8 cache a total for
    each row, as its conversion needs the registers."""
    if keys.dtype.element_ty.primitive_bitwidth > 8:
        return tl.zeros((ROWS, BLOCK_N), tl.float32)
    else:
        return tl.zeros((ROWS,), tl.float32)


@triton.jit
def prefetch_tokens(base, offsets, SIZE: tl.constexpr):
    """Prefetches SIZE channels of tokens into the L2 cache. That is safe before the previous kernel
    has written them, as its writes also go to the L2 cache."""
    PER_LINE: tl.constexpr = 1024 // base.dtype.element_ty.primitive_bitwidth
    line = tl.arange(0, max(1, tile_width(SIZE) // PER_LINE)) * PER_LINE
    prefetch_lines(base + offsets[:, None] + tl.minimum(line, SIZE - 1)[None, :])


@triton.jit
def merge_splits(
    splits,
    target,
    sinks,
    heads,
    valid,
    v_scale,
    DTYPE: tl.constexpr,
    HEADS: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Merges the results of the splits, some channels at a time, as if one program had attended all
    tokens. Bypasses the L1 cache, as other processors wrote them."""
    partial, sums, _, _, _, _, used = splits
    for column in range(0, tile_width(V), WIDTH):
        d = column + tl.arange(0, WIDTH)
        acc = tl.zeros((HEADS, WIDTH), tl.float32)
        total = tl.zeros((HEADS,), tl.float32)
        top = tl.full((HEADS,), LOWEST, tl.float32)
        for start in range(0, used, MERGED):
            weights, parts = (), ()
            for part in tl.static_range(MERGED):
                there = valid & (start + part < used)
                spot = split_spot(splits, start + part, heads)
                x = tl.load(
                    partial + spot[:, None] * V + d[None, :],
                    mask=there[:, None] & (d[None, :] < V),
                    other=0.0,
                    cache_modifier=".cg",
                )
                parts = parts + (x,)
            # Without the barrier the compiler delays some loads until it has weighted other parts.
            tl.debug_barrier()
            for part in tl.static_range(MERGED):
                there = valid & (start + part < used)
                spot = split_spot(splits, start + part, heads)
                found = tl.load(sums + spot, mask=there, other=LOWEST, cache_modifier=".cg")
                weights = weights + (found,)
            new_top = top
            for part in tl.static_range(MERGED):
                new_top = tl.maximum(new_top, weights[part])
            kept = tl.exp2(top - new_top)
            acc, total, top = acc * kept[:, None], total * kept, new_top
            for part in tl.static_range(MERGED):
                share = tl.exp2(weights[part] - top)
                acc += parts[part] * share[:, None]
                total += share
        y = finish(acc, total, top, sinks, heads, valid, v_scale).to(DTYPE)
        store_heads(target, y, column, heads, valid, V, WIDTH)


@triton.jit
def split_spot(splits, number, heads):
    """Where split `number` of the sequence has its result: extra ones are behind all others."""
    _, _, first, num_splits, beyond, num_heads, _ = splits
    place = first + number + tl.where(number < num_splits, 0, beyond)
    return place.to(tl.int64) * num_heads + heads


@triton.jit
def store_heads(target, x, column, heads, valid, V: tl.constexpr, WIDTH: tl.constexpr):
    """Stores WIDTH channels of heads from `column` on; with scales as `quantise_rows` does."""
    out, scales, out_head, scale_group = target
    d = column + tl.arange(0, WIDTH)
    if scales is not None:
        GROUPS: tl.constexpr = WIDTH // 128
        grouped = tl.reshape(x.to(tl.float32), (x.shape[0], GROUPS, 128))
        # As an integer, NaN is the largest number.
        bits = tl.max(grouped.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2)
        found = fp8_scales(bits.to(tl.float32, bitcast=True), 1)
        group = column // 128 + tl.arange(0, GROUPS)
        spot = (heads * (V // 128))[:, None] + group[None, :]
        there = valid[:, None] & (group[None, :] < V // 128)
        tl.store(scales + spot * scale_group, found, mask=there)
        x = tl.reshape(to_fp8(grouped, found[:, :, None]), (x.shape[0], WIDTH))
    pointers = out + (heads * out_head)[:, None] + d[None, :]
    tl.store(pointers, x.to(out.dtype.element_ty), mask=valid[:, None] & (d[None, :] < V))
