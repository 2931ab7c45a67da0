"""Low latency: one copy for each pair of token and slot, in a fixed block of rows for each slot.

P ranks · C tokens of a rank at most · e local slots · M rows of a slot's block · N tokens of all
ranks · T of this one · K chosen · H hidden. Results are weighted where the token lives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.core.step import Step
from moesaic.moe.dispatch.base import BaseDispatcher, CommContext, DispatchConfig
from moesaic.moe.dispatch.exchange import Exchange, ExchangeSpec, Offers, Signal, Wanted
from moesaic.moe.formats import (
    CombineInput,
    LowLatencyCombineInput,
    LowLatencyDispatchOutput,
    TopKOutput,
)
from moesaic.moe.quant.payload import Payload
from moesaic.moe.runner.grouped import SMALL_ROWS


@dataclass(frozen=True, slots=True)
class Pending:
    lane: int
    topk: TopKOutput


@dataclass(frozen=True, slots=True)
class Route:
    lane: int
    wanted: Wanted


class LowLatencyDispatcher(BaseDispatcher):
    name = "deepep_low_latency"

    def __init__(self, config: DispatchConfig, comm: CommContext) -> None:
        super().__init__(config, comm)
        self.layout = config.layout
        self.block = self.block_rows(config)
        self.exchange = Exchange.shared(self.buffer_spec(config), comm)

    @staticmethod
    def block_rows(config: DispatchConfig) -> int:
        """Every rank may send all its tokens to one slot; blocks are whole tiles."""
        most = config.layout.size * config.max_decode_tokens
        return -(-most // SMALL_ROWS) * SMALL_ROWS

    @classmethod
    def buffer_spec(cls, config: DispatchConfig) -> ExchangeSpec:
        return ExchangeSpec(
            payload=config.payload.name,
            hidden_size=config.hidden_size,
            dtype=config.dtype,
            top_k=config.top_k,
            tokens=config.max_decode_tokens,
            result_rows=config.layout.slots_per_rank * cls.block_rows(config),
            inbox_rows=config.layout.slots_per_rank * cls.block_rows(config),
        )

    def _dispatch_a(self, x_TH: Tensor, topk: TopKOutput, step: Step) -> Pending:
        most = self.config.max_decode_tokens
        if len(x_TH) > most:
            raise ValueError(
                f"{self.operation('dispatch')}: {len(x_TH)} tokens are more than the {most} that "
                f"a rank may bring in low_latency mode: use --deepep-mode auto or normal, or raise "
                f"--max-running-requests"
            )
        operation = self.operation("dispatch")
        self.exchange.begin(step.lane, operation)
        x = self.config.encode(x_TH)
        self.exchange.offer(step.lane, x, topk, slice(None), operation)
        return Pending(step.lane, topk)

    def _dispatch_b(self, pending: Pending) -> LowLatencyDispatchOutput:
        lane = pending.lane
        offers = self.exchange.offers(lane, self.operation("dispatch"))
        x, masked_m = self._take(offers, lane)
        route = self._route(offers, pending)
        y_eMH = self.exchange.results(lane).unflatten(0, (-1, self.block))
        return LowLatencyDispatchOutput(route, x, masked_m, y_eMH)

    def _take(self, offers: Offers, lane: int) -> tuple[Payload, list[int]]:
        """Copies the rows of each local slot into its block, in the order of ranks and tokens."""
        slots = self.layout.slots_per_rank
        local = self.layout.local(offers.ids_NK).flatten()
        pairs = (local >= 0).nonzero().squeeze(1)
        order = pairs[local[pairs].argsort(stable=True)]
        rows = offers.rows_N[order // offers.ids_NK.shape[1]]
        counts: list[int] = torch.bincount(local[pairs], minlength=slots).tolist()
        x = self.exchange.take_blocks(lane, rows, counts, self.config.global_scale)
        width = offers.ids_NK.shape[1]
        own = slice(offers.own.start * width, offers.own.stop * width)
        self.note_dispatch(len(rows) - int((local[own] >= 0).sum()))
        return x, counts

    def _route(self, offers: Offers, pending: Pending) -> Route:
        """Rows of a slot lie in the order of ranks and tokens: those of lower ranks come first."""
        num_slots, own = self.layout.num_slots, offers.own
        ids_NK = offers.ids_NK
        before = ids_NK[: own.start].flatten()
        base_E = torch.bincount(before[before >= 0], minlength=num_slots)
        ids_TK = ids_NK[own]
        flat = ids_TK.flatten()
        places = rank_within(flat) + base_E[flat.clamp(min=0)]
        places += flat % self.layout.slots_per_rank * self.block
        owners_TK = self.layout.owner(ids_TK).clamp(min=0)
        places_TK = torch.where(ids_TK < 0, -1, places.view_as(ids_TK))
        return Route(pending.lane, Wanted(owners_TK, places_TK, pending.topk.weights_TK))

    def _combine_a(self, results: CombineInput) -> Route:
        assert isinstance(results, LowLatencyCombineInput)
        route: Route = results.handle
        target = self.exchange.results(route.lane).unflatten(0, (-1, self.block))
        if results.y_eMH.data_ptr() != target.data_ptr():
            target.copy_(results.y_eMH)
        self.exchange.signal(Signal.RESULTS, route.lane, self.operation("combine"))
        return route

    def _combine_b(self, route: Route) -> Tensor:
        self.exchange.wait(Signal.RESULTS, route.lane, self.operation("combine"))
        wanted = self.reachable(route.wanted)
        y_TH, foreign = self.exchange.collect(route.lane, wanted, self.layout.moe_tp_size)
        self.note_combine(foreign)
        self.exchange.end(route.lane)
        return y_TH

    def reachable(self, wanted: Wanted) -> Wanted:
        """What can be had of the results."""
        return wanted


def rank_within(keys: Tensor) -> Tensor:
    """How many equal keys stand before each: [5, 3, 5, 5] -> [0, 0, 1, 2]."""
    order = keys.argsort(stable=True)
    ordered = keys[order]
    first = torch.searchsorted(ordered, ordered)
    return torch.empty_like(order).index_copy_(0, order, torch.arange(len(keys)) - first)
