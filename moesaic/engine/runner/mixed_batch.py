"""Steps with prompts on static buffers, replayed as CUDA graphs of fixed numbers of tokens.

T tokens of the step · H hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

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
from moesaic.engine.schedule.plan import StepPlan
from moesaic.layers.gpu_attention import GpuAttention

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
    ) -> None:
        """`sizes`: tokens of the buckets."""
        self._runner, self._uploads, self._future_tokens = runner, uploads, future_tokens
        device, ranks, most = runner.device, runner.ranks, max(sizes, default=0)
        self._buffers = runner.attention.mixed(most, runner.max_running) if sizes else None
        tokens, differ = () if self._buffers is None else sizes, ranks.mesh.dp > 1
        self.graphs = MixedGraphs(tokens, runner.max_running, self._compute, device, differ)
        self._attention: dict[MixedKey, GpuAttention] = {}
        if self._buffers is not None:
            self._attention = {
                key: self._buffers.attention(key.tokens, key.sequences) for key in self.graphs.keys
            }
        self._packed = torch.zeros(PACKED, most, dtype=torch.int64, device=device)
        # The lower halves of the two numbers, which hold all of them.
        self._count_1 = self._packed[COUNT].view(torch.int32)[:1]
        self._own_1 = self._packed[OWN].view(torch.int32)[:1]
        self._x_TH = None if ranks.is_first else runner.hidden_buffer(most)
        self._hidden_TH = runner.hidden_buffer(most)

    def can_run(self, plan: StepPlan) -> bool:
        """Whether the step's results may be in static buffers: scores and routed experts are read
        when the next step may have overwritten them."""
        scores = any(item.score is not None for item in plan.items)
        return not scores and not plan.is_routed

    def run(
        self, plan: StepPlan, agreed: int, x_TH: Tensor | None, slots: TokenSlots
    ) -> EagerOutput:
        """`agreed`: the bucket of the rank with the most tokens."""
        assert self._buffers is not None
        inputs, count = StepInputs.of(plan, slots), plan.num_tokens
        key = self.graphs.key(agreed, count, self._buffers.num_singles(plan.lengths))
        self._upload(inputs, key)
        if self._x_TH is not None and x_TH is not None:
            self._x_TH[:count].copy_(x_TH)
        self._buffers.fill(sequences_of(plan, self._runner.page_table))
        self.graphs.run(key)
        rows_R, slots_R = self._uploads.upload(inputs.rows_R, inputs.slots_R)
        hidden_TH = self._hidden_TH[:count]
        if not self._runner.ranks.is_last:
            hidden_TH = hidden_TH.clone()
        return EagerOutput(hidden_TH, rows_R, slots_R)

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
        hidden_TH = self._runner.model(
            self._future_tokens.resolve(packed[IDS], packed[SLOTS]),
            packed[POSITIONS],
            self._attention[key],
            Step(
                prefill=True,
                rows=key.agreed,
                num_tokens_1=self._count_1,
                own_tokens_1=self._own_1,
            ),
            None if self._x_TH is None else self._x_TH[: key.rows],
        )
        self._hidden_TH[: key.rows].copy_(hidden_TH)
