"""Forward passes of a draft model on static buffers, replayed as CUDA graphs: of the rows of a
decode step, and of a token of each sequence.

B rows of a graph · T of them have a token · H hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from moesaic.core.step import Step
from moesaic.engine.runner.attention import TorchBackend
from moesaic.engine.runner.graphs import GraphCache, GraphKey
from moesaic.engine.runner.pinned import PinnedRing
from moesaic.engine.schedule.plan import Ints
from moesaic.engine.setup.graph_sizes import GraphSizes
from moesaic.engine.speculate.drafters import DraftModel, DraftRows, TargetReader
from moesaic.layers.paged_cache import Sequences

if TYPE_CHECKING:
    from moesaic.engine.runner.model_runner import ModelRunner

IDS, POSITIONS, COUNT, OWN, PACKED = range(5)


class Places(NamedTuple):
    """The new token of each sequence, and the first entry of the sequence in the page table."""

    positions_B: Tensor
    first_B: Tensor


class DraftGraphs(GraphCache):
    kind = "draft"

    def __init__(
        self,
        runner: ModelRunner,
        model: DraftModel,
        attention: TorchBackend,
        sizes: GraphSizes,
        uploads: PinnedRing,
    ) -> None:
        given = (sizes.plain, self._compute, runner.device, sizes.verify)
        super().__init__(*given, trees=runner.verifies_trees)
        self._runner, self._model, self._uploads = runner, model, uploads
        self._attention = {key: attention.static(key) for key in self.keys}
        most = max((key.rows for key in self.keys), default=1)
        self._packed = torch.zeros(PACKED, most, dtype=torch.int64, device=runner.device)
        # The lower halves of the two numbers, which hold all of them.
        self._count_1 = self._packed[COUNT].view(torch.int32)[:1]
        self._own_1 = self._packed[OWN].view(torch.int32)[:1]
        self._hidden_BH = runner.hidden_buffer(most, model.hidden_size)
        self._found_BH = torch.zeros_like(self._hidden_BH)

    def forward(
        self,
        key: GraphKey,
        ids_T: Ints | Tensor,
        positions_T: Ints,
        hidden_TH: Tensor,
        sequences: Sequences,
    ) -> Tensor:
        """Hidden states in a static buffer, until the next pass. `ids_T` may be on the device."""
        count = len(positions_T)
        host, event = self._uploads.next_buffer(self._packed.numel())
        packed = host.view(self._packed.shape)
        table = packed.numpy()
        table[:COUNT, : key.rows] = 0
        table[POSITIONS, :count] = positions_T
        table[COUNT, 0] = count
        table[OWN, 0] = self._runner.parallel.own_tokens(count, key.rows)
        if not isinstance(ids_T, Tensor):
            table[IDS, :count] = ids_T
        self._packed.copy_(packed, non_blocking=True)
        event.record()
        if isinstance(ids_T, Tensor):
            self._packed[IDS, :count].copy_(ids_T)
        if self._model.reads_target:
            self._hidden_BH[:count].copy_(hidden_TH)
        self._attention[key].fill(sequences)
        self.run(key)
        return self._found_BH[:count]

    def forward_singles(
        self, key: GraphKey, ids_B: Tensor, at: Places, hidden_BH: Tensor
    ) -> Tensor:
        """The same for a token of each sequence, of which only the device knows the positions."""
        count = len(ids_B)
        self._packed[:COUNT].zero_()
        self._packed[IDS, :count].copy_(ids_B)
        self._packed[POSITIONS, :count].copy_(at.positions_B)
        self._count_1.fill_(count)
        self._own_1.fill_(self._runner.parallel.own_tokens(count, key.rows))
        if self._model.reads_target:
            self._hidden_BH[:count].copy_(hidden_BH)
        self._attention[key].fill_singles(*at)
        self.run(key)
        return self._found_BH[:count]

    def _rows(self, key: GraphKey) -> DraftRows:
        return DraftRows(self._packed[IDS, : key.rows], self._packed[POSITIONS, : key.rows])

    def _compute(self, key: GraphKey) -> None:
        """The body of a graph."""
        rows = self._rows(key)
        counts = (self._count_1, self._own_1)
        step = Step(prefill=False, rows=key.rows, num_tokens_1=counts[0], own_tokens_1=counts[1])
        attention = self._attention[key].attention
        found_BH = self._model.forward(rows, self._hidden_BH[: key.rows], attention, step)
        self._found_BH[: key.rows].copy_(found_BH)


class StoreGraphs(DraftGraphs):
    """Of steps without drafts, whose rows are only put into the model's cache."""

    kind = "draft cache"

    def _compute(self, key: GraphKey) -> None:
        assert isinstance(self._model, TargetReader)
        attention = self._attention[key].attention
        self._model.store(self._rows(key), self._hidden_BH[: key.rows], attention)
