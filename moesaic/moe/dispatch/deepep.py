"""`deepep`: normal mode sends a token once to each rank, low_latency once to each expert; auto is
normal in steps in which any rank prefills. On a GPU both send a token once to each rank, and differ
in how results come back (device/rows.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from moesaic.core.step import Step
from moesaic.moe.dispatch.base import BaseDispatcher, CommContext, DispatchConfig
from moesaic.moe.dispatch.device.rows import DeviceRowsDispatcher
from moesaic.moe.dispatch.host.low_latency import DeviceLowLatency, LowLatencyDispatcher
from moesaic.moe.dispatch.host.rows import Rounds, RowsDispatcher
from moesaic.moe.dispatch.local import device_provider
from moesaic.moe.dispatch.long_sequences import rounds_from_environment
from moesaic.moe.formats import (
    CombineInput,
    DispatchOutput,
    LowLatencyCombineInput,
    NormalDispatchOutput,
    TopKOutput,
)
from moesaic.moe.registry import UNQUANTIZED, A2aBackend, BufferSpec, Provider, register_a2a
from moesaic.observe.spans import Spans


class NormalDispatcher(RowsDispatcher):
    name = "deepep_normal"
    output = NormalDispatchOutput

    @classmethod
    def rounds_for(cls, config: DispatchConfig) -> Rounds:
        return rounds_from_environment(config)


class DeviceNormal(DeviceRowsDispatcher):
    name = "deepep_normal"
    output = NormalDispatchOutput

    def programs(self, phase: str) -> int:
        config = self.config
        return config.dispatch_programs if phase == "dispatch" else config.combine_programs


# A mode's dispatcher, and its handle.
Chosen = tuple[BaseDispatcher, Any]


class AutoDispatcher(BaseDispatcher):
    """Both modes; all ranks know the kind of the step."""

    name = "deepep"
    kinds: ClassVar[tuple[type[BaseDispatcher], type[BaseDispatcher]]] = (
        NormalDispatcher,
        LowLatencyDispatcher,
    )

    def __init__(self, config: DispatchConfig, comm: CommContext) -> None:
        super().__init__(config, comm)
        del comm.traffic[self.name]  # the two modes count and record themselves
        self.spans = Spans()
        self.normal, self.low_latency = (kind(config, comm) for kind in self.kinds)

    @classmethod
    def buffers(cls, config: DispatchConfig) -> Sequence[BufferSpec]:
        return [spec for kind in cls.kinds for spec in kind.buffers(config)]

    def set_global_scale(self, scale: float) -> None:
        for dispatcher in (self.normal, self.low_latency):
            dispatcher.set_global_scale(scale)

    def _dispatch_a(self, x_TH: Tensor, topk: TopKOutput, step: Step) -> Chosen:
        chosen = self.normal if step.prefill else self.low_latency
        return chosen, chosen.dispatch_a(x_TH, topk, step)

    def _dispatch_b(self, pending: Chosen) -> DispatchOutput:
        chosen, inner = pending
        return chosen.dispatch_b(inner)

    def _combine_a(self, results: CombineInput) -> Chosen:
        chosen = self._dispatched(results)
        return chosen, chosen.combine_a(results)

    def _dispatched(self, results: CombineInput) -> BaseDispatcher:
        fixed = isinstance(results, LowLatencyCombineInput)
        return self.low_latency if fixed else self.normal

    def _combine_b(self, pending: Chosen) -> Tensor:
        chosen, inner = pending
        return chosen.combine_b(inner)


class DeviceAuto(AutoDispatcher):
    """Works in graphs: each is captured for one kind of step."""

    kinds = (DeviceNormal, DeviceLowLatency)

    def _dispatched(self, results: CombineInput) -> BaseDispatcher:
        dispatcher: BaseDispatcher = results.handle.owner
        return dispatcher


DISPATCHERS: dict[str, type[BaseDispatcher]] = {
    "auto": AutoDispatcher,
    "normal": NormalDispatcher,
    "low_latency": LowLatencyDispatcher,
}
DEVICE_DISPATCHERS: dict[str, type[BaseDispatcher]] = {
    "auto": DeviceAuto,
    "normal": DeviceNormal,
    "low_latency": DeviceLowLatency,
}

DEEPEP = register_a2a(
    A2aBackend(
        name="deepep",
        summary="normal: a token once per rank; low_latency: once per expert, fixed shapes",
        formats={"normal": "deepep_normal", "low_latency": "deepep_ll"},
        payloads=(*UNQUANTIZED, "fp8", "int8", "nvfp4", "mxfp4"),
        providers={
            "cpu": Provider.choosing(lambda config: DISPATCHERS[config.mode]),
            "cuda": device_provider(
                lambda config: DEVICE_DISPATCHERS[config.mode],
                {"normal": "deepep_normal", "low_latency": "standard"},
            ),
        },
        modes_in_rounds=("normal",),
    )
)
