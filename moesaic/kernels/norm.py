"""Root-mean-square normalisation, alone or with the addition before it.

T tokens · H channels.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from moesaic.kernels.native import native
from moesaic.kernels.quantise import quantise_rows

NORM = "moesaic.kernels.triton.norm"


@native(NORM)
def rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension, in float32, rounded once.

    [3, 4] with weight [1, 2], eps 0: mean of squares 12.5, so [0.8485, 2.2627].
    """
    return F.rms_norm(x, weight_H.shape, weight_H, eps)


@native(NORM)
def add_rms_norm(
    x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(norm of the sum, the sum): the sum is rounded to its type first, then normed.

    x [1, 1], residual [2, 3], weight [1, 2], eps 0: sum [3, 4], normed as in `rms_norm`.
    """
    sum_TH = residual_TH + x_TH
    return F.rms_norm(sum_TH, weight_H.shape, weight_H, eps), sum_TH


@native(NORM)
def add_rms_norm_fp8(
    x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `add_rms_norm`, with the normed rows quantised too, as `quantise_rows` does it: (normed,
    sum, fp8 values [T, H], float32 scales [T, H / 128])."""
    sum_TH = residual_TH + x_TH
    normed_TH = F.rms_norm(sum_TH, weight_H.shape, weight_H, eps)
    return normed_TH, sum_TH, *quantise_rows(normed_TH, "fp8")
