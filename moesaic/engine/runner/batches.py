"""How the tokens of a step pass through this rank's layers.

T tokens of the step · B rows of a decode step, with padding · R rows that sample, then those that
score · V vocabulary · H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moesaic.core.overlap import Overlap
from moesaic.core.step import Step
from moesaic.engine.runner.attention import StaticAttention
from moesaic.engine.runner.future_tokens import FutureTokens, TokenSlots
from moesaic.engine.runner.graphs import GraphCache, GraphKey
from moesaic.engine.runner.pinned import Ints, PinnedRing
from moesaic.engine.runner.recorded_tokens import StepTokens
from moesaic.engine.runner.split_step import SplitRows, SplitStep
from moesaic.engine.schedule.plan import StepPlan
from moesaic.engine.setup.graph_sizes import GraphSizes
from moesaic.kernels.sampling import greedy_rows
from moesaic.layers.context import AttentionStep
from moesaic.layers.paged_cache import PageTable, Sequences
from moesaic.models.halves import forward_halves

if TYPE_CHECKING:
    from moesaic.engine.runner.model_runner import ModelRunner

# Rows of the packed inputs of a decode step: token ids, positions, future token slots; then how
# many tokens the step has, and how many of them this rank takes to the experts.
IDS, POSITIONS, SLOTS, COUNT, OWN, PACKED = range(6)


def sequences_of(plan: StepPlan, table: PageTable) -> Sequences:
    lengths = plan.lengths.astype(np.int32)
    starts = np.cumsum(lengths, dtype=np.int32) - lengths
    kv_lens, first = plan.first.astype(np.int32) + lengths, plan.rows * table.max_pages
    columns = (starts, lengths, kv_lens, first.astype(np.int32))
    return Sequences(*columns, masks_T=plan.row_masks())


class StepInputs(NamedTuple):
    """A step's input on the host."""

    ids_T: Ints
    positions_T: Ints
    slots_T: Sequence[int] | Ints
    """Future token slots, if there are any."""
    rows_R: Ints
    """As StepPlan.logit_rows."""
    slots_R: Sequence[int] | Ints
    """Future token slots of the sampled ones."""

    @classmethod
    def of(cls, plan: StepPlan, slots: TokenSlots | None) -> StepInputs:
        return cls(
            plan.token_ids,
            plan.positions,
            () if slots is None else slots.numbers.repeat(plan.lengths),
            plan.logit_rows(),
            () if slots is None else slots.numbers.repeat(plan.sampled),
        )


@dataclass(frozen=True, slots=True)
class EagerOutput:
    hidden_TH: Tensor
    rows_R: Tensor
    """Rows whose logits are needed, as StepPlan.logit_rows."""
    slots_R: Tensor
    """Future token slots of the sampled ones."""
    tokens: StepTokens | None = None
    """With the slots that routers chose, if the step keeps them."""


class EagerBatch:
    """A step of any shape, launched kernel by kernel."""

    def __init__(
        self,
        runner: ModelRunner,
        uploads: PinnedRing,
        future_tokens: FutureTokens | None = None,
        idle: IdleBatch | None = None,
    ) -> None:
        """`idle`: for halves without tokens, where kernels need a row."""
        self._runner, self._uploads, self._future_tokens = runner, uploads, future_tokens
        self._idle = idle

    def run(
        self,
        plan: StepPlan,
        step: Step,
        x_TH: Tensor | None = None,
        slots: TokenSlots | None = None,
        split: SplitStep | None = None,
    ) -> EagerOutput:
        """`split`: the two micro-batches, if the step has them."""
        runner, inputs = self._runner, StepInputs.of(plan, slots)
        ids_T, positions_T, slots_T, rows_R, slots_R = self._uploads.upload(*inputs)
        if self._future_tokens is not None:
            ids_T = self._future_tokens.resolve(ids_T, slots_T)
        sequences = sequences_of(plan, runner.page_table)
        if split is None:
            attention = runner.attention.attend(sequences)
            hidden_TH = runner.model(ids_T, positions_T, attention, step, x_TH)
        else:
            idle = None if self._idle is None else self._idle.attention()
            halves = split.launched(runner, sequences, idle)
            hidden_TH = forward_halves(runner.model, ids_T, positions_T, halves, x_TH)
        tokens = None
        if step.routed is not None:
            tokens = StepTokens(ids_T, positions_T, step.routed, plan.num_tokens)
        return EagerOutput(hidden_TH, rows_R, slots_R, tokens)


class IdleBatch:
    """A step in which only other ranks have tokens; its one row is padding, as kernels need one."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner, self._buffers = runner, runner.attention.static(GraphKey(1))

    def attention(self) -> AttentionStep:
        """That of a row of padding."""
        self._buffers.fill(sequences_of(StepPlan(), self._runner.page_table))
        return self._buffers.attention

    def run(self, step: Step, split: SplitStep | None = None) -> Tensor:
        """Hidden states of no tokens."""
        runner, attention = self._runner, self.attention()
        nothing_1 = torch.zeros(1, dtype=torch.int64, device=runner.device)
        none_1 = nothing_1.int()
        step = replace(step, num_tokens_1=none_1, own_tokens_1=none_1)
        x_1H = None if runner.ranks.is_first else runner.hidden_buffer(1)
        if split is not None:
            split = replace(split, tokens=(0, 0))
            nothing = split.launched(runner, sequences_of(StepPlan(), runner.page_table), attention)
            return forward_halves(runner.model, nothing_1, nothing_1, nothing, x_1H)
        hidden_1H: Tensor = runner.model(nothing_1, nothing_1, attention, step, x_1H)
        return hidden_1H[:0]


class GraphBatch:
    """A decode step of one lane on static buffers; requests may have drafts behind their token."""

    def __init__(
        self,
        runner: ModelRunner,
        uploads: PinnedRing,
        future_tokens: FutureTokens,
        graphs: GraphSizes,
    ) -> None:
        self._runner, self._uploads, self._future_tokens = runner, uploads, future_tokens
        device, ranks = runner.device, runner.ranks
        given = (graphs.plain, self._compute, device, graphs.verify, runner.schedules)
        self.graphs = GraphCache(*given, trees=runner.verifies_trees)
        keys = self.graphs.keys
        self.attention: dict[GraphKey, list[StaticAttention]] = {}
        """Of the whole batch, or of both halves, of the graphs that have been used."""
        most = max((key.rows for key in keys), default=1)
        self.packed = torch.zeros(PACKED, most, dtype=torch.int64, device=device)
        # The lower halves of the two numbers, which hold all of them.
        self._count_1 = self.packed[COUNT].view(torch.int32)[:1]
        self._own_1 = self.packed[OWN].view(torch.int32)[:1]
        self.found_2B = torch.zeros(2, most, dtype=torch.int64, device=device)
        shape = (most if keys and ranks.is_last else 0, runner.vocab_size)
        self.logits_BV = torch.zeros(shape, dtype=torch.float32, device=device)
        self.routed: dict[GraphKey, list[Tensor]] = {}
        """The slots that each graph's routers choose, by layer: held, so that they keep their
        memory, and overwritten by every replay."""
        self._ids: dict[GraphKey, Tensor] = {}
        """The token ids that each graph computes, held like the slots."""
        self._x_BH = None if ranks.is_first else runner.hidden_buffer(most)
        keeps_rows = not ranks.is_last or runner.draft is not None
        size = runner.model.output_size
        self._hidden_BH = runner.hidden_buffer(most, size) if keeps_rows else None
        self._split = SplitRows(runner, most)

    def run(
        self,
        plan: StepPlan,
        key: GraphKey,
        x_TH: Tensor | None,
        slots: TokenSlots,
        split: SplitStep | None = None,
    ) -> Tensor | None:
        """Hidden states for the next stage or a draft model; the last stage fills `logits_BV` and
        `found_2B`."""
        count, lengths = plan.num_tokens, plan.lengths
        assert count <= key.rows, f"{count} tokens for {key.name}"
        host, event = self._uploads.next_buffer(self.packed.numel())
        packed = host.view(self.packed.shape)
        table = packed.numpy()
        sequences = sequences_of(plan, self._runner.page_table)
        table[IDS, :count] = plan.token_ids
        table[POSITIONS, :count] = plan.positions
        table[SLOTS, :count] = np.repeat(slots.numbers, lengths)
        padding = self._future_tokens.padding
        table[IDS : SLOTS + 1, count : key.rows] = [[0], [0], [padding]]
        table[COUNT, 0] = count
        table[OWN, 0] = self._runner.parallel.own_tokens(count, key.rows)
        self.packed.copy_(packed, non_blocking=True)
        event.record()
        if self._x_BH is not None and x_TH is not None:
            self._x_BH[:count].copy_(x_TH)
        parts: tuple[Sequences, ...] = (sequences,)
        if split is not None:
            parts = sequences.cut(split.tokens[0])
            self._split.fill(split.tokens, key.rows)
        for attention, part in zip(self._attention_of(key), parts, strict=True):
            attention.fill(part)
        self.graphs.run(key)
        return None if self._hidden_BH is None else self._hidden_BH[:count].clone()

    def _attention_of(self, key: GraphKey) -> list[StaticAttention]:
        """Allocated in the first run of the body, before it is captured. Whole batches have the
        same, whatever they overlap."""
        halves = key.overlap == Overlap.TBO
        key = key if halves else key._replace(overlap=Overlap.OFF)
        if key not in self.attention:
            make = self._runner.attention.static
            self.attention[key] = [make(key.half), make(key.half)] if halves else [make(key)]
        return self.attention[key]

    def tokens(self, key: GraphKey, count: int) -> StepTokens:
        """The rows of the step that has run last, in static buffers."""
        positions_B = self.packed[POSITIONS, : key.rows]
        return StepTokens(self._ids[key], positions_B, self.routed[key], count)

    def _compute(self, key: GraphKey) -> None:
        """The body of a graph, from static buffers to static buffers. All rows are sampled
        greedily, which is cheaper than to select those that should be."""
        runner, packed = self._runner, self.packed[:, : key.rows]
        self._ids[key] = self._future_tokens.resolve(packed[IDS], packed[SLOTS])
        hidden_BH = self._layers(key, self._ids[key], packed[POSITIONS])
        if self._hidden_BH is not None:
            self._hidden_BH[: key.rows].copy_(hidden_BH)
        if not runner.ranks.is_last:
            return
        logits_BV = runner.model.logits(hidden_BH)
        if not runner.samples:
            return
        self.logits_BV[: key.rows].copy_(logits_BV)
        found_2B = greedy_rows(logits_BV)
        self.found_2B[:, : key.rows].copy_(found_2B)
        self._future_tokens.store(packed[SLOTS], found_2B[0])

    def _layers(self, key: GraphKey, ids_B: Tensor, positions_B: Tensor) -> Tensor:
        x_BH = None if self._x_BH is None else self._x_BH[: key.rows]
        attention = [buffers.attention for buffers in self._attention_of(key)]
        step = Step(prefill=False, rows=key.rows, overlap=key.overlap)
        if key.overlap == Overlap.TBO:
            halves = self._split.halves(attention, step, key.rows)
            return forward_halves(self._runner.model, ids_B, positions_B, halves, x_BH)
        self.routed[key] = []
        step = replace(step, num_tokens_1=self._count_1, own_tokens_1=self._own_1)
        step = replace(step, routed=self.routed[key])
        hidden_BH: Tensor = self._runner.model(ids_B, positions_B, attention[0], step, x_BH)
        return hidden_BH
