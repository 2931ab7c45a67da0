"""Logits adjusted by penalties, biases and the least length of an answer, before a token is drawn.

R rows · V vocabulary. kernels/penalties.py does the same on a device, with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from moesaic.engine.sampling.token_history import Edits, OutputTokens, TokenHistory

if TYPE_CHECKING:
    from moesaic.engine.sampling.sampler import SampleRow

AdjustedRow = tuple[int, OutputTokens]
"""The number of a row of logits, and the tokens before the sampled one."""


def adjust(raw_RV: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """A copy of the logits with penalties, biases and forbidden end tokens, if there are any."""
    found = [(n, tokens_of(row)) for n, row in enumerate(rows) if row.params.adjusts]
    penalised = [one for one in found if one[1].history.params.penalised]
    biases = [(n, tokens.history.biases) for n, tokens in found if len(tokens.history.biases.ids)]
    ends = [(n, tokens.history.ends) for n, tokens in found if tokens.too_short]
    if not (penalised or biases or ends):
        return raw_RV
    scores_RV = raw_RV.clone(memory_format=torch.contiguous_format)
    if penalised:
        _penalise(scores_RV, penalised)
    for edits in (biases, ends):
        if edits:
            where, _, amounts = _flat_edits(scores_RV, edits, [1.0] * len(edits))
            scores_RV.view(-1).index_add_(0, where, amounts)
    return scores_RV


def tokens_of(row: SampleRow) -> OutputTokens:
    """Those of a row that has no history are counted anew."""
    if isinstance(row.output_ids, OutputTokens):
        return row.output_ids
    return TokenHistory.of(row).outputs()


def _penalise(scores_RV: Tensor, rows: Sequence[AdjustedRow]) -> None:
    found = [(n, tokens.penalties()) for n, tokens in rows]
    repetition = [tokens.history.params.repetition_penalty for _, tokens in rows]
    where, by, amounts = _flat_edits(scores_RV, found, repetition)
    flat = scores_RV.view(-1)
    x = flat.index_select(0, where)
    if repetition.count(1.0) < len(repetition):
        x = torch.where(x > 0, x / by, x * by)
    flat.index_copy_(0, where, x.sub_(amounts))


def _flat_edits(
    scores_RV: Tensor, rows: Sequence[tuple[int, Edits]], factors: Sequence[float]
) -> tuple[Tensor, Tensor, Tensor]:
    """The places of the edited tokens in the flat scores, the factors of their rows, and their
    amounts; without tokens that are not in the vocabulary."""
    vocab, sizes = scores_RV.shape[1], [len(edits.ids) for _, edits in rows]
    tokens = np.concatenate([edits.ids for _, edits in rows])
    where = tokens + (np.array([n for n, _ in rows], np.int64) * vocab).repeat(sizes)
    by = np.array(factors, np.float32).repeat(sizes)
    amounts = np.concatenate([edits.amounts for _, edits in rows])
    if len(tokens) and tokens.max() >= vocab:
        kept = tokens < vocab
        where, by, amounts = where[kept], by[kept], amounts[kept]
    device = scores_RV.device
    where_N = torch.from_numpy(where).to(device)
    return where_N, torch.from_numpy(by).to(device), torch.from_numpy(amounts).to(device)
