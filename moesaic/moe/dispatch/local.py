"""One rank: nothing is sent. On a GPU this serves all backends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from moesaic.core.step import Step
from moesaic.kernels.experts import PairSum, weigh_pairs
from moesaic.moe.dispatch.base import BaseDispatcher, DispatchConfig
from moesaic.moe.dispatch.device.payload_rows import encoded_rows
from moesaic.moe.formats import (
    CombineInput,
    DeferredCombineInput,
    RowsCombineInput,
    StandardDispatchOutput,
    TopKOutput,
)
from moesaic.moe.registry import Provider
from moesaic.moe.runner.host.layouts import weighted_sum

Choose = Callable[[DispatchConfig], type[BaseDispatcher]]


class LocalDispatcher(BaseDispatcher):
    name = "none"

    def _dispatch_a(self, x_TH: Tensor, topk: TopKOutput, step: Step) -> StandardDispatchOutput:
        return StandardDispatchOutput(topk, self.config.encode(x_TH), topk.ids_TK, topk.weights_TK)

    def _dispatch_b(self, pending: StandardDispatchOutput) -> StandardDispatchOutput:
        return pending

    def _combine_a(self, results: CombineInput) -> RowsCombineInput:
        assert isinstance(results, RowsCombineInput)
        return results

    def _combine_b(self, pending: RowsCombineInput) -> Tensor:
        if not pending.pairs:
            return pending.y_RH
        topk: TopKOutput = pending.handle
        valid_TK = topk.ids_TK >= 0
        return weighted_sum(
            pending.y_RH, torch.arange(len(pending.y_RH)), topk.weights_TK, valid_TK
        )


class LocalDeviceDispatcher(LocalDispatcher):
    """One rank on a GPU: invalid pairs have rows, too."""

    def _dispatch_a(self, x_TH: Tensor, topk: TopKOutput, step: Step) -> StandardDispatchOutput:
        rows = encoded_rows(self.config, x_TH)
        return StandardDispatchOutput(topk, rows, topk.ids_TK, topk.weights_TK)

    @property
    def defers_reduce(self) -> bool:
        return not any(self._hooks.values())

    def _combine_a(self, results: CombineInput) -> Any:
        assert isinstance(results, RowsCombineInput | DeferredCombineInput)
        return results

    def _combine_b(self, pending: RowsCombineInput | DeferredCombineInput) -> Any:
        """A `PairSum` where the reduce is deferred, else a tensor."""
        topk: TopKOutput = pending.handle
        if isinstance(pending, DeferredCombineInput):
            return PairSum(pending.y_NH, topk.ids_TK)
        if not pending.pairs:
            return pending.y_RH
        y_NH = pending.y_RH
        out_TH = y_NH.new_empty(len(topk.ids_TK), y_NH.shape[1])
        return weigh_pairs(y_NH, topk.ids_TK, topk.weights_TK, out_TH)


def device_provider(choose: Choose, formats: Mapping[str, str] | None = None) -> Provider:
    """A backend on a GPU: `choose` gives the dispatcher of several ranks."""
    return Provider.choosing(
        lambda config: LocalDeviceDispatcher if config.layout.size == 1 else choose(config),
        formats,
        local=True,
    )
