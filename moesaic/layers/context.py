"""What a forward pass needs beside the weights.

T tokens of the step · N query heads · M key/value heads · D head size · C latent size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What one token leaves behind in one layer; with `value_dim` 0 the keys serve as values too
    (the latent of MLA)."""

    num_layers: int
    num_heads: int
    key_dim: int
    value_dim: int

    def bytes_per_token(self, element_size: int) -> int:
        return self.num_layers * self.num_heads * (self.key_dim + self.value_dim) * element_size


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """How one layer attends. `window` counts the visible tokens including the query's own."""

    layer: int
    scale: float
    window: int | None = None
    sinks_N: Tensor | None = None


class AttentionStep(ABC):
    """Attention of one step's tokens over their own and the cached keys and values."""

    @abstractmethod
    def attend(
        self, spec: AttentionSpec, q_TND: Tensor, k_TMD: Tensor, v_TMD: Tensor | None
    ) -> Tensor:
        """Stores the new keys and values, then returns the mixed values [T, N, D]."""


@dataclass(frozen=True, slots=True)
class ForwardContext:
    positions_T: Tensor
    cos: Tensor
    sin: Tensor
    attention: AttentionStep
