"""A prefill instance's ranks send what their steps have computed.

L layers · T tokens · M heads · D channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moesaic.core.disagg import KVSend, KVShare, KVTarget
from moesaic.disagg.layout import Piece, piece
from moesaic.disagg.messages import Buffer, Chunk, PromptResult, frame
from moesaic.disagg.outlets import KVOutlets
from moesaic.layers.paged_cache import PagedCache

# The bytes that a rank copies at once, and so those of a frame: one that is on its way does not
# hold up others for long.
FRAME_BYTES: Final = 32 << 20


class KVSender:
    """`shares`: those of all ranks of the group; `own`: this rank's place among them."""

    def __init__(self, shares: Sequence[KVShare], own: int, outlets: KVOutlets) -> None:
        self._shares, self._own, self._outlets = shares, own, outlets

    def send(self, order: KVSend, cache: PagedCache, slots_T: Tensor) -> None:
        """The order's tokens, which are in these slots, to each rank that needs a part of them. The
        pages may be given away at once: what is sent is a copy."""
        targets = [rank.share for rank in order.target.ranks]
        parts = [piece(self._shares, self._own, targets, n) for n in range(len(targets))]
        wanted = [
            (rank, part)
            for rank, part in zip(order.target.ranks, parts, strict=True)
            if part.layers and part.heads
        ]
        step = tokens_at_once(self._shares[self._own], cache.keys.element_size())
        for start in range(order.first, order.stop if wanted else order.first, step):
            stop = min(start + step, order.stop)
            some_T = slots_T[start - order.first : stop - order.first]
            keys_LTMD = cache.keys.flatten(1, 2)[:, some_T]
            values_LTMD = cache.values.flatten(1, 2)[:, some_T]
            for rank, part in wanted:
                extent = (part.layers.start, part.layers.stop), (part.heads.start, part.heads.stop)
                dtype = str(keys_LTMD.dtype).removeprefix("torch.")
                chunk = Chunk(order.target.ticket, start, stop, *extent, dtype)
                body = [self._part(one, part) for one in (keys_LTMD, values_LTMD)]
                self._outlets.put(rank.host, rank.port, frame(chunk, body))

    def _part(self, whole_LTMD: Tensor, part: Piece) -> Buffer:
        share = self._shares[self._own]
        layers, heads = _within(part.layers, share.layers), _within(part.heads, share.heads)
        return bytes_of(whole_LTMD[layers, :, heads])

    def finish(self, target: KVTarget, result: PromptResult) -> None:
        leader = target.ranks[0]
        self._outlets.put(leader.host, leader.port, frame(result))


def tokens_at_once(share: KVShare, itemsize: int) -> int:
    layers, heads = len(range(*share.layers)), len(range(*share.heads))
    return max(1, FRAME_BYTES // (layers * heads * (share.key_dim + share.value_dim) * itemsize))


def bytes_of(tensor: Tensor) -> Buffer:
    """Of a copy, unless the tensor is contiguous."""
    if not tensor.numel():
        return b""
    raw: npt.NDArray[np.uint8] = tensor.contiguous().view(torch.uint8).flatten().numpy()
    return raw.data


def _within(part: range, whole: tuple[int, int]) -> slice:
    return slice(part.start - whole[0], part.stop - whole[0])
