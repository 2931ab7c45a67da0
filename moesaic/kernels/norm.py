"""Root-mean-square normalisation, alone or with the addition before it.

T tokens · H channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from moesaic.kernels.experts import PairSum, Rows, summed
from moesaic.kernels.native import native
from moesaic.kernels.quantise import quantise_rows

NORM = "moesaic.kernels.triton.norm"


@dataclass(frozen=True, slots=True)
class SumToNorm:
    """Rows `values` [T, H], the residual to add, and the norm of the sum."""

    values: Tensor | PairSum
    residual_TH: Tensor
    weight_H: Tensor
    eps: float


@native(NORM)
def rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension, in float32, rounded once.

    [3, 4] with weight [1, 2], eps 0: mean of squares 12.5, so [0.8485, 2.2627].
    """
    return F.rms_norm(x, weight_H.shape, weight_H, eps)


@native(NORM)
def add_rms_norm(
    x_TH: Tensor | PairSum, residual_TH: Tensor, weight_H: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(norm of the sum, the sum). The sum is rounded to its type before the norm; a sum of pairs is
    rounded before the residual is added.

    x [1, 1], residual [2, 3], weight [1, 2], eps 0: sum [3, 4], normed as in `rms_norm`.
    """
    sum_TH = residual_TH + summed(x_TH)
    return F.rms_norm(sum_TH, weight_H.shape, weight_H, eps), sum_TH


@native(NORM)
def add_rms_norm_fp8(
    x_TH: Tensor | PairSum,
    residual_TH: Tensor,
    weight_H: Tensor,
    eps: float,
    by_column: bool = False,
) -> tuple[Rows, Tensor]:
    """`add_rms_norm`, with the normed rows quantised as by `quantise_rows`.

    x [1, 1], residual [1, 3], weight [1, 1], eps 0: sum [2, 4], normed [0.6325, 1.2649], which is
    [224, 448] with scale 0.002823.
    """
    normed_TH, sum_TH = add_rms_norm.twin(x_TH, residual_TH, weight_H, eps)
    return Rows(*quantise_rows(normed_TH, "fp8", by_column)), sum_TH
