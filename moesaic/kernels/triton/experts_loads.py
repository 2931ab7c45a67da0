"""How the loading warps of experts_hopper.py fill its ring with an item's rows and weights.

`P` is an ExpertsConstants; a ring is its buffers and barriers; `descs` describe rows by 64, weights
by 128 and, for tall items of two parts, by 64. A stage holds 128 and 256 lines: an item's rows and
weights, or a tall item's weights and rows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma


@gluon.jit
def _row_pointers(x, order, place, end, P: gl.constexpr, ROWS: gl.constexpr):
    """Addresses of the first channels of ROWS rows, 16 bytes for each thread, and a mask."""
    layout: gl.constexpr = gl.BlockedLayout([1, P.BK // 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    places = place + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    rows = gl.load(order + gl.minimum(places, end - 1)) // P.TOP_K
    ks = gl.arange(0, P.BK, layout=gl.SliceLayout(0, layout))
    return x + (rows.to(gl.int64) * P.K)[:, None] + ks[None, :], (places < end)[:, None]


@gluon.jit
def load_wide(x, descs, found, order, ring, step, P: gl.constexpr):
    """Loads up to 128 rows and two blocks of 128 columns."""
    x_desc, w_desc, _ = descs
    strip, expert, place, end = found
    a_bufs, b_bufs, ready, empty = ring
    WEIGHTS: gl.constexpr = 2 * w_desc.block_type.nbytes
    row = expert * P.rows + strip * P.STRIP
    both = place + 64 < end
    if P.GATHER:
        pointers, there = _row_pointers(x, order, place, end, P, 128)
    for k in range(0, P.K, P.BK):
        stage = step % P.STAGES
        bar = ready.index(stage)
        a = a_bufs.index(stage)
        b = b_bufs.index(stage)
        mbarrier.wait(empty.index(stage), step // P.STAGES & 1 ^ 1)
        if P.GATHER:
            mbarrier.expect(bar, WEIGHTS)
        else:
            ROWS: gl.constexpr = x_desc.block_type.nbytes
            mbarrier.expect(bar, WEIGHTS + ROWS, pred=not both)
            mbarrier.expect(bar, WEIGHTS + 2 * ROWS, pred=both)
            tma.async_copy_global_to_shared(x_desc, [place, k], bar, a.slice(0, 64))
            tma.async_copy_global_to_shared(
                x_desc, [place + 64, k], bar, a.slice(64, 64), pred=both
            )
        tma.async_copy_global_to_shared(w_desc, [row, k], bar, b.slice(0, 128))
        tma.async_copy_global_to_shared(w_desc, [row + P.HALF, k], bar, b.slice(128, 128))
        if P.GATHER:
            async_copy.async_copy_global_to_shared(a, pointers + k, mask=there)
            async_copy.mbarrier_arrive(bar, increment_count=False)
        step += 1
    return step


@gluon.jit
def load_tall(x, descs, found, order, ring, step, P: gl.constexpr):
    """Loads 129 to 192 rows and 128 columns: half of a strip."""
    x_desc, w_desc, half_desc = descs
    strip, expert, place, end = found
    b_bufs, a_bufs, ready, empty = ring
    WEIGHTS: gl.constexpr = w_desc.block_type.nbytes
    row = expert * P.rows + (strip - P.NUM_STRIPS) * (P.STRIP // 2)
    if P.GATHER:
        pointers, there = _row_pointers(x, order, place, end, P, 128)
        more, more_there = _row_pointers(x, order, place + 128, end, P, 64)
    for k in range(0, P.K, P.BK):
        stage = step % P.STAGES
        bar = ready.index(stage)
        a = a_bufs.index(stage)
        b = b_bufs.index(stage)
        mbarrier.wait(empty.index(stage), step // P.STAGES & 1 ^ 1)
        if P.GATHER:
            mbarrier.expect(bar, WEIGHTS)
        else:
            ROWS: gl.constexpr = x_desc.block_type.nbytes
            mbarrier.expect(bar, WEIGHTS + 3 * ROWS)
            for i in gl.static_range(3):
                tma.async_copy_global_to_shared(
                    x_desc, [place + 64 * i, k], bar, a.slice(64 * i, 64)
                )
        if P.PARTS == 2:
            tma.async_copy_global_to_shared(half_desc, [row, k], bar, b.slice(0, 64))
            tma.async_copy_global_to_shared(half_desc, [row + P.HALF, k], bar, b.slice(64, 64))
        else:
            tma.async_copy_global_to_shared(w_desc, [row, k], bar, b)
        if P.GATHER:
            async_copy.async_copy_global_to_shared(a.slice(0, 128), pointers + k, mask=there)
            async_copy.async_copy_global_to_shared(a.slice(128, 64), more + k, mask=more_there)
            async_copy.mbarrier_arrive(bar, increment_count=False)
        step += 1
    return step
