"""What a forward pass needs beside the weights.

T tokens of the step · N query heads · M key/value heads · D head size · V value size ·
C latent size · L tokens of a sequence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from moesaic.core.step import PREFILL, Step


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


class LatentMaps(Protocol):
    """The two equal forms of latent attention. Absorbed: queries go into the latent space and mixed
    latents come out of it. Expanded: latents become keys and values of every head."""

    def absorbs(self, queries: int, kv_len: int) -> bool:
        """Whether the absorbed form is the cheaper one."""

    def absorb(self, q_TND: Tensor) -> Tensor:
        """[T, N, D] -> [T, N, C]"""

    def release(self, mixed_TNC: Tensor) -> Tensor:
        """[T, N, C] -> [T, N, V]"""

    def expand(self, latents_LC: Tensor) -> tuple[Tensor, Tensor]:
        """[L, C] -> keys [L, N, D] and values [L, N, V]"""


class AttentionStep(ABC):
    """Attention of one step's tokens over their own and the cached keys and values."""

    @abstractmethod
    def attend(self, spec: AttentionSpec, q_TND: Tensor, k_TMD: Tensor, v_TMD: Tensor) -> Tensor:
        """Stores the new keys and values, then returns the mixed values [T, N, D]."""

    @abstractmethod
    def attend_latent(
        self, spec: AttentionSpec, q_TND: Tensor, latents_TC: Tensor, maps: LatentMaps
    ) -> Tensor:
        """Stores the new latents, then returns the mixed values [T, N, V]; for each sequence in
        whichever form takes fewer operations."""


@dataclass(frozen=True, slots=True)
class ForwardContext:
    cos: Tensor
    sin: Tensor
    attention: AttentionStep
    step: Step = PREFILL
