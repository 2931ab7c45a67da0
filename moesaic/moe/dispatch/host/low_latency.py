"""Low latency: one copy for each pair of token and slot, in a fixed block of rows for each slot.

P ranks · C tokens of a rank at most · e local slots · M rows of a slot's block · N tokens of all
ranks · T of this one · K chosen · H hidden. The token's rank weights the results.

On a GPU a token travels once to each rank, not once to each slot: the first product gathers rows
anyway, and blocks would only be more bytes. The runner gets the format `standard`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.core.step import Step
from moesaic.kernels.cpu.rows import Terms, plan_pairs
from moesaic.moe.dispatch.base import CommContext, DispatchConfig
from moesaic.moe.dispatch.device.rows import DeviceRowsDispatcher
from moesaic.moe.dispatch.host.exchange import ExchangeSignal, ExchangeSpec
from moesaic.moe.dispatch.host.windowed import ExchangeDispatcher, PendingTokens
from moesaic.moe.formats import (
    CombineInput,
    LowLatencyCombineInput,
    LowLatencyDispatchOutput,
    TopKOutput,
)
from moesaic.moe.runner.host.grouped import SMALL_ROWS


@dataclass(frozen=True, slots=True)
class LowLatencyRoute:
    lane: int
    terms: Terms
    filled: list[int]
    rows_R: Tensor


class LowLatencyDispatcher(ExchangeDispatcher):
    name = "deepep_low_latency"
    by_pairs = True

    def __init__(self, config: DispatchConfig, comm: CommContext) -> None:
        super().__init__(config, comm)
        self.block = self.block_rows(config)

    @staticmethod
    def block_rows(config: DispatchConfig) -> int:
        """All tokens of all ranks, rounded up to whole tiles."""
        most = config.layout.size * config.max_decode_tokens
        return -(-most // SMALL_ROWS) * SMALL_ROWS

    @classmethod
    def buffer_spec(cls, config: DispatchConfig) -> ExchangeSpec:
        tokens, rows = config.max_decode_tokens, cls.block_rows(config)
        rows *= config.layout.slots_per_rank
        return ExchangeSpec.of(config, tokens=tokens, result_rows=rows, inbox_rows=rows)

    def _dispatch_a(self, x_TH: Tensor, topk: TopKOutput, step: Step) -> PendingTokens:
        most = self.config.max_decode_tokens
        if len(x_TH) > most:
            raise ValueError(
                f"{self.operation('dispatch')}: {len(x_TH)} tokens are more than the {most} that "
                f"a rank may bring in low_latency mode: use --deepep-mode auto or normal, or raise "
                f"--max-running-requests"
            )
        return self.publish(x_TH, topk, step.lane)

    def _dispatch_b(self, pending: PendingTokens) -> LowLatencyDispatchOutput:
        lane, layout = pending.lane, self.layout
        self.wait(ExchangeSignal.TOKENS_READY, lane)
        plan = plan_pairs(self.exchange.published(lane, layout))
        scale = self.config.global_scale
        x = self.exchange.copy_to_blocks(lane, plan.rows_R, plan.filled, scale)
        self.verify(ExchangeSignal.TOKENS_READY, lane)
        self.note_dispatch(len(plan.rows_R) - plan.own)
        ids_TK = pending.topk.ids_TK
        first_TK = ids_TK.remainder(layout.slots_per_rank) * self.block
        places_TK = torch.where(ids_TK < 0, -1, first_TK + plan.places_TK)
        terms = Terms(layout.owner(ids_TK), places_TK, pending.topk.weights_TK)
        y_eMH = self.exchange.results(lane).unflatten(0, (-1, self.block))
        return LowLatencyDispatchOutput(
            LowLatencyRoute(lane, terms, plan.filled, plan.rows_R), x, plan.filled, y_eMH
        )

    def _combine_a(self, results: CombineInput) -> LowLatencyRoute:
        assert isinstance(results, LowLatencyCombineInput)
        route: LowLatencyRoute = results.handle
        target = self.exchange.results(route.lane).unflatten(0, (-1, self.block))
        if results.y_eMH.data_ptr() != target.data_ptr():
            for slot, count in enumerate(route.filled):
                target[slot, :count] = results.y_eMH[slot, :count]
        starts = range(0, len(route.filled) * self.block, self.block)
        self.exchange.touch_results(route.lane, starts, route.rows_R.split(route.filled))
        self.signal(ExchangeSignal.RESULTS_READY, route.lane)
        return route

    def _combine_b(self, route: LowLatencyRoute) -> Tensor:
        self.wait(ExchangeSignal.RESULTS_READY, route.lane)
        y_TH = self.sum_results(route.lane, route.terms)
        self.verify(ExchangeSignal.RESULTS_READY, route.lane)
        self.lanes.release(route.lane)
        return y_TH


class DeviceLowLatency(DeviceRowsDispatcher):
    """Weights stay with the token; results come back by pairs."""

    name = "deepep_low_latency"
    pairs = True
    decodes = True
