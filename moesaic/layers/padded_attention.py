"""Attention of a step whose last rows are padding, on CPU.

T rows of the step · R of them are somebody's · N query heads · M key/value heads · D head size ·
C latent size · V value size.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moesaic.layers.context import AttentionSpec, LatentMaps
from moesaic.layers.torch_attention import PagedCache, SequenceSpan, TorchAttention


class PaddedAttention(TorchAttention):
    """Attends for the rows that `fill` was told of last; all others get zeros and leave nothing in
    the cache."""

    def __init__(self, cache: PagedCache) -> None:
        super().__init__(cache, [])

    def fill(self, spans: Sequence[SequenceSpan]) -> None:
        """Of one token each, in the order of the rows."""
        super().__init__(self.cache, spans)

    def attend(self, spec: AttentionSpec, q_TND: Tensor, k_TMD: Tensor, v_TMD: Tensor) -> Tensor:
        out_TND, rows = q_TND.new_zeros(q_TND.shape), len(self.spans)
        if rows:
            out_TND[:rows] = super().attend(spec, q_TND[:rows], k_TMD[:rows], v_TMD[:rows])
        return out_TND

    def attend_latent(
        self, spec: AttentionSpec, q_TND: Tensor, latents_TC: Tensor, maps: LatentMaps
    ) -> Tensor:
        rows = len(self.spans)
        if not rows:
            return maps.release(maps.absorb(q_TND)) * 0
        mixed_RNV = super().attend_latent(spec, q_TND[:rows], latents_TC[:rows], maps)
        out_TNV = mixed_RNV.new_zeros(len(q_TND), *mixed_RNV.shape[1:])
        out_TNV[:rows] = mixed_RNV
        return out_TNV

    @property
    def attention(self) -> PaddedAttention:
        """Under the name that buffers of a GPU have it."""
        return self
