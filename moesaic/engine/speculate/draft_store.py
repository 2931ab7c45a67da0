"""What a draft model that reads the target's hidden states keeps of steps without drafts: the
entries of its cache, as the hidden states are gone later.

T tokens of the step · L rows whose tokens the host samples · H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from moesaic.engine.runner.batches import sequences_of
from moesaic.engine.schedule.plan import Ints, ItemResult, StepPlan, StepResult
from moesaic.engine.setup.graph_sizes import GraphSizes
from moesaic.engine.speculate.draft_graphs import StoreGraphs
from moesaic.engine.speculate.draft_passes import DraftPasses
from moesaic.engine.speculate.draft_rows import single_tokens, tokens_behind
from moesaic.engine.speculate.drafters import DraftRows, TargetReader
from moesaic.layers.paged_cache import Sequences

StoreRest = Callable[[StepResult], None]


class DraftStore:
    def __init__(self, passes: DraftPasses, reader: TargetReader) -> None:
        """`reader`: the model of the passes."""
        self._passes, self._reader = passes, reader
        self.graphs: StoreGraphs | None = None

    def use_graphs(self, sizes: GraphSizes) -> None:
        passes, plain = self._passes, sizes._replace(verify=())
        given = (passes.runner, passes.model, passes.attention, plain, passes.uploads)
        self.graphs = StoreGraphs(*given)

    def begin(
        self, plan: StepPlan, hidden_TH: Tensor, found_2R: Tensor, on_host: Sequence[int]
    ) -> StoreRest | None:
        """As DraftPhase.begin, of a step without drafts. `on_host`: which of its tokens the host
        samples later; what is returned stores their rows then."""
        if not plan.has_work:
            return None
        if self._passes.runner.ranks.attention.size > 1:  # steps do not overlap
            return partial(self.run, plan, hidden_TH)
        hidden_TH = self._passes.model.of_target(hidden_TH)
        empty = StepResult([ItemResult() for _ in plan.items])
        rows_R = plan.logit_rows()[: plan.num_sampled]
        next_T, places_R = self._passes.uploads.upload(tokens_behind(plan, empty), rows_R)
        next_T.index_copy_(0, places_R, found_2R[0])
        self._store(next_T, plan.positions, sequences_of(plan, self._passes.table), hidden_TH)
        return self._rest(plan, hidden_TH, rows_R[on_host]) if len(on_host) else None

    def _rest(self, plan: StepPlan, hidden_TH: Tensor, rows_L: Ints) -> StoreRest:
        """Stores these rows again. All but the tokens behind them is kept as it is now."""
        numbers = np.repeat(np.arange(plan.num_sequences), plan.lengths)[rows_L]
        positions_L = plan.positions[rows_L]
        first_L = plan.rows[numbers] * self._passes.table.max_pages
        at = single_tokens(plan.places[rows_L], first_L)
        attention, some_LH = self._passes.attention.attend(at), hidden_TH[rows_L]

        def store(result: StepResult) -> None:
            ids = tokens_behind(plan, result)[rows_L]
            rows = DraftRows(*self._passes.uploads.upload(ids, positions_L))
            self._reader.store(rows, some_LH, attention)

        return store

    def run(self, plan: StepPlan, hidden_TH: Tensor, result: StepResult) -> None:
        """The rows of a step whose results are known."""
        if not plan.has_work:
            return
        next_T, group = tokens_behind(plan, result), self._passes.runner.ranks.attention
        if group.size > 1:
            counts = [plan.num_tokens] + [0] * (group.size - 1)
            own = torch.from_numpy(next_T)[:, None]
            own = own if group.rank == 0 else own[:0]
            next_T = group.gather_rows(own, counts, "tokens for drafts").numpy()[:, 0]
        hidden_TH = self._passes.model.of_target(hidden_TH)
        self._store(next_T, plan.positions, sequences_of(plan, self._passes.table), hidden_TH)

    def _store(
        self, ids_T: Ints | Tensor, positions_T: Ints, sequences: Sequences, hidden_TH: Tensor
    ) -> None:
        if self.graphs is not None:
            key = self.graphs.bucket(len(positions_T))
            if key is not None:
                self.graphs.forward(key, ids_T, positions_T, hidden_TH, sequences)
                return
        rows = self._passes.upload_rows(ids_T, positions_T)
        self._reader.store(rows, hidden_TH, self._passes.attention.attend(sequences))
