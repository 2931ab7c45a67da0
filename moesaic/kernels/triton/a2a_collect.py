"""The kernel that collects results from the regions of other ranks; twins in kernels/a2a.py.

One program has waited before (waiting in all programs was no faster, and occupies the processors of
ranks that share the GPU). Rows are loaded past the L1 cache, which does not see peers' writes.
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


@triton.jit
def _sum_of_rows(
    bases, ids_ptr, state_ptr, active, token, rank, rows, channel, results,
    H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
    OWNERS: tl.constexpr, SIZE: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Sums one row of each rank that the token went to."""
    ROW_BYTES: tl.constexpr = H * (TYPE.primitive_bitwidth // 8)
    went = tl.full((), 0, tl.int64) - (1 if OWNERS.everywhere else 0)
    for k in tl.static_range(K):
        group = groups_of(tl.load(ids_ptr + token * K + k), OWNERS.slots).to(tl.int64)
        went |= tl.where(group < 0, 0, tl.full((), 1, tl.int64) << tl.maximum(group, 0))
    row = rank.to(tl.int64) * rows + token
    parts = ()
    for by in tl.static_range(SIZE):
        at = byte_at(bases[by], results + row * ROW_BYTES, TYPE, ALIGN)
        mask = (channel < H) & bit(active, by) & bit(went, by // OWNERS.width)
        parts = parts + (tl.load(at + channel, mask, cache_modifier=".cg"),)
    # Issues all loads before the first sum: the sums depend on a load behind this barrier.
    tl.debug_barrier()
    members = tl.load(state_ptr + ACTIVE)
    total = tl.zeros((BLOCK,), tl.float32)
    for by in tl.static_range(SIZE):
        comes = bit(members, by) & bit(went, by // OWNERS.width)
        total += tl.where(comes, parts[by].to(tl.float32), 0.0)
    return total


@triton.jit
def _sum_of_pairs(
    bases_ptr, ids_ptr, weights_ptr, active, token, row, channel, results,
    H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
    OWNERS: tl.constexpr, SIZE: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Sums the weighted rows of the token's pairs, each from the ranks of its slot's group."""
    WIDTH: tl.constexpr = OWNERS.width
    ROW_BYTES: tl.constexpr = H * (TYPE.primitive_bitwidth // 8)
    parts = ()
    for k in tl.static_range(K):
        group = groups_of(tl.load(ids_ptr + token * K + k), OWNERS.slots)
        first = tl.minimum(tl.maximum(group, 0) * WIDTH, SIZE - WIDTH)
        for member in tl.static_range(WIDTH):
            by = first + member
            at = byte_at(tl.load(bases_ptr + by), results + (row + k) * ROW_BYTES, TYPE, ALIGN)
            mask = (channel < H) & (group * WIDTH == first) & bit(active, by)
            parts = parts + (tl.load(at + channel, mask, 0.0, cache_modifier=".cg"),)
    # Issues all loads before the first sum: the sums depend on loads behind this barrier.
    tl.debug_barrier()
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        y = parts[k * WIDTH].to(tl.float32)
        for member in tl.static_range(1, WIDTH):
            y += parts[k * WIDTH + member].to(tl.float32)
        weight = tl.load(weights_ptr + token * K + k)
        total += tl.where(tl.load(ids_ptr + token * K + k) >= 0, y * weight, 0.0)
    return total


@triton.jit(do_not_specialize=VARYING)
def collect_kernel(
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
    OWNERS: tl.constexpr,
    SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Takes items of BLOCK channels of a token, and sums its rows or its PAIRS."""
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    PARTS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    await_inputs(PDL)
    if not PAIRS:
        bases = all_bases(bases_ptr, SIZE)
    release_next(PDL)
    active = tl.load(state_ptr + ACTIVE)
    tokens = num_rows if num_tokens_ptr is None else tl.load(num_tokens_ptr)
    for item in range(tl.program_id(0), tokens * PARTS, tl.num_programs(0)):
        token = tl.cast(item // PARTS, tl.int64)
        channel = item % PARTS * BLOCK + tl.arange(0, BLOCK)
        if PAIRS:
            row = (rank.to(tl.int64) * rows + token) * K
            total = _sum_of_pairs(
                bases_ptr, ids_ptr, weights_ptr, active, token, row, channel, results,
                H, K, BLOCK, ALIGN, OWNERS, SIZE, TYPE,
            )  # fmt: skip
        else:
            total = _sum_of_rows(
                bases, ids_ptr, state_ptr, active, token, rank, rows, channel, results,
                H, K, BLOCK, ALIGN, OWNERS, SIZE, TYPE,
            )  # fmt: skip
        tl.store(out_ptr + token * stride + channel, total.to(TYPE), channel < H)
