"""`ascend_fuseep`: one function from dispatch to combine. The vendor's serves decode steps only;
here buffers follow the largest step, so that prefill goes through it as well.

Nothing is copied in between: the gather of the first product reads the other ranks' tokens in
place, the last product writes where the tokens' ranks read, and that read sums.

On a GPU a rank keeps its rows in its own memory, in the activation format of the weights, and sends
only ids; the first product gathers rows from all ranks (kernels/triton/experts_remote_rows.py), and
combine applies the weights. Rows are copied first if there are too many to read them again for
every column of tiles, or if no kernel reads their format (weights below eight bits, and int8).

Why a rank may overwrite its rows in the lane's next step: by then it has its results, after a wait
for the flags of all ranks, including those without any of its tokens; a rank raises that flag after
the last product, when it has read all rows and ids. For results see host/exchange.py.

N tokens of all ranks · T of this one · K chosen · H hidden · Y rows of the runner's layout.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moesaic.core.step import Step
from moesaic.kernels.a2a import LocalTokens
from moesaic.kernels.cpu.rows import PairPlan, Terms, plan_pairs
from moesaic.kernels.experts import RemoteRows
from moesaic.kernels.payloads import PLAIN
from moesaic.moe.backends import load_runners
from moesaic.moe.dispatch.base import BaseDispatcher, CommContext, DispatchConfig
from moesaic.moe.dispatch.device.exchange import DeviceExchangeSpec
from moesaic.moe.dispatch.device.rows import DeviceRoute
from moesaic.moe.dispatch.host.exchange import ExchangeSignal, ExchangeSpec
from moesaic.moe.dispatch.host.low_latency import DeviceLowLatency
from moesaic.moe.dispatch.host.windowed import ExchangeDispatcher
from moesaic.moe.dispatch.local import LocalDeviceDispatcher
from moesaic.moe.formats import (
    CombineInput,
    FusedCombineInput,
    FusedDispatchOutput,
    StandardDispatchOutput,
    TopKOutput,
)
from moesaic.moe.permute import register_fused_func
from moesaic.moe.registry import RUNNER_REGISTRY, UNQUANTIZED, A2aBackend, Provider, register_a2a
from moesaic.moe.runner.base import RunContext
from moesaic.moe.runner.device.sorted_pairs import post_permute_pairs, pre_permute_pairs
from moesaic.moe.runner.host.grouped import SMALL_ROWS
from moesaic.moe.runner.host.layouts import GroupedInput, LayoutPlan, plan_standard


@dataclass(frozen=True, slots=True)
class FusedPending:
    lane: int
    dispatcher: FuseEPDispatcher


class FusedDispatcher(BaseDispatcher):
    """Dispatch and combine hand over; the fused function between them does the rest."""

    name = "ascend_fuseep"

    def _dispatch_b(self, pending: FusedDispatchOutput) -> FusedDispatchOutput:
        return pending

    def _combine_a(self, results: CombineInput) -> FusedCombineInput:
        assert isinstance(results, FusedCombineInput)
        return results

    def _combine_b(self, pending: FusedCombineInput) -> Tensor:
        return pending.y_TH


class FuseEPDispatcher(FusedDispatcher, ExchangeDispatcher):
    by_pairs = True

    @classmethod
    def buffer_spec(cls, config: DispatchConfig) -> ExchangeSpec:
        """Every slot's rows are padded by less than a tile."""
        layout = config.layout
        pairs = layout.size * config.max_decode_tokens * min(config.top_k, layout.slots_per_rank)
        return ExchangeSpec.of(
            config,
            tokens=config.max_decode_tokens,
            result_rows=pairs + SMALL_ROWS * layout.slots_per_rank,
            bases=layout.slots_per_rank,
        )

    def _dispatch_a(self, x_TH: Tensor, topk: TopKOutput, step: Step) -> FusedDispatchOutput:
        if len(x_TH) > self.config.max_decode_tokens:
            raise ValueError(
                f"{self.operation('dispatch')}: {len(x_TH)} tokens are more than the "
                f"{self.config.max_decode_tokens} that there is room for: raise "
                f"--max-running-requests or --chunked-prefill-size"
            )
        self.publish(x_TH, topk, step.lane)
        return FusedDispatchOutput(FusedPending(step.lane, self), x_TH, topk)

    def compute(self, lane: int, plan: PairPlan, context: RunContext) -> None:
        """Runs local experts on all ranks' tokens; results go where the tokens' ranks read."""
        config, exchange = context.config, self.exchange
        places = plan_standard(plan.filled, config.rounding)
        x_YH = context.workspace.borrow("x", (places.total, config.hidden_size), config.dtype)
        if places.total:
            source_Y = spread_rows(plan.rows_R, plan.filled, places)
            values = exchange.flat("values", lane)
            if values.dtype == x_YH.dtype:
                torch.index_select(values, 0, source_Y, out=x_YH)
            else:
                x_YH.copy_(values.index_select(0, source_Y))
        y_YH = exchange.results(lane)[: places.total]
        inputs = GroupedInput(x_YH, places.groups, None, False, y_YH)
        context.core.run(inputs, context.weights, context.workspace)
        exchange.touch_results(lane, places.bases, plan.rows_R.split(plan.filled))
        bases = exchange.window.plane("bases")[lane]
        bases.copy_(torch.tensor(places.bases))
        exchange.window.touch(bases)
        self.verify(ExchangeSignal.TOKENS_READY, lane)
        self.signal(ExchangeSignal.RESULTS_READY, lane)
        self.note_dispatch(len(plan.rows_R) - plan.own)

    def reduce(self, lane: int, plan: PairPlan, topk: TopKOutput) -> Tensor:
        exchange, layout = self.exchange, self.layout
        self.wait(ExchangeSignal.RESULTS_READY, lane)
        # Ranks of a group lay out its results in the same order.
        bases = exchange.window.stacked("bases")[:: layout.moe_tp_size, lane].flatten()
        first_TK = bases[topk.ids_TK.clamp(min=0)]
        places_TK = torch.where(topk.ids_TK < 0, -1, first_TK + plan.places_TK)
        terms = Terms(layout.owner(topk.ids_TK), places_TK, topk.weights_TK)
        y_TH = self.sum_results(lane, terms)
        self.verify(ExchangeSignal.RESULTS_READY, lane)
        return y_TH

    def _combine_b(self, pending: FusedCombineInput) -> Tensor:
        handle: FusedPending = pending.handle
        self.lanes.release(handle.lane)
        return super()._combine_b(pending)


def fused_moe(rows: FusedDispatchOutput, context: RunContext) -> FusedCombineInput:
    """Dispatch, experts and combine in one."""
    handle: FusedPending = rows.handle
    dispatcher = handle.dispatcher
    begin = time.monotonic_ns()
    dispatcher.wait(ExchangeSignal.TOKENS_READY, handle.lane)
    plan = plan_pairs(dispatcher.exchange.published(handle.lane, dispatcher.layout))
    dispatcher.note_dispatch_time(begin, dispatcher.traffic.dispatch_bytes)
    dispatcher.compute(handle.lane, plan, context)
    begin, before = time.monotonic_ns(), dispatcher.traffic.combine_bytes
    y_TH = dispatcher.reduce(handle.lane, plan, rows.topk)
    dispatcher.note_combine_time(begin, before, len(y_TH))
    return FusedCombineInput(handle, y_TH, plan.filled)


# Formats that the first product reads from remote memory instead of the model's type.
REMOTE_PAYLOADS = ("fp8",)
PLAIN_NAMES = {dtype: name for name, dtype in PLAIN.items()}


class DeviceFusedRows(DeviceLowLatency):
    """Transfers ids and results for the fused function; rows stay on their ranks."""

    name = "ascend_fuseep"

    @classmethod
    def buffer_spec(cls, config: DispatchConfig) -> DeviceExchangeSpec:
        """Readers would quantise the rows to the same bits."""
        kept = config.activation
        return replace(
            super().buffer_spec(config),
            payload=kept if kept in REMOTE_PAYLOADS else PLAIN_NAMES[config.dtype],
            home_rows=cls.most_tokens(config),
        )

    def _tokens(self, x_TH: Tensor, topk: TopKOutput, step: Step) -> LocalTokens:
        """Rounded as the payload would round them."""
        rounded_TH = x_TH.to(PLAIN[self.config.payload.name]).to(self.config.dtype)
        return super()._tokens(rounded_TH, topk, step)

    def _dispatch_b(self, route: DeviceRoute) -> StandardDispatchOutput:
        ids = super()._dispatch_b(route)
        assert isinstance(ids, StandardDispatchOutput)
        inbox, signals = self._inboxes[route.lane], self.exchange.window.signals
        return replace(ids, remote=RemoteRows(signals, route.rows, inbox.values, inbox.scales))


@dataclass(frozen=True, slots=True)
class DevicePending:
    dispatcher: DeviceFuseEP
    sent: Any
    """The handle of `dispatcher.rows`."""


class DeviceFuseEP(FusedDispatcher):
    def __init__(self, config: DispatchConfig, comm: CommContext) -> None:
        super().__init__(config, comm)
        alone = config.layout.size == 1
        self.rows: BaseDispatcher = (LocalDeviceDispatcher if alone else DeviceFusedRows)(
            config, comm
        )

    @classmethod
    def buffer_spec(cls, config: DispatchConfig) -> DeviceExchangeSpec | None:
        return None if config.layout.size == 1 else DeviceFusedRows.buffer_spec(config)

    def _dispatch_a(self, x_TH: Tensor, topk: TopKOutput, step: Step) -> FusedDispatchOutput:
        sent = self.rows._dispatch_a(x_TH, topk, step)
        return FusedDispatchOutput(DevicePending(self, sent), x_TH, topk)


def fused_moe_on_device(rows: FusedDispatchOutput, context: RunContext) -> FusedCombineInput:
    pending: DevicePending = rows.handle
    inner = pending.dispatcher.rows
    received = inner._dispatch_b(pending.sent)
    assert isinstance(received, StandardDispatchOutput)
    inputs = pre_permute_pairs(received, context)
    outputs = context.core.run(inputs, context.weights, context.workspace)
    results = post_permute_pairs(outputs, inputs, received, context)
    y_TH = inner._combine_b(inner._combine_a(results))
    return FusedCombineInput(pending, y_TH, count_e=results.count_e)


def spread_rows(rows_R: Tensor, filled: list[int], places: LayoutPlan) -> Tensor:
    """Rows slot after slot, at the places of their slots; padding repeats the first."""
    if places.total == len(rows_R):
        return rows_R
    source_Y = rows_R[:1].repeat(places.total)
    for base, rows in zip(places.bases, rows_R.split(filled), strict=True):
        source_Y[base : base + len(rows)] = rows
    return source_Y


ASCEND_FUSEEP = register_a2a(
    A2aBackend(
        name="ascend_fuseep",
        summary="one fused function from dispatch to combine",
        formats={"low_latency": "fused"},
        payloads=UNQUANTIZED,
        providers={
            "cpu": Provider(FuseEPDispatcher, FuseEPDispatcher.buffers),
            "cuda": Provider(DeviceFuseEP, DeviceFuseEP.buffers, local=True),
        },
    )
)


# This module may be imported before the runners.
load_runners()
for runner in RUNNER_REGISTRY.values():
    if "fused" in runner.layouts:
        register_fused_func(ASCEND_FUSEEP.name, runner.name)(fused_moe)
        register_fused_func(ASCEND_FUSEEP.name, runner.name, "cuda")(fused_moe_on_device)
