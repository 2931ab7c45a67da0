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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic.core.speculation import Speculation
from moesaic.core.step import Step
from moesaic.engine.runner.attention import BACKENDS
from moesaic.engine.runner.batches import sequences_of
from moesaic.engine.runner.graphs import GraphKey
from moesaic.engine.runner.pinned import PinnedRing
from moesaic.engine.runner.row_results import LOGIT_ROWS
from moesaic.engine.schedule.plan import Ints, ItemResult, StepAgreement, StepPlan, StepResult
from moesaic.engine.setup.graph_sizes import GraphSizes
from moesaic.engine.speculate.draft_branches import Branches, Frontier
from moesaic.engine.speculate.draft_graphs import DraftGraphs, Places, StoreGraphs
from moesaic.engine.speculate.draft_rows import (
    Continuation,
    Extension,
    SampledRows,
    add_chains,
    single_tokens,
    tokens_behind,
)
from moesaic.engine.speculate.drafters import DraftModel, DraftRows, TargetReader
from moesaic.kernels.sampling import greedy_rows
from moesaic.layers.paged_cache import PagedCache, PageTable, Sequences

if TYPE_CHECKING:
    from moesaic.engine.runner.model_runner import ModelRunner


AddDrafts = Callable[[Sequence[ItemResult]], None]
StoreRest = Callable[[StepResult], None]


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


class DraftPhase:
    def __init__(
        self, runner: ModelRunner, model: DraftModel, speculation: Speculation, timeout: float
    ) -> None:
        self._runner, self.model, self._speculation = runner, model, speculation
        self.num_steps = num_steps = speculation.num_steps
        self._grows_trees = speculation.topk > 1
        self._timeout = timeout + runner.ranks.timeout * (runner.ranks.mesh.tp > 1)
        self._uploads = PinnedRing(runner.device, 4 * LOGIT_ROWS, self._timeout)
        self._downloads = PinnedRing(runner.device, num_steps * runner.max_running, self._timeout)
        self.graphs: DraftGraphs | None = None
        self._reader = model if isinstance(model, TargetReader) else None
        """The model, if steps without drafts store what it needs of them."""
        self._store_graphs: StoreGraphs | None = None

    def use_cache(self, target: PagedCache, table: PageTable) -> None:
        """Makes a cache with the pages of the target's, filled with zeros: positions that the model
        has not computed are read as such."""
        runner, pages = self._runner, target.keys.shape[1] - 1
        sizes = (pages, target.page_size, target.keys.dtype, runner.device)
        self.cache, self._table = PagedCache(self.model.cache, *sizes), table
        for part in (self.cache.keys, self.cache.values):
            part.view(torch.uint8).zero_()
        given = (self.cache, table, runner.moe.deterministic)
        self._attention = BACKENDS[runner.kind](*given, trees=runner.verifies_trees)
        self._idle = self._attention.static(GraphKey(1)) if runner.kind == "cuda" else None

    @torch.inference_mode()
    def use_graphs(self, sizes: GraphSizes) -> None:
        """Captures them on a GPU; elsewhere static buffers are used all the same."""
        runner = self._runner
        self.graphs = DraftGraphs(runner, self.model, self._attention, sizes, self._uploads)
        if self._reader is not None:
            plain = sizes._replace(verify=())
            given = (runner, self.model, self._attention, plain, self._uploads)
            self._store_graphs = StoreGraphs(*given)
        if runner.device.type == "cuda":
            pool = torch.cuda.graph_pool_handle()
            for graphs in self._all_graphs:
                graphs.capture(pool)

    def drop(self) -> None:
        """After a failed step, as AsynchronousSteps.drop."""
        for graphs in self._all_graphs:
            graphs.drop()

    @property
    def _all_graphs(self) -> list[DraftGraphs]:
        return [graphs for graphs in (self.graphs, self._store_graphs) if graphs is not None]

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
        found_TH = self.model.forward(given, hidden_TH, self._attention.attend(sequences), step)
        if self._reader is not None:
            self._reader.store(given, hidden_TH, self._attention.attend(sequences))
        if not step.counts:
            self._most_likely(found_TH[: self._runner.max_running], (self._runner.max_running,))

    def clear(self, pages: Sequence[int]) -> None:
        self._attention.clear(pages)

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
        rows = SampledRows.of(plan, self._table.max_pages)
        next_T, rows_R, *columns = self._uploads.upload(*rows.columns())
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
            ids_D = self._most_likely(hidden_DH, agreement.drafting)
            found.append(ids_D)
        for number in self._chained(agreement):
            at_D = torch.minimum(position_D + accepted_D + number, until_D)
            at = Places(at_D, first_D)
            hidden_DH = self._forward_singles(agreement.drafting, ids_D, at, hidden_DH)
            ids_D = self._most_likely(hidden_DH, agreement.drafting)
            found.append(ids_D)
        return self._download(plan, torch.stack(found))

    def _download(self, plan: StepPlan, drafts: Tensor) -> AddDrafts:
        host, event = self._downloads.next_buffer(drafts.numel())
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
        facts = self._settle(plan, results)
        hidden_TH = self._extend(plan, agreement, facts.next_T, hidden_TH)
        if agreement.draft_branches > 1:
            self._add_trees(plan, agreement, facts, hidden_TH, results)
            return
        drafts = self._chain(plan, agreement, facts, hidden_TH)
        if results and drafts is not None:
            add_chains(plan, results, drafts, len(drafts) - self.model.reads_target)

    def _extend(
        self, plan: StepPlan, agreement: StepAgreement, next_T: Ints | Tensor, hidden_TH: Tensor
    ) -> Tensor:
        """The hidden states behind the rows of the step, and of gaps."""
        which, rows = Pass.extending(plan, agreement), Extension.of(plan, self._table)
        ids_T = next_T
        if not self.model.reads_target:
            ids_T = np.concatenate((plan.token_ids, rows.gaps_G)) if plan.gaps else plan.token_ids
        hidden_TH = self.model.of_target(hidden_TH)
        return self._forward(which, ids_T, rows.positions_T, rows.sequences, hidden_TH)

    def begin_store(
        self, plan: StepPlan, hidden_TH: Tensor, found_2R: Tensor, on_host: Sequence[int]
    ) -> StoreRest | None:
        """As `begin`, of a step without drafts. `on_host`: which of its tokens the host samples
        later; what is returned stores their rows then."""
        if self._reader is None or not plan.has_work:
            return None
        if self._runner.ranks.attention.size > 1:  # steps do not overlap
            return partial(self.store, plan, hidden_TH)
        hidden_TH = self.model.of_target(hidden_TH)
        empty = StepResult([ItemResult() for _ in plan.items])
        rows_R = plan.logit_rows()[: plan.num_sampled]
        next_T, places_R = self._uploads.upload(tokens_behind(plan, empty), rows_R)
        next_T.index_copy_(0, places_R, found_2R[0])
        self._store(next_T, plan.positions(), sequences_of(plan, self._table), hidden_TH)
        return self._rest(plan, hidden_TH, rows_R[on_host]) if len(on_host) else None

    def _rest(self, plan: StepPlan, hidden_TH: Tensor, rows_L: Ints) -> StoreRest:
        """Stores these rows again. All but the tokens behind them is kept as it is now."""
        numbers = np.repeat(np.arange(plan.num_sequences), plan.lengths)[rows_L]
        positions_L = plan.positions()[rows_L]
        first_L = plan.rows[numbers] * self._table.max_pages
        at = single_tokens(plan.places()[rows_L], first_L)
        attention, some_LH = self._attention.attend(at), hidden_TH[rows_L]

        def store(result: StepResult) -> None:
            assert self._reader is not None
            ids = tokens_behind(plan, result)[rows_L]
            self._reader.store(
                DraftRows(*self._uploads.upload(ids, positions_L)), some_LH, attention
            )

        return store

    def store(self, plan: StepPlan, hidden_TH: Tensor, result: StepResult) -> None:
        """As `run`, of a step without drafts: the model's cache gets what it needs of the rows."""
        if self._reader is None or not plan.has_work:
            return
        next_T, group = tokens_behind(plan, result), self._runner.ranks.attention
        if group.size > 1:
            counts = [plan.num_tokens] + [0] * (group.size - 1)
            own = torch.from_numpy(next_T)[:, None]
            own = own if group.rank == 0 else own[:0]
            next_T = group.gather_rows(own, counts, "tokens for drafts").numpy()[:, 0]
        hidden_TH = self.model.of_target(hidden_TH)
        self._store(next_T, plan.positions(), sequences_of(plan, self._table), hidden_TH)

    def _store(
        self, ids_T: Ints | Tensor, positions_T: Ints, sequences: Sequences, hidden_TH: Tensor
    ) -> None:
        assert self._reader is not None
        if self._store_graphs is not None:
            key = self._store_graphs.bucket(len(positions_T))
            if key is not None:
                self._store_graphs.forward(key, ids_T, positions_T, hidden_TH, sequences)
                return
        rows = self._upload_rows(ids_T, positions_T)
        self._reader.store(rows, hidden_TH, self._attention.attend(sequences))

    def _upload_rows(self, ids_T: Ints | Tensor, positions_T: Ints) -> DraftRows:
        columns = [positions_T] if isinstance(ids_T, Tensor) else [positions_T, ids_T]
        given_T, *uploaded = self._uploads.upload(*columns)
        return DraftRows(ids_T if isinstance(ids_T, Tensor) else uploaded[0], given_T)

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
        last_D, ids_D = self._uploads.upload(facts.last_D, facts.next_T[facts.last_D])
        hidden_DH, found = hidden_TH[last_D], list[Tensor]()
        if self.model.reads_target:
            ids_D = self._most_likely(hidden_DH, counts)
            found.append(ids_D)
        drafting = np.array([item.draft_until > 0 for item in plan.items], bool)
        until_D = np.array([item.draft_until for item in plan.items], np.int64)[drafting]
        first_D = plan.rows[drafting] * self._table.max_pages
        position_D = plan.positions()[facts.last_D]
        for number in self._chained(agreement):
            at_D = np.minimum(position_D + number, until_D)
            given_D, sequences = self._shared(ids_D, len(at_D)), single_tokens(at_D, first_D)
            hidden_DH = self._forward(Pass(counts), given_D, at_D, sequences, hidden_DH)
            ids_D = self._most_likely(hidden_DH, counts)
            found.append(ids_D)
        return self._on_host(torch.stack(found)) if self._runner.samples else None

    def _add_trees(
        self,
        plan: StepPlan,
        agreement: StepAgreement,
        facts: Continuation,
        hidden_TH: Tensor,
        results: Sequence[ItemResult],
    ) -> None:
        """The host chooses the branches of each pass."""
        counts = agreement.drafting
        if not any(counts):
            return
        frontier = Frontier.of(plan, facts.last_D, self._table.max_pages)
        branches = Branches(len(facts.last_D), agreement.draft_branches)
        tokens_DK = facts.next_T[facts.last_D][:, None]
        from_DK = np.zeros_like(tokens_DK)
        (last_D,) = self._uploads.upload(facts.last_D)
        hidden_RH = hidden_TH[last_D]
        for step in range(agreement.draft_steps):
            if step or not self.model.reads_target:
                frontier = frontier.behind(from_DK)
                hidden_RH = self._forward_branches(counts, frontier, tokens_DK, from_DK, hidden_RH)
            rows = tuple(frontier.slots_DK.shape[1] * count for count in counts)
            tokens_DK, from_DK = self._choose(branches, hidden_RH, rows, len(facts.last_D))
        if self._runner.samples and results:
            drafting = [n for n, item in enumerate(plan.items) if item.draft_until]
            drafts = branches.best(self._speculation.num_drafts)
            for number, draft in zip(drafting, drafts, strict=True):
                results[number].drafts, results[number].parents = draft

    def _forward_branches(
        self,
        counts: tuple[int, ...],
        frontier: Frontier,
        tokens_DK: Ints,
        from_DK: Ints,
        hidden_RH: Tensor,
    ) -> Tensor:
        """`hidden_RH`: of the rows that each of these is behind."""
        count, width = from_DK.shape
        before = len(hidden_RH) // max(1, count)
        (from_R,) = self._uploads.upload((np.arange(count)[:, None] * before + from_DK).ravel())
        which = Pass(tuple(width * n for n in counts), verifies=True, shares=True)
        given = tokens_DK.ravel(), frontier.positions, frontier.sequences
        return self._forward(which, *given, hidden_RH[from_R])

    def _choose(
        self, branches: Branches, hidden_RH: Tensor, rows: tuple[int, ...], sequences: int
    ) -> tuple[Ints, Ints]:
        """As Branches.grow; the first rank of an attention group tells the others."""
        topk, group = branches.topk, self._runner.ranks.attention
        ids_RK, likely_RK = self._most_likely_of(hidden_RH, rows, topk)
        found = np.zeros((0, 2), np.int64)
        if self._runner.samples and sequences:
            tokens_DK, from_DK = branches.grow(ids_RK, likely_RK)
            found = np.stack((tokens_DK.ravel(), from_DK.ravel()), 1)
        if group.size > 1 and sequences:
            counts = [sequences * topk] + [0] * (group.size - 1)
            found = group.gather_rows(torch.from_numpy(found), counts, "branches").numpy()
        tokens_DK, from_DK = found.T.reshape(2, sequences, topk)
        return tokens_DK, from_DK

    def _most_likely_of(
        self, hidden_RH: Tensor, counts: tuple[int, ...], topk: int
    ) -> tuple[Ints, NDArray[np.float64]]:
        """The tokens behind each row, and the logarithms of their probabilities; no rows where
        `_most_likely` has none."""
        groups = self._runner.ranks.mesh.dp > 1
        found = [torch.zeros(0, 2, topk, dtype=torch.float64, device=self._runner.device)]
        for piece, rows in self._pieces(hidden_RH, counts):
            logits_RV = self.model.logits(piece, rows if groups else ())
            if self._runner.samples and len(piece):
                likely, ids = logits_RV.float().log_softmax(-1).topk(topk)
                ids = self.model.to_target(ids)
                found.append(torch.stack((ids.double(), likely.double()), 1))
        bits = self._on_host(torch.cat(found).view(torch.int64))
        both = bits.view(torch.float64).numpy().copy()
        return both[:, 0].astype(np.int64), both[:, 1]

    def _chained(self, agreement: StepAgreement) -> range:
        """How far behind the last token each pass of a chain is."""
        return range(1, agreement.draft_steps + (not self.model.reads_target))

    @property
    def positions_ahead(self) -> int:
        """Positions behind a step's last one that chains or trees fill."""
        if not self._grows_trees:
            return self.num_steps - self.model.reads_target
        root = 0 if self.model.reads_target else 1
        return root + self._speculation.topk * (self.num_steps - 1)

    def _on_host(self, drafts: Tensor) -> Tensor:
        """The draft model has run when they are there."""
        host, event = self._downloads.next_buffer(drafts.numel())
        host.copy_(drafts.view(-1), non_blocking=True)
        event.record()
        event.wait(self._timeout, "the draft model")
        return host.view(drafts.shape)

    def _forward(
        self,
        which: Pass,
        ids_T: Ints | Tensor,
        positions_T: Ints,
        sequences: Sequences,
        hidden_TH: Tensor,
    ) -> Tensor:
        most, runner = max(which.counts), self._runner
        if self.graphs is not None and not which.prefill:
            key = self.graphs.bucket(most, which.verifies)
            if key is not None:
                return self.graphs.forward(key, ids_T, positions_T, hidden_TH, sequences)
        groups = which.counts if runner.ranks.mesh.dp > 1 else ()
        step = Step(which.prefill, counts=groups, rows=most if runner.kind == "cuda" else 0)
        if self._idle is not None and not len(sequences):
            return self._run_idle(step)
        attention = self._attention.attend(sequences, which.shares)
        return self.model.forward(self._upload_rows(ids_T, positions_T), hidden_TH, attention, step)

    def _forward_singles(
        self, counts: tuple[int, ...], ids_D: Tensor, at: Places, hidden_DH: Tensor
    ) -> Tensor:
        """A token of each sequence, of which only the device knows the positions."""
        most, runner = max(counts), self._runner
        key = None if self.graphs is None else self.graphs.bucket(most)
        if self.graphs is not None and key is not None:
            return self.graphs.forward_singles(key, ids_D, at, hidden_DH)
        groups = counts if runner.ranks.mesh.dp > 1 else ()
        step = Step(False, counts=groups, rows=most if runner.kind == "cuda" else 0)
        if self._idle is not None and not len(ids_D):
            return self._run_idle(step)
        buffers = self._attention.static(GraphKey(max(1, len(ids_D))))
        buffers.fill_singles(*at)
        rows = DraftRows(ids_D, at.positions_B)
        return self.model.forward(rows, hidden_DH, buffers.attention, step)

    def _run_idle(self, step: Step) -> Tensor:
        """As IdleBatch: kernels need a row, which is padding."""
        runner = self._runner
        assert self._idle is not None
        self._idle.fill(sequences_of(StepPlan(), self._table))
        nothing_1 = torch.zeros(1, dtype=torch.int64, device=runner.device)
        none_1 = nothing_1.int()
        step = replace(step, num_tokens_1=none_1, own_tokens_1=none_1)
        rows, x_1H = (
            DraftRows(nothing_1, nothing_1),
            runner.hidden_buffer(1, self.model.hidden_size),
        )
        return self.model.forward(rows, x_1H, self._idle.attention, step)[:0]

    def _most_likely(self, hidden_DH: Tensor, counts: Sequence[int]) -> Tensor:
        """On the first rank of a group; no rows on the others, and where it has no sequences."""
        groups = self._runner.ranks.mesh.dp > 1
        found = [torch.zeros(0, dtype=torch.int64, device=self._runner.device)]
        for piece, rows in self._pieces(hidden_DH, counts):
            logits_RV = self.model.logits(piece, rows if groups else ())
            if self._runner.samples and len(piece):
                found.append(self.model.to_target(greedy_rows(logits_RV)[0]))
        return torch.cat(found)

    def _pieces(
        self, hidden_DH: Tensor, counts: Sequence[int]
    ) -> Iterator[tuple[Tensor, list[int]]]:
        """Rows whose logits are computed at once, and how many of them each group has."""
        for start in range(0, max(counts), LOGIT_ROWS):
            rows = [min(max(0, count - start), LOGIT_ROWS) for count in counts]
            yield hidden_DH[start : start + LOGIT_ROWS], rows

    def _shared(self, ids_D: Tensor, count: int) -> Tensor:
        """The tokens on all ranks of the group."""
        group = self._runner.parallel.attention
        if group.size == 1 or not count:
            return ids_D
        counts, own = [count] + [0] * (group.size - 1), ids_D[:, None]
        own = own if group.rank == 0 else own[:0]
        return group.gather_rows(own, counts, "drafts")[:, 0]
