"""The experts by `torch._grouped_mm`, which is CUTLASS in PyTorch: unquantised bfloat16 on a GPU.

R rows · K chosen · N = R * K pairs · P = N places of the sorted order · H hidden · I intermediate.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from moesaic.kernels.experts import Groups, gather_remote
from moesaic.moe.runner.base import ExpertWeights, RunnerInput, RunnerOutput, Workspace
from moesaic.moe.runner.device.sorted_pairs import SortedPairsCore, SortedPairsInput

ALIGNED = 8
HOPPER = (9, 0)


class TorchGroupedCore(SortedPairsCore):
    """Copies rows in the order of experts, multiplies them and copies the results back. Only sorted
    pairs in bfloat16 qualify; our own kernels take the rest, single rows (unsorted) and
    deterministic mode (CUTLASS chooses tiles by the number of rows)."""

    provider: ClassVar[str] = "torch._grouped_mm for bf16, native for the rest"

    def run(
        self, inputs: RunnerInput, weights: ExpertWeights, workspace: Workspace
    ) -> RunnerOutput:
        assert isinstance(inputs, SortedPairsInput)
        w13, w2 = weights.w13_eJH.plain, weights.w2_eHI.plain
        groups = inputs.groups
        order_P = None if groups.ids_K is not None or groups.fixed else groups.order_P
        if w13 is None or w2 is None or order_P is None or not fits(w13, w2, len(order_P)):
            return super().run(inputs, weights, workspace)
        sorted_ = SortedPlaces(groups, order_P)
        x_PH = gather_remote(inputs.x).values.index_select(0, sorted_.pair_P // groups.top_k)
        gate_up = sorted_.product(x_PH, w13, weights.b13_eJ)
        h_PI = self.config.activation(*gate_up.chunk(2, dim=-1)).contiguous()
        y_PH = sorted_.product(h_PI, w2, weights.b2_eH)
        if inputs.weights_RK is not None:
            y_PH = y_PH * inputs.weights_RK.flatten()[sorted_.pair_P].unsqueeze(1)
        inputs.y_NH.copy_(y_PH.index_select(0, sorted_.places()))
        return RunnerOutput(inputs.y_NH)


def fits(w13_eJH: Tensor, w2_eHI: Tensor, places: int) -> bool:
    """Rows of 16 bytes; before Hopper torch would wait for the device and multiply one by one."""
    aligned = w13_eJH.shape[2] % ALIGNED == 0 and w2_eHI.shape[2] % ALIGNED == 0
    able = not w13_eJH.is_cuda or torch.cuda.get_device_capability(w13_eJH.device) >= HOPPER
    return places > 0 and w13_eJH.dtype == torch.bfloat16 and aligned and able


class SortedPlaces:
    """Places in the order of experts; those past the last valid one read pair 0, for no reader."""

    def __init__(self, groups: Groups, order_P: Tensor) -> None:
        self.order_P = order_P
        self.ends_E = groups.first_E + groups.count_E
        self.place_P = torch.arange(len(order_P), device=order_P.device)
        self.valid_P = self.place_P < self.ends_E[-1]
        self.pair_P = torch.where(self.valid_P, order_P, 0).long()

    def product(self, x_PK: Tensor, w_ENK: Tensor, bias_EN: Tensor | None) -> Tensor:
        y_PN: Tensor = torch._grouped_mm(x_PK, w_ENK.transpose(1, 2), offs=self.ends_E)
        if bias_EN is None:
            return y_PN
        expert_P = torch.searchsorted(self.ends_E, self.place_P.int(), right=True)
        return y_PN + bias_EN[expert_P.clamp(max=len(bias_EN) - 1)]

    def places(self) -> Tensor:
        """The place of each pair; arbitrary for invalid pairs."""
        count = len(self.order_P)
        place_N = torch.zeros(count + 1, dtype=torch.int64, device=self.order_P.device)
        to_P = torch.where(self.valid_P, self.order_P, count).long()
        return place_N.scatter_(0, to_P, self.place_P)[:count]
