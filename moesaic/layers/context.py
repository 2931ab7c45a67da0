"""What a forward pass takes beside the weights.

T tokens of the step · N query heads · M key/value heads · D head size · V value size · C latent
size · L tokens of a sequence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from moesaic.core.step import PREFILL, Step
from moesaic.kernels.experts import Rows
from moesaic.layers.linear import RowLinear
from moesaic.layers.norm import RMSNorm
from moesaic.layers.rotary import RotaryTable


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The cache of one token. With `value_dim` 0 the keys serve as values too (MLA latents)."""

    num_layers: int
    num_heads: int
    key_dim: int
    value_dim: int

    def bytes_per_token(self, element_size: int) -> int:
        return self.num_layers * self.num_heads * (self.key_dim + self.value_dim) * element_size


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """How one layer attends."""

    layer: int
    scale: float
    window: int | None = None
    """Visible tokens, including the query's own."""
    sinks_N: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec(AttentionSpec):
    """A layer's input is one tensor of its query, key and value heads on this rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RotaryTable
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None
    output: RowLinear | None = None
    """The projection of the attention output: it may take float8 rows."""


Angles = tuple[Tensor, Tensor]
"""cos and sin of each token, [T, 1, rotated channels / 2]."""


class LatentProjections(Protocol):
    """The two equivalent forms of latent attention. Absorbed: queries are projected to the latent
    space, and mixed latents back from it. Expanded: latents are projected to keys and values of
    every head."""

    def prefers_absorbed(self, queries: int, kv_len: int) -> bool:
        """Whether the absorbed form takes fewer operations."""

    def absorb(self, q_TND: Tensor) -> Tensor:
        """[T, N, D] -> [T, N, C]"""

    def absorb_nope(self, q_TND: Tensor) -> Tensor:
        """The same for the channels without rotary embedding, which are the ones that change."""

    def up_project(self, mixed_TNC: Tensor) -> Tensor:
        """[T, N, C] -> [T, N, V]"""

    def expand(self, latents_LC: Tensor) -> tuple[Tensor, Tensor]:
        """[L, C] -> keys [L, N, D] and values [L, N, V]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec(AttentionSpec):
    """The last `rope_dim` channels of queries and latents are rotated; the other channels of the
    latents are normed."""

    rope_dim: int
    rope: RotaryTable
    norm: RMSNorm
    projections: LatentProjections


class AttentionStep(ABC):
    """Attention of one step's tokens over their own and the cached keys and values, from the output
    of a layer's input projections to the input of its output projection."""

    @abstractmethod
    def attend_heads(self, spec: HeadSpec, qkv_TX: Tensor, angles: Angles) -> Tensor | Rows:
        """Norms, rotates and stores, then returns the mixed values [T, N, D]; or [T, N * D] in the
        type that `spec.output` multiplies."""

    @abstractmethod
    def attend_latents(
        self, spec: LatentSpec, q_TND: Tensor, latents_TC: Tensor, angles: Angles
    ) -> Tensor:
        """The same with a cache of latents; returns the mixed values [T, N, V]."""

    @abstractmethod
    def store_heads(self, spec: HeadSpec, qkv_TX: Tensor, angles: Angles) -> None:
        """Only stores what `attend_heads` stores."""

    @abstractmethod
    def store_latents(self, spec: LatentSpec, latents_TC: Tensor, angles: Angles) -> None:
        """Only stores what `attend_latents` stores."""


@dataclass(frozen=True, slots=True)
class ForwardContext:
    angles: Angles
    attention: AttentionStep
    step: Step = PREFILL
    tapped: list[Tensor] = field(default_factory=list)
    """The hidden states that `CausalLM.tap` asks for, layer by layer."""
