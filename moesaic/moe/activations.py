"""The activation between the two products of an expert."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from moesaic.kernels.cpu.experts import SwigluSpec
from moesaic.layers.invariant import sigmoid, silu

Activation = Callable[[Tensor, Tensor], Tensor]


class Swiglu(SwigluSpec):
    """Clamps gate and linear part, and shifts the latter by one, if gpt-oss's limit is set."""

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.limit is None:
            return silu(gate).mul_(up)
        gate = gate.clamp(max=self.limit)
        up = up.clamp(-self.limit, self.limit).add_(1)
        return gate.mul(sigmoid(self.alpha * gate)).mul_(up)


silu_and_mul = Swiglu()
