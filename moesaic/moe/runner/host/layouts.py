"""The three layouts of a runner on CPU, with their pre-permutes and post-permutes.

R rows received · K chosen · N valid pairs of row and slot · e local slots · H hidden ·
Y rows of all slots · M rows of a slot.

    standard     pairs sorted by slot; slots with few rows padded alike, so that neighbours make one
                 batched product
    contiguous   pairs sorted by slot, each slot's rows padded to the block
    masked       a block of M rows for each slot, of which the first ones count
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from moesaic.kernels.cpu import experts
from moesaic.kernels.cpu.experts import ExpertRows, ExpertTensors, SwigluSpec
from moesaic.kernels.cpu.rows import Terms, sum_rows
from moesaic.moe.formats import (
    CombineInput,
    LowLatencyCombineInput,
    LowLatencyDispatchOutput,
    RowsCombineInput,
    StandardDispatchOutput,
)
from moesaic.moe.quant.payload import Payload
from moesaic.moe.runner.base import (
    ExpertWeights,
    MoeRunnerConfig,
    MoeRunnerCore,
    Rounding,
    RunContext,
    RunnerInput,
    RunnerOutput,
    Workspace,
)
from moesaic.moe.runner.host.grouped import (
    SMALL_ROWS,
    GroupedMLP,
    SlotGroup,
    in_pieces,
    round_up,
    runs,
)


@dataclass(frozen=True, slots=True)
class ValidPairs:
    rows_N: Tensor
    """Rows of the dispatch output."""
    places_N: Tensor
    """Rows of the layout that compute them."""
    valid_RK: Tensor | None
    """Which of R x K are pairs; None: all."""


@dataclass(frozen=True)
class GroupedInput(RunnerInput):
    x_YH: Tensor
    groups: list[SlotGroup]
    pairs: ValidPairs | None
    quantized: bool
    """Whether the rows were sent in the activation format of the weights."""
    y_YH: Tensor | None = None
    """The buffer for results; None: any."""


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """Where each slot's rows begin, the number of rows, and which slots are computed together."""

    bases: list[int]
    total: int
    groups: list[SlotGroup]


def exact_groups(
    counts: Sequence[int], bases: Sequence[int], strides: Sequence[int]
) -> list[SlotGroup]:
    """A group for each slot that has rows, without padding."""
    return [
        SlotGroup(range(slot, slot + 1), bases[slot], count, strides[slot])
        for slot, count in enumerate(counts)
        if count
    ]


def slots_together(counts: list[int]) -> list[range]:
    """Neighbours with up to SMALL_ROWS rows, which one product computes, then the larger ones."""
    small = [slot for slot, count in enumerate(counts) if 0 < count <= SMALL_ROWS]
    large = [slot for slot, count in enumerate(counts) if count > SMALL_ROWS]
    return [*runs(small), *(range(slot, slot + 1) for slot in large)]


def plan_standard(counts: list[int], rounding: Rounding) -> LayoutPlan:
    """Small slots first, padded to one length, then the others. Exact rounding pads nothing."""
    if rounding is Rounding.EXACT:
        *bases, total = accumulate(counts, initial=0)
        return LayoutPlan(bases, total, exact_groups(counts, bases, counts))
    most = max((count for count in counts if count <= SMALL_ROWS), default=0)
    padded = SMALL_ROWS if rounding is Rounding.PIECES else round_up(most)
    bases = [0] * len(counts)
    groups = []
    total = 0
    for run in slots_together(counts):
        rows = max(padded, round_up(counts[run.start]))
        groups.append(SlotGroup(run, total, rows, rows))
        for slot in run:
            bases[slot] = total
            total += rows
    return LayoutPlan(bases, total, groups)


def plan_contiguous(counts: list[int], rounding: Rounding) -> LayoutPlan:
    """Slots in order, padded to blocks of SMALL_ROWS; neighbours of one block run together."""
    rows = [-(-count // SMALL_ROWS) * SMALL_ROWS for count in counts]
    *bases, total = accumulate(rows, initial=0)
    if rounding is Rounding.EXACT:
        return LayoutPlan(bases, total, exact_groups(counts, bases, rows))
    firsts = ((run, run.start) for run in slots_together(counts))
    groups = [SlotGroup(run, bases[slot], rows[slot], rows[slot]) for run, slot in firsts]
    return LayoutPlan(bases, total, groups)


def plan_masked(counts: list[int], rounding: Rounding) -> LayoutPlan:
    """A block for each slot, sized for the fullest one."""
    block = round_up(max(counts, default=0))
    block = max(block, SMALL_ROWS) if rounding is Rounding.PIECES and block else block
    bases = [slot * block for slot in range(len(counts))]
    return LayoutPlan(bases, block * len(counts), masked_groups(counts, block, rounding))


def masked_groups(counts: list[int], block: int, rounding: Rounding) -> list[SlotGroup]:
    """The rows to compute in blocks of `block` rows, of which `counts` are filled."""
    if rounding is Rounding.EXACT:
        bases = [slot * block for slot in range(len(counts))]
        return exact_groups(counts, bases, [block] * len(counts))
    least = SMALL_ROWS if rounding is Rounding.PIECES else 0
    groups = []
    for run in slots_together(counts):
        rows = max(least, *(round_up(counts[slot]) for slot in run))
        groups.append(SlotGroup(run, run.start * block, rows, block))
    return groups


LayoutPlanner = Callable[[list[int], Rounding], LayoutPlan]


def pair_up(ids_RK: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """(slots, rows, which) of the valid pairs, in the order of rows and k."""
    top_k = ids_RK.shape[1]
    flat = ids_RK.flatten()
    valid = flat >= 0
    if bool(valid.all()):
        return flat, torch.arange(len(flat)) // top_k, None
    pairs_N = valid.nonzero().squeeze(1)
    return flat[pairs_N], pairs_N // top_k, valid.view_as(ids_RK)


def place_pairs(
    slots_N: Tensor, num_slots: int, placer: LayoutPlanner, rounding: Rounding
) -> tuple[Tensor, LayoutPlan]:
    """The place of each pair. Example: slots [0, 2, 0, 1] of three in the standard layout: counts
    [2, 1, 1], all small and padded to 2, bases [0, 2, 4]: places [0, 4, 1, 2]."""
    order_N = slots_N.argsort(stable=True)
    counts_e = torch.bincount(slots_N, minlength=num_slots)
    places = placer(counts_e.tolist(), rounding)
    shift_e = torch.tensor(places.bases) - (counts_e.cumsum(0) - counts_e)
    sorted_N = torch.arange(len(slots_N)) + shift_e[slots_N[order_N]]
    return torch.empty_like(sorted_N).index_copy_(0, order_N, sorted_N), places


def pre_permute_rows(
    placer: LayoutPlanner, rows: StandardDispatchOutput, context: RunContext
) -> GroupedInput:
    """Copies each row to the places of its pairs."""
    config = context.config
    slots_N, rows_N, valid_RK = pair_up(rows.ids_RK)
    places_N, places = place_pairs(slots_N, config.num_experts, placer, config.rounding)
    source_Y = torch.zeros(places.total, dtype=torch.int64).index_copy_(0, places_N, rows_N)
    x_YH = _take_rows(rows.x, source_Y, context)
    pairs = ValidPairs(rows_N, places_N, valid_RK)
    return GroupedInput(x_YH, places.groups, pairs, _is_quantized(rows.x, context))


def post_permute_rows(
    outputs: RunnerOutput, inputs: GroupedInput, rows: StandardDispatchOutput, context: RunContext
) -> CombineInput:
    """A weighted sum for each row; in deterministic mode the pairs themselves."""
    pairs = inputs.pairs
    assert pairs is not None
    wanted = pairs.places_N if context.config.deterministic else rows.ids_RK
    out = None
    if rows.y_OH is not None and len(wanted) <= len(rows.y_OH):
        out = rows.y_OH[: len(wanted)]
    if context.config.deterministic:
        y_NH = torch.index_select(outputs.y, 0, pairs.places_N, out=out)
        return RowsCombineInput(rows.handle, y_NH, pairs=True)
    assert rows.weights_RK is not None
    y_RH = weighted_sum(outputs.y, pairs.places_N, rows.weights_RK, pairs.valid_RK, out)
    return RowsCombineInput(rows.handle, y_RH)


def weighted_sum(
    y_YH: Tensor,
    places_N: Tensor,
    weights_RK: Tensor,
    valid_RK: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """out[r] = sum over valid k of weights[r, k] * y[place], in float32, in the order of k."""
    if valid_RK is None:
        places_RK = places_N.view(weights_RK.shape)
    else:
        places_RK = torch.full(weights_RK.shape, -1).masked_scatter_(valid_RK, places_N)
    return sum_rows(y_YH, Terms(None, places_RK, weights_RK), out=out)[0]


def pre_permute_blocks(
    placer: LayoutPlanner, rows: LowLatencyDispatchOutput, context: RunContext
) -> GroupedInput:
    """Copies the filled rows of each slot's block into another layout."""
    config = context.config
    block = rows.y_eMH.shape[1]
    places = placer(rows.masked_m, config.rounding)
    counts_e, bases_e = torch.tensor(rows.masked_m), torch.tensor(places.bases)
    slots_N = torch.arange(len(counts_e)).repeat_interleave(counts_e)
    # The rows before it in its own slot.
    before_N = torch.arange(len(slots_N)) - (counts_e.cumsum(0) - counts_e)[slots_N]
    rows_N, places_N = slots_N * block + before_N, bases_e[slots_N] + before_N
    source_Y = rows_N[:1].repeat(places.total).index_copy_(0, places_N, rows_N)
    x_YH = _take_rows(flat_blocks(rows.x), source_Y, context)
    pairs = ValidPairs(rows_N, places_N, None)
    return GroupedInput(x_YH, places.groups, pairs, _is_quantized(rows.x, context))


def post_permute_blocks(
    outputs: RunnerOutput, inputs: GroupedInput, rows: LowLatencyDispatchOutput, context: RunContext
) -> CombineInput:
    pairs = inputs.pairs
    assert pairs is not None
    y_NH = outputs.y.index_select(0, pairs.places_N)
    rows.y_eMH.flatten(0, 1).index_copy_(0, pairs.rows_N, y_NH)
    return LowLatencyCombineInput(rows.handle, rows.y_eMH)


def pre_permute_masked(rows: LowLatencyDispatchOutput, context: RunContext) -> GroupedInput:
    """Uses the blocks as they are; only decoding copies rows."""
    config = context.config
    block = rows.y_eMH.shape[1]
    shape = (len(rows.masked_m), block, config.hidden_size)
    if rows.x.scales is None and rows.x.values.dtype == config.dtype:
        x_eMH = rows.x.values
    else:
        x_eMH = context.workspace.borrow("x", shape, config.dtype)
        for slot, count in enumerate(rows.masked_m):
            if count:
                x_eMH[slot, :count] = _slot_rows(rows.x, slot, count).dense(config.dtype)
    return GroupedInput(
        x_YH=x_eMH.flatten(0, 1),
        groups=masked_groups(rows.masked_m, block, config.rounding),
        pairs=None,
        quantized=_is_quantized(rows.x, context),
        y_YH=rows.y_eMH.flatten(0, 1),
    )


def post_permute_masked(
    outputs: RunnerOutput, inputs: GroupedInput, rows: LowLatencyDispatchOutput, context: RunContext
) -> CombineInput:
    """The results are already in the dispatcher's buffer."""
    return LowLatencyCombineInput(rows.handle, rows.y_eMH)


def _take_rows(x: Payload, source_Y: Tensor, context: RunContext) -> Tensor:
    """Selects and decodes rows, in the order that decodes fewer."""
    dtype = context.config.dtype
    if len(source_Y) == 0:
        return torch.empty(0, x.hidden_size, dtype=dtype)
    if x.scales is not None and len(source_Y) < len(x.values):
        return x.select(source_Y).dense(dtype)
    x_YH = context.workspace.borrow("x", (len(source_Y), x.hidden_size), dtype)
    return torch.index_select(x.dense(dtype), 0, source_Y, out=x_YH)


def _slot_rows(x: Payload, slot: int, count: int) -> Payload:
    return x.viewed(lambda tensor: tensor[slot, :count])


def flat_blocks(x: Payload) -> Payload:
    """[e, M, H] as [e * M, H]."""
    return x.viewed(lambda tensor: tensor.flatten(0, 1))


def _is_quantized(x: Payload, context: RunContext) -> bool:
    return x.format.name == context.weights.w13_eJH.format.activation


class GroupedCore(MoeRunnerCore):
    """Computes rows in groups, by the compiled kernel if it fits, else by torch."""

    def run(
        self, inputs: RunnerInput, weights: ExpertWeights, workspace: Workspace
    ) -> RunnerOutput:
        assert isinstance(inputs, GroupedInput)
        x_YH, y_YH = inputs.x_YH, inputs.y_YH
        if y_YH is None:
            y_YH = workspace.borrow("y", tuple(x_YH.shape), self.config.dtype)
        if self.config.kernel:
            h_YI = workspace.borrow("h", (len(x_YH), self.config.intermediate_size), x_YH.dtype)
            rows = [
                ExpertRows(group.slots.start, group.start, group.rows) for group in inputs.groups
            ]
            experts.run(x_YH, y_YH, h_YI, rows, self._tensors(weights))
            return RunnerOutput(y_YH)
        pieces = self.config.rounding is Rounding.PIECES
        groups = list(in_pieces(inputs.groups)) if pieces else inputs.groups
        mlp = GroupedMLP(self.config, weights, workspace)
        mlp.run(x_YH, y_YH, groups, inputs.quantized)
        return RunnerOutput(y_YH)

    def _tensors(self, weights: ExpertWeights) -> ExpertTensors:
        w13, w2, activation = weights.w13_eJH.plain, weights.w2_eHI.plain, self.config.activation
        assert w13 is not None and w2 is not None and isinstance(activation, SwigluSpec)
        return ExpertTensors(w13, w2, weights.b13_eJ, weights.b2_eH, activation)


def kernel_fits(config: MoeRunnerConfig, quantised: bool) -> bool:
    """Whether the kernel can compute a layer on this machine."""
    plain = not quantised and isinstance(config.activation, SwigluSpec)
    return plain and experts.fits(config.hidden_size, config.intermediate_size, config.dtype)
