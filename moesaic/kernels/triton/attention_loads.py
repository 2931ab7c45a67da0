"""The loading warps of attention_hopper.py, and the addresses of an item's rows and keys.

`P`: AttentionConstants of attention_hopper.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier


@gluon.jit
def count_items(total):
    """Items come longest first; programs take them in alternating order, to balance the work."""
    programs = gl.num_programs(0)
    full = total // programs
    place = gl.program_id(0) + (full & 1) * (programs - 1 - 2 * gl.program_id(0))
    return full + (place < total % programs).to(gl.int32)


@gluon.jit
def item_of(number, total):
    programs = gl.num_programs(0)
    place = gl.program_id(0) + (number & 1) * (programs - 1 - 2 * gl.program_id(0))
    return gl.minimum(number * programs + place, total - 1)


@gluon.jit
def look_up(item, parts, tables):
    """An item's sequence, offset of its first query, and the sequence's first row and sizes."""
    tiles, starts, lengths, kv_lens, _, _ = tables
    seq = gl.load(tiles + 2 * (item // parts) + 2)
    offset = gl.load(tiles + 2 * (item // parts) + 3)
    return seq, offset, gl.load(starts + seq), gl.load(lengths + seq), gl.load(kv_lens + seq)


@gluon.jit
def first_key(oldest, P: gl.constexpr):
    """The first key of the first block that any row sees."""
    low = 0
    if P.WINDOW > 0:
        low = gl.maximum(oldest - P.WINDOW + 1, 0) // P.ring.block * P.ring.block
    return low


@gluon.constexpr_function
def row_layout(width):
    """Rows of `width` elements of 2 bytes, 16 bytes for each thread of four warps."""
    across = min(width // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])


@gluon.jit
def row_heads(numbers, part, offset, P: gl.constexpr):
    """Query of each row of a tile, and its head within those of the key/value head."""
    return offset + numbers // P.PER_TILE, (
        part % P.member_blocks * P.PER_TILE + numbers % P.PER_TILE
    )


@gluon.jit
def _load_queries(
    buffer, base, row_stride, head_stride, found, part, P: gl.constexpr, SIZE: gl.constexpr
):
    """Rows outside the sequence repeat another one; their results are not stored."""
    _, offset, start, length, _ = found
    layout: gl.constexpr = row_layout(SIZE)
    numbers = gl.arange(0, 128, layout=gl.SliceLayout(1, layout))
    query, member = row_heads(numbers, part, offset, P)
    row = (start + gl.minimum(query, length - 1)).to(gl.int64)
    head = part // P.member_blocks * P.GROUP + gl.minimum(member, P.GROUP - 1)
    d = gl.arange(0, SIZE, layout=gl.SliceLayout(0, layout))
    pointers = base + (row * row_stride + head * head_stride)[:, None] + d[None, :]
    async_copy.async_copy_global_to_shared(buffer, pointers)


@gluon.jit
def _slots(start, kv_len, pages, P: gl.constexpr, SIZE: gl.constexpr):
    """Slots of a block's keys. Past the end they repeat the last one, which the mask hides."""
    n = start + gl.arange(0, P.ring.block, layout=gl.SliceLayout(1, row_layout(SIZE)))
    n = gl.minimum(n, kv_len - 1)
    return gl.load(pages + n // P.PAGE) * P.PAGE + n % P.PAGE


@gluon.jit
def _load_block(buffer, base, slots, slot_stride, SIZE: gl.constexpr):
    """Copies a block of keys or values."""
    layout: gl.constexpr = row_layout(SIZE)
    slots = slots.to(gl.int64)
    d = gl.arange(0, SIZE, layout=gl.SliceLayout(0, layout))
    async_copy.async_copy_global_to_shared(
        buffer, base + (slots * slot_stride)[:, None] + d[None, :]
    )


@gluon.jit
def load_items(q, cache, tables, buffers, barriers, parts, total, P: gl.constexpr):
    q1, q2, q1_row, q1_head, q2_row, q2_head = q
    keys, values, k_slot, k_head, v_slot, v_head = cache
    q1_bufs, q2_bufs, k1_bufs, k2_bufs, v_bufs, _staging = buffers
    q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, _turns = barriers
    step = 0
    for number in range(count_items(total)):
        item = item_of(number, total)
        part = item % parts
        found = look_up(item, parts, tables)
        seq, offset, _start, length, kv_len = found
        pages = tables[5] + gl.load(tables[4] + seq)
        head = (part // P.member_blocks).to(gl.int64)
        oldest = kv_len - length + offset
        place = number % P.ring.tiles
        mbarrier.wait(q_empty.index(place), number // P.ring.tiles & 1 ^ 1)
        _load_queries(q1_bufs.index(place), q1, q1_row, q1_head, found, part, P, P.D1)
        if P.D2 > 0:
            _load_queries(q2_bufs.index(place), q2, q2_row, q2_head, found, part, P, P.D2)
        async_copy.mbarrier_arrive(q_ready.index(place), increment_count=False)
        for start in range(
            first_key(oldest, P), gl.minimum(oldest + P.positions, kv_len), P.ring.block
        ):
            stage = step % P.ring.stages
            phase = step // P.ring.stages & 1 ^ 1
            k, v = keys + head * k_head, values + head * v_head
            # Loaded before the wait, so that no copy waits for them.
            slots = _slots(start, kv_len, pages, P, P.D1)
            mbarrier.wait(k_empty.index(stage), phase)
            _load_block(k1_bufs.index(stage), k, slots, k_slot, P.D1)
            if P.D2 > 0:
                slots2 = _slots(start, kv_len, pages, P, P.D2)
                _load_block(k2_bufs.index(stage), k + P.D1, slots2, k_slot, P.D2)
            async_copy.mbarrier_arrive(k_ready.index(stage), increment_count=False)
            if P.V != P.D1:
                slots = _slots(start, kv_len, pages, P, P.V)
            mbarrier.wait(v_empty.index(stage), phase)
            _load_block(v_bufs.index(stage), v, slots, v_slot, P.V)
            async_copy.mbarrier_arrive(v_ready.index(stage), increment_count=False)
            step += 1
