"""What dispatchers that signal through a window have in common."""

from __future__ import annotations

from moesaic.moe.dispatch.base import BaseDispatcher
from moesaic.moe.dispatch.host.exchange import ExchangeSignal, Lanes

PHASES = {
    ExchangeSignal.TOKENS_READY: "dispatch",
    ExchangeSignal.TOKENS_READ: "dispatch",
    ExchangeSignal.RESULTS_READY: "combine",
    ExchangeSignal.RESULTS_READ: "combine",
}


class WindowDispatcher(BaseDispatcher):
    """`lanes` is shared by the layers that share buffers."""

    lanes: Lanes

    def signal(self, kind: ExchangeSignal, lane: int) -> None:
        self.lanes.signal(kind, lane, self.config.layer, self.operation(PHASES[kind]))

    def wait(self, kind: ExchangeSignal, lane: int) -> None:
        self.lanes.wait(kind, lane, self.config.layer, self.operation(PHASES[kind]))

    def verify(self, kind: ExchangeSignal, lane: int) -> None:
        """After reading: what was read is what was waited for."""
        self.lanes.verify(kind, lane, self.config.layer, self.operation(PHASES[kind]))
