"""The gated feed-forward layer of dense blocks and shared experts."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from moesaic.comm.mesh import share
from moesaic.core.step import PREFILL, Step
from moesaic.layers.linear import LinearConfig, MergedLinear, OutputPart, RowLinear
from moesaic.layers.module import Module
from moesaic.layers.parallel import Parallel


class GatedMLP(Module):
    """Split over `parallel.dense_tp` ranks by its inner size. If these ranks belong to several
    attention groups, the tokens of all groups are gathered first."""

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
        parallel, rows = self.parallel, None
        if parallel.spans_groups(parallel.dense_tp):
            rows = parallel.group_rows(step.counts)
            mine_TH = x_TH[parallel.own_rows(len(x_TH))]
            counts = parallel.row_counts(step.counts)
            x_TH = parallel.stage.gather_rows(mine_TH, counts, self.operation)
        return self.down_proj(self.gate_up_proj.gated(x_TH), rows)
