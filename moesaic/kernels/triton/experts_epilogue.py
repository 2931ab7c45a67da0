"""The epilogue of an item of experts_hopper.py: from sums in registers to rows of the output.

`P` is an ExpertsConstants; blocks are [64, 128] of four warps, for tall items other sizes as well.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import PropagateNan

from moesaic.kernels.quantise import FP8_MAX, TINY

FP8_LIMIT = gl.constexpr(FP8_MAX)
LEAST = gl.constexpr(TINY)
# A limit must not hide a NaN.
EVERY_NAN = gl.constexpr(PropagateNan.ALL)


@gluon.jit
def finish(block, scales, bias, scale, expert, column, P: gl.constexpr, mma: gl.constexpr):
    """Applies the column scales and the bias; `column` counts over all parts."""
    columns = column + gl.arange(0, block.shape[1], layout=gl.SliceLayout(0, mma))
    at = expert.to(gl.int64) * P.rows + columns
    if P.SCALING == 1:
        block = block * gl.load(scales[1] + at, mask=columns < P.rows, other=0.0)[None, :]
    if P.SCALED:
        block = block * scale
    if bias is not None:
        moved = gl.load(bias + at, mask=columns < P.rows, other=0.0).to(gl.float32)
        block = block + moved[None, :]
    return block


@gluon.jit
def split_columns(block, mma: gl.constexpr):
    """Splits a block into left and right half of layout `mma`, without moving registers."""
    ROWS: gl.constexpr = block.shape[0]
    HALF: gl.constexpr = block.shape[1] // 2
    left, right = block.reshape([ROWS, 2, HALF]).permute((0, 2, 1)).split()
    left = gl.convert_layout(left, mma, assert_trivial=True)
    return left, gl.convert_layout(right, mma, assert_trivial=True)


@gluon.jit
def split_rows(block, mma: gl.constexpr):
    """Splits a block into its upper and lower 64 rows, likewise."""
    upper, lower = block.reshape([2, 64, block.shape[1]]).permute((1, 2, 0)).split()
    upper = gl.convert_layout(upper, mma, assert_trivial=True)
    return upper, gl.convert_layout(lower, mma, assert_trivial=True)


@gluon.jit
def _sigmoid(x):
    """1 / (1 + 2 ^ (x * -log2(e))), in five instructions instead of a dozen."""
    return gl.inline_asm_elementwise(
        """{
        .reg .f32 t;
        mul.f32 t, $1, 0fBFB8AA3B;
        ex2.approx.ftz.f32 t, t;
        add.f32 t, t, 0f3F800000;
        rcp.approx.ftz.f32 $0, t;
        }""",
        "=f,f",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def activate(gate, up, alpha, limit, P: gl.constexpr):
    if P.LIMITED:
        gate = gl.minimum(gate, limit, propagate_nan=EVERY_NAN)
        up = gl.maximum(up, -limit, propagate_nan=EVERY_NAN)
        up = gl.minimum(up, limit, propagate_nan=EVERY_NAN) + 1.0
        up = up * _sigmoid(alpha * gate)
    else:
        up = up * _sigmoid(gate)
    return gate * up


@gluon.constexpr_function
def _row_layout(bits, width):
    """Rows of `width` elements, 16 bytes for each thread of four warps."""
    threads = width * bits // 128
    return gl.BlockedLayout([1, 128 // bits], [32 // threads, threads], [4, 1], [1, 0])


@gluon.jit
def find_targets(out, order, place, end, P: gl.constexpr, WIDTH: gl.constexpr):
    """The row of `out` for each of 64 places, or -1; for blocks of WIDTH columns."""
    layout: gl.constexpr = _row_layout(out.dtype.element_ty.primitive_bitwidth, WIDTH)
    places = place + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    if P.SCATTER:
        # Not used before it is needed: a thread that uses it waits for it.
        targets = gl.load(order + places, mask=places < end, other=-1)
    else:
        targets = gl.where(places < end, places, -1)
    return targets


@gluon.jit
def store_block(block, staging, out, targets, column, P: gl.constexpr):
    """Stores rows at their targets, through shared memory so that each thread writes 16 bytes."""
    WIDTH: gl.constexpr = block.shape[1]
    layout: gl.constexpr = _row_layout(out.dtype.element_ty.primitive_bitwidth, WIDTH)
    staging.store(block.to(out.dtype.element_ty))
    block = staging.load(layout)
    columns = column + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    to = out + (targets.to(gl.int64) * P.N)[:, None] + columns[None, :]
    gl.store(to, block, mask=(targets >= 0)[:, None] & (columns < P.N)[None, :])


@gluon.jit
def quantise(h, out_scales, places, end, column, P: gl.constexpr):
    """Scales h for float8, whose conversion saturates and keeps a NaN."""
    largest = gl.max(gl.abs(h), 1)
    scales = gl.where(largest == 0.0, 1.0, gl.maximum(largest / FP8_LIMIT, LEAST))
    at = out_scales + places.to(gl.int64) * (P.N // 128) + column // 128
    gl.store(at, scales, mask=places < end)
    return h * (1.0 / scales)[:, None]
