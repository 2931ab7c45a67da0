"""Results on their way back: kernels that read the regions of other ranks. Twins in kernels/a2a.py.

One program has waited for them before (a kernel whose programs all wait was no faster, and keeps
ranks that share the GPU from its processors). Rows there are read past the first-level cache, which
does not know what others write.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moesaic.kernels.triton.a2a_signals import (
    ACTIVE,
    VARYING,
    all_bases,
    bit,
    byte_at,
    groups_of,
)
from moesaic.kernels.triton.launch import await_inputs, release_next


@triton.jit(do_not_specialize=VARYING)
def collect_rows_kernel(
    out_ptr,
    ids_ptr,
    weights_ptr,
    num_tokens_ptr,
    bases_ptr,
    state_ptr,
    stride,
    num_rows,
    rows,
    rank,
    results,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    EVERYWHERE: tl.constexpr,
    SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Item by item: BLOCK channels of a token, from all ranks that it went to."""
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    ROW_BYTES: tl.constexpr = H * (TYPE.primitive_bitwidth // 8)
    PARTS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    await_inputs(PDL)
    bases = all_bases(bases_ptr, SIZE)
    release_next(PDL)
    active = tl.load(state_ptr + ACTIVE)
    tokens = num_rows if num_tokens_ptr is None else tl.load(num_tokens_ptr)
    for item in range(tl.program_id(0), tokens * PARTS, tl.num_programs(0)):
        token = tl.cast(item // PARTS, tl.int64)
        inside = item % PARTS * BLOCK + tl.arange(0, BLOCK)
        went = tl.full((), 0, tl.int64) - (1 if EVERYWHERE else 0)
        for k in tl.static_range(K):
            group = groups_of(tl.load(ids_ptr + token * K + k), SLOTS).to(tl.int64)
            went |= tl.where(group < 0, 0, tl.full((), 1, tl.int64) << tl.maximum(group, 0))
        row = rank.to(tl.int64) * rows + token
        parts = ()
        for by in tl.static_range(SIZE):
            at = byte_at(bases[by], results + row * ROW_BYTES, TYPE, ALIGN)
            mask = (inside < H) & bit(active, by) & bit(went, by // WIDTH)
            parts = parts + (tl.load(at + inside, mask, cache_modifier=".cg"),)
        # All are asked for before the first is waited for: sums need what is only read here.
        tl.debug_barrier()
        members = tl.load(state_ptr + ACTIVE)
        total = tl.zeros((BLOCK,), tl.float32)
        for by in tl.static_range(SIZE):
            comes = bit(members, by) & bit(went, by // WIDTH)
            total += tl.where(comes, parts[by].to(tl.float32), 0.0)
        tl.store(out_ptr + token * stride + inside, total.to(TYPE), inside < H)


@triton.jit(do_not_specialize=VARYING)
def collect_pairs_kernel(
    out_ptr,
    ids_ptr,
    weights_ptr,
    num_tokens_ptr,
    bases_ptr,
    state_ptr,
    stride,
    num_rows,
    rows,
    rank,
    results,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    EVERYWHERE: tl.constexpr,
    SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Item by item: BLOCK channels of a token, of all its pairs from the ranks that had them."""
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    ROW_BYTES: tl.constexpr = H * (TYPE.primitive_bitwidth // 8)
    PARTS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    await_inputs(PDL)
    release_next(PDL)
    active = tl.load(state_ptr + ACTIVE)
    tokens = num_rows if num_tokens_ptr is None else tl.load(num_tokens_ptr)
    for item in range(tl.program_id(0), tokens * PARTS, tl.num_programs(0)):
        token = tl.cast(item // PARTS, tl.int64)
        inside = item % PARTS * BLOCK + tl.arange(0, BLOCK)
        row = (rank.to(tl.int64) * rows + token) * K
        parts = ()
        for k in tl.static_range(K):
            group = groups_of(tl.load(ids_ptr + token * K + k), SLOTS)
            first = tl.minimum(tl.maximum(group, 0) * WIDTH, SIZE - WIDTH)
            for member in tl.static_range(WIDTH):
                by = first + member
                at = byte_at(tl.load(bases_ptr + by), results + (row + k) * ROW_BYTES, TYPE, ALIGN)
                mask = (inside < H) & (group * WIDTH == first) & bit(active, by)
                parts = parts + (tl.load(at + inside, mask, 0.0, cache_modifier=".cg"),)
        # All are asked for before the first is waited for: sums need what is only read here.
        tl.debug_barrier()
        total = tl.zeros((BLOCK,), tl.float32)
        for k in tl.static_range(K):
            y = parts[k * WIDTH].to(tl.float32)
            for member in tl.static_range(1, WIDTH):
                y += parts[k * WIDTH + member].to(tl.float32)
            weight = tl.load(weights_ptr + token * K + k)
            total += tl.where(tl.load(ids_ptr + token * K + k) >= 0, y * weight, 0.0)
        tl.store(out_ptr + token * stride + inside, total.to(TYPE), inside < H)
