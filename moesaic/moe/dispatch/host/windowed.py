"""The bases of dispatchers that signal through a window."""

from __future__ import annotations

from dataclasses import dataclass

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

    def signal(self, kind: ExchangeSignal, lane: int) -> None:
        self.lanes.signal(kind, lane, self.config.layer, self.operation(kind.phase))

    def wait(self, kind: ExchangeSignal, lane: int) -> None:
        self.lanes.wait(kind, lane, self.config.layer, self.operation(kind.phase))

    def verify(self, kind: ExchangeSignal, lane: int) -> None:
        """Raises, after reading, if the data have been overwritten."""
        self.lanes.verify(kind, lane, self.config.layer, self.operation(kind.phase))


class ExchangeDispatcher(WindowDispatcher):
    """Publishes tokens and results where all ranks read them."""

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
        self.signal(ExchangeSignal.TOKENS_READY, lane)
        return PendingTokens(lane, x, topk)

    def sum_results(self, lane: int, terms: Terms) -> Tensor:
        y_TH, foreign = self.exchange.collect(lane, terms, self.layout.moe_tp_size)
        self.note_combine(foreign)
        return y_TH
