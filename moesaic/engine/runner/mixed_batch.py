"""Steps with prompts on static buffers, replayed as CUDA graphs of fixed numbers of tokens.

T tokens of the step · H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moesaic.core.overlap import Overlap
from moesaic.core.step import Step
from moesaic.engine.runner.batches import (
    COUNT,
    IDS,
    OWN,
    PACKED,
    POSITIONS,
    SLOTS,
    EagerOutput,
    StepInputs,
    sequences_of,
)
from moesaic.engine.runner.future_tokens import FutureTokens, TokenSlots
from moesaic.engine.runner.graphs import MixedGraphs, MixedKey
from moesaic.engine.runner.pinned import PinnedRing
from moesaic.engine.runner.split_step import SplitRows, SplitStep, half_rows
from moesaic.engine.schedule.plan import StepPlan
from moesaic.layers.gpu_attention import GpuAttention
from moesaic.layers.mixed_buffers import MixedBuffers
from moesaic.layers.paged_cache import Sequences
from moesaic.models.halves import forward_halves

if TYPE_CHECKING:
    from moesaic.engine.runner.model_runner import ModelRunner


class MixedBatch:
    """A step with prompts. Logits and sampling follow the graph: which rows need them differs from
    step to step, and they take few launches."""

    def __init__(
        self,
        runner: ModelRunner,
        uploads: PinnedRing,
        future_tokens: FutureTokens,
        sizes: tuple[int, ...],
        schedules: Sequence[Overlap] = (Overlap.OFF,),
    ) -> None:
        """`sizes`: tokens of the buckets. `schedules`: those that have graphs."""
        self._runner, self._uploads, self._future_tokens = runner, uploads, future_tokens
        device, ranks, most = runner.device, runner.ranks, max(sizes, default=0)
        self._buffers = runner.attention.mixed(most, runner.max_running) if sizes else None
        tokens, differ = () if self._buffers is None else sizes, ranks.mesh.dp > 1
        sizes_of_graphs = (tokens, runner.max_running)
        self.graphs = MixedGraphs(*sizes_of_graphs, self._compute, device, differ, schedules)
        self._half_buffers: list[MixedBuffers] = []
        if tokens and Overlap.TBO in schedules:
            half = (half_rows(most), runner.max_running)
            made = (runner.attention.mixed(*half) for _ in range(2))
            self._half_buffers = [buffers for buffers in made if buffers is not None]
        self._split = SplitRows(runner, most)
        self._attention: dict[MixedKey, list[GpuAttention]] = {}
        self._packed = torch.zeros(PACKED, most, dtype=torch.int64, device=device)
        # The lower halves of the two numbers, which hold all of them.
        self._count_1 = self._packed[COUNT].view(torch.int32)[:1]
        self._own_1 = self._packed[OWN].view(torch.int32)[:1]
        self._x_TH = None if ranks.is_first else runner.hidden_buffer(most)
        self._hidden_TH = runner.hidden_buffer(most, runner.model.output_size)

    def _attention_of(self, key: MixedKey) -> list[GpuAttention]:
        """Of the whole batch, or of both halves; allocated in the first run of the body, before it
        is captured. Whole batches have the same, whatever they overlap."""
        halves = key.overlap == Overlap.TBO
        key = key if halves else key._replace(overlap=Overlap.OFF)
        if key not in self._attention:
            rows = half_rows(key.tokens) if halves else key.tokens
            parts = self._half_buffers if halves else [self._buffers]
            made = (part.attention(rows, key.sequences) for part in parts if part is not None)
            self._attention[key] = list(made)
        return self._attention[key]

    def can_run(self, plan: StepPlan) -> bool:
        """Whether the step's results may be in static buffers: scores and routed experts are read
        when the next step may have overwritten them. Each row of a tree takes the room of a
        sequence."""
        scores = any(item.score is not None for item in plan.items)
        return not scores and not plan.is_routed and not plan.has_trees

    def key(
        self, plan: StepPlan, agreed: int, split: SplitStep | None, overlap: Overlap
    ) -> MixedKey:
        """`agreed`: the bucket of the rank with the most tokens."""
        assert self._buffers is not None
        singles = self._buffers.num_singles(plan.lengths, halves=split is not None)
        if split is None:
            return self.graphs.key(agreed, plan.num_tokens, singles, overlap)
        return self.graphs.key(agreed, 2 * max(split.tokens), singles, Overlap.TBO)

    def run(
        self,
        plan: StepPlan,
        agreed: int,
        x_TH: Tensor | None,
        slots: TokenSlots,
        split: SplitStep | None = None,
        overlap: Overlap = Overlap.OFF,
    ) -> EagerOutput:
        """`agreed`: as in `key`."""
        inputs, count = StepInputs.of(plan, slots), plan.num_tokens
        key = self.key(plan, agreed, split, overlap)
        self._upload(inputs, key)
        if self._x_TH is not None and x_TH is not None:
            self._x_TH[:count].copy_(x_TH)
        self._fill_attention(sequences_of(plan, self._runner.page_table), key, split)
        self.graphs.run(key)
        rows_R, slots_R = self._uploads.upload(inputs.rows_R, inputs.slots_R)
        hidden_TH = self._hidden_TH[:count]
        if not self._runner.ranks.is_last:
            hidden_TH = hidden_TH.clone()
        return EagerOutput(hidden_TH, rows_R, slots_R)

    def _fill_attention(self, sequences: Sequences, key: MixedKey, split: SplitStep | None) -> None:
        if split is None:
            assert self._buffers is not None
            self._buffers.fill(sequences, key.sequences)
            return
        self._split.fill(split.tokens, key.rows)
        parts = sequences.cut(split.tokens[0])
        for buffers, part in zip(self._half_buffers, parts, strict=True):
            buffers.fill(part, key.sequences)

    def _upload(self, inputs: StepInputs, key: MixedKey) -> None:
        count = len(inputs.ids_T)
        host, event = self._uploads.next_buffer(PACKED * key.rows)
        packed = host.view(PACKED, key.rows)
        table = packed.numpy()
        table[IDS, :count] = inputs.ids_T
        table[POSITIONS, :count] = inputs.positions_T
        table[SLOTS, :count] = inputs.slots_T
        table[IDS : SLOTS + 1, count:] = [[0], [0], [self._future_tokens.padding]]
        table[COUNT, 0] = count
        table[OWN, 0] = self._runner.parallel.own_tokens(count, key.rows)
        self._packed[:, : key.rows].copy_(packed, non_blocking=True)
        event.record()

    def _compute(self, key: MixedKey) -> None:
        """The body of a graph, from static buffers to static buffers."""
        packed = self._packed[:, : key.rows]
        ids_T = self._future_tokens.resolve(packed[IDS], packed[SLOTS])
        x_TH = None if self._x_TH is None else self._x_TH[: key.rows]
        model, attention = self._runner.model, self._attention_of(key)
        step = Step(prefill=True, rows=key.agreed, overlap=key.overlap)
        if key.overlap == Overlap.TBO:
            halves = self._split.halves(attention, step, key.rows)
            hidden_TH = forward_halves(model, ids_T, packed[POSITIONS], halves, x_TH)
        else:
            step = replace(step, num_tokens_1=self._count_1, own_tokens_1=self._own_1)
            hidden_TH = model(ids_T, packed[POSITIONS], attention[0], step, x_TH)
        self._hidden_TH[: key.rows].copy_(hidden_TH)
