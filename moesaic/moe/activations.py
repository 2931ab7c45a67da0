"""What stands between the two products of an expert."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Callable[[Tensor, Tensor], Tensor]


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate).mul_(up)


def clamped_swiglu(alpha: float, limit: float) -> Activation:
    """gpt-oss: the gate is clamped from above, the linear part on both sides and shifted by one."""

    def activate(gate: Tensor, up: Tensor) -> Tensor:
        gate = gate.clamp(max=limit)
        return gate.mul(torch.sigmoid(alpha * gate)).mul_(up.clamp(-limit, limit).add_(1))

    return activate
