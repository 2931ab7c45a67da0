"""The rows that a draft model computes or stores behind a step, as the host knows them.

T tokens of the step · D sequences that get drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from msgspec.structs import astuple
from torch import Tensor

from moesaic.core.draft_tree import path_of
from moesaic.engine.runner.batches import sequences_of
from moesaic.engine.schedule.plan import Ints, ItemResult, PlanItem, StepPlan, StepResult
from moesaic.layers.paged_cache import PageTable, Sequences

NO_TOKEN: Final = -1


def tokens_behind(plan: StepPlan, result: StepResult) -> Ints:
    """The token behind each row of a step; arbitrary behind rejected drafts."""
    next_T, start = np.zeros(plan.num_tokens, np.int64), len(plan.decodes)
    next_T[:-1] = plan.token_ids[1:]
    next_T[:start] = result.token_ids or 0
    for item, found in zip(plan.items, result.items, strict=True):
        stop = start + len(item.token_ids)
        next_T[stop - 1] = item.next_id
        if item.sample is not None:
            rows = stop - item.num_sampled + np.array(_accepted(item, found))
            next_T[rows] = found.token_ids or 0
        start = stop
    return next_T


def _accepted(item: PlanItem, found: ItemResult) -> list[int]:
    """The sampled rows of an item whose tokens count."""
    return [0, *path_of(item.drafts, item.parents, found.token_ids)]


class Continuation(NamedTuple):
    """What sampling has decided, which all ranks of an attention group need."""

    next_T: Ints
    """The token behind each row of the step; arbitrary behind rejected drafts."""
    last_D: Ints
    """The row of the last token of each sequence that gets drafts."""

    @classmethod
    def of(cls, plan: StepPlan, results: Sequence[ItemResult]) -> Continuation:
        assert not len(plan.decodes), "with drafts every request is an item of its own"
        stops = np.cumsum(plan.lengths).tolist()
        last = [
            stop - item.num_sampled + _accepted(item, result)[-1]
            for item, result, stop in zip(plan.items, results, stops, strict=True)
            if item.sample is not None and item.draft_until
        ]
        next_T = tokens_behind(plan, StepResult([*results]))
        return cls(next_T, np.array(last, np.int64))


class SampledRows(NamedTuple):
    """Where a step samples, and what it continues if it gets drafts: the host knows this before the
    step has run. R sampled rows · K drafts of the request with the most."""

    next_T: Ints
    """As in Continuation, where no row samples."""
    rows_R: Ints
    """The row of each sampled token."""
    places_DK: Ints
    """Which of the sampled tokens each draft has to equal."""
    drafts_DK: Ints
    """The drafts; -1 where there is none."""
    last_D: Ints
    """The first sampled row of each sequence, and its position."""
    position_D: Ints
    until_D: Ints
    first_D: Ints

    @classmethod
    def of(cls, plan: StepPlan, max_pages: int) -> SampledRows:
        empty = [ItemResult() for _ in plan.items]
        next_T = Continuation.of(plan, empty).next_T
        rows_R = plan.logit_rows()[: plan.num_sampled]
        drafting = [n for n, item in enumerate(plan.items) if item.draft_until]
        items = [plan.items[n] for n in drafting]
        starts_D = (np.cumsum(plan.sampled) - plan.sampled)[drafting]
        most = max((item.num_drafts for item in items), default=0)
        drafts_DK = np.full((len(items), most), NO_TOKEN)
        for row, item in zip(drafts_DK, items, strict=True):
            row[: item.num_drafts] = item.drafts
        places_DK = np.where(drafts_DK < 0, 0, starts_D[:, None] + np.arange(most))
        position_D = plan.positions[rows_R[starts_D]]
        until_D = np.array([item.draft_until for item in items], np.int64)
        first_D = plan.rows[drafting] * max_pages
        parts = (rows_R[starts_D], position_D, until_D, first_D)
        return cls(next_T, rows_R, places_DK, drafts_DK, *parts)

    @property
    def most_drafts(self) -> int:
        return self.drafts_DK.shape[1]

    def columns(self) -> list[Ints]:
        return [part.ravel() for part in self]


class Extension(NamedTuple):
    """The rows by which the draft model extends its cache: those of the step, then those of gaps,
    whose sequences are other ones of the same requests."""

    positions_T: Ints
    sequences: Sequences
    gaps_G: Ints
    """The own tokens of the rows of gaps."""

    @classmethod
    def of(cls, plan: StepPlan, table: PageTable) -> Extension:
        positions_T, sequences = plan.positions, sequences_of(plan, table)
        if not plan.gaps:
            return cls(positions_T, sequences, positions_T[:0])
        rows, first = (np.array([gap[n] for gap in map(astuple, plan.gaps)]) for n in (0, 1))
        lengths = np.array([len(gap.token_ids) for gap in plan.gaps])
        starts = len(positions_T) + np.cumsum(lengths) - lengths
        columns = (starts, lengths, first + lengths, rows * table.max_pages)
        pairs = zip(sequences.arrays(), columns, strict=True)
        joined = (np.concatenate((own, other.astype(np.int32))) for own, other in pairs)
        behind = [np.arange(len(gap.token_ids)) + gap.first for gap in plan.gaps]
        tokens = np.array([token for gap in plan.gaps for token in gap.token_ids])
        masks_T = sequences.masks_T
        if masks_T is not None:
            masks_T = np.concatenate((masks_T, np.full(len(tokens), -1)))
        joined_T = np.concatenate((positions_T, *behind))
        return cls(joined_T, Sequences(*joined, masks_T=masks_T), tokens)


def single_tokens(positions_D: Ints, first_D: Ints) -> Sequences:
    """One new token of each sequence, at these positions."""
    count = len(positions_D)
    starts, ones = np.arange(count, dtype=np.int32), np.ones(count, np.int32)
    return Sequences(starts, ones, (positions_D + 1).astype(np.int32), first_D.astype(np.int32))


def add_chains(plan: StepPlan, results: Sequence[ItemResult], drafts: Tensor, ahead: int) -> None:
    """Sets the drafts of results. `drafts`: [steps, D] on the host, of which the last one needs
    entries at `ahead` positions behind the step's last row: where pages end before, they are
    fewer."""
    drafting = ((n, item) for n, item in enumerate(plan.items) if item.draft_until)
    for (number, item), tokens in zip(drafting, drafts.T.tolist(), strict=True):
        last = item.first + len(item.token_ids) - item.num_drafts - 2
        last += max(1, len(results[number].token_ids))
        fitting = len(tokens) - max(0, last + ahead - item.draft_until)
        results[number].drafts = tokens[: max(0, fitting)]
