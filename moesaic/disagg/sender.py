"""A prefill instance's ranks send what their steps have computed.

L layers · S slots · T tokens · M heads · D channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moesaic.core.disagg import KVRank, KVSend, KVShare, KVTarget
from moesaic.disagg.layout import Piece, piece
from moesaic.disagg.messages import Chunk, PromptResult
from moesaic.disagg.outlets import KVOutlets
from moesaic.layers.paged_cache import PagedCache, lanes


class KVSender:
    """`shares`: those of all ranks of the group; `own`: this rank's place among them."""

    def __init__(self, shares: Sequence[KVShare], own: int, outlets: KVOutlets) -> None:
        self._shares, self._own, self._outlets = shares, own, outlets

    def send(self, order: KVSend, cache: PagedCache, slots_T: Tensor) -> None:
        """The order's tokens, which are in these slots, to each rank that needs a part of them. The
        pages may be given away at once: what is sent is a copy."""
        targets = [rank.share for rank in order.target.ranks]
        for number, rank in enumerate(order.target.ranks):
            part = piece(self._shares, self._own, targets, number)
            if part.layers and part.heads:
                self._send_piece(order, rank, part, cache, slots_T)

    def _send_piece(
        self, order: KVSend, rank: KVRank, part: Piece, cache: PagedCache, slots_T: Tensor
    ) -> None:
        share, buffer = self._shares[self._own], self._outlets.buffer
        layers, heads = _within(part.layers, share.layers), _within(part.heads, share.heads)
        per_channel = cache.keys.element_size() * len(part.layers) * len(part.heads)
        key_bytes, per_token = (
            per_channel * dims for dims in (share.key_dim, share.key_dim + share.value_dim)
        )
        step = max(1, buffer.largest // per_token)
        dtype = str(cache.keys.dtype).removeprefix("torch.")
        for start in range(0, order.stop - order.first, step):
            slots = slots_T[start : start + step]
            first, stop = order.first + start, order.first + start + len(slots)
            extent = (part.layers.start, part.layers.stop), (part.heads.start, part.heads.stop)
            place = self._outlets.take(rank.host, rank.port, per_token * len(slots))
            if place is None:
                return  # the other instance misses it
            data = buffer.at(place)
            gather(cache.keys, layers, heads, slots, data[: key_bytes * len(slots)])
            if share.value_dim:
                gather(cache.values, layers, heads, slots, data[key_bytes * len(slots) :])
            chunk = Chunk(order.target.ticket, first, stop, *extent, dtype, place)
            self._outlets.put(rank.host, rank.port, chunk)

    @property
    def transports(self) -> dict[str, str]:
        """What each rank that is connected reads by, by its address."""
        return self._outlets.transports

    def finish(self, target: KVTarget, result: PromptResult) -> None:
        leader = target.ranks[0]
        self._outlets.put(leader.host, leader.port, result)


def gather(part: Tensor, layers: slice, heads: slice, slots_T: Tensor, out: Tensor) -> None:
    """Copies [layers, tokens, heads, channels] of a cache's keys or values to `out`, bytes."""
    wide_LSX = lanes(part)[layers]
    per_head = wide_LSX.shape[-1] // part.shape[-2]
    wide_LSX = wide_LSX[..., heads.start * per_head : heads.stop * per_head]
    out_LTX = out.view(wide_LSX.dtype).view(len(wide_LSX), len(slots_T), wide_LSX.shape[-1])
    if part.is_cuda:
        torch.index_select(wide_LSX, 1, slots_T, out=out_LTX)
        return
    for source_SX, target_TX in zip(wide_LSX, out_LTX, strict=True):  # faster than all at once
        torch.index_select(source_SX, 0, slots_T, out=target_TX)


def _within(part: range, whole: tuple[int, int]) -> slice:
    return slice(part.start - whole[0], part.stop - whole[0])
