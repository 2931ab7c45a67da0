"""Attention of a step whose last rows are padding, on CPU: the twin of `DecodeBuffers`.

T rows of the step · R of them have a token · N query heads · M key/value heads · D head size ·
C latent size · V value size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.layers.context import AttentionSpec, LatentSpec
from moesaic.layers.paged_cache import PagedCache, PageTable, Sequences
from moesaic.layers.torch_attention import TorchAttention


class PaddedAttention(TorchAttention):
    """Attends for the rows that `fill` set last; all others get zeros and store nothing."""

    def __init__(self, cache: PagedCache, table: PageTable) -> None:
        super().__init__(cache, [])
        self.table = table

    def fill(self, sequences: Sequences) -> None:
        """The sequences' rows follow each other from row 0 on."""
        super().__init__(self.cache, self.table.spans(sequences))

    def fill_singles(self, positions_B: Tensor, first_B: Tensor) -> None:
        """As DecodeBuffers.fill_singles."""
        rows_B, ones_B = torch.arange(len(first_B)), torch.ones(len(first_B), dtype=torch.int64)
        columns = (rows_B, ones_B, positions_B + 1, first_B)
        self.fill(Sequences(*(column.int().numpy() for column in columns)))

    def attend(self, spec: AttentionSpec, q_TND: Tensor, k_TMD: Tensor, v_TMD: Tensor) -> Tensor:
        out_TND, rows = q_TND.new_zeros(q_TND.shape), len(self.slots_T)
        if rows:
            out_TND[:rows] = super().attend(spec, q_TND[:rows], k_TMD[:rows], v_TMD[:rows])
        return out_TND

    def attend_latent(self, spec: LatentSpec, q_TND: Tensor, latents_TC: Tensor) -> Tensor:
        rows = len(self.slots_T)
        if not rows:
            return spec.projections.up_project(spec.projections.absorb(q_TND)) * 0
        mixed_RNV = super().attend_latent(spec, q_TND[:rows], latents_TC[:rows])
        out_TNV = mixed_RNV.new_zeros(len(q_TND), *mixed_RNV.shape[1:])
        out_TNV[:rows] = mixed_RNV
        return out_TNV

    @property
    def attention(self) -> PaddedAttention:
        """The same name as in `DecodeBuffers`."""
        return self
