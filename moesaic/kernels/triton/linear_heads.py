"""Products of each head's rows with its own matrix, for deterministic mode.

N heads · T rows · I inputs · O outputs. The tile and the order of summation are those of
`linear_invariant`, whatever the number of heads, rows and outputs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.triton.launch import await_inputs, dependent_launch, release_next
from moesaic.kernels.triton.linear import INVARIANT


def heads_invariant(x_NTI: Tensor, w_NOI: Tensor) -> Tensor:
    heads, rows, inputs = x_NTI.shape
    outputs, tile = w_NOI.shape[1], INVARIANT[w_NOI.element_size()]
    assert w_NOI.shape == (heads, outputs, inputs) and x_NTI.stride(2) == 1
    y_NTO = x_NTI.new_empty(heads, rows, outputs)
    if not y_NTO.numel():
        return y_NTO
    pdl = dependent_launch(x_NTI)
    grid = (-(-outputs // tile.outputs), -(-rows // tile.rows), heads)
    heads_kernel[grid](
        x_NTI, w_NOI, y_NTO, rows, outputs, inputs, *x_NTI.stride()[:2], *w_NOI.stride(),
        BLOCK_T=tile.rows, BLOCK_O=tile.outputs, BLOCK_I=tile.inputs, PDL=pdl.on,
        num_warps=tile.warps, num_stages=tile.stages, **pdl.options,
    )  # fmt: skip
    return y_NTO


@triton.jit(do_not_specialize=["num_rows"])
def heads_kernel(
    x, w, y, num_rows, num_outputs, num_inputs, x_head, x_row, w_head, w_row, w_column,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(2).to(tl.int64)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    i = tl.arange(0, BLOCK_I)
    row_t = t.to(tl.int64)[:, None]
    release_next(PDL)
    await_inputs(PDL)
    x_at = x + head * x_head + row_t * x_row + i[None, :]
    w_at = w + head * w_head + o.to(tl.int64)[:, None] * w_row + i[None, :] * w_column
    acc_TO = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
    for at in range(0, num_inputs, BLOCK_I):
        inside = (i < num_inputs - at)[None, :]
        x_TI = tl.load(x_at + at, mask=(t < num_rows)[:, None] & inside, other=0.0)
        w_OI = tl.load(w_at + at * w_column, mask=(o < num_outputs)[:, None] & inside, other=0.0)
        acc_TO = tl.dot(x_TI, w_OI.T, acc_TO, input_precision="ieee")
    y_at = y + (head * num_rows + row_t) * num_outputs + o[None, :]
    mask = (t < num_rows)[:, None] & (o < num_outputs)[None, :]
    tl.store(y_at, acc_TO.to(y.dtype.element_ty), mask=mask)
