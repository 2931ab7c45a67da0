"""Dense projections. T tokens, I inputs, O outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.layers.module import Module, TensorSlot, parameter, slot


class Linear(Module):
    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype, bias: bool = False) -> None:
        super().__init__()
        self.weight = parameter(outputs, inputs, dtype=dtype)
        self.bias = parameter(outputs, dtype=dtype) if bias else None

    def forward(self, x_TI: Tensor) -> Tensor:
        return F.linear(x_TI, self.weight, self.bias)


class MergedLinear(Linear):
    """Several projections of one input as one matrix product.

    `parts` gives the checkpoint name and the outputs of each, e.g. {"q_proj": 64, "k_proj": 16}.
    """

    def __init__(
        self, inputs: int, parts: Mapping[str, int], dtype: torch.dtype, bias: bool = False
    ) -> None:
        super().__init__(inputs, sum(parts.values()), dtype, bias)
        self.parts = dict(parts)

    def split(self, x_TI: Tensor) -> tuple[Tensor, ...]:
        return self.forward(x_TI).split(list(self.parts.values()), dim=-1)

    def slots(self, prefix: str) -> Iterator[TensorSlot]:
        # The merged layer has no name of its own in the checkpoint: drop the last part of the path.
        stem = prefix.rstrip(".").rpartition(".")[0]
        start = 0
        for name, size in self.parts.items():
            yield slot(f"{stem}.{name}.weight", self.weight[start : start + size])
            if self.bias is not None:
                yield slot(f"{stem}.{name}.bias", self.bias[start : start + size])
            start += size
