"""How a group of warps of experts_hopper.py multiplies its 64 places of an item, step by step.

`P` is an ExpertsConstants; a ring is its buffers and barriers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def _await(ring, step, P: gl.constexpr):
    """Waits for a step's rows and weights."""
    mbarrier.wait(ring[2].index(step % P.STAGES), step // P.STAGES & 1)
    if P.GATHER:
        # The matrix units need a fence behind writes by threads instead of the copy engine.
        fence_async_shared()


@gluon.jit
def plain_sums(
    ring, step, P: gl.constexpr, FIRST: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr
):
    """Sums [ROWS, COLUMNS] of an item from row FIRST on; the last product is still pending."""
    a_bufs, b_bufs, _, empty = ring
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    sums = gl.zeros([ROWS, COLUMNS], gl.float32, wide)
    for k in range(P.steps):
        stage = step % P.STAGES
        _await(ring, step, P)
        a = a_bufs.index(stage).slice(FIRST, ROWS)
        b = b_bufs.index(stage).permute((1, 0))
        sums = warpgroup_mma(a, b, sums, use_acc=k > 0, is_async=True)
        sums = warpgroup_mma_wait(1, deps=(sums,))
        mbarrier.arrive(empty.index((step + P.STAGES - 1) % P.STAGES), count=1, pred=k > 0)
        step += 1
    return sums, step


@gluon.jit
def _add_scaled(sums, part, scale):
    """Keeps its position between the products: the compiler would move an expression behind the
    next product, which would need registers of its own."""
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;",
        "=f,f,f,f",
        [part, scale[:, None], sums],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def scaled_sums(ring, step, scales, rows, expert, column, P: gl.constexpr, WHICH: gl.constexpr):
    """Sums both blocks [64, 128] of an item; each 128 channels' products are scaled separately."""
    a_bufs, b_bufs, _, empty = ring
    x_scales, w_scales = scales
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    first = gl.zeros([64, 128], gl.float32, mma)
    second = gl.zeros([64, 128], gl.float32, mma)
    part = gl.zeros([64, 128], gl.float32, mma)
    x_scale = gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, mma))
    near_scale = 1.0
    far_scale = 1.0
    if x_scales is not None:
        x_at = x_scales + rows.to(gl.int64) * P.inner_blocks
        x_scale = gl.load(x_at)
    if P.SCALING == 2:
        near = expert * (P.PARTS * P.row_blocks) + column // 128
        if P.PARTS == 2:
            far = near + P.row_blocks
        else:
            far = gl.minimum(near + 1, (expert + 1) * P.row_blocks - 1)
        near_at = w_scales + near.to(gl.int64) * P.inner_blocks
        far_at = w_scales + far.to(gl.int64) * P.inner_blocks
        near_scale = gl.load(near_at)
        far_scale = gl.load(far_at)
    _await(ring, step, P)
    for k in range(P.steps):
        stage = step % P.STAGES
        a = a_bufs.index(stage).slice(64 * WHICH, 64)
        b = b_bufs.index(stage)
        part = warpgroup_mma(a, b.slice(0, 128).permute((1, 0)), part, use_acc=False, is_async=True)
        # After the product is issued: the arrival synchronises the group's warps.
        mbarrier.arrive(empty.index((step + P.STAGES - 1) % P.STAGES), count=1, pred=k > 0)
        near_by = x_scale * near_scale
        far_by = x_scale * far_scale
        following = gl.minimum(k + 1, P.steps - 1)
        # Only the scaling of the sums remains between two products.
        _await(ring, step + following - k, P)
        # Loads the next step's scales during this step.
        if x_scales is not None:
            x_scale = gl.load(x_at + following)
        if P.SCALING == 2:
            near_scale = gl.load(near_at + following)
            far_scale = gl.load(far_at + following)
        part = warpgroup_mma_wait(0, deps=(part,))
        first = _add_scaled(first, part, near_by)
        part = warpgroup_mma(
            a, b.slice(128, 128).permute((1, 0)), part, use_acc=False, is_async=True
        )
        part = warpgroup_mma_wait(0, deps=(part,))
        second = _add_scaled(second, part, far_by)
        step += 1
    mbarrier.arrive(empty.index((step + P.STAGES - 1) % P.STAGES), count=1)
    return first, second, step
