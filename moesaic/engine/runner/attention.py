"""Attention of a step, by torch or by the kernels of a GPU, over this rank's KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from moesaic.layers.context import AttentionStep
from moesaic.layers.deterministic_attention import DeterministicAttention
from moesaic.layers.gpu_attention import DecodeBuffers, GpuAttention
from moesaic.layers.padded_attention import PaddedAttention
from moesaic.layers.torch_attention import PagedCache, SequenceSpan, TorchAttention


class StaticAttention(Protocol):
    """Attention over static buffers, for decode steps of a fixed size."""

    @property
    def attention(self) -> AttentionStep: ...

    def fill(self, spans: Sequence[SequenceSpan]) -> None:
        """Sets the sequences of the next step; rows beyond them are padding."""


class AttentionBackend(Protocol):
    def for_spans(self, spans: Sequence[SequenceSpan]) -> AttentionStep: ...

    def static(self, sequences: int, queries: int = 1) -> StaticAttention:
        """Of up to `sequences` sequences with `queries` new tokens each."""

    def clear(self, pages: Sequence[int]) -> None:
        """Zeroes reused pages, where unwritten entries are read."""


class TorchBackend:
    def __init__(self, cache: PagedCache, max_pages: int, deterministic: bool) -> None:
        self._cache, self._deterministic = cache, deterministic

    def for_spans(self, spans: Sequence[SequenceSpan]) -> AttentionStep:
        attend = DeterministicAttention if self._deterministic else TorchAttention
        return attend(self._cache, spans)

    def static(self, sequences: int, queries: int = 1) -> StaticAttention:
        return PaddedAttention(self._cache, **_queries(queries))

    def clear(self, pages: Sequence[int]) -> None:
        if pages:
            self._cache.clear(pages)


class GpuBackend:
    """Its kernels never read entries that were not written, so pages are not cleared."""

    def __init__(self, cache: PagedCache, max_pages: int, deterministic: bool) -> None:
        self._cache, self._max_pages, self._deterministic = cache, max_pages, deterministic

    def for_spans(self, spans: Sequence[SequenceSpan]) -> AttentionStep:
        return GpuAttention.from_spans(self._cache, spans, self._deterministic)

    def static(self, sequences: int, queries: int = 1) -> StaticAttention:
        sizes = (sequences, self._max_pages)
        return DecodeBuffers(self._cache, *sizes, self._deterministic, **_queries(queries))

    def clear(self, pages: Sequence[int]) -> None:
        return


def _queries(queries: int) -> dict[str, int]:
    return {} if queries == 1 else {"queries": queries}


BACKENDS: Final[dict[str, Callable[[PagedCache, int, bool], AttentionBackend]]] = {
    "cpu": TorchBackend,
    "cuda": GpuBackend,
}
"""By the kind of a rank: whose code it runs, wherever its tensors reside."""
