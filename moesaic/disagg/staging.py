"""The part of a request's KV cache that has come from another instance, outside of all pages.

L layers and M heads of this rank · T tokens of the transfer · D channels.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moesaic.core.disagg import KVShare
from moesaic.disagg.messages import Chunk, Malformed
from moesaic.kernels.kv_rows import copy_rows, packed_rows
from moesaic.layers.paged_cache import PagedCache, kv_rows


class StagedCache:
    """A page may be given away and come back while a transfer is under way: what comes is kept here
    until a step moves it to the pages that the request has then."""

    def __init__(
        self,
        share: KVShare,
        first: int,
        stop: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.share, self.first, self.stop = share, first, stop
        layers, heads = len(range(*share.layers)), len(range(*share.heads))
        shape = (layers, stop - first, heads)
        self.keys_LTMD = torch.empty(*shape, share.key_dim, dtype=dtype, device=device)
        self.values_LTMD = torch.empty(*shape, share.value_dim, dtype=dtype, device=device)
        self.allocated: Any = None
        """The event after which a GPU has no other use of this memory."""
        if self.keys_LTMD.is_cuda:
            self.allocated = torch.cuda.Event()
            self.allocated.record(torch.cuda.current_stream(self.keys_LTMD.device))
        self._missing_LTM = np.ones(shape, bool)
        self.num_missing = self._missing_LTM.size

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

    def misses(self, chunk: Chunk) -> bool:
        """Whether any of a chunk that was checked has not come before."""
        return bool(self._missing_LTM[self._within(chunk)].any())

    def write(self, chunk: Chunk, body: Tensor) -> None:
        """Copies the bytes of a chunk that was checked, in the order of the current stream."""
        if self.allocated is not None:
            self.allocated.wait()
        layers, tokens, heads = self._within(chunk)
        parts, dtype = (self.keys_LTMD, self.values_LTMD), getattr(torch, chunk.dtype)
        if dtype is self.keys_LTMD.dtype and body.device == self.keys_LTMD.device:
            count = chunk.stop - chunk.first
            keys, values = (part[:, tokens, None] for part in parts)
            target = kv_rows(keys, values, layers, heads)
            copy_rows(target.keys, target, packed_rows(body, target, count), count)
            return
        begin, flat = 0, body.view(dtype)
        for part_LTMD in (part[layers, tokens, heads] for part in parts):
            data = flat[begin : begin + part_LTMD.numel()].view(part_LTMD.shape)
            part_LTMD.copy_(_within_bounds(data, part_LTMD.dtype))
            begin += part_LTMD.numel()

    def add(self, chunk: Chunk) -> None:
        """What was written is what was sent."""
        missing = self._missing_LTM[self._within(chunk)]
        self.num_missing -= int(np.count_nonzero(missing))
        missing[:] = False

    def remove(self, chunk: Chunk) -> None:
        """What was written is something else."""
        missing = self._missing_LTM[self._within(chunk)]
        self.num_missing += int(np.count_nonzero(~missing))
        missing[:] = True

    def _within(self, chunk: Chunk) -> tuple[slice, slice, slice]:
        bases = self.share.layers[0], self.first, self.share.heads[0]
        layers, tokens, heads = (
            slice(start - base, stop - base)
            for (start, stop), base in zip(_extent(chunk), bases, strict=True)
        )
        return layers, tokens, heads

    def move_to(self, cache: PagedCache, slots_T: Tensor) -> None:
        """`slots_T`: the slots of these tokens."""
        parts = self.keys_LTMD, self.values_LTMD
        if self.keys_LTMD.is_cuda:  # its memory is used again behind this step
            for part in parts:
                part.record_stream(torch.cuda.current_stream(part.device))
        source = kv_rows(self.keys_LTMD[:, :, None], self.values_LTMD[:, :, None])
        target = kv_rows(cache.keys, cache.values)._replace(slots=slots_T)
        copy_rows(target.keys, target, source, len(slots_T))


class StagedCaches:
    """What has come of one transfer: a part of each cache of the rank. Whoever writes holds
    `lock`."""

    def __init__(
        self,
        shares: Sequence[KVShare],
        first: int,
        stop: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.first, self.stop, self.lock = first, stop, threading.Lock()
        self.parts = [StagedCache(share, first, stop, dtype, device) for share in shares]

    @property
    def num_missing(self) -> int:
        return sum(part.num_missing for part in self.parts)

    @property
    def is_complete(self) -> bool:
        return self.num_missing == 0

    @property
    def nbytes(self) -> int:
        return sum(part.keys_LTMD.nbytes + part.values_LTMD.nbytes for part in self.parts)

    def part(self, chunk: Chunk) -> StagedCache:
        """The one that a chunk belongs to."""
        if chunk.cache >= len(self.parts):
            raise Malformed(f"{chunk}: this rank has {len(self.parts)} caches")
        return self.parts[chunk.cache]

    def move_to(self, caches: Sequence[PagedCache], slots_T: Tensor) -> None:
        """`slots_T`: the slots of these tokens."""
        for part, cache in zip(self.parts, caches, strict=True):
            part.move_to(cache, slots_T)


def _within_bounds(data: Tensor, dtype: torch.dtype) -> Tensor:
    """float8_e4m3fn has no infinity: what is larger becomes the largest number."""
    if dtype is not torch.float8_e4m3fn:
        return data
    most = torch.finfo(dtype).max
    return data.clamp(-most, most)


def _extent(chunk: Chunk) -> tuple[tuple[int, int], ...]:
    return chunk.layers, (chunk.first, chunk.stop), chunk.heads
