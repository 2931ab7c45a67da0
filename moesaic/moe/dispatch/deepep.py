"""`deepep`: normal mode sends a token once to each rank, low_latency once to each expert; auto is
normal in steps in which any rank prefills."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moesaic.core.step import Step
from moesaic.moe.dispatch.base import BaseDispatcher, CommContext, DispatchConfig
from moesaic.moe.dispatch.exchange import ExchangeSpec
from moesaic.moe.dispatch.long_sequences import rounds_from_environment
from moesaic.moe.dispatch.low_latency import LowLatencyDispatcher
from moesaic.moe.dispatch.rows import Rounds, Route, RowsDispatcher
from moesaic.moe.formats import (
    CombineInput,
    DispatchOutput,
    LowLatencyCombineInput,
    NormalDispatchOutput,
    TopKOutput,
)
from moesaic.moe.quant.payload import Payload
from moesaic.moe.registry import UNQUANTIZED, A2aBackend, register_a2a
from moesaic.observe.spans import Spans


class NormalDispatcher(RowsDispatcher):
    name = "deepep_normal"

    def __init__(
        self, config: DispatchConfig, comm: CommContext, rounds: Rounds | None = None
    ) -> None:
        super().__init__(config, comm, rounds or rounds_from_environment(config))

    def output(
        self, x: Payload, ids_RK: Tensor, weights_RK: Tensor, route: Route
    ) -> DispatchOutput:
        slots = self.layout.slots_per_rank
        rows_e: list[int] = (ids_RK.flatten() + 1).bincount(minlength=slots + 1)[1:].tolist()
        y_OH = self.results(route.lane)
        return NormalDispatchOutput(route, x, ids_RK, weights_RK, rows_e, y_OH=y_OH)


class AutoDispatcher(BaseDispatcher):
    """Both modes; ranks agree because a step's kind is agreed."""

    name = "deepep"
    keeps_lanes = True

    def __init__(self, config: DispatchConfig, comm: CommContext) -> None:
        super().__init__(config, comm)
        del comm.traffic[self.name]  # the two count for themselves, and record
        self.spans = Spans()
        self.normal = NormalDispatcher(config, comm)
        self.low_latency = LowLatencyDispatcher(config, comm)

    def restart(self, generation: int) -> None:
        for dispatcher in (self.normal, self.low_latency):
            dispatcher.restart(generation)

    def set_global_scale(self, scale: float) -> None:
        for dispatcher in (self.normal, self.low_latency):
            dispatcher.set_global_scale(scale)

    def _dispatch_a(self, x_TH: Tensor, topk: TopKOutput, step: Step) -> Any:
        chosen = self.normal if step.prefill else self.low_latency
        return chosen, chosen.dispatch_a(x_TH, topk, step)

    def _dispatch_b(self, pending: Any) -> DispatchOutput:
        chosen, inner = pending
        output: DispatchOutput = chosen.dispatch_b(inner)
        return output

    def _combine_a(self, results: CombineInput) -> Any:
        fixed = isinstance(results, LowLatencyCombineInput)
        chosen = self.low_latency if fixed else self.normal
        return chosen, chosen.combine_a(results)

    def _combine_b(self, pending: Any) -> Tensor:
        chosen, inner = pending
        y_TH: Tensor = chosen.combine_b(inner)
        return y_TH


DISPATCHERS = {
    "auto": AutoDispatcher,
    "normal": NormalDispatcher,
    "low_latency": LowLatencyDispatcher,
}


def make_deepep(config: DispatchConfig, comm: CommContext) -> BaseDispatcher:
    return DISPATCHERS[config.mode](config, comm)


def normal_buffers(config: DispatchConfig) -> tuple[ExchangeSpec, ...]:
    return (NormalDispatcher.buffer_spec(config, rounds_from_environment(config)),)


def deepep_buffers(config: DispatchConfig) -> tuple[ExchangeSpec, ...]:
    low_latency = (LowLatencyDispatcher.buffer_spec(config),)
    return {
        "auto": normal_buffers(config) + low_latency,
        "normal": normal_buffers(config),
        "low_latency": low_latency,
    }[config.mode]


DEEPEP = register_a2a(
    A2aBackend(
        name="deepep",
        summary="normal: a token once per rank; low_latency: once per expert, fixed shapes",
        formats={"normal": "deepep_normal", "low_latency": "deepep_ll"},
        payloads=(*UNQUANTIZED, "fp8", "int8", "nvfp4", "mxfp4"),
        providers={"cpu": make_deepep},
        buffers=deepep_buffers,
        rounds=True,
    )
)
