"""Outcomes of the rows of logits that a step samples or scores.

R rows · V vocabulary.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Final, NamedTuple

import torch
from msgspec import structs
from torch import Tensor

from moesaic.core.draft_tree import behind
from moesaic.core.speculation import AcceptThresholds
from moesaic.engine.runner.matchers import GrammarMask, MaskKey
from moesaic.engine.sampling.adjust import tokens_of
from moesaic.engine.sampling.sampler import NonFiniteLogits, SampleRow, sample, token_logprobs
from moesaic.engine.schedule.plan import (
    NOT_FINITE,
    DecodeRows,
    ItemResult,
    PlanItem,
    StepPlan,
)
from moesaic.kernels.sampling import OfferedDrafts

NONE_LEFT: Final = "no token is left that its grammar, logit_bias and other parameters allow"
# The vocabulary is wide: logits are computed for at most this many rows at once.
LOGIT_ROWS: Final = 128

NO_ITEM: Final = -1


class SampledRow(NamedTuple):
    """One of the rows that an item of a plan samples, and how."""

    item: int
    sample: SampleRow
    number: int = 0
    """0: the newest token's; n: that of draft n."""
    offered: Sequence[int] = ()
    """The drafts behind it, if it may take them by AcceptThresholds."""

    @property
    def mask_key(self) -> MaskKey:
        return self.item, self.number


def sampled_rows(plan: StepPlan, offers: bool = False) -> list[SampledRow]:
    """Those of the plan's items, in the order of StepPlan.logit_rows. `offers`: rows may take
    drafts by AcceptThresholds."""
    rows: list[SampledRow] = []
    for number, item in enumerate(plan.items):
        if item.sample is None:
            continue
        rows.append(SampledRow(number, item.sample, 0, _offered(item, 0) if offers else ()))
        if item.num_drafts:
            rows += [
                SampledRow(number, row, draft, _offered(item, draft) if offers else ())
                for draft, row in enumerate(_rows_after_drafts(item, item.sample), 1)
            ]
    return rows


def _offered(item: PlanItem, row: int) -> Sequence[int]:
    return behind(item.drafts, item.parents, row)


def offered_drafts(
    rows: Sequence[SampledRow], thresholds: AcceptThresholds | None, device: torch.device
) -> OfferedDrafts | None:
    """None where no row may take one."""
    if thresholds is None or not any(row.offered for row in rows):
        return None
    return OfferedDrafts.of([row.offered for row in rows], thresholds, device)


class KnownRows:
    """How the requests in the rows of the page table are sampled, as their items have said."""

    def __init__(self, rows: int) -> None:
        self._known: list[tuple[int, SampleRow] | None] = [None] * rows

    def learn(self, items: Sequence[PlanItem]) -> None:
        for item in items:
            if item.sample is not None:
                self._known[item.row] = item.request_no, item.sample

    def sampled(self, decodes: DecodeRows) -> list[SampledRow]:
        """Rows that are no item's."""
        columns = decodes.request_nos.tolist(), decodes.rows.tolist(), decodes.first.tolist()
        return [SampledRow(NO_ITEM, self._row(*column)) for column in zip(*columns, strict=True)]

    def _row(self, request_no: int, row: int, first: int) -> SampleRow:
        known = self._known[row]
        if known is None or known[0] != request_no:
            raise ValueError(f"request {request_no} decodes, but no earlier step samples it")
        return structs.replace(known[1], position=first + 1)


def decoded_tokens(found: Sequence[ItemResult]) -> tuple[list[int], list[int]]:
    """The tokens of a plan's decodes, and which of them are broken."""
    tokens = [result.token_ids[0] if result.token_ids else 0 for result in found]
    return tokens, [n for n, result in enumerate(found) if result.broken]


def _rows_after_drafts(item: PlanItem, row: SampleRow) -> Iterator[SampleRow]:
    for number in range(1, item.num_drafts + 1):
        drafts = item.drafts_before(number)
        output_ids = tokens_of(row).then(drafts) if row.params.adjusts else ()
        yield structs.replace(row, position=row.position + len(drafts), output_ids=output_ids)


def item_results(plan: StepPlan, found: Sequence[ItemResult]) -> list[ItemResult]:
    """The result of each item: that of its first sampled row, or an empty one without `found`."""
    results, start = [], 0
    for item in plan.items:
        if item.sample is None or not found:
            results.append(ItemResult())
        else:
            results.append(found[start])
            start += 1 + item.num_drafts
    return results


def accept_drafts(plan: StepPlan, found: Sequence[ItemResult]) -> None:
    """Adds the results of the rows behind an item's accepted drafts to that of its first row."""
    if not found or not any(item.num_drafts for item in plan.items):
        return
    start = 0
    for item in plan.items:
        stop = start + item.num_sampled
        if item.num_drafts and stop > start:
            _accept(item, found[start:stop])
        start = stop


def _accept(item: PlanItem, rows: Sequence[ItemResult]) -> None:
    """A row that could not be sampled ends the item like a rejected draft: the next step fails."""
    result, last = rows[0], 0
    drafts = zip(item.parents or range(item.num_drafts), item.drafts, rows[1:], strict=True)
    for number, (parent, draft, row) in enumerate(drafts, 1):
        if parent != last or not result.token_ids or result.token_ids[-1] != draft:
            continue
        if not row.token_ids:
            return
        last = number
        result.token_ids = [*result.token_ids, *row.token_ids]
        result.logprobs = [*result.logprobs, *row.logprobs]
        result.top_logprobs = [*result.top_logprobs, *row.top_logprobs]


def sample_rows(
    rows: Sequence[SampledRow],
    logits_RV: Tensor,
    found: Sequence[ItemResult],
    masks: Mapping[MaskKey, GrammarMask],
    thresholds: AcceptThresholds | None = None,
) -> None:
    """Samples each row into its entry of `found`. `masks`: of those with a grammar; `thresholds`:
    of drafts, if not only equal ones are accepted."""
    keys = [row.mask_key for row in rows] if masks else []
    for key, result in zip(keys, found, strict=True) if masks else ():
        if (mask := masks.get(key)) is not None:
            result.broken, result.ended, result.unready = mask.broken, mask.ended, mask.unready
    open_rows = _open_rows(found)
    while open_rows:
        some_RV = logits_RV if len(open_rows) == len(rows) else logits_RV[open_rows]
        chosen = [rows[n] for n in open_rows]
        row_masks = [masks.get(keys[n]) for n in open_rows] if masks else ()
        row_bits = [None if mask is None else mask.bits for mask in row_masks]
        try:
            offered = offered_drafts(chosen, thresholds, some_RV.device)
            sampled = sample(some_RV, [row.sample for row in chosen], row_bits, offered)
        except NonFiniteLogits as error:
            for n in error.rows:
                masked = bool(row_masks) and row_masks[n] is not None
                masked = masked and math.isfinite(some_RV[n].max().item())
                found[open_rows[n]].broken = NONE_LEFT if masked else NOT_FINITE
            open_rows = _open_rows(found)
            continue
        for number, token, logprob, top in zip(open_rows, *sampled, strict=True):
            result = found[number]
            result.token_ids = [token]
            if logprob is not None:
                result.logprobs, result.top_logprobs = [logprob], [top or []]
        return


def _open_rows(found: Sequence[ItemResult]) -> list[int]:
    return [n for n, one in enumerate(found) if not (one.broken or one.ended or one.unready)]


class ScoreQueue:
    """Prompt tokens whose logprobs were requested, in the order in which their logits come."""

    def __init__(self, plan: StepPlan, results: Sequence[ItemResult]) -> None:
        self._waiting = deque(
            (result, target, item.score)
            for item, result in zip(plan.items, results, strict=True)
            if item.score is not None
            for target in item.score.targets
        )

    def score_next(self, logits_RV: Tensor) -> None:
        rows, start = [self._waiting.popleft() for _ in range(len(logits_RV))], 0
        for _, group in groupby(rows, key=lambda row: id(row[0])):
            results, targets, scores = zip(*group, strict=True)
            some_RV = logits_RV[start : start + len(targets)]
            start += len(targets)
            score = scores[0]
            logprobs, top_logprobs = token_logprobs(some_RV, targets, score.top, score.token_ids)
            result = results[0]
            if not all(map(math.isfinite, logprobs)):
                result.broken = NOT_FINITE
            result.input_logprobs = [*result.input_logprobs, *logprobs]
            result.input_top_logprobs = [*result.input_top_logprobs, *top_logprobs]
