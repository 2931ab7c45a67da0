"""The gated feed-forward layer of dense blocks and shared experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.core.step import Step
from moesaic.layers.linear import Linear, MergedLinear
from moesaic.layers.module import Module


class GatedMLP(Module):
    def __init__(
        self, hidden_size: int, intermediate_size: int, dtype: torch.dtype, bias: bool = False
    ) -> None:
        super().__init__()
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = MergedLinear(hidden_size, parts, dtype, bias)
        self.down_proj = Linear(intermediate_size, hidden_size, dtype, bias)

    def forward(self, x_TH: Tensor, step: Step | None = None) -> Tensor:
        """The step changes nothing here; sparse blocks, which stand in the same place, need it."""
        gate, up = self.gate_up_proj.split(x_TH)
        return self.down_proj(F.silu(gate) * up)
