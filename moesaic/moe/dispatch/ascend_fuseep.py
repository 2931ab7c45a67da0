"""`ascend_fuseep`: one function from dispatch to combine, for decode steps.

Nothing is copied in between: the gather in front of the first product reads the other ranks' tokens
where they lie, the last product writes where their owners read, and the reading adds up.

N tokens of all ranks · T of this one · K chosen · H hidden · Y rows of the runner's layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.core.step import Step
from moesaic.moe.dispatch.base import BaseDispatcher, CommContext, DispatchConfig
from moesaic.moe.dispatch.exchange import Exchange, ExchangeSpec, Offers, Signal, Wanted
from moesaic.moe.formats import CombineInput, FusedCombineInput, FusedDispatchOutput, TopKOutput
from moesaic.moe.permute import register_fused_func
from moesaic.moe.registry import RUNNER_REGISTRY, UNQUANTIZED, A2aBackend, register_a2a
from moesaic.moe.runner.base import RunContext
from moesaic.moe.runner.grouped import SMALL_ROWS
from moesaic.moe.runner.layouts import StandardInput, pair_up, place_pairs, standard_places


@dataclass(frozen=True, slots=True)
class Pending:
    lane: int
    dispatcher: FuseEPDispatcher


class FuseEPDispatcher(BaseDispatcher):
    name = "ascend_fuseep"

    def __init__(self, config: DispatchConfig, comm: CommContext) -> None:
        super().__init__(config, comm)
        self.layout = config.layout
        self.exchange = Exchange.shared(self.buffer_spec(config), comm)

    @classmethod
    def buffer_spec(cls, config: DispatchConfig) -> ExchangeSpec:
        """Every slot's rows are padded by less than a tile."""
        layout = config.layout
        pairs = layout.size * config.max_decode_tokens * min(config.top_k, layout.slots_per_rank)
        return ExchangeSpec(
            payload=config.payload.name,
            hidden_size=config.hidden_size,
            dtype=config.dtype,
            top_k=config.top_k,
            tokens=config.max_decode_tokens,
            result_rows=pairs + SMALL_ROWS * layout.slots_per_rank,
            told_pairs=layout.size * config.max_decode_tokens * config.top_k,
        )

    def _dispatch_a(self, x_TH: Tensor, topk: TopKOutput, step: Step) -> FusedDispatchOutput:
        if len(x_TH) > self.config.max_decode_tokens:
            raise ValueError(
                f"{self.operation('dispatch')}: {len(x_TH)} tokens are more than the "
                f"{self.config.max_decode_tokens} of a decode step: use --moe-a2a-backend deepep "
                f"for prefill, or raise --max-running-requests"
            )
        operation = self.operation("dispatch")
        self.exchange.begin(step.lane, operation)
        x = self.config.encode(x_TH)
        self.exchange.offer(step.lane, x, topk, slice(None), operation)
        return FusedDispatchOutput(Pending(step.lane, self), x_TH, topk)

    def _dispatch_b(self, pending: FusedDispatchOutput) -> FusedDispatchOutput:
        return pending

    def compute(self, lane: int, offers: Offers, context: RunContext) -> None:
        """Local experts on everybody's tokens; results and their places are left for the owners."""
        config, exchange = context.config, self.exchange
        slots_N, rows_N, valid_NK = pair_up(self.layout.local(offers.ids_NK))
        places_N, places = place_pairs(
            slots_N, config.num_experts, standard_places, config.rounding
        )
        first = offers.rows_N[:1] if len(offers.rows_N) else torch.zeros(1, dtype=torch.int64)
        source_Y = first.repeat(places.total).index_copy_(0, places_N, offers.rows_N[rows_N])
        x_YH = context.workspace.take("x", (places.total, config.hidden_size), config.dtype)
        values = exchange.flat("values")
        if values.dtype != config.dtype:
            x_YH.copy_(values.index_select(0, source_Y))
        elif places.total:
            torch.index_select(values, 0, source_Y, out=x_YH)
        y_YH = exchange.results(lane)[: places.total]
        inputs = StandardInput(x_YH, places.groups, None, False, y_YH)
        context.core.run(inputs, context.weights, context.workspace)
        told = torch.full((offers.ids_NK.numel(),), -1, dtype=torch.int32)
        which = slice(None) if valid_NK is None else valid_NK.flatten()
        told[which] = places_N.int()
        exchange.window.plane("places")[lane][: len(told)] = told
        own = (rows_N >= offers.own.start) & (rows_N < offers.own.stop)
        self.note_dispatch(len(rows_N) - int(own.sum()))
        exchange.signal(Signal.RESULTS, lane, self.operation("combine"))

    def reduce(self, lane: int, offers: Offers, topk: TopKOutput) -> Tensor:
        exchange = self.exchange
        exchange.wait(Signal.RESULTS, lane, self.operation("combine"))
        owners_TK = self.layout.owner(topk.ids_TK).clamp(min=0)
        width = self.layout.moe_tp_size
        pairs_TK = torch.arange(offers.own.start, offers.own.stop).unsqueeze(1)
        pairs_TK = pairs_TK * self.config.top_k + torch.arange(self.config.top_k)
        told = exchange.window.stacked("places")[::width, lane]
        places_TK = torch.where(topk.ids_TK < 0, -1, told[owners_TK, pairs_TK].long())
        wanted = Wanted(owners_TK, places_TK, topk.weights_TK)
        y_TH, foreign = exchange.collect(lane, wanted, width)
        self.note_combine(foreign)
        return y_TH

    def _combine_a(self, results: CombineInput) -> FusedCombineInput:
        assert isinstance(results, FusedCombineInput)
        return results

    def _combine_b(self, pending: FusedCombineInput) -> Tensor:
        handle: Pending = pending.handle
        self.exchange.end(handle.lane)
        return pending.y_TH


def fused_moe(rows: FusedDispatchOutput, context: RunContext) -> FusedCombineInput:
    """Dispatch, experts and combine in one."""
    handle: Pending = rows.handle
    dispatcher = handle.dispatcher
    offers = dispatcher.exchange.offers(handle.lane, dispatcher.operation("dispatch"))
    dispatcher.compute(handle.lane, offers, context)
    return FusedCombineInput(handle, dispatcher.reduce(handle.lane, offers, rows.topk))


ASCEND_FUSEEP = register_a2a(
    A2aBackend(
        name="ascend_fuseep",
        summary="one fused function from dispatch to combine",
        formats={"low_latency": "fused"},
        payloads=UNQUANTIZED,
        phases=("decode",),
        providers={"cpu": FuseEPDispatcher},
        buffers=lambda config: (FuseEPDispatcher.buffer_spec(config),),
    )
)


for runner in RUNNER_REGISTRY.values():
    if "fused" in runner.layouts:
        register_fused_func(ASCEND_FUSEEP.name, runner.name)(fused_moe)
