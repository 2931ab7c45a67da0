"""A prefill instance's ranks send what their steps have computed.

L layers · S slots · T tokens · M heads · D channels.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moesaic.core.disagg import KVRank, KVSend, KVShare, KVTarget
from moesaic.disagg.layout import SharedPart, piece
from moesaic.disagg.messages import Chunk, PromptResult
from moesaic.disagg.outlets import KVOutlets
from moesaic.kernels.kv_rows import copy_rows, packed_rows
from moesaic.layers.paged_cache import PagedCache, kv_rows


class KVSender:
    """`shares`: those of all ranks of the group, each with one for each of its caches; `own`: this
    rank's place among them."""

    def __init__(self, shares: Sequence[Sequence[KVShare]], own: int, outlets: KVOutlets) -> None:
        self._shares = [*zip(*shares, strict=True)]
        """By cache."""
        self._own, self._outlets = own, outlets

    def send(self, order: KVSend, cache: PagedCache, slots_T: Tensor, which: int = 0) -> None:
        """The order's tokens, which are in these slots, to each rank that needs a part of them. The
        pages may be given away at once: what is sent is a copy. `which`: the number of the
        `cache`."""
        if any(which >= len(rank.shares) for rank in order.target.ranks):
            return  # the other instance makes no such drafts
        targets = [rank.shares[which] for rank in order.target.ranks]
        for number, rank in enumerate(order.target.ranks):
            part = piece(self._shares[which], self._own, targets, number)
            if part.layers and part.heads:
                self._send_piece(order, rank, part, cache, slots_T, which)

    def _send_piece(
        self,
        order: KVSend,
        rank: KVRank,
        part: SharedPart,
        cache: PagedCache,
        slots_T: Tensor,
        which: int,
    ) -> None:
        share, buffer = self._shares[which][self._own], self._outlets.buffer
        layers, heads = _within(part.layers, share.layers), _within(part.heads, share.heads)
        per_token = cache.keys.element_size() * len(part.layers) * len(part.heads)
        per_token *= share.key_dim + share.value_dim
        step = max(1, buffer.largest // per_token)
        dtype = str(cache.keys.dtype).removeprefix("torch.")
        for start in range(0, order.stop - order.first, step):
            slots = slots_T[start : start + step]
            first, stop = order.first + start, order.first + start + len(slots)
            extent = (part.layers.start, part.layers.stop), (part.heads.start, part.heads.stop)
            place = self._outlets.take(rank.host, rank.port, per_token * len(slots))
            if place is None:  # the other instance misses it
                self._outlets.miss(rank.host, rank.port, order.target.ticket)
                return
            gather(cache, layers, heads, slots, buffer.at(place))
            chunk = Chunk(order.target.ticket, first, stop, *extent, dtype, place, which)
            self._outlets.put(rank.host, rank.port, chunk)

    @property
    def transports(self) -> dict[str, str]:
        """What each rank that is connected reads by, by its address."""
        return self._outlets.transports

    def finish(self, target: KVTarget, result: PromptResult) -> str:
        """Returns why this rank has not sent all, if it knows that already."""
        leader = target.ranks[0]
        self._outlets.put(leader.host, leader.port, result)
        return self._outlets.why_missed(target.ticket)


def gather(cache: PagedCache, layers: slice, heads: slice, slots_T: Tensor, data: Tensor) -> None:
    """Copies a part of a cache to bytes: keys, and values behind them."""
    source, tokens = kv_rows(cache.keys, cache.values, layers, heads), len(slots_T)
    target = packed_rows(data, source, tokens)
    copy_rows(target.keys, target, source._replace(slots=slots_T), tokens)


def _within(part: range, whole: tuple[int, int]) -> slice:
    return slice(part.start - whole[0], part.stop - whole[0])
