"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.kernels.experts import PairSum, summed
from moesaic.kernels.norm import add_rms_norm, rms_norm
from moesaic.layers.module import Module, parameter


class RMSNorm(Module):
    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(size, dtype=dtype)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x_TH: Tensor | PairSum, residual_TH: Tensor | None) -> tuple[Tensor, Tensor]:
        """The norm of the sum, and the sum; without a residual the sum is `x_TH`."""
        if residual_TH is None:
            x_TH = summed(x_TH)
            return self(x_TH), x_TH
        return add_rms_norm(x_TH, residual_TH, self.weight, self.eps)
