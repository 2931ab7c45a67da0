"""Dense projections: what the GPU's kernels compute, and the same in torch.

T tokens · I inputs · O outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.kernels.cpu import linear as compiled
from moesaic.kernels.native import native

LINEAR = "moesaic.kernels.triton.linear"
# For so few rows the compiled kernel reads bfloat16 weights faster than oneDNN does.
FEW_ROWS = 64


@native(LINEAR)
def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x W' + bias, summed in float32 and rounded once.

    x [[1, 2]], weight [[3, 4], [5, 6], [0, 1]], bias [0, 0, 7]: [[11, 17, 9]].
    """
    few = len(x_TI) <= FEW_ROWS and x_TI.dtype == weight_OI.dtype == torch.bfloat16
    if few and compiled.fits(weight_OI):
        return compiled.run(x_TI, weight_OI, bias_O)
    return F.linear(x_TI, weight_OI, bias_O)


@native(LINEAR)
def linear_float32(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """As `linear`, and not rounded at all: 16-bit numbers in, float32 out.

    x [[1, 2**-8]], weight [[1, 1]] in bfloat16: [[1.00390625]], where `linear` gives 1.
    """
    bias = None if bias_O is None else bias_O.float()
    return F.linear(x_TI.float(), weight_OI.float(), bias)


@native(LINEAR)
def logits(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """`linear` in float32. A GPU does not round on the way there, a CPU does."""
    return linear(x_TI, weight_OI).float()


@native(LINEAR)
def gate_up_silu(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """silu(gate) * up; the matrix holds the rows of gate, then as many of up.

    x [[1]], weight [[0], [2], [5], [3]]: gate [0, 2], up [5, 3], result [[0, 5.2848]].
    """
    gate, up = linear(x_TI, weight_OI, bias_O).chunk(2, dim=-1)
    return silu_and_mul(gate, up)


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """By element, in float32 too, where F.silu computes the last few of a tensor otherwise."""
    silu = gate / (1 + torch.exp(-gate)) if gate.dtype == torch.float32 else F.silu(gate)
    return silu * up
