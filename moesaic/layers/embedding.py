"""Token embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.layers.module import Module, parameter


class Embedding(Module):
    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(vocab_size, hidden_size, dtype=dtype)

    def forward(self, ids_T: Tensor) -> Tensor:
        return F.embedding(ids_T, self.weight)
