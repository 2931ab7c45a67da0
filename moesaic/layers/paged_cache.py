"""The paged KV cache, and where a step's sequences are stored in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from moesaic.layers.context import CacheSpec


class SequenceSpan(NamedTuple):
    """The new tokens of one sequence: rows [start, start + length) of the step are the last
    `length` of its `kv_len` tokens, which are stored in `pages`."""

    start: int
    length: int
    kv_len: int
    pages: Sequence[int]

    @property
    def positions(self) -> range:
        """Positions of the new tokens in the sequence."""
        return range(self.kv_len - self.length, self.kv_len)

    def slots(self, positions: range, page_size: int) -> list[int]:
        """The cache slots of these positions."""
        pages = self.pages
        return [pages[p // page_size] * page_size + p % page_size for p in positions]


class PagedCache:
    """Keys and values of all layers. Page 0 pads page tables and stays zero. In float8_e4m3fn (on a
    GPU) the numbers are scaled by `k_scale` and `v_scale`."""

    def __init__(
        self,
        spec: CacheSpec,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (spec.num_layers, num_pages + 1, page_size, spec.num_heads)
        self.page_size = page_size
        self.keys = torch.empty(*shape, spec.key_dim, dtype=dtype, device=device)
        self.values = torch.empty(*shape, spec.value_dim, dtype=dtype, device=device)
        self.layers = list(zip(self.keys.unbind(), self.values.unbind(), strict=True))
        self.k_scale = self.v_scale = 1.0
        self.clear([0])

    def clear(self, pages: Sequence[int]) -> None:
        """Zeroes pages before use: NaN or infinity behind the end of a sequence would reach the
        result in spite of masks. Does nothing on a GPU, whose kernels never read them."""
        if self.keys.is_cuda:
            return
        index = torch.tensor(pages)
        self.keys.index_fill_(1, index, 0)
        self.values.index_fill_(1, index, 0)

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes
