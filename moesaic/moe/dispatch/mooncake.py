"""`mooncake`: the low-latency layout for ranks that may fail.

The supervisor gives all ranks the same list of active ranks. Inactive ranks are not awaited and not
read, and pairs of their experts add nothing. PeerTimeout names a rank that is late; after agreeing
on a new list, the remaining ranks call `resume` with the same new number and redo the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moesaic.comm.lifecycle import Membership
from moesaic.core.step import Step
from moesaic.kernels.a2a import LocalTokens
from moesaic.moe.dispatch.host.low_latency import DeviceLowLatency, LowLatencyDispatcher
from moesaic.moe.dispatch.local import device_provider
from moesaic.moe.formats import TopKOutput
from moesaic.moe.registry import UNQUANTIZED, A2aBackend, Provider, register_a2a


class Resumable:
    exchange: Any
    """An `InFlight` of ranks on CPU or on GPUs."""

    @property
    def active_ranks(self) -> list[int]:
        return list(self.exchange.active)

    def resume(self, active_ranks: Sequence[int], generation: int) -> None:
        """Continues with these ranks; `generation` is higher than any before."""
        self.exchange.restart(Membership(generation, tuple(active_ranks)))


class MooncakeDispatcher(LowLatencyDispatcher, Resumable):
    name = "mooncake"


class DeviceMooncake(DeviceLowLatency, Resumable):
    """The kernels skip inactive ranks; slots of an incomplete group are not used."""

    name = "mooncake"

    def _tokens(self, x_TH: Tensor, topk: TopKOutput, step: Step) -> LocalTokens:
        if self.layout.moe_tp_size > 1:
            whole_G = self.exchange.active_P.view(self.layout.ep_size, -1).all(1)
            owners_TK = self.layout.owner(topk.ids_TK).clamp(min=0).long()
            ids_TK = torch.where(whole_G[owners_TK], topk.ids_TK, -1)
            topk = TopKOutput(ids_TK, topk.weights_TK)
        return super()._tokens(x_TH, topk, step)


register_a2a(
    A2aBackend(
        name="mooncake",
        summary="low_latency with a list of active ranks: the others are neither awaited nor used",
        formats={"low_latency": "deepep_ll"},
        payloads=(*UNQUANTIZED, "fp8", "int8", "nvfp4", "mxfp4"),
        providers={
            "cpu": Provider(MooncakeDispatcher, MooncakeDispatcher.buffers),
            "cuda": device_provider(lambda config: DeviceMooncake, {"low_latency": "standard"}),
        },
    )
)
