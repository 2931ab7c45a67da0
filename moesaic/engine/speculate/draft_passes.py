"""Forward passes of a draft model on this rank, by graphs where there are any, and the choice of
tokens behind them. All ranks of a stage take part in each pass, also with no rows.

T rows of a pass · D sequences that get drafts · R rows with logits · H hidden · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic.core.step import Step
from moesaic.engine.runner.attention import BACKENDS
from moesaic.engine.runner.batches import sequences_of
from moesaic.engine.runner.graphs import GraphKey
from moesaic.engine.runner.pinned import PinnedRing
from moesaic.engine.runner.row_results import LOGIT_ROWS
from moesaic.engine.schedule.plan import Ints, StepAgreement, StepPlan
from moesaic.engine.setup.graph_sizes import GraphSizes
from moesaic.engine.speculate.draft_graphs import DraftGraphs, Places
from moesaic.engine.speculate.drafters import DraftModel, DraftRows
from moesaic.kernels.sampling import greedy_rows
from moesaic.layers.paged_cache import PagedCache, PageTable, Sequences

if TYPE_CHECKING:
    from moesaic.engine.runner.model_runner import ModelRunner


class Pass(NamedTuple):
    """A forward pass of all ranks: the rows of each group, and whether any has prompts."""

    counts: tuple[int, ...]
    prefill: bool = False
    verifies: bool = False
    """Sequences may have several rows."""
    shares: bool = False
    """Some of the sequences are of one request: a row may read what another one stores."""

    @classmethod
    def extending(cls, plan: StepPlan, agreement: StepAgreement) -> Pass:
        prefill = agreement.prefill or agreement.fills_gaps
        return cls(agreement.extending, prefill, plan.verifies, bool(plan.gaps))


class DraftPasses:
    def __init__(
        self, runner: ModelRunner, model: DraftModel, num_steps: int, timeout: float
    ) -> None:
        """`num_steps`: the most passes behind a step."""
        self.runner, self.model, self._timeout = runner, model, timeout
        self.uploads = PinnedRing(runner.device, 4 * LOGIT_ROWS, timeout)
        self.downloads = PinnedRing(runner.device, num_steps * runner.max_running, timeout)
        self.graphs: DraftGraphs | None = None

    def use_cache(self, target: PagedCache, table: PageTable) -> None:
        """Makes a cache with the pages of the target's, filled with zeros: positions that the model
        has not computed are read as such."""
        runner, pages = self.runner, target.keys.shape[1] - 1
        sizes = (pages, target.page_size, target.keys.dtype, runner.device)
        self.cache, self.table = PagedCache(self.model.cache, *sizes), table
        for part in (self.cache.keys, self.cache.values):
            part.view(torch.uint8).zero_()
        given = (self.cache, table, runner.moe.deterministic)
        self.attention = BACKENDS[runner.kind](*given, trees=runner.verifies_trees)
        self._idle = self.attention.static(GraphKey(1)) if runner.kind == "cuda" else None

    def use_graphs(self, sizes: GraphSizes) -> None:
        self.graphs = DraftGraphs(self.runner, self.model, self.attention, sizes, self.uploads)

    def forward(
        self,
        which: Pass,
        ids_T: Ints | Tensor,
        positions_T: Ints,
        sequences: Sequences,
        hidden_TH: Tensor,
    ) -> Tensor:
        most, runner = max(which.counts), self.runner
        if self.graphs is not None and not which.prefill:
            key = self.graphs.bucket(most, which.verifies)
            if key is not None:
                return self.graphs.forward(key, ids_T, positions_T, hidden_TH, sequences)
        groups = which.counts if runner.ranks.mesh.dp > 1 else ()
        step = Step(which.prefill, counts=groups, rows=most if runner.kind == "cuda" else 0)
        if self._idle is not None and not len(sequences):
            return self._run_idle(step)
        attention = self.attention.attend(sequences, which.shares)
        return self.model.forward(self.upload_rows(ids_T, positions_T), hidden_TH, attention, step)

    def forward_singles(
        self, counts: tuple[int, ...], ids_D: Tensor, at: Places, hidden_DH: Tensor
    ) -> Tensor:
        """A token of each sequence, of which only the device knows the positions."""
        most, runner = max(counts), self.runner
        key = None if self.graphs is None else self.graphs.bucket(most)
        if self.graphs is not None and key is not None:
            return self.graphs.forward_singles(key, ids_D, at, hidden_DH)
        groups = counts if runner.ranks.mesh.dp > 1 else ()
        step = Step(False, counts=groups, rows=most if runner.kind == "cuda" else 0)
        if self._idle is not None and not len(ids_D):
            return self._run_idle(step)
        buffers = self.attention.static(GraphKey(max(1, len(ids_D))))
        buffers.fill_singles(*at)
        rows = DraftRows(ids_D, at.positions_B)
        return self.model.forward(rows, hidden_DH, buffers.attention, step)

    def _run_idle(self, step: Step) -> Tensor:
        """As IdleBatch: kernels need a row, which is padding."""
        runner = self.runner
        assert self._idle is not None
        self._idle.fill(sequences_of(StepPlan(), self.table))
        nothing_1 = torch.zeros(1, dtype=torch.int64, device=runner.device)
        none_1 = nothing_1.int()
        step = replace(step, num_tokens_1=none_1, own_tokens_1=none_1)
        rows, x_1H = (
            DraftRows(nothing_1, nothing_1),
            runner.hidden_buffer(1, self.model.hidden_size),
        )
        return self.model.forward(rows, x_1H, self._idle.attention, step)[:0]

    def upload_rows(self, ids_T: Ints | Tensor, positions_T: Ints) -> DraftRows:
        columns = [positions_T] if isinstance(ids_T, Tensor) else [positions_T, ids_T]
        given_T, *uploaded = self.uploads.upload(*columns)
        return DraftRows(ids_T if isinstance(ids_T, Tensor) else uploaded[0], given_T)

    def most_likely(self, hidden_DH: Tensor, counts: Sequence[int]) -> Tensor:
        """On the first rank of a group; no rows on the others, and where it has no sequences."""
        groups = self.runner.ranks.mesh.dp > 1
        found = []
        for piece, rows in self._pieces(hidden_DH, counts):
            logits_RV = self.model.logits(piece, rows if groups else ())
            if self.runner.samples and len(piece):
                found.append(self.model.to_target(greedy_rows(logits_RV)[0]))
        if len(found) == 1:
            return found[0]
        return torch.cat([torch.zeros(0, dtype=torch.int64, device=self.runner.device), *found])

    def most_likely_of(
        self, hidden_RH: Tensor, counts: tuple[int, ...], topk: int
    ) -> tuple[Ints, NDArray[np.float64]]:
        """The tokens behind each row, and the logarithms of their probabilities; no rows where
        `most_likely` has none."""
        groups = self.runner.ranks.mesh.dp > 1
        found = [torch.zeros(0, 2, topk, dtype=torch.float64, device=self.runner.device)]
        for piece, rows in self._pieces(hidden_RH, counts):
            logits_RV = self.model.logits(piece, rows if groups else ())
            if self.runner.samples and len(piece):
                likely, ids = logits_RV.float().log_softmax(-1).topk(topk)
                ids = self.model.to_target(ids)
                found.append(torch.stack((ids.double(), likely.double()), 1))
        bits = self.on_host(torch.cat(found).view(torch.int64))
        both = bits.view(torch.float64).numpy().copy()
        return both[:, 0].astype(np.int64), both[:, 1]

    def _pieces(
        self, hidden_DH: Tensor, counts: Sequence[int]
    ) -> Iterator[tuple[Tensor, list[int]]]:
        """Rows whose logits are computed at once, and how many of them each group has."""
        for start in range(0, max(counts), LOGIT_ROWS):
            rows = [min(max(0, count - start), LOGIT_ROWS) for count in counts]
            yield hidden_DH[start : start + LOGIT_ROWS], rows

    def shared(self, ids_D: Tensor, count: int) -> Tensor:
        """The tokens on all ranks of the group."""
        group = self.runner.parallel.attention
        if group.size == 1 or not count:
            return ids_D
        counts, own = [count] + [0] * (group.size - 1), ids_D[:, None]
        own = own if group.rank == 0 else own[:0]
        return group.gather_rows(own, counts, "drafts")[:, 0]

    def on_host(self, drafts: Tensor) -> Tensor:
        """The draft model has run when they are there."""
        host, event = self.downloads.next_buffer(drafts.numel())
        host.copy_(drafts.view(-1), non_blocking=True)
        event.record()
        event.wait(self._timeout, "the draft model")
        return host.view(drafts.shape)
