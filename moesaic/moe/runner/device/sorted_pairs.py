"""The experts on a GPU: permutes of its one layout, and the products.

R rows received · K chosen · N = R * K pairs of row and slot · e local slots · H hidden ·
I intermediate · P places · M rows of a slot's block.

Pairs are sorted by slot, but rows stay where they are: the first product gathers them, the last one
scatters the results. Only the device knows how many rows a slot has; the host never waits for it,
and no shape depends on it. On CPU tensors the torch twins of the kernels compute the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moesaic.kernels.cpu.experts import SwigluSpec
from moesaic.kernels.experts import (
    FeedForward,
    Groups,
    Matrices,
    RemoteRows,
    Rows,
    blocks,
    down,
    down_row,
    gate_up,
    gate_up_down,
    gather_remote,
    group_pairs,
    sort_pairs,
    sum_pairs,
)
from moesaic.kernels.formats import nvfp4_grid
from moesaic.kernels.quantise import FP8_GROUP, quantise_rows
from moesaic.kernels.tuning import (
    FP8_WEIGHT_ONLY,
    ExpertsShape,
    block_for,
    plan_for,
    plan_for_block,
    quantises_inner,
)
from moesaic.moe.formats import (
    CombineInput,
    DeferredCombineInput,
    LowLatencyCombineInput,
    LowLatencyDispatchOutput,
    RowsCombineInput,
    StandardDispatchOutput,
)
from moesaic.moe.quant.payload import PAYLOAD_FORMATS, Payload
from moesaic.moe.quant.weights import ExpertMatrix, WeightFormat
from moesaic.moe.runner.base import (
    ExpertWeights,
    MoeRunnerConfig,
    MoeRunnerCore,
    RunContext,
    RunnerInput,
    RunnerOutput,
    Workspace,
)
from moesaic.moe.runner.host.layouts import flat_blocks

# Rows of a block in deterministic mode.
FIXED_BLOCK = 16


@dataclass(frozen=True)
class SortedPairsInput(RunnerInput):
    x: Rows
    groups: Groups
    weights_RK: Tensor | None
    """Given if the last product applies them."""
    y_NH: Tensor
    """The buffer for results."""


def pre_permute_pairs(rows: StandardDispatchOutput, context: RunContext) -> SortedPairsInput:
    """Rows with ids, int32 or int64."""
    config, ids_RK = context.config, rows.ids_RK
    if rows.remote is None:
        x, groups = rows_for_weights(rows.x, context), _grouped(rows, context)
    else:
        groups = _grouped(rows, context)
        x = _gathered(rows, rows.remote, groups, context)
    if rows.y_NH is not None:
        return SortedPairsInput(x, groups, None, rows.y_NH)
    weights_RK = None if config.deterministic else rows.weights_RK
    if _sums_row(groups, context.weights) or _is_sum(rows, context):
        return SortedPairsInput(x, groups, weights_RK, _results(rows, context))
    shape = (ids_RK.numel(), config.hidden_size)
    y_NH = torch.empty(shape, dtype=config.dtype, device=ids_RK.device)
    return SortedPairsInput(x, groups, weights_RK, y_NH)


def _grouped(rows: StandardDispatchOutput, context: RunContext) -> Groups:
    """Sorts pairs into blocks sized for the expected number. The products sort and sum the pairs of
    a single row themselves, if they are summed here."""
    config, ids_RK = context.config, rows.ids_RK
    if config.deterministic:
        groups = sort_pairs(ids_RK, config.num_experts, FIXED_BLOCK, context.load_e)
        return replace(groups, fixed=True)
    w2 = matrices(context.weights.w2_eHI, None)
    if rows.y_NH is None and (rows.expected_pairs is None or len(ids_RK) == 1):
        return group_pairs(ids_RK, w2, context.load_e)
    expected = ids_RK.numel() if rows.expected_pairs is None else rows.expected_pairs
    block = block_for(w2.format, *w2.shape, expected, ids_RK.device)
    groups = sort_pairs(ids_RK, config.num_experts, block, context.load_e)
    return replace(groups, expected=expected)


def _gathered(
    rows: StandardDispatchOutput, remote: RemoteRows, groups: Groups, context: RunContext
) -> Rows:
    """Remote rows stay on their ranks if the first product reads their format and a slot has few:
    every column of tiles reads them again. Else, and in deterministic mode, they are copied."""
    x, weights = rows.x, context.weights
    activation, dtype = weights.w13_eJH.format.activation, context.config.dtype
    readable = x.format.name == activation or (activation is None and x.values.dtype == dtype)
    sizes = (_shape(context.config, weights), groups.planned_places, groups.block)
    plan = plan_for_block(rows.ids_RK.device, *sizes)
    if readable and not groups.fixed and plan.implementation == "small":
        return replace(rows_for_weights(x, context), remote=remote)
    here = gather_remote(Rows(x.values, x.scales, remote=remote))
    return rows_for_weights(replace(x, values=here.values, scales=here.scales), context)


def _is_sum(rows: StandardDispatchOutput, context: RunContext) -> bool:
    """Whether a row's only pair is its result: products write it straight to the output."""
    return rows.ids_RK.shape[1] == 1 and not context.config.deterministic


def _sums_row(groups: Groups, weights: ExpertWeights) -> bool:
    """Whether the last product of a single row sums its pairs, which in fp8 would be slower."""
    plain = weights.w2_eHI.format.activation is None
    return groups.ids_K is not None and groups.top_k > 1 and plain


def _results(rows: StandardDispatchOutput, context: RunContext) -> Tensor:
    """The buffer for one result per row."""
    num_rows, config = len(rows.ids_RK), context.config
    if rows.y_OH is not None and num_rows <= len(rows.y_OH):
        return rows.y_OH[:num_rows]
    shape = (num_rows, config.hidden_size)
    return torch.empty(shape, dtype=config.dtype, device=rows.ids_RK.device)


def post_permute_pairs(
    outputs: RunnerOutput,
    inputs: SortedPairsInput,
    rows: StandardDispatchOutput,
    context: RunContext,
) -> CombineInput:
    """A weighted sum for each row, or all pairs: on request and in deterministic mode."""
    count_e = inputs.groups.count_E
    if context.config.deterministic or rows.y_NH is not None:
        return RowsCombineInput(rows.handle, outputs.y, pairs=True, count_e=count_e)
    if _sums_row(inputs.groups, context.weights):
        return RowsCombineInput(rows.handle, outputs.y, count_e=count_e)
    is_sum = _is_sum(rows, context)
    if context.defers_reduce and not is_sum:
        return DeferredCombineInput(rows.handle, outputs.y, count_e=count_e)
    out_RH = outputs.y if is_sum else _results(rows, context)
    if len(rows.ids_RK):
        sum_pairs(outputs.y, rows.ids_RK, out_RH)
    return RowsCombineInput(rows.handle, out_RH, count_e=count_e)


def pre_permute_masked(rows: LowLatencyDispatchOutput, context: RunContext) -> SortedPairsInput:
    """The rows of the blocks are places already."""
    count_e = rows.count_e
    if count_e is None:
        count_e = torch.tensor(rows.masked_m, dtype=torch.int32, device=rows.y_eMH.device)
    y_NH = rows.y_eMH.flatten(0, 1)
    shape, fixed = _shape(context.config, context.weights), context.config.deterministic
    x = rows_for_weights(flat_blocks(rows.x), context)
    block = FIXED_BLOCK if fixed else plan_for(y_NH.device, shape, len(y_NH)).block
    groups = blocks(count_e, rows.y_eMH.shape[1], block, context.load_e)
    return SortedPairsInput(x, replace(groups, fixed=fixed), None, y_NH)


def post_permute_masked(
    outputs: RunnerOutput,
    inputs: SortedPairsInput,
    rows: LowLatencyDispatchOutput,
    context: RunContext,
) -> CombineInput:
    """The results are in the dispatcher's buffer; combine weights them."""
    return LowLatencyCombineInput(rows.handle, rows.y_eMH, count_e=inputs.groups.count_E)


def _shape(config: MoeRunnerConfig, weights: ExpertWeights) -> ExpertsShape:
    format = kernel_format(weights.w13_eJH.format)
    return ExpertsShape(format, config.num_experts, config.hidden_size, config.intermediate_size)


def rows_for_weights(x: Payload, context: RunContext) -> Rows:
    """Rows in the weights' activation format, as sent if that is it; products quantise to fp8."""
    weights, config = context.weights, context.config
    activation = weights.w13_eJH.format.activation
    if x.format.name != activation:
        x_RH = x.dense(config.dtype)
        return Rows(x_RH) if activation == "fp8" else on_grid(x_RH, activation, weights.input_scale)
    if not x.format.has_global_scale:
        return Rows(x.values, x.scales)
    assert x.scales is not None
    values = torch.empty(x.shape, dtype=config.dtype, device=x.values.device)
    x.format.at(1.0).decode([x.values, x.scales], values)
    return Rows(values, scale=x.global_scale)


def on_grid(x_TH: Tensor, activation: str | None, scale: float) -> Rows:
    """Rows in the payload format that the weights are multiplied with."""
    if activation is None:
        return Rows(x_TH)
    if PAYLOAD_FORMATS[activation].has_global_scale:
        return Rows(nvfp4_grid(x_TH, scale), scale=scale)
    return Rows(*quantise_rows(x_TH, "int8" if activation == "int8" else "fp8"))


def kernel_format(format: WeightFormat) -> str:
    """The kernels' name of a format; weights with unquantised activations have other names."""
    return format.name if format.activation else FP8_WEIGHT_ONLY.get(format.name, format.name)


def matrices(matrix: ExpertMatrix, bias: Tensor | None) -> Matrices:
    name, group = kernel_format(matrix.format), matrix.format.group_size
    return Matrices(name, matrix.planes, matrix.shape, matrix.parts, bias, group)


class SortedPairsCore(MoeRunnerCore):
    """Both products and the activation between them, on sorted pairs."""

    def __init__(self, config: MoeRunnerConfig) -> None:
        super().__init__(config)
        if not isinstance(config.activation, SwigluSpec):
            raise ValueError(
                f"activation {config.activation} has no kernel on a GPU: take a Swiglu, or "
                f"--device cpu"
            )
        self.activation: SwigluSpec = config.activation
        self._made: tuple[ExpertWeights, FeedForward] | None = None

    def run(
        self, inputs: RunnerInput, weights: ExpertWeights, workspace: Workspace
    ) -> RunnerOutput:
        assert isinstance(inputs, SortedPairsInput)
        groups = inputs.groups
        if groups.num_places == 0:
            return RunnerOutput(inputs.y_NH)
        experts = self._experts(weights)
        if _sums_row(groups, weights):
            return RunnerOutput(self._run_row(inputs, experts))
        h, ready = self._inner(groups, weights, inputs.y_NH.device)
        if ready:
            y_NH = gate_up_down(inputs.x, experts, groups, inputs.weights_RK, h, inputs.y_NH)
            return RunnerOutput(y_NH)
        gate_up(inputs.x, experts.w13, groups, self.activation, h)
        h = on_grid(h.values, weights.w2_eHI.format.activation, weights.inner_scale)
        return RunnerOutput(down(h, experts.w2, groups, inputs.weights_RK, inputs.y_NH))

    def _run_row(self, inputs: SortedPairsInput, experts: FeedForward) -> Tensor:
        groups, config = inputs.groups, self.config
        assert groups.ids_K is not None and inputs.weights_RK is not None
        shape = (groups.num_places, config.intermediate_size)
        h = Rows(torch.empty(shape, dtype=config.dtype, device=inputs.y_NH.device))
        gate_up(inputs.x, experts.w13, groups, self.activation, h)
        return down_row(h, experts.w2, groups.ids_K, inputs.weights_RK, inputs.y_NH)

    def _experts(self, weights: ExpertWeights) -> FeedForward:
        if self._made is None or self._made[0] is not weights:
            w13 = matrices(weights.w13_eJH, weights.b13_eJ)
            w2 = matrices(weights.w2_eHI, weights.b2_eH)
            self._made = weights, FeedForward(w13, w2, self.activation)
        return self._made[1]

    def _inner(
        self, groups: Groups, weights: ExpertWeights, device: torch.device
    ) -> tuple[Rows, bool]:
        """The buffer between the products, and whether the second one reads what the first writes:
        int8 and nvfp4 need finished rows. The first product writes fp8 if a tile is a whole group,
        but not in deterministic mode, where bits must not depend on the width of a tile."""
        config, activation = self.config, weights.w2_eHI.format.activation
        shape, inner, places = _shape(config, weights), config.intermediate_size, groups.num_places
        facts = (shape.format, shape.experts, shape.hidden, shape.inner)
        sizes = (*facts, groups.planned_places, device)
        if activation != "fp8" or config.deterministic or not quantises_inner(*sizes):
            h = Rows(torch.empty(places, inner, dtype=config.dtype, device=device))
            return h, activation in (None, "fp8")
        return Rows(
            torch.empty(places, inner, dtype=torch.float8_e4m3fn, device=device),
            torch.empty(places, inner // FP8_GROUP, dtype=torch.float32, device=device),
        ), True
