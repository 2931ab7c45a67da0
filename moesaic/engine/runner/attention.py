"""Attention over this rank's KV cache, by torch or by the kernels of a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from moesaic.engine.runner.graphs import GraphKey
from moesaic.layers.context import AttentionStep
from moesaic.layers.deterministic_attention import DeterministicAttention
from moesaic.layers.gpu_attention import DecodeBuffers, GpuAttention
from moesaic.layers.mixed_buffers import MixedBuffers, MixedSizes
from moesaic.layers.padded_attention import PaddedAttention
from moesaic.layers.paged_cache import PagedCache, PageTable, Sequences
from moesaic.layers.torch_attention import TorchAttention

StaticAttention = PaddedAttention | DecodeBuffers


class TorchBackend:
    def __init__(
        self, cache: PagedCache, table: PageTable, deterministic: bool, trees: bool = False
    ) -> None:
        """`trees`: drafts may be some."""
        self._cache, self._table, self._deterministic = cache, table, deterministic
        self._trees = trees

    def attend(self, sequences: Sequences, shares: bool = False) -> AttentionStep:
        """`shares`: a row may read what another sequence's row stores."""
        attend = DeterministicAttention if self._deterministic else TorchAttention
        return attend(self._cache, self._table.spans(sequences))

    def static(self, key: GraphKey) -> StaticAttention:
        """Attention over static buffers, for decode steps of a fixed size."""
        return PaddedAttention(self._cache, self._table)

    def mixed(self, tokens: int, max_running: int) -> MixedBuffers | None:
        """Static buffers for steps of up to `tokens` tokens with prompts, if there are any."""
        return None

    def clear(self, pages: Sequence[int]) -> None:
        """Zeroes reused pages, as entries are read that were not written."""
        if pages:
            self._cache.clear(pages)


class GpuBackend(TorchBackend):
    def attend(self, sequences: Sequences, shares: bool = False) -> AttentionStep:
        made = GpuAttention.of(self._cache, sequences, self._table, self._deterministic)
        made.fused = made.fused and not shares
        return made

    def static(self, key: GraphKey) -> StaticAttention:
        given = (self._cache, key.rows, self._table, self._deterministic)
        trees = self._trees and key.verifies
        return DecodeBuffers(*given, shares=key.verifies, trees=trees)

    def mixed(self, tokens: int, max_running: int) -> MixedBuffers | None:
        """Latents have none: how many of them are expanded differs from step to step."""
        if not self._cache.values.shape[-1]:
            return None
        sizes = MixedSizes(tokens, max_running)
        return MixedBuffers(self._cache, self._table, sizes, self._deterministic)

    def clear(self, pages: Sequence[int]) -> None:
        """Kernels read only what was written."""


BACKENDS: Final = {"cpu": TorchBackend, "cuda": GpuBackend}
"""By the kind of a rank: whose code it runs, wherever its tensors reside."""
