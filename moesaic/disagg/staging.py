"""The part of a request's KV cache that has come from another instance, outside of all pages.

L layers and M heads of this rank · T tokens of the transfer · D channels.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moesaic.core.disagg import KVShare
from moesaic.disagg.messages import Chunk, Malformed
from moesaic.layers.paged_cache import PagedCache


class StagedCache:
    """A page may be given away and come back while a transfer is under way: what comes is kept here
    until a step moves it to the pages that the request has then."""

    def __init__(self, share: KVShare, first: int, stop: int, dtype: torch.dtype) -> None:
        self.share, self.first, self.stop = share, first, stop
        layers, heads = len(range(*share.layers)), len(range(*share.heads))
        shape = (layers, stop - first, heads)
        self.keys_LTMD = torch.empty(*shape, share.key_dim, dtype=dtype)
        self.values_LTMD = torch.empty(*shape, share.value_dim, dtype=dtype)
        self._missing_LTM = np.ones(shape, bool)
        self.num_missing = self._missing_LTM.size

    @property
    def is_complete(self) -> bool:
        return self.num_missing == 0

    def check(self, chunk: Chunk, size: int) -> None:
        """Malformed unless it is a part of this one, and has as many bytes."""
        dtype = getattr(torch, chunk.dtype, None)
        shape = tuple(stop - start for start, stop in _extent(chunk))
        own = self.share.layers, (self.first, self.stop), self.share.heads
        fits = all(
            low <= start < stop <= high
            for (start, stop), (low, high) in zip(_extent(chunk), own, strict=True)
        )
        channels = self.share.key_dim + self.share.value_dim
        if not isinstance(dtype, torch.dtype) or not fits:
            raise Malformed(f"{chunk}: this rank holds layers, tokens and heads {own}")
        if size != (wanted := int(np.prod(shape)) * channels * dtype.itemsize):
            raise Malformed(f"{chunk} with {size} bytes: {wanted} are expected")

    def write(self, chunk: Chunk, body: bytearray) -> None:
        """A chunk that was checked; it may come again."""
        layers, tokens, heads = (
            slice(start - base, stop - base)
            for (start, stop), base in zip(
                _extent(chunk), (self.share.layers[0], self.first, self.share.heads[0]), strict=True
            )
        )
        dtype = getattr(torch, chunk.dtype)
        keys, values = (
            self.keys_LTMD[layers, tokens, heads],
            self.values_LTMD[layers, tokens, heads],
        )
        flat = torch.frombuffer(body, dtype=dtype)
        keys.copy_(flat[: keys.numel()].view(keys.shape))
        values.copy_(flat[keys.numel() :].view(values.shape))
        missing = self._missing_LTM[layers, tokens, heads]
        self.num_missing -= int(np.count_nonzero(missing))
        missing[:] = False

    def move_to(self, cache: PagedCache, slots_T: Tensor) -> None:
        """`slots_T`: the slots of these tokens."""
        cache.keys.flatten(1, 2).index_copy_(1, slots_T, self.keys_LTMD)
        if self.share.value_dim:
            cache.values.flatten(1, 2).index_copy_(1, slots_T, self.values_LTMD)


def _extent(chunk: Chunk) -> tuple[tuple[int, int], ...]:
    return chunk.layers, (chunk.first, chunk.stop), chunk.heads
