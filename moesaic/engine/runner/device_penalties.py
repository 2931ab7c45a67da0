"""Counters of tokens on the device, for requests whose logits are adjusted before they are sampled.

A token is counted when a step continues from it, also if only the device knows it yet. What the
host says of a request is the truth: counters that are ahead of it, or were dropped after a failed
step, are made again from its tokens.

S requests · V vocabulary · E edits of a request · R rows of logits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from torch import Tensor

from moesaic.engine.runner.future_tokens import FutureTokens, SamplingPath, TokenSlots
from moesaic.engine.runner.pinned import PinnedRing
from moesaic.engine.runner.row_results import SampledRow
from moesaic.engine.sampling.adjust import tokens_of
from moesaic.engine.sampling.token_history import TokenHistory
from moesaic.engine.schedule.plan import PlanItem, StepPlan
from moesaic.kernels.penalties import IN_PROMPT, PenaltyTables, RowPenalty, penalise_rows

# Edits for which a table has room at first.
FEW_EDITS: Final = 16
ROW, NUM_ENDS, FIRST_DRAFT = (
    RowPenalty._fields.index(name) for name in ("row", "num_ends", "first_draft")
)


@dataclass(slots=True)
class CountedRequest:
    place: int
    """Its row of the tables."""
    is_penalised: bool
    min_output: int
    num_output: int = 0
    """Tokens of its answer that are counted."""


@dataclass(slots=True)
class NewTokens:
    """What a step adds to the counters; `bases`: first counters of requests."""

    cleared: list[int] = field(default_factory=list)
    where: list[int] = field(default_factory=list)
    amounts: list[int] = field(default_factory=list)
    bases: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    """Future tokens, each of the request at the same place of `bases`."""


class DevicePenalties:
    """The tables of at most S requests; the least recently sampled one leaves for another."""

    def __init__(self, requests: int, vocab: int, uploads: PinnedRing) -> None:
        self._uploads, self._vocab = uploads, vocab
        shape, device = (requests, FEW_EDITS), uploads.device
        self._tables = PenaltyTables(
            torch.zeros(requests, vocab, dtype=torch.int32, device=device),
            torch.zeros(shape, dtype=torch.int32, device=device),
            torch.zeros(shape, device=device),
        )
        self._packed_SN = np.zeros((requests, len(RowPenalty._fields)), np.int64)
        """On the host: how the next row of each request is adjusted, as long as it is too short."""
        self._known: OrderedDict[int, CountedRequest] = OrderedDict()
        self._free = list(range(requests))

    def count(
        self,
        plan: StepPlan,
        slots: TokenSlots,
        future_tokens: FutureTokens,
    ) -> None:
        """Counts the tokens that items continue from, before their slots have later ones."""
        new, begin = NewTokens(), len(plan.decodes)
        for n in np.flatnonzero(slots.paths == SamplingPath.ADJUSTED).tolist():
            item = plan.items[n - begin]
            if item.sample is not None:
                self._count_item(item, int(slots.numbers[n]), new)
        if new.cleared or new.where or new.bases:
            self._add(new, future_tokens)

    def _count_item(self, item: PlanItem, slot: int, new: NewTokens) -> None:
        assert item.sample is not None
        tokens, is_future = tokens_of(item.sample), item.token_ids[0] < 0
        have, known = len(tokens), self._known.get(item.request_no)
        if known is None or known.num_output > have:
            known = self._enter(item.request_no, tokens.history)
            if known.is_penalised:
                self._begin(known.place, tokens.history, new)
        else:
            self._known.move_to_end(item.request_no)
        if known.is_penalised:
            base = known.place * self._vocab
            if known.num_output < have:
                unknown = tokens[known.num_output :]
                new.where += [base + token for token in unknown]
                new.amounts += [1] * len(unknown)
            if is_future:
                new.bases.append(base)
                new.slots.append(slot)
        known.num_output = have + is_future

    def _begin(self, place: int, history: TokenHistory, new: NewTokens) -> None:
        new.cleared.append(place)
        base, vocab = place * self._vocab, self._vocab
        prompt = [base + token for token in history.prompt_tokens() if token < vocab]
        new.where += prompt
        new.amounts += [IN_PROMPT] * len(prompt)

    def _add(self, new: NewTokens, future_tokens: FutureTokens) -> None:
        cleared, where, amounts, bases, slots = self._uploads.upload(
            new.cleared, new.where, new.amounts, new.bases, new.slots
        )
        counts_SV = self._tables.counts_SV
        if new.cleared:
            counts_SV.index_fill_(0, cleared, 0)
        if new.where:
            counts_SV.view(-1).scatter_add_(0, where, amounts.int())
        if new.bases:
            where = bases + future_tokens.read(slots)
            counts_SV.view(-1).scatter_add_(0, where, torch.ones_like(where, dtype=torch.int32))

    def _enter(self, key: int, history: TokenHistory) -> CountedRequest:
        """Gives the request a row of the tables and writes its edits there."""
        self.free([key])
        place = self._free.pop() if self._free else self._known.popitem(last=False)[1].place
        sizes, columns = [0, 0], []
        wanted = (history.params.logit_bias, history.params.min_new_tokens)
        for n, edits in enumerate((history.biases, history.ends)):
            if wanted[n]:
                kept = edits.ids < self._vocab
                sizes[n] = int(kept.sum())
                columns.append((edits.ids[kept], edits.amounts[kept].view(np.int32)))
        if total := sum(sizes):
            self._reserve_edits(total)
            ids, amounts = (np.concatenate(column) for column in zip(*columns, strict=True))
            ids_E, bits_E = self._uploads.upload(ids, amounts.astype(np.int64))
            self._tables.edit_ids_SE[place, :total] = ids_E.int()
            self._tables.amounts_SE[place, :total] = bits_E.int().view(torch.float32)
        params = history.params
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self._packed_SN[place] = RowPenalty.pack([RowPenalty(0, place, *penalties, *sizes)])
        known = self._known[key] = CountedRequest(place, params.penalised, params.min_new_tokens)
        return known

    def _reserve_edits(self, size: int) -> None:
        tables = self._tables
        have = tables.edit_ids_SE.shape[1]
        if size > have:
            more = (0, max(size, 2 * have) - have)
            self._tables = PenaltyTables(
                tables.counts_SV,
                torch.nn.functional.pad(tables.edit_ids_SE, more),
                torch.nn.functional.pad(tables.amounts_SE, more),
            )

    def adjust(
        self, logits_RV: Tensor, plan: StepPlan, rows: Sequence[SampledRow], first: int = 0
    ) -> None:
        """Adjusts float32 logits in place, as `count` has left the counters; `rows`: those of the
        logits from `first` on."""
        numbers, places, enough = list[int](), list[int](), list[bool]()
        drafts, draft_columns = list[int](), list[tuple[int, int]]()
        for n, row in enumerate(rows, first):
            item = plan.items[row.item]
            if (known := self._known.get(item.request_no)) is None:
                continue
            first_draft = behind = 0
            if row.number:
                before = item.drafts_before(row.number)
                behind, first_draft = len(before), len(drafts)
                drafts += before
            numbers.append(n)
            places.append(known.place)
            enough.append(known.num_output + behind >= known.min_output)
            draft_columns.append((first_draft, behind))
        if numbers:
            packed = self._packed_SN[places]
            packed[:, ROW] = numbers
            packed[enough, NUM_ENDS] = 0
            packed[:, FIRST_DRAFT:] = draft_columns
            packed_A, drafts_D = self._uploads.upload(packed.reshape(-1), drafts)
            penalise_rows(logits_RV, self._tables, packed_A, drafts_D)

    def free(self, keys: Iterable[int]) -> None:
        self._free += [self._known.pop(key).place for key in keys if key in self._known]

    def clear(self) -> None:
        self.free(list(self._known))
