"""`none` on a GPU: an all-gather of tokens, or of nothing where all ranks have the same ones.

T tokens of this rank · K chosen · H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from moesaic.core.step import Step
from moesaic.kernels.a2a import ChannelCall, signal, wait
from moesaic.kernels.link import NO_LOAD, LinkLoad
from moesaic.moe.dispatch.base import CommContext, DispatchConfig
from moesaic.moe.dispatch.device.exchange import RESULTS, ROWS, SECOND_RESULTS, DeviceExchangeSpec
from moesaic.moe.dispatch.device.payload_rows import encoded_rows
from moesaic.moe.dispatch.device.rows import DeviceRoute, DeviceRowsDispatcher
from moesaic.moe.formats import DispatchOutput, StandardDispatchOutput, TopKOutput


class DeviceGather(DeviceRowsDispatcher):
    """All tokens go to all ranks; results are read only from ranks with a token's experts."""

    name = "none"
    everywhere = True


@dataclass(frozen=True, slots=True)
class ReplicatedRoute(DeviceRoute):
    """Token t is row t on all ranks."""

    meets: bool = False
    """Whether all ranks meet before results are written."""


class DeviceReplicated(DeviceRowsDispatcher):
    """All ranks have the same tokens: dispatch sends nothing, and token t is row t on all ranks.

    No arriving token shows that its rank has read the last results, so results have two halves,
    which layers use in turn. A rank that writes the half of two layers ago has seen all ranks'
    results of the last layer, which they wrote after reading those of two layers ago. For the same
    reason each half has its own channel: a rank may write its next results before others have read
    its last ones. At the start of a pass over the layers (each layer knows its number, also in a
    graph capture), ranks meet first: the last pass may have ended with the same half.
    """

    name = "none"

    def __init__(self, config: DispatchConfig, comm: CommContext) -> None:
        super().__init__(config, comm)
        self._place = self.exchange.register_layer()
        self._half = self._place % 2

    def _prepare(self) -> None:
        """Nothing arrives: there is no inbox."""

    @classmethod
    def buffer_spec(cls, config: DispatchConfig) -> DeviceExchangeSpec:
        each = config.top_k if config.deterministic else 1
        return DeviceExchangeSpec.of(
            config,
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
        tokens, overlaps = self._tokens(x_TH, topk, step), self._overlaps(step)
        return ReplicatedRoute(self, lane, 0, tokens, overlaps, meets=meets)

    def _dispatch_b(self, route: DeviceRoute) -> DispatchOutput:
        assert isinstance(route, ReplicatedRoute)
        if route.meets:
            wait(self._calls[route.lane][ROWS])
        tokens = route.tokens
        return StandardDispatchOutput(
            route,
            encoded_rows(self.config, tokens.x_TH),
            self.layout.local(tokens.ids_TK),
            tokens.weights_TK,
            **self._room(route.lane, tokens.x_TH.shape[0]),
        )

    def _first(self) -> int:
        return self._half * (self.spec.result_rows // 2)

    def _load(self, lane: int) -> LinkLoad:
        """No rows came that could be counted: `_given` knows the most that a step can send."""
        return NO_LOAD

    def _given(self, route: DeviceRoute) -> ChannelCall:
        call = self._calls[route.lane][SECOND_RESULTS if self._half else RESULTS]
        if self.comm.link is None:
            return call
        config, rows = self.config, route.tokens.x_TH.shape[0]
        if self.by_pairs:
            rows = -(-rows * config.top_k // config.layout.ep_size)
        nbytes = rows * config.hidden_size * config.dtype.itemsize
        return replace(call, load=LinkLoad(fixed=nbytes))
