"""`none`: every rank gets all tokens (all-gather) and returns a part of every result
(reduce-scatter). If all ranks hold the same tokens, only results travel (all-reduce)."""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.core.step import Step
from moesaic.kernels.cpu.rows import GatheredTokens, Terms
from moesaic.moe.dispatch.base import BaseDispatcher, DispatchConfig
from moesaic.moe.dispatch.device.none import DeviceGather, DeviceReplicated
from moesaic.moe.dispatch.host.exchange import ExchangeSignal, ExchangeSpec
from moesaic.moe.dispatch.host.rows import (
    Rounds,
    RoundsResult,
    RowsDispatcher,
    RowsRoute,
)
from moesaic.moe.dispatch.host.windowed import PendingTokens
from moesaic.moe.dispatch.local import LocalDispatcher, device_provider
from moesaic.moe.formats import (
    DispatchOutput,
    RowsCombineInput,
    TopKOutput,
)
from moesaic.moe.registry import UNQUANTIZED, A2aBackend, Provider, register_a2a


class StandardDispatcher(RowsDispatcher):
    """Tokens of all ranks to all ranks."""

    name = "none"
    everywhere = True


class ReplicatedDispatcher(StandardDispatcher):
    """The same tokens on all ranks. Results alternate between two halves of the buffer: no tokens
    arrive to show that the last results were read, but the next results do."""

    @classmethod
    def buffer_spec(cls, config: DispatchConfig, rounds: Rounds | None = None) -> ExchangeSpec:
        each = min(config.top_k, config.layout.slots_per_rank) if config.deterministic else 1
        return ExchangeSpec.of(config, tokens=1, result_rows=2 * config.max_tokens * each)

    def _dispatch_a(self, x_TH: Tensor, topk: TopKOutput, step: Step) -> PendingTokens:
        self.check_tokens(len(x_TH))
        pending = PendingTokens(step.lane, self.config.encode(x_TH), topk)
        self.exchange.acquire(step.lane, self.operation("dispatch"))
        return pending

    def _dispatch_b(self, pending: PendingTokens) -> DispatchOutput:
        topk, layout = pending.topk, self.layout
        plan = RoundsResult(self, pending)
        plan.route(
            GatheredTokens(
                ids_PCK=topk.ids_TK.int().unsqueeze(0),
                weights_PCK=topk.weights_TK.unsqueeze(0),
                counts=[len(pending.x)],
                rank=0,
                slots=layout.slots_per_rank,
                groups=layout.ep_size,
                group=layout.ep_rank,
            )
        )
        plan.x = pending.x
        plan.parts.append((self.layout.local(topk.ids_TK), topk.weights_TK))
        return plan.finish()

    def results(self, lane: int) -> Tensor | None:
        """The half is not known before combine."""
        return None

    def publish_results(self, results: RowsCombineInput, number: int) -> None:
        route: RowsRoute = results.handle
        half = self._half(route.lane, 0)
        target = self.exchange.results(route.lane)[half : half + len(results.y_RH)]
        target.copy_(results.y_RH)
        window = self.exchange.window
        window.touch(target)
        if window.link is not None:
            for rank in range(self.layout.size):
                window.link.carry(rank, target.nbytes)
        self.signal(ExchangeSignal.RESULTS_READY, route.lane)

    def collect(self, route: RowsRoute, number: int) -> Tensor:
        half = self._half(route.lane, 1)
        places_TS = torch.where(route.places_TS < 0, -1, route.places_TS + half)
        return self.sum_results(route.lane, Terms(route.owners_TS, places_TS, route.weights_TS))

    def _half(self, lane: int, since: int) -> int:
        number = self.exchange.count(ExchangeSignal.RESULTS_READY, lane) - since
        return number % 2 * (self.exchange.spec.result_rows // 2)


def host_dispatcher(config: DispatchConfig) -> type[BaseDispatcher]:
    if config.layout.size == 1:
        return LocalDispatcher
    return ReplicatedDispatcher if config.replicated else StandardDispatcher


NONE = register_a2a(
    A2aBackend(
        name="none",
        summary="all-gather of tokens, reduce-scatter or all-reduce of results",
        formats={"normal": "standard", "low_latency": "standard"},
        payloads=(*UNQUANTIZED, "fp8", "int8", "nvfp4", "mxfp4"),
        providers={
            "cpu": Provider.choosing(host_dispatcher),
            "cuda": device_provider(
                lambda config: DeviceReplicated if config.replicated else DeviceGather
            ),
        },
        takes_replicated=True,
    )
)
