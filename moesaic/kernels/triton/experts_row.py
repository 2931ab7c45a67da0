"""The second product of one row's experts and their sum: only the finished row is written.

K chosen experts · O outputs of a program · I channels of a step. A program has few outputs and
loops over all experts, without tensor cores, which one row cannot use. Each thread has the same
channels of all its outputs; loads in flight occupy registers.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.experts import Matrices, Rows
from moesaic.kernels.triton.launch import await_inputs, dependent_launch, release_next


@dataclass(frozen=True, slots=True)
class RowTile:
    """`ahead`: steps whose weights are in flight; the first are loaded before h is ready."""

    outputs: int
    inputs: int
    warps: int
    ahead: int


# By the bytes of a weight: the first tile whose steps divide a row, else the last. Steps are
# unrolled: longer is better. Programs are small: some run beside `gate_up`, and all processors get
# as many.
TILES = {
    4: (RowTile(1, 1024, 4, 4), RowTile(1, 256, 1, 4)),
    2: (RowTile(4, 1024, 4, 4), RowTile(4, 512, 2, 5), RowTile(4, 256, 1, 6)),
}


def row_tile(inner: int, item: int) -> RowTile:
    tiles = TILES[item]
    return next((tile for tile in tiles if inner % tile.inputs == 0), tiles[-1])


def down_row(h: Rows, w2: Matrices, ids_K: Tensor, weights_RK: Tensor, y_1H: Tensor) -> Tensor:
    """Runs directly after `gate_up` of the same ids, which releases it after these have arrived."""
    _, hidden, inner = w2.shape
    values = w2.planes["values"]
    assert h.scales is None and h.scale == 1.0 and "scales" not in w2.planes, w2.format
    arrays = (h.values, values, w2.bias_EN, ids_K, weights_RK, y_1H)
    assert all(array is None or array.is_contiguous() for array in arrays)
    tile = row_tile(inner, values.element_size())
    pdl = dependent_launch(y_1H)
    _down_row_kernel[(triton.cdiv(hidden, tile.outputs),)](
        *arrays, HIDDEN=hidden, INNER=inner, K=ids_K.numel(),
        BO=tile.outputs, BI=tile.inputs, AHEAD=tile.ahead, PDL=pdl.on,
        num_warps=tile.warps, **pdl.options,
    )  # fmt: skip
    return y_1H


@triton.jit
def _load_h(h, STEP: tl.constexpr, INNER: tl.constexpr, BI: tl.constexpr):
    """Loads [I] of a pair's row; rows of unassigned pairs are undefined."""
    blocks: tl.constexpr = (INNER + BI - 1) // BI
    i = STEP % blocks * BI + tl.arange(0, BI)
    if INNER % BI:
        return tl.load(h + STEP // blocks * INNER + i, mask=i < INNER, other=0.0)
    else:
        return tl.load(h + STEP // blocks * INNER + i)


@triton.jit
def _load_w(
    w, first, line_O, chosen, known, STEP: tl.constexpr, HIDDEN: tl.constexpr,
    INNER: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """Loads [O, I] of an expert. For unassigned pairs all programs read the same lines of a known
    expert, which are in the cache: masked loads, which first set zeros, needed twice the
    registers."""
    blocks: tl.constexpr = (INNER + BI - 1) // BI
    i = STEP % blocks * BI + tl.arange(0, BI)
    id = chosen[STEP // blocks]
    line = tl.where(id >= 0, id.to(tl.int64) * HIDDEN + first, known)
    place = (w + line * INNER) + (line_O[:, None] * INNER + i[None, :])
    if INNER % BI:
        return tl.load(place, mask=(i < INNER)[None, :], other=0.0)
    else:
        return tl.load(place)


@triton.jit
def _down_row_kernel(
    h, w, bias, ids, weights, y,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, K: tl.constexpr,
    BO: tl.constexpr, BI: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Steps of all experts form one sequence: the next one's weights load during products."""
    blocks: tl.constexpr = (INNER + BI - 1) // BI
    steps: tl.constexpr = K * blocks
    first = tl.program_id(0) * BO
    line_O = tl.arange(0, BO)
    if HIDDEN % BO:
        # Lines past the end repeat the last one; their sums are not stored.
        line_O = tl.minimum(line_O, HIDDEN - 1 - first)
    # Loaded before the wait, and past the L1 cache, where an earlier layer may have left these
    # addresses.
    chosen, factors = (), ()
    for k in tl.static_range(K):
        chosen = chosen + (tl.load(ids + k, cache_modifier=".cg").to(tl.int32),)
        factors = factors + (tl.load(weights + k, cache_modifier=".cg"),)
    most = chosen[0]
    for k in tl.static_range(1, K):
        most = tl.maximum(most, chosen[k])
    known = tl.maximum(most, 0).to(tl.int64) * HIDDEN
    all_w, all_h = (), ()
    for step in tl.static_range(min(AHEAD, steps)):
        all_w = all_w + (_load_w(w, first, line_O, chosen, known, step, HIDDEN, INNER, BI),)
    await_inputs(PDL)
    release_next(PDL)
    for step in tl.static_range(min(AHEAD, steps)):
        all_h = all_h + (_load_h(h, step, INNER, BI),)
    acc_OI = tl.zeros([BO, BI], tl.float32)
    for step in tl.static_range(steps):
        if step + AHEAD < steps:
            all_w = all_w + (
                _load_w(w, first, line_O, chosen, known, step + AHEAD, HIDDEN, INNER, BI),
            )
            all_h = all_h + (_load_h(h, step + AHEAD, INNER, BI),)
        h_I = all_h[step].to(tl.float32) * factors[step // blocks]
        h_I = tl.where(chosen[step // blocks] >= 0, h_I, 0.0)
        acc_OI += all_w[step].to(tl.float32) * h_I[None, :]
    y_O = tl.sum(acc_OI, 1)
    if bias is not None:
        for k in tl.static_range(K):
            at_O = (tl.maximum(chosen[k], 0).to(tl.int64) * HIDDEN + first) + line_O
            bias_O = tl.load(bias + at_O).to(tl.float32)
            y_O += tl.where(chosen[k] >= 0, bias_O * factors[k], 0.0)
    y_O = tl.where(most >= 0, y_O, 0.0)
    o = tl.arange(0, BO)
    tl.store(y + first + o, y_O.to(y.dtype.element_ty), mask=first + o < HIDDEN)
