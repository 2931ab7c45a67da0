"""The bases of dispatchers that signal through a window."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from moesaic.kernels.cpu.rows import Terms
from moesaic.moe.dispatch.base import BaseDispatcher, CommContext, DispatchConfig
from moesaic.moe.dispatch.host.exchange import Exchange, ExchangeSignal, ExchangeSpec, Lanes
from moesaic.moe.formats import TopKOutput
from moesaic.moe.quant.payload import Payload


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """This rank's tokens while their dispatch is in flight."""

    lane: int
    x: Payload
    topk: TopKOutput


class WindowDispatcher(BaseDispatcher):
    lanes: Lanes
    """Shared by the layers that share buffers."""

    @property
    def row_bytes(self) -> int:
        """What a token takes on its way to a rank, with its ids and weights."""
        config = self.config
        return config.payload.row_bytes(config.hidden_size) + 8 * config.top_k

    def signal(self, kind: ExchangeSignal, lane: int) -> None:
        self.lanes.signal(kind, lane, self.config.layer, self.operation(kind.phase))

    def wait(self, kind: ExchangeSignal, lane: int) -> None:
        self.lanes.wait(kind, lane, self.config.layer, self.operation(kind.phase))

    def verify(self, kind: ExchangeSignal, lane: int) -> None:
        """Raises, after reading, if the data have been overwritten."""
        self.lanes.verify(kind, lane, self.config.layer, self.operation(kind.phase))

    def reachable(self, terms: Terms) -> Terms:
        """Without the results of groups that have lost a rank."""
        if len(self.lanes.active) == self.layout.size:
            return terms
        active = torch.zeros(self.layout.size, dtype=torch.bool)
        active[self.lanes.active] = True
        whole_G = active.view(self.layout.ep_size, -1).all(1)
        places_TS = torch.where(whole_G[terms.owners_TS], terms.places_TS, -1)
        return replace(terms, places_TS=places_TS)


class ExchangeDispatcher(WindowDispatcher):
    """Publishes tokens and results where all ranks read them."""

    everywhere: ClassVar[bool] = False
    """Whether all tokens go to all groups."""
    by_pairs: ClassVar[bool] = False
    """Whether a token goes to a rank once for each of its slots there."""

    def __init__(self, config: DispatchConfig, comm: CommContext) -> None:
        super().__init__(config, comm)
        spec = self.buffer_spec(config)
        self.lanes = self.exchange = comm.shared(spec, lambda: Exchange(spec, comm))

    @classmethod
    def buffer_spec(cls, config: DispatchConfig) -> ExchangeSpec:
        raise NotImplementedError

    def publish(self, x_TH: Tensor, topk: TopKOutput, lane: int) -> PendingTokens:
        x = self.config.encode(x_TH)
        self.lanes.acquire(lane, self.operation("dispatch"))
        self.exchange.publish(lane, x, topk, slice(None))
        self.carry_tokens(topk.ids_TK)
        self.signal(ExchangeSignal.TOKENS_READY, lane)
        return PendingTokens(lane, x, topk)

    def carry_tokens(self, ids_TK: Tensor) -> None:
        """Puts these tokens on the emulated link, if there is one, for the ranks that read them."""
        link = self.exchange.window.link
        if link is None:
            return
        groups_TK, width = self.layout.owner(ids_TK), self.layout.moe_tp_size
        for group in range(self.layout.ep_size):
            here_TK = groups_TK == group
            goes = here_TK.any(1) | self.everywhere
            count = int(here_TK.sum() if self.by_pairs else goes.sum())
            for rank in range(group * width, (group + 1) * width):
                link.carry(rank, count * self.row_bytes)

    def sum_results(self, lane: int, terms: Terms) -> Tensor:
        y_TH, foreign = self.exchange.collect(lane, self.reachable(terms), self.layout.moe_tp_size)
        self.note_combine(foreign)
        return y_TH
