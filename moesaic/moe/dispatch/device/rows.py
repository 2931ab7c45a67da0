"""Dispatchers on a GPU: kernels write rows straight into the memory of the ranks that compute them.

P ranks · C rows of a rank in a step · T tokens of this rank · K chosen · R = P * C rows · N = R * K
pairs · H hidden.

Dispatch sends a token once to each rank that holds one of its slots, with ids that are local there;
the runner finds the rows of each slot on the device. Results come back in one of two forms:

    by rows     the expert's rank weights and sums the pairs of a row; the token's rank adds up one
                row of each rank. Fewest bytes where a rank holds several of a token's experts.
    by pairs    the token's rank weights and sums all pairs in the order of k. No kernel in between,
                and bits do not depend on which experts share a rank: deterministic mode uses it.

Where a step overlaps, a lane's transfers run on a side stream: `dispatch_a` launches the send and
the wait for the rows of all ranks, `combine_a` the wait for the results and their sum; the halves
behind them let the step's stream wait for that. Elsewhere the halves run back to back: the kernel
that sends also waits, and the one that waits for results also signals.

The host counts nothing and waits for nothing, and no shape depends on what was chosen: a step can
be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from moesaic.core.overlap import Overlap
from moesaic.core.step import Step
from moesaic.kernels.a2a import (
    ChannelCall,
    LocalTokens,
    ResultPlane,
    SlotOwners,
    collect_pairs,
    collect_rows,
    receive,
    send,
    signal,
)
from moesaic.kernels.link import NO_LOAD, LinkLoad
from moesaic.moe.dispatch.base import BaseDispatcher, CommContext, DispatchConfig
from moesaic.moe.dispatch.device.exchange import (
    CHANNELS,
    RESULTS,
    ROWS,
    DeviceExchange,
    DeviceExchangeSpec,
)
from moesaic.moe.formats import (
    CombineInput,
    DispatchOutput,
    RowsCombineInput,
    StandardDispatchOutput,
    TopKOutput,
)

PHASES = ("dispatch", "combine", "combine")
assert len(PHASES) == CHANNELS


@dataclass(frozen=True, slots=True)
class DeviceRoute:
    """Token t of this rank p is row p * `rows` + t of the ranks that compute it."""

    owner: DeviceRowsDispatcher
    lane: int
    rows: int
    tokens: LocalTokens
    overlaps: bool = False
    """Whether other work runs between the halves."""
    y_TH: Tensor | None = None
    """The result, where the side stream makes it."""


class DeviceRowsDispatcher(BaseDispatcher):
    pairs: ClassVar[bool] = False
    """Results come back by pairs, also without deterministic mode."""
    weights_travel: ClassVar[bool] = False
    """Weights travel with the rows, also if the token's rank applies them."""
    everywhere: ClassVar[bool] = False
    """All tokens go to all ranks."""
    decodes: ClassVar[bool] = False
    """Buffers hold decode steps only."""

    def __init__(self, config: DispatchConfig, comm: CommContext) -> None:
        super().__init__(config, comm)
        layout, self.spec = config.layout, self.buffer_spec(config)
        self.exchange = comm.shared(self.spec, lambda: DeviceExchange(self.spec, comm))
        self.sides = self.exchange.sides
        self.by_pairs = self.pairs or config.deterministic
        self.spread = SlotOwners(layout.slots_per_rank, layout.moe_tp_size)
        self._sent = SlotOwners(layout.slots_per_rank, layout.moe_tp_size, self.everywhere)
        self._calls = [
            [
                replace(
                    self.exchange.call(kind, lane, self.operation(phase), config.layer),
                    programs=self.programs(phase),
                    load=self._load(lane) if phase == "combine" else NO_LOAD,
                )
                for kind, phase in enumerate(PHASES)
            ]
            for lane in range(config.lanes)
        ]
        self._name = self.operation("dispatch")
        self._prepare()

    def _load(self, lane: int) -> LinkLoad:
        """What results take of an emulated link."""
        if self.comm.link is None:
            return NO_LOAD
        unit = self.config.hidden_size * self.config.dtype.itemsize
        return LinkLoad(0, unit, self.exchange.channel(ROWS, lane), self.by_pairs)

    def programs(self, phase: str) -> int:
        """The most programs of a phase's kernels; 0: no limit."""
        return 0

    def _prepare(self) -> None:
        scale = self.config.global_scale
        self._inboxes = [self.exchange.inbox(lane, scale) for lane in range(self.config.lanes)]

    @classmethod
    def most_tokens(cls, config: DispatchConfig) -> int:
        return config.max_decode_tokens if cls.decodes else config.max_tokens

    @classmethod
    def buffer_spec(cls, config: DispatchConfig) -> DeviceExchangeSpec:
        rows = config.layout.size * cls.most_tokens(config)
        by_pairs = cls.pairs or config.deterministic
        return DeviceExchangeSpec.of(
            config,
            rows=rows,
            result_rows=rows * (config.top_k if by_pairs else 1),
            weights=cls.weights_travel or not by_pairs,
            lanes=config.lanes,
        )

    def set_global_scale(self, scale: float) -> None:
        super().set_global_scale(scale)
        self._prepare()

    def rows_of(self, count: int, step: Step) -> int:
        """C, equal on all ranks and at least one: a kernel needs a row."""
        agreed = step.rows or max(step.counts, default=0)
        rows = agreed or (count if self.layout.size == 1 else 0)
        most = self.most_tokens(self.config)
        if count > rows:
            raise ValueError(
                f"{self.operation('dispatch')}: {count} tokens are more than the {rows} rows of a "
                f"rank in this step: give Step.rows, the most of any rank, the same on all"
            )
        if rows > most:
            raise ValueError(
                f"{self.operation('dispatch')}: {rows} tokens of a rank are more than the {most} "
                f"that the buffers were made for: raise "
                f"{'--max-running-requests' if self.decodes else '--chunked-prefill-size'}"
            )
        return max(1, rows)

    def _dispatch_a(self, x_TH: Tensor, topk: TopKOutput, step: Step) -> DeviceRoute:
        rows = self.rows_of(x_TH.shape[0], step)
        self.exchange.acquire(step.lane, self._name)
        tokens = self._tokens(x_TH, topk, step)
        inbox, call = self._inboxes[step.lane], self._calls[step.lane][ROWS]
        route = DeviceRoute(self, step.lane, rows, tokens, self._overlaps(step))
        if not route.overlaps:
            send(tokens, rows, inbox, self._sent, call, receives=True)
            return route
        with self.sides.beside(step.lane):
            send(tokens, rows, inbox, self._sent, call)
            if self.sides.exist:  # else the host would wait
                self._receive(route)
        return route

    def _overlaps(self, step: Step) -> bool:
        return step.overlap != Overlap.OFF

    def _receive(self, route: DeviceRoute) -> None:
        inbox, call = self._inboxes[route.lane], self._calls[route.lane][ROWS]
        receive(call, route.rows, self.config.top_k, inbox.ids)

    def _tokens(self, x_TH: Tensor, topk: TopKOutput, step: Step) -> LocalTokens:
        ids_TK, weights_TK = topk.ids_TK.int().contiguous(), topk.weights_TK.contiguous()
        return LocalTokens(x_TH.contiguous(), ids_TK, weights_TK, step.num_tokens_1)

    def _dispatch_b(self, route: DeviceRoute) -> DispatchOutput:
        exchange, lane = self.exchange, route.lane
        if route.overlaps:
            self.sides.join(lane)
            if not self.sides.exist:
                self._receive(route)
        rows = self.layout.size * route.rows
        arrived = exchange.arrived(lane, rows, self.config.global_scale)
        return self.output(route, *arrived, **self._room(lane, rows))

    def _room(self, lane: int, rows: int) -> dict[str, Any]:
        """The buffer for the results of `rows` rows, and how many pairs the runner may expect."""
        pairs, groups = rows * self.config.top_k, self.layout.ep_size
        expected = None if groups == 1 else -(-pairs // groups)
        if self.by_pairs:
            return {"y_NH": self._target(lane, pairs), "expected_pairs": expected}
        return {"y_OH": self._target(lane, rows), "expected_pairs": expected}

    output: ClassVar[Callable[..., DispatchOutput]] = StandardDispatchOutput
    """Makes the dispatch output of the backend's format."""

    def _combine_a(self, results: CombineInput) -> DeviceRoute:
        assert isinstance(results, RowsCombineInput) and results.pairs == self.by_pairs
        route: DeviceRoute = results.handle
        target_RH = self._target(route.lane, results.y_RH.shape[0])
        if results.y_RH.data_ptr() != target_RH.data_ptr():  # such as a hook's results
            target_RH.copy_(results.y_RH)
        if not route.overlaps:
            return route
        y_TH = self._empty(route)
        with self.sides.beside(route.lane):
            signal(self._given(route))
            if self.sides.exist:
                self._collect(route, y_TH)
        return replace(route, y_TH=y_TH)

    def _target(self, lane: int, rows: int) -> Tensor:
        """The buffer for this many of this rank's results."""
        return self.exchange.results(lane, self._first(), rows)

    def _first(self) -> int:
        """The first row of the results."""
        return 0

    def _given(self, route: DeviceRoute) -> ChannelCall:
        """The channel that signals the results."""
        return self._calls[route.lane][RESULTS]

    def _combine_b(self, route: DeviceRoute) -> Tensor:
        y_TH = self._empty(route) if route.y_TH is None else route.y_TH
        if route.overlaps and self.sides.exist:
            self.sides.join(route.lane)
        else:
            self._collect(route, y_TH)
        self.exchange.release(route.lane)
        return y_TH

    def _empty(self, route: DeviceRoute) -> Tensor:
        return torch.empty_like(route.tokens.x_TH, dtype=self.config.dtype)

    def _collect(self, route: DeviceRoute, y_TH: Tensor) -> None:
        """Padding rows give zeros; with `num_tokens_1` the kernel would leave them unwritten."""
        tokens = route.tokens
        if tokens.num_tokens_1 is not None:
            tokens = replace(tokens, num_tokens_1=None)
        first = self._first() * self.config.hidden_size * self.config.dtype.itemsize
        offset = self.exchange.window.offset(f"results {route.lane}") + first
        results = ResultPlane(route.rows, offset, self.spread)
        collect = collect_pairs if self.by_pairs else collect_rows
        collect(y_TH, tokens, results, self._given(route), not route.overlaps)
