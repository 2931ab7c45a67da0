"""Dense projections: the interface of the GPU kernels, and their torch twins.

T tokens · N heads · I inputs · O outputs · G groups of 128 inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.kernels.cpu import linear as compiled
from moesaic.kernels.cpu import widened
from moesaic.kernels.experts import Rows, dense
from moesaic.kernels.native import native
from moesaic.kernels.norm import SumToNorm, add_rms_norm
from moesaic.kernels.quantise import FP8_GROUP, FP8_MAX, absmax_scales, quantise_rows, silu_and_mul

LINEAR = "moesaic.kernels.triton.linear"
LINEAR_HEADS = "moesaic.kernels.triton.linear_heads"
LINEAR_FP8 = "moesaic.kernels.triton.linear_fp8"
NORM_LINEAR = "moesaic.kernels.triton.norm_linear"
# Up to this many rows the compiled kernel reads bfloat16 weights faster than oneDNN.
FEW_ROWS = 64


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """float8_e4m3fn numbers [O, I] with float32 scales of blocks of 128 x 128 (`rows` 128; the last
    ones may be smaller) or of whole rows, [O, 1] (`rows` 1)."""

    values: Tensor
    scales: Tensor
    rows: int = FP8_GROUP

    @classmethod
    def of(cls, weight_OI: Tensor, rows: int = FP8_GROUP) -> Fp8Matrix:
        """[[448, 2], [1, 0]] has one block, with scale 1."""
        weight = weight_OI.float()
        columns = FP8_GROUP if rows > 1 else weight.shape[1]
        outputs, inputs = weight.shape
        padded = F.pad(weight, (0, -inputs % columns, 0, -outputs % rows))
        blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        scales = absmax_scales(blocks.abs().amax((1, 3)), FP8_MAX)
        scaled = (blocks / scales[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX)
        values = scaled.flatten(2).flatten(0, 1)[:outputs, :inputs]
        return cls(values.contiguous().to(torch.float8_e4m3fn), scales, rows)

    def dense(self) -> Tensor:
        outputs, inputs = self.values.shape
        columns = FP8_GROUP if self.rows > 1 else inputs
        by_row = self.scales.repeat_interleave(self.rows, 0)[:outputs]
        return self.values.float() * by_row.repeat_interleave(columns, 1)[:, :inputs]


@native(LINEAR)
def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x W' + bias, summed in float32 and rounded once.

    x [[1, 2]], weight [[3, 4], [5, 6], [0, 1]], bias [0, 0, 7]: [[11, 17, 9]].
    """
    few = len(x_TI) <= FEW_ROWS and x_TI.dtype == weight_OI.dtype == torch.bfloat16
    if few and compiled.fits(weight_OI):
        return compiled.run(x_TI, weight_OI, bias_O)
    return widened.linear(x_TI, weight_OI, bias_O)


@native(LINEAR)
def linear_invariant(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`linear`; on a GPU no bit of a row depends on other rows or outputs.

    x [[1, 2], [3, 4]], weight [[5, 6]]: [[17], [39]].
    """
    return compiled.reference(x_TI, weight_OI, bias_O)


@native(LINEAR_HEADS)
def heads_invariant(x_NTI: Tensor, w_NOI: Tensor) -> Tensor:
    """`linear_invariant` of each head's rows and matrix: [N, T, O]. Matrices may be transposed.

    x [[[1, 2]], [[3, 4]]], w [[[5, 6]], [[7, 8]]]: [[[17]], [[53]]].
    """
    products = [compiled.reference(x, w) for x, w in zip(x_NTI, w_NOI, strict=True)]
    return torch.stack(products)


@native(LINEAR)
def linear_float32(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`linear` without rounding: 16-bit numbers in, float32 out.

    x [[1, 2**-8]], weight [[1, 1]] in bfloat16: [[1.00390625]], where `linear` gives 1.
    """
    bias = None if bias_O is None else bias_O.float()
    return F.linear(x_TI.float(), weight_OI.float(), bias)


@native(LINEAR)
def logits(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """`linear` in float32. Only a CPU rounds to the type of the inputs in between."""
    return linear(x_TI, weight_OI).float()


@native(LINEAR)
def gate_up_silu(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """silu(gate) * up; the matrix holds the rows of gate, then those of up.

    x [[1]], weight [[0], [2], [5], [3]]: gate [0, 2], up [5, 3], result [[0, 5.2848]].
    """
    gate, up = linear(x_TI, weight_OI, bias_O).chunk(2, dim=-1)
    return silu_and_mul(gate, up)


@native(LINEAR_FP8)
def linear_fp8(x: Rows, weight: Fp8Matrix, bias_O: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`linear` of float8 rows and a float8 matrix, in `dtype`. `quantise_groups` converts rows of
    another type first.

    Rows [[448, 1]] with scale 0.5, weight [[2], [0]]' with scale 3: [[1344]].
    """
    y_TO = multiplied_fp8(x, weight)
    return (y_TO if bias_O is None else y_TO + bias_O.float()).to(dtype)


@native(LINEAR_FP8)
def gate_up_silu_fp8(
    x: Rows, weight: Fp8Matrix, bias_O: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """`gate_up_silu` in float8. The rows of up begin a new block of scales."""
    gate, up = linear_fp8(x, weight, bias_O, torch.float32).chunk(2, dim=-1)
    return silu_and_mul(gate, up).to(dtype)


@native(LINEAR_FP8)
def scales_by_column(
    x_TI: Tensor, weight: Fp8Matrix, bias_O: Tensor | None, dtype: torch.dtype
) -> bool:
    """Whether `linear_fp8` is faster with `by_column` scales of these rows."""
    return False


@native(NORM_LINEAR)
def norm_linear(
    rows: SumToNorm, weight_OI: Tensor, bias_O: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(`linear` of the normed rows, the sum) after `add_rms_norm`; a single kernel for one row.

    values [[1, 0]], residual [[0, 1]], weight [1, 1], eps 0: sum and normed [[1, 1]]; with the
    matrix [[3, 4], [5, 6]]: [[7, 11]].
    """
    normed_TH, sum_TH = add_rms_norm(rows.values, rows.residual_TH, rows.weight_H, rows.eps)
    return linear(normed_TH, weight_OI, bias_O), sum_TH


def multiplied_fp8(x: Rows, weight: Fp8Matrix) -> Tensor:
    """The product in float32."""
    quantised = quantise_groups(x.values) if x.scales is None else x
    assert quantised.scales is not None and quantised.scale == 1.0
    return dense(quantised) @ weight.dense().T


def quantise_groups(x_TI: Tensor, by_column: bool = False) -> Rows:
    """float8 values and a float32 scale for each 128 channels; the last group may be smaller. A
    group of zeros has scale 1, a group that is not finite NaN. `by_column`: as in `quantise_rows`.

    [[-4, 1]]: values [[-448, 112]], scales [[4 / 448]].
    """
    return Rows(*quantise_rows(x_TI, "fp8", by_column))
