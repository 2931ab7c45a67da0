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

from moesaic.core.disagg import KVRank, KVSend, KVShare, KVTarget
from moesaic.disagg.layout import Piece, piece
from moesaic.disagg.messages import Buffer, Chunk, PromptResult, frame
from moesaic.disagg.outlets import KVOutlets
from moesaic.layers.paged_cache import PagedCache

# The bytes of a frame, so that one that is on its way does not hold up others for long.
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
        if not any(part.layers and part.heads for part in parts) or order.first == order.stop:
            return
        keys_LTMD = cache.keys.flatten(1, 2)[:, slots_T]
        values_LTMD = cache.values.flatten(1, 2)[:, slots_T]
        for rank, part in zip(order.target.ranks, parts, strict=True):
            if part.layers and part.heads:
                self._send_piece(order, rank, part, keys_LTMD, values_LTMD)

    def _send_piece(
        self, order: KVSend, rank: KVRank, part: Piece, keys_LTMD: Tensor, values_LTMD: Tensor
    ) -> None:
        share = self._shares[self._own]
        layers, heads = _within(part.layers, share.layers), _within(part.heads, share.heads)
        per_token = keys_LTMD.element_size() * len(part.layers) * len(part.heads)
        per_token *= share.key_dim + share.value_dim
        step = max(1, FRAME_BYTES // per_token)
        dtype = str(keys_LTMD.dtype).removeprefix("torch.")
        for start in range(0, order.stop - order.first, step):
            tokens = slice(start, min(start + step, order.stop - order.first))
            first, stop = order.first + tokens.start, order.first + tokens.stop
            extent = (part.layers.start, part.layers.stop), (part.heads.start, part.heads.stop)
            chunk = Chunk(order.target.ticket, first, stop, *extent, dtype)
            body = [bytes_of(one[layers, tokens, heads]) for one in (keys_LTMD, values_LTMD)]
            self._outlets.put(rank.host, rank.port, frame(chunk, body))

    def finish(self, target: KVTarget, result: PromptResult) -> None:
        leader = target.ranks[0]
        self._outlets.put(leader.host, leader.port, frame(result))


def bytes_of(tensor: Tensor) -> Buffer:
    """Of a copy, unless the tensor is contiguous."""
    if not tensor.numel():
        return b""
    raw: npt.NDArray[np.uint8] = tensor.contiguous().view(torch.uint8).flatten().numpy()
    return raw.data


def _within(part: range, whole: tuple[int, int]) -> slice:
    return slice(part.start - whole[0], part.stop - whole[0])
