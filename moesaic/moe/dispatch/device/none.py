"""`none` on a GPU: an all-gather of tokens, or of nothing where all ranks have the same ones.

T tokens of this rank · K chosen · H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moesaic.core.step import Step
from moesaic.kernels.a2a import ChannelCall, signal, wait
from moesaic.kernels.quantise import quantise_rows
from moesaic.moe.dispatch.base import CommContext, DispatchConfig
from moesaic.moe.dispatch.device.exchange import RESULTS, ROWS, SECOND_RESULTS, DeviceExchangeSpec
from moesaic.moe.dispatch.device.rows import DeviceRoute, DeviceRowsDispatcher
from moesaic.moe.formats import (
    DispatchOutput,
    StandardDispatchOutput,
    TopKOutput,
)
from moesaic.moe.quant.payload import Payload


class DeviceGather(DeviceRowsDispatcher):
    """Tokens of all ranks to all ranks. Results are taken only from those that hold a token's
    experts: all others have zeros."""

    name = "none"
    everywhere = True


@dataclass(frozen=True, slots=True)
class ReplicatedRoute(DeviceRoute):
    """Rows of no rank: token t is row t, wherever it is. `half`: of the results. `meets`: whether
    all ranks meet before results are written."""

    half: int
    meets: bool


class DeviceReplicated(DeviceRowsDispatcher):
    """All ranks have the same tokens: nothing travels on the way in, and a token is row t of all.

    No token that arrives says that its rank has taken the last results, so results have two halves,
    which layers take in turn. Whoever writes the half of two layers ago has seen the results of the
    last layer of all ranks, which they gave after they had taken those of two layers ago. Each half
    has a channel of its own, for the same reason: a rank may give its next results before others
    have looked at its last ones. Where a pass over the layers begins (each knows its place, also
    while a graph is captured), ranks meet first: the last pass may have ended with the same half.
    """

    name = "none"

    def __init__(self, config: DispatchConfig, comm: CommContext) -> None:
        super().__init__(config, comm)
        self._place = self.exchange.register_layer()

    def _prepare(self) -> None:
        """Nothing arrives."""

    @classmethod
    def buffer_spec(cls, config: DispatchConfig) -> DeviceExchangeSpec:
        each = config.top_k if config.deterministic else 1
        return DeviceExchangeSpec(
            payload=config.payload.name,
            hidden_size=config.hidden_size,
            dtype=config.dtype,
            top_k=config.top_k,
            rows=0,
            result_rows=2 * cls.most_tokens(config) * each,
            weights=False,
            lanes=config.lanes,
        )

    def rows_of(self, count: int, step: Step) -> int:
        return super().rows_of(count, Step(rows=count))

    def _dispatch_a(self, x_TH: Tensor, topk: TopKOutput, step: Step) -> ReplicatedRoute:
        lane = step.lane
        self.rows_of(x_TH.shape[0], step)
        self.exchange.acquire(lane, self._name)
        meets = not self.exchange.follows(lane, self._place)
        if meets:
            signal(self._calls[lane][ROWS])
        return ReplicatedRoute(
            self, lane, 0, self._tokens(x_TH, topk, step), self._place % 2, meets
        )

    def _dispatch_b(self, route: DeviceRoute) -> DispatchOutput:
        assert isinstance(route, ReplicatedRoute)
        if route.meets:
            wait(self._calls[route.lane][ROWS])
        tokens = route.tokens
        return StandardDispatchOutput(
            route,
            self._encoded(tokens.x_TH),
            self.layout.local(tokens.ids_TK),
            tokens.weights_TK,
            **self._room(route, tokens.x_TH.shape[0]),
        )

    def _encoded(self, x_TH: Tensor) -> Payload:
        """There is a kernel for some formats; others are encoded by torch."""
        payload = self.config.payload
        if payload.name in ("fp8", "int8"):
            values = quantise_rows(x_TH, "fp8" if payload.name == "fp8" else "int8")
            return Payload(*values, payload)
        return self.config.encode(x_TH)

    def _first(self, route: DeviceRoute) -> int:
        assert isinstance(route, ReplicatedRoute)
        return route.half * (self.spec.result_rows // 2)

    def _given(self, route: DeviceRoute) -> ChannelCall:
        assert isinstance(route, ReplicatedRoute)
        return self._calls[route.lane][SECOND_RESULTS if route.half else RESULTS]
