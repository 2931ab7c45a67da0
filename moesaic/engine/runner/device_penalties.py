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

from moesaic.engine.runner.future_tokens import FutureTokens, FutureTokenSlot, SamplingPath
from moesaic.engine.runner.pinned import PinnedRing
from moesaic.engine.runner.row_results import SampledRow
from moesaic.engine.sampling.adjust import tokens_of
from moesaic.engine.sampling.token_history import TokenHistory
from moesaic.engine.schedule.plan import PlanItem, StepPlan
from moesaic.kernels.penalties import IN_PROMPT, PenaltyTables, RowPenalty, penalise_rows

# Edits for which a table has room at first.
FEW_EDITS: Final = 16


@dataclass(slots=True)
class CountedRequest:
    place: int
    """Its row of the tables."""
    num_biases: int = 0
    num_ends: int = 0
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
        self._known: OrderedDict[int, CountedRequest] = OrderedDict()
        self._free = list(range(requests))

    def count(
        self,
        items: Sequence[PlanItem],
        slots: Sequence[FutureTokenSlot],
        future_tokens: FutureTokens,
    ) -> None:
        """Counts the tokens that items continue from, before their slots have later ones."""
        new = NewTokens()
        for item, slot in zip(items, slots, strict=True):
            if slot.path is SamplingPath.ADJUSTED and item.sample is not None:
                self._count_item(item, slot, new)
        if new.cleared or new.where or new.bases:
            self._add(new, future_tokens)

    def _count_item(self, item: PlanItem, slot: FutureTokenSlot, new: NewTokens) -> None:
        assert item.sample is not None
        tokens, is_future = tokens_of(item.sample), item.token_ids[0] < 0
        known = self._known.get(item.request_no)
        is_new = known is None or known.num_output > len(tokens)
        if known is None or is_new:
            known = self._enter(item.request_no, tokens.history)
        self._known.move_to_end(item.request_no)
        if item.sample.params.penalised:
            base = known.place * self._vocab
            if is_new:
                new.cleared.append(known.place)
                prompt = [token for token in tokens.history.prompt_tokens() if token < self._vocab]
                new.where += [base + token for token in prompt]
                new.amounts += [IN_PROMPT] * len(prompt)
            unknown = tokens[known.num_output :]
            new.where += [base + token for token in unknown]
            new.amounts += [1] * len(unknown)
            if is_future:
                new.bases.append(base)
                new.slots.append(slot.number)
        known.num_output = len(tokens) + is_future

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
        known = self._known[key] = CountedRequest(place, *sizes)
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

    def adjust(self, logits_RV: Tensor, plan: StepPlan, rows: Sequence[SampledRow]) -> None:
        """Adjusts float32 logits in place, as `count` has left the counters; `rows`: one each."""
        packed, drafts = list[RowPenalty](), list[int]()
        for n, (number, row) in enumerate(rows):
            item, params = plan.items[number], row.params
            if (known := self._known.get(item.request_no)) is None or item.sample is None:
                continue
            behind = row.position - item.sample.position
            if behind == 1:
                drafts += item.token_ids[-item.num_drafts :]
            ends = known.num_ends if known.num_output + behind < params.min_new_tokens else 0
            penalties = (params.repetition_penalty, params.frequency_penalty)
            edits = (known.num_biases, ends, len(drafts) - item.num_drafts if behind else 0)
            packed.append(
                RowPenalty(n, known.place, *penalties, params.presence_penalty, *edits, behind)
            )
        if packed:
            numbers, drafts_D = self._uploads.upload(RowPenalty.pack(packed), drafts)
            penalise_rows(logits_RV, self._tables, numbers, drafts_D)

    def free(self, keys: Iterable[int]) -> None:
        self._free += [self._known.pop(key).place for key in keys if key in self._known]

    def clear(self) -> None:
        self.free(list(self._known))
