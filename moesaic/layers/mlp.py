"""The gated feed-forward layer of dense blocks and shared experts."""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from moesaic.comm.mesh import share
from moesaic.core.step import PREFILL, Step
from moesaic.layers.linear import LinearConfig, MergedLinear, OutputPart, RowLinear
from moesaic.layers.module import Module
from moesaic.layers.parallel import Parallel


class GatedMLP(Module):
    """Split over `parallel.dense_tp` ranks by its inner size. If these ranks belong to several
    attention groups, the tokens of all groups are gathered first, also by a group without any."""

    def __init__(self, config: LinearConfig, parallel: Parallel, operation: str) -> None:
        """`config.inputs` is the hidden size, `config.outputs` the inner size."""
        super().__init__()
        self.parallel, self.operation = parallel, operation
        group, rank, size = parallel.shard_group(parallel.dense_tp)
        inner = config.outputs
        parts = [share(inner, part, size) for part in range(size)]
        merged = dict.fromkeys(("gate_proj", "up_proj"), OutputPart(inner, parts[rank]))
        self.gate_up_proj = MergedLinear(replace(config, outputs=2 * inner), merged)
        down = replace(config, inputs=inner, outputs=config.inputs)
        self.down_proj = RowLinear(down, parts, group, operation)

    def forward(self, x_TH: Tensor, step: Step = PREFILL) -> Tensor:
        return self.outward(*self.inward(x_TH, step))

    def inward(self, x_TH: Tensor, step: Step = PREFILL) -> tuple[Tensor, slice | None]:
        """The first half of the layer: what `outward` takes."""
        rows = None
        if self.parallel.spans_groups(self.parallel.dense_tp):
            gather = self._gather_even if step.rows else self._gather_counted
            x_TH, rows = gather(x_TH, step)
        return self.gate_up_proj.gated(x_TH), rows

    def outward(self, inner_TI: Tensor, rows: slice | None) -> Tensor:
        return self.down_proj(inner_TI, rows)

    def _gather_counted(self, x_TH: Tensor, step: Step) -> tuple[Tensor, slice]:
        """The rows of all groups, and which of them are this group's."""
        parallel = self.parallel
        mine_TH = x_TH[parallel.own_rows(len(x_TH))]
        counts = parallel.row_counts(step.counts)
        all_TH = parallel.stage.gather_rows(mine_TH, counts, self.operation)
        return all_TH, parallel.group_rows(step.counts)

    def _gather_even(self, x_TH: Tensor, step: Step) -> tuple[Tensor, slice]:
        """The same in a fixed shape, since captured graphs know no counts: every rank gives its
        part of `step.rows` rows, padded with zeros. No rank computes more than one that has the
        whole layer and the most tokens."""
        parallel, count = self.parallel, len(x_TH)
        assert count <= step.rows, f"{count} rows in a step of at most {step.rows}"
        part = parallel.most_rows(step.rows)
        first = parallel.attention.rank * part
        mine_TH = x_TH[first : first + part]
        if len(mine_TH) < part:
            mine_TH = F.pad(mine_TH, (0, 0, 0, part - len(mine_TH)))
        counts = [part] * parallel.stage.size
        start = parallel.dp_rank * parallel.attention.size * part
        all_TH = parallel.stage.gather_rows(mine_TH, counts, self.operation)
        return all_TH, slice(start, start + count)
