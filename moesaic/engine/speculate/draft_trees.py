"""Drafts of a draft model that are trees: the host chooses the branches of each pass.

D sequences that get drafts · K branches of each · R rows of a pass · T tokens of the step · H
hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moesaic.engine.schedule.plan import Ints, ItemResult, StepAgreement, StepPlan
from moesaic.engine.speculate.draft_branches import Branches, Frontier
from moesaic.engine.speculate.draft_passes import DraftPasses, Pass
from moesaic.engine.speculate.draft_rows import Continuation


class DraftTrees:
    def __init__(self, passes: DraftPasses, most: int) -> None:
        """`most`: tokens of a tree."""
        self._passes, self._most = passes, most

    def add(
        self,
        plan: StepPlan,
        agreement: StepAgreement,
        facts: Continuation,
        hidden_TH: Tensor,
        results: Sequence[ItemResult],
    ) -> None:
        """Sets the drafts of `results`, which only the rank that samples has."""
        counts = agreement.drafting
        if not any(counts):
            return
        frontier = Frontier.of(plan, facts.last_D, self._passes.table.max_pages)
        branches = Branches(len(facts.last_D), agreement.draft_branches)
        tokens_DK = facts.next_T[facts.last_D][:, None]
        from_DK = np.zeros_like(tokens_DK)
        (last_D,) = self._passes.uploads.upload(facts.last_D)
        hidden_RH = hidden_TH[last_D]
        for step in range(agreement.draft_steps):
            if step or not self._passes.model.reads_target:
                frontier = frontier.behind(from_DK)
                hidden_RH = self._forward_branches(counts, frontier, tokens_DK, from_DK, hidden_RH)
            rows = tuple(frontier.slots_DK.shape[1] * count for count in counts)
            tokens_DK, from_DK = self._choose(branches, hidden_RH, rows, len(facts.last_D))
        if self._passes.runner.samples and results:
            drafting = [n for n, item in enumerate(plan.items) if item.draft_until]
            drafts = branches.best(self._most)
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
        rows_DK = np.arange(count)[:, None] * before + from_DK
        (from_R,) = self._passes.uploads.upload(rows_DK.ravel())
        which = Pass(tuple(width * n for n in counts), verifies=True, shares=True)
        given = tokens_DK.ravel(), frontier.positions, frontier.sequences
        return self._passes.forward(which, *given, hidden_RH[from_R])

    def _choose(
        self, branches: Branches, hidden_RH: Tensor, rows: tuple[int, ...], sequences: int
    ) -> tuple[Ints, Ints]:
        """As Branches.grow; the first rank of an attention group tells the others."""
        topk, group = branches.topk, self._passes.runner.ranks.attention
        ids_RK, likely_RK = self._passes.most_likely_of(hidden_RH, rows, topk)
        found = np.zeros((0, 2), np.int64)
        if self._passes.runner.samples and sequences:
            tokens_DK, from_DK = branches.grow(ids_RK, likely_RK)
            found = np.stack((tokens_DK.ravel(), from_DK.ravel()), 1)
        if group.size > 1 and sequences:
            counts = [sequences * topk] + [0] * (group.size - 1)
            found = group.gather_rows(torch.from_numpy(found), counts, "branches").numpy()
        tokens_DK, from_DK = found.T.reshape(2, sequences, topk)
        return tokens_DK, from_DK
