"""The base of dispatchers that signal through a window."""

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
    lanes: Lanes
    """Shared by the layers that share buffers."""

    def signal(self, kind: ExchangeSignal, lane: int) -> None:
        self.lanes.signal(kind, lane, self.config.layer, self.operation(PHASES[kind]))

    def wait(self, kind: ExchangeSignal, lane: int) -> None:
        self.lanes.wait(kind, lane, self.config.layer, self.operation(PHASES[kind]))

    def verify(self, kind: ExchangeSignal, lane: int) -> None:
        """Raises, after reading, if the data have been overwritten."""
        self.lanes.verify(kind, lane, self.config.layer, self.operation(PHASES[kind]))
