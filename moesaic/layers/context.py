"""What a forward pass needs beside the weights.

T tokens of the step · N query heads · M key/value heads · D head size · V value size ·
C latent size · L tokens of a sequence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moesaic.core.step import PREFILL, Step
from moesaic.kernels.experts import Rows
from moesaic.layers.linear import RowLinear
from moesaic.layers.norm import RMSNorm
from moesaic.layers.rotary import RotaryTable


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


@dataclass(frozen=True, slots=True)
class HeadParts:
    """What a layer's projections give, side by side: queries, keys and values of this rank's heads;
    and what is done with queries and keys before they meet. `output`: who multiplies the mixed
    values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RotaryTable
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None
    output: RowLinear | None = None


@dataclass(frozen=True, slots=True)
class LatentParts:
    """The same of latent attention: the last `rope_dim` channels of queries and latents are
    rotated, the others of the latents normed."""

    rope_dim: int
    rope: RotaryTable
    norm: RMSNorm


Angles = tuple[Tensor, Tensor]
"""cos and sin of each token, [T, 1, rotated channels / 2]."""


class LatentMaps(Protocol):
    """The two equal forms of latent attention. Absorbed: queries go into the latent space and mixed
    latents come out of it. Expanded: latents become keys and values of every head."""

    def absorbs(self, queries: int, kv_len: int) -> bool:
        """Whether the absorbed form is the cheaper one."""

    def absorb(self, q_TND: Tensor) -> Tensor:
        """[T, N, D] -> [T, N, C]"""

    def absorb_plain(self, q_TND: Tensor) -> Tensor:
        """The same of the channels that are not rotated, which alone are changed."""

    def release(self, mixed_TNC: Tensor) -> Tensor:
        """[T, N, C] -> [T, N, V]"""

    def expand(self, latents_LC: Tensor) -> tuple[Tensor, Tensor]:
        """[L, C] -> keys [L, N, D] and values [L, N, V]"""


class AttentionStep(ABC):
    """Attention of one step's tokens over their own and the cached keys and values, from what a
    layer's projections give to what its output projection takes."""

    @abstractmethod
    def attend_heads(
        self, spec: AttentionSpec, qkv_TX: Tensor, parts: HeadParts, angles: Angles
    ) -> Tensor | Rows:
        """Norms, rotates and stores, then returns the mixed values [T, N, D]; or [T, N * D] as
        `parts.output` multiplies them."""

    @abstractmethod
    def attend_latents(
        self,
        spec: AttentionSpec,
        q_TND: Tensor,
        latents_TC: Tensor,
        parts: LatentParts,
        maps: LatentMaps,
        angles: Angles,
    ) -> Tensor:
        """The same with a cache of latents; returns the mixed values [T, N, V]."""


class CpuAttention(AttentionStep):
    """Norms and rotates in steps of their own, and leaves the rest to what it is the base of."""

    @abstractmethod
    def attend(self, spec: AttentionSpec, q_TND: Tensor, k_TMD: Tensor, v_TMD: Tensor) -> Tensor:
        """Stores the new keys and values, then returns the mixed values [T, N, D]."""

    @abstractmethod
    def attend_latent(
        self, spec: AttentionSpec, q_TND: Tensor, latents_TC: Tensor, maps: LatentMaps
    ) -> Tensor:
        """Stores the new latents, then returns the mixed values [T, N, V]; for each sequence in
        whichever form takes fewer operations."""

    def attend_heads(
        self, spec: AttentionSpec, qkv_TX: Tensor, parts: HeadParts, angles: Angles
    ) -> Tensor:
        dim, queries, kv = parts.head_dim, parts.num_heads, parts.num_kv_heads
        split = qkv_TX.split([queries * dim, kv * dim, kv * dim], dim=-1)
        q_TND, k_TMD, v_TMD = (part.unflatten(-1, (-1, dim)) for part in split)
        if parts.q_norm is not None and parts.k_norm is not None:
            q_TND, k_TMD = parts.q_norm(q_TND), parts.k_norm(k_TMD)
        q_TND, k_TMD = parts.rope.rotate(q_TND, *angles), parts.rope.rotate(k_TMD, *angles)
        return self.attend(spec, q_TND, k_TMD, v_TMD)

    def attend_latents(
        self,
        spec: AttentionSpec,
        q_TND: Tensor,
        latents_TC: Tensor,
        parts: LatentParts,
        maps: LatentMaps,
        angles: Angles,
    ) -> Tensor:
        q_plain, q_rope = q_TND.split([q_TND.shape[-1] - parts.rope_dim, parts.rope_dim], dim=-1)
        q_TND = torch.cat((q_plain, parts.rope.rotate(q_rope, *angles)), dim=-1)
        plain = latents_TC.shape[-1] - parts.rope_dim
        latent, k_rope = latents_TC.split([plain, parts.rope_dim], dim=-1)
        k_rope = parts.rope.rotate(k_rope.unsqueeze(1), *angles).squeeze(1)
        latents_TC = torch.cat((parts.norm(latent), k_rope), dim=-1)
        return self.attend_latent(spec, q_TND, latents_TC, maps)


@dataclass(frozen=True, slots=True)
class ForwardContext:
    cos: Tensor
    sin: Tensor
    attention: AttentionStep
    step: Step = PREFILL
