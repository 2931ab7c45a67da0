"""`loop`: one expert after the other, two plain products each. Slow, short, and easy to check.

R rows received · K chosen · N valid pairs of row and slot · C rows of one slot · e local slots ·
H hidden · I intermediate · J = 2 * I.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.moe.formats import RowsCombineInput, StandardDispatchOutput
from moesaic.moe.permute import register_fused_func, register_post_permute, register_pre_permute
from moesaic.moe.registry import UNQUANTIZED, RunnerBackend, register_runner
from moesaic.moe.runner.base import (
    ExpertWeights,
    MoeRunnerCore,
    RunContext,
    RunnerInput,
    RunnerOutput,
    Workspace,
)
from moesaic.moe.runner.host.layouts import weighted_sum

PIECE = 32  # deterministic mode multiplies exactly this many rows at a time


@dataclass(frozen=True)
class LoopInput(RunnerInput):
    """One row for each pair, in the order of rows and k, and its slot."""

    x_NH: Tensor
    slots_N: Tensor


@dataclass(frozen=True)
class LoopOutput(RunnerOutput):
    """`y`: one row for each pair, not weighted."""


class LoopCore(MoeRunnerCore):
    def run(self, inputs: RunnerInput, weights: ExpertWeights, workspace: Workspace) -> LoopOutput:
        assert isinstance(inputs, LoopInput)
        y_NH = torch.empty_like(inputs.x_NH)
        for slot in inputs.slots_N.unique().tolist():
            pairs = (inputs.slots_N == slot).nonzero().squeeze(1)
            y_NH[pairs] = self.expert(slot, inputs.x_NH[pairs], weights)
        return LoopOutput(y_NH)

    def expert(self, slot: int, x_CH: Tensor, weights: ExpertWeights) -> Tensor:
        """down(activation(gate(x), up(x))) of one slot's rows."""
        gate_up_CJ = self._linear(x_CH, weights.w13_eJH.dense(slot))
        if weights.b13_eJ is not None:
            gate_up_CJ += weights.b13_eJ[slot]
        inner_CI = self.config.activation(*gate_up_CJ.chunk(2, dim=-1))
        y_CH = self._linear(inner_CI, weights.w2_eHI.dense(slot))
        if weights.b2_eH is not None:
            y_CH += weights.b2_eH[slot]
        return y_CH

    def _linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """In deterministic mode in pieces of one shape: torch picks other kernels for other
        numbers of rows, and their bits differ."""
        if not self.config.deterministic:
            return F.linear(x, weight)
        padded = F.pad(x, (0, 0, 0, -len(x) % PIECE))
        return torch.cat([F.linear(piece, weight) for piece in padded.split(PIECE)])[: len(x)]


register_runner(
    RunnerBackend(
        name="loop",
        summary="one expert after the other; for reading and checking",
        layouts={"standard": "pairs", "deepep_normal": "pairs"},
        weights=(*UNQUANTIZED, "int8_w8a16", "int4_w4a16", "mxfp4"),
        payloads=(*UNQUANTIZED, "fp8", "int8", "nvfp4", "mxfp4"),
        providers={"cpu": LoopCore},
    )
)


@register_pre_permute("standard", "loop")
@register_pre_permute("deepep_normal", "loop")
def pre_permute(rows: StandardDispatchOutput, context: RunContext) -> LoopInput:
    """A copy of each row for each of its experts here; what was sent quantised is decoded."""
    valid_RK = rows.ids_RK >= 0
    x_RH = rows.x.dense(context.config.dtype)
    return LoopInput(x_RH[valid_RK.nonzero()[:, 0]], rows.ids_RK[valid_RK])


@register_post_permute("loop", "standard")
@register_post_permute("loop", "deepep_normal")
def post_permute(
    outputs: RunnerOutput, inputs: LoopInput, rows: StandardDispatchOutput, context: RunContext
) -> RowsCombineInput:
    """One weighted row for each received row. In deterministic mode pairs return unsummed: the rank
    that owns the token adds them in the order of k."""
    if context.config.deterministic:
        return RowsCombineInput(rows.handle, outputs.y, pairs=True)
    places_N = torch.arange(len(outputs.y))
    y_RH = weighted_sum(outputs.y, places_N, rows.weights_RK, rows.ids_RK >= 0)
    return RowsCombineInput(rows.handle, y_RH)


@register_fused_func("none", "loop")
def fused(rows: StandardDispatchOutput, context: RunContext) -> RowsCombineInput:
    """Takes the place of both permutes and the core where `none` brings the rows: nothing is copied
    for a row's second expert; each expert takes its rows and adds its results to theirs."""
    core = context.core
    assert isinstance(core, LoopCore)
    if context.config.deterministic:  # the order of experts is not that of k
        inputs = pre_permute(rows, context)
        outputs = core.run(inputs, context.weights, context.workspace)
        return post_permute(outputs, inputs, rows, context)
    x_RH = rows.x.dense(context.config.dtype)
    y_RH = torch.zeros(x_RH.shape, dtype=torch.float32)
    for slot in rows.ids_RK[rows.ids_RK >= 0].unique().tolist():
        row_C, k_C = (rows.ids_RK == slot).nonzero(as_tuple=True)
        y_CH = core.expert(slot, x_RH[row_C], context.weights)
        y_RH.index_add_(0, row_C, y_CH * rows.weights_RK[row_C, k_C].unsqueeze(1))
    return RowsCombineInput(rows.handle, y_RH.to(x_RH.dtype))
