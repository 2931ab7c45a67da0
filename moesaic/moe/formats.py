"""What travels between the stages of a MoE layer. T tokens, K chosen experts of each."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TopKOutput:
    """The experts of each token and their weights (float32, applied exactly once, downstream)."""

    ids_TK: Tensor
    weights_TK: Tensor
