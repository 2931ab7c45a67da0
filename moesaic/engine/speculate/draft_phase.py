"""Drafts of a model that runs on all ranks, at the end of each step.

A step of the target gives tokens and, for each of its rows, a hidden state. The draft model first
extends its own KV cache by the same rows (each with the token behind it), then continues every
sequence that sampled by a chain of tokens, one forward pass each, which the next step verifies. Its
cache has the target's page numbers, so that prefixes, retraction and rollbacks need nothing else.

All ranks of a stage take part, also with no rows: the agreement says how many there are.

In a step without drafts a model that reads the target's hidden states only stores what its cache
needs of the rows, and any other does nothing: it computes the tokens that it lacks in the next step
with drafts (`StepPlan.gaps`).

T tokens of the step · D sequences that get drafts · H hidden · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from moesaic.core.speculation import Speculation
from moesaic.core.step import Step
from moesaic.engine.schedule.plan import Ints, ItemResult, StepAgreement, StepPlan, StepResult
from moesaic.engine.setup.graph_sizes import GraphSizes
from moesaic.engine.speculate.draft_graphs import DraftGraphs, Places
from moesaic.engine.speculate.draft_passes import DraftPasses, Pass
from moesaic.engine.speculate.draft_rows import (
    Continuation,
    Extension,
    SampledRows,
    add_chains,
    single_tokens,
)
from moesaic.engine.speculate.draft_store import DraftStore, StoreRest
from moesaic.engine.speculate.draft_trees import DraftTrees
from moesaic.engine.speculate.drafters import DraftModel, DraftRows, TargetReader
from moesaic.layers.paged_cache import PagedCache, PageTable, Sequences

if TYPE_CHECKING:
    from moesaic.engine.runner.model_runner import ModelRunner


AddDrafts = Callable[[Sequence[ItemResult]], None]


class DraftPhase:
    def __init__(
        self, runner: ModelRunner, model: DraftModel, speculation: Speculation, timeout: float
    ) -> None:
        self._runner, self.model, self._speculation = runner, model, speculation
        self.num_steps = speculation.num_steps
        timeout += runner.ranks.timeout * (runner.ranks.mesh.tp > 1)
        self._passes = DraftPasses(runner, model, self.num_steps, timeout)
        self._trees = DraftTrees(self._passes, speculation.num_drafts)
        self._store: DraftStore | None = None
        """If steps without drafts store what the model needs of them."""
        if isinstance(model, TargetReader):
            self._store = DraftStore(self._passes, model)

    def use_cache(self, target: PagedCache, table: PageTable) -> None:
        """As DraftPasses.use_cache."""
        self._passes.use_cache(target, table)

    @property
    def cache(self) -> PagedCache:
        return self._passes.cache

    @torch.inference_mode()
    def use_graphs(self, sizes: GraphSizes) -> None:
        """Captures them on a GPU; elsewhere static buffers are used all the same."""
        self._passes.use_graphs(sizes)
        if self._store is not None:
            self._store.use_graphs(sizes)
        if self._runner.device.type == "cuda":
            pool = torch.cuda.graph_pool_handle()
            for graphs in self._all_graphs:
                graphs.capture(pool)

    def drop(self) -> None:
        """After a failed step, as AsynchronousSteps.drop."""
        for graphs in self._all_graphs:
            graphs.drop()

    @property
    def _all_graphs(self) -> list[DraftGraphs]:
        stored = None if self._store is None else self._store.graphs
        return [graphs for graphs in (self._passes.graphs, stored) if graphs is not None]

    @property
    def graph_bytes(self) -> int:
        return sum(graphs.nbytes for graphs in self._all_graphs)

    @property
    def fills_gaps(self) -> bool:
        """Whether the model computes the tokens of steps without drafts later."""
        return not self.model.reads_target

    def warm_up(self, hidden_TH: Tensor, sequences: Sequences, step: Step) -> None:
        """Runs a step of arbitrary tokens, as ModelRunner.dummy_logits does."""
        hidden_TH = self.model.of_target(hidden_TH)
        rows = torch.arange(len(hidden_TH), device=hidden_TH.device)
        given = DraftRows(rows % self._runner.vocab_size, rows % self._runner.context_length)
        attention, most = self._passes.attention, self._runner.max_running
        found_TH = self.model.forward(given, hidden_TH, attention.attend(sequences), step)
        if isinstance(self.model, TargetReader):
            self.model.store(given, hidden_TH, attention.attend(sequences))
        if not step.counts:
            self._passes.most_likely(found_TH[:most], (most,))

    def clear(self, pages: Sequence[int]) -> None:
        self._passes.attention.clear(pages)

    def begin(
        self,
        plan: StepPlan,
        agreement: StepAgreement,
        hidden_TH: Tensor,
        found_2R: Tensor | None,
    ) -> AddDrafts:
        """Launches the passes behind a step that was just launched, and returns what adds the
        drafts to its results; then the device is done. `found_2R`: what it samples; None if the
        host samples some: the passes wait for it."""
        on_host = found_2R is None or self._runner.ranks.attention.size > 1
        if found_2R is None or on_host or agreement.draft_branches > 1:
            return partial(self.run, plan, agreement, hidden_TH)
        add = self._launch(plan, agreement, hidden_TH, found_2R)
        self._runner.record_drafts(plan, agreement)
        return add

    def _launch(
        self, plan: StepPlan, agreement: StepAgreement, hidden_TH: Tensor, found_2R: Tensor
    ) -> AddDrafts:
        rows = SampledRows.of(plan, self._passes.table.max_pages)
        next_T, rows_R, *columns = self._passes.uploads.upload(*rows.columns())
        next_T.index_copy_(0, rows_R, found_2R[0])
        hidden_TH = self._extend(plan, agreement, next_T, hidden_TH)
        if not any(agreement.drafting):
            return lambda results: None
        places, drafts, last_D, position_D, until_D, first_D = columns
        shape = (len(last_D), rows.most_drafts)
        right_DK = found_2R[0][places].view(shape) == drafts.view(shape)
        accepted_D = right_DK.long().cumprod(1).sum(1)
        last_D = last_D + accepted_D
        hidden_DH, ids_D = hidden_TH[last_D], next_T[last_D]
        found = list[Tensor]()
        if self.model.reads_target:
            ids_D = self._passes.most_likely(hidden_DH, agreement.drafting)
            found.append(ids_D)
        for number in self._chained(agreement):
            at_D = torch.minimum(position_D + accepted_D + number, until_D)
            at = Places(at_D, first_D)
            hidden_DH = self._passes.forward_singles(agreement.drafting, ids_D, at, hidden_DH)
            ids_D = self._passes.most_likely(hidden_DH, agreement.drafting)
            found.append(ids_D)
        return self._download(plan, torch.stack(found))

    def _download(self, plan: StepPlan, drafts: Tensor) -> AddDrafts:
        host, event = self._passes.downloads.next_buffer(drafts.numel())
        host.copy_(drafts.view(-1), non_blocking=True)
        event.record()
        ahead = len(drafts) - self.model.reads_target
        return lambda results: add_chains(plan, results, host.view(drafts.shape), ahead)

    def run(
        self,
        plan: StepPlan,
        agreement: StepAgreement,
        hidden_TH: Tensor,
        results: Sequence[ItemResult],
    ) -> None:
        """Sets the `drafts` of `results`, which only the rank that samples has."""
        self._run(plan, agreement, hidden_TH, results)
        self._runner.record_drafts(plan, agreement)

    def _run(
        self,
        plan: StepPlan,
        agreement: StepAgreement,
        hidden_TH: Tensor,
        results: Sequence[ItemResult],
    ) -> None:
        facts = self._settle(plan, results)
        hidden_TH = self._extend(plan, agreement, facts.next_T, hidden_TH)
        if agreement.draft_branches > 1:
            self._trees.add(plan, agreement, facts, hidden_TH, results)
            return
        drafts = self._chain(plan, agreement, facts, hidden_TH)
        if results and drafts is not None:
            add_chains(plan, results, drafts, len(drafts) - self.model.reads_target)

    def _extend(
        self, plan: StepPlan, agreement: StepAgreement, next_T: Ints | Tensor, hidden_TH: Tensor
    ) -> Tensor:
        """The hidden states behind the rows of the step, and of gaps."""
        which, rows = Pass.extending(plan, agreement), Extension.of(plan, self._passes.table)
        ids_T = next_T
        if not self.model.reads_target:
            ids_T = np.concatenate((plan.token_ids, rows.gaps_G)) if plan.gaps else plan.token_ids
        hidden_TH = self.model.of_target(hidden_TH)
        return self._passes.forward(which, ids_T, rows.positions_T, rows.sequences, hidden_TH)

    def begin_store(
        self, plan: StepPlan, hidden_TH: Tensor, found_2R: Tensor, on_host: Sequence[int]
    ) -> StoreRest | None:
        """As DraftStore.begin, of a step without drafts."""
        if self._store is None:
            return None
        return self._store.begin(plan, hidden_TH, found_2R, on_host)

    def store(self, plan: StepPlan, hidden_TH: Tensor, result: StepResult) -> None:
        """As `run`, of a step without drafts: the model's cache gets what it needs of the rows."""
        if self._store is not None:
            self._store.run(plan, hidden_TH, result)

    def _settle(self, plan: StepPlan, results: Sequence[ItemResult]) -> Continuation:
        """The first rank of an attention group has sampled; the others get what it knows."""
        group, tokens = self._runner.ranks.attention, plan.num_tokens
        drafting = sum(item.draft_until > 0 for item in plan.items)
        if not plan.has_work:
            return Continuation(np.zeros(0, np.int64), np.zeros(0, np.int64))
        if group.size == 1:
            return Continuation.of(plan, results)
        counts = [tokens + drafting] + [0] * (group.size - 1)
        column = np.zeros((0, 1), np.int64)
        if group.rank == 0:
            column = np.concatenate(Continuation.of(plan, results))[:, None]
        found = group.gather_rows(torch.from_numpy(column), counts, "tokens for drafts")
        return Continuation(*np.split(found.numpy()[:, 0], [tokens]))

    def _chain(
        self, plan: StepPlan, agreement: StepAgreement, facts: Continuation, hidden_TH: Tensor
    ) -> Tensor | None:
        """[steps, D]: the proposals; None where this rank has none of the logits."""
        counts = agreement.drafting
        if not any(counts):
            return None
        last_D, ids_D = self._passes.uploads.upload(facts.last_D, facts.next_T[facts.last_D])
        hidden_DH, found = hidden_TH[last_D], list[Tensor]()
        if self.model.reads_target:
            ids_D = self._passes.most_likely(hidden_DH, counts)
            found.append(ids_D)
        drafting = np.array([item.draft_until > 0 for item in plan.items], bool)
        until_D = np.array([item.draft_until for item in plan.items], np.int64)[drafting]
        first_D = plan.rows[drafting] * self._passes.table.max_pages
        position_D = plan.positions[facts.last_D]
        for number in self._chained(agreement):
            at_D = np.minimum(position_D + number, until_D)
            given_D, sequences = self._passes.shared(ids_D, len(at_D)), single_tokens(at_D, first_D)
            hidden_DH = self._passes.forward(Pass(counts), given_D, at_D, sequences, hidden_DH)
            ids_D = self._passes.most_likely(hidden_DH, counts)
            found.append(ids_D)
        return self._passes.on_host(torch.stack(found)) if self._runner.samples else None

    def _chained(self, agreement: StepAgreement) -> range:
        """How far behind the last token each pass of a chain is."""
        return range(1, agreement.draft_steps + (not self.model.reads_target))

    @property
    def positions_ahead(self) -> int:
        """Positions behind a step's last one that chains or trees fill."""
        if self._speculation.topk == 1:
            return self.num_steps - self.model.reads_target
        root = 0 if self.model.reads_target else 1
        return root + self._speculation.topk * (self.num_steps - 1)
