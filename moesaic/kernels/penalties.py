"""Penalties, biases and forbidden end tokens on logits that never leave the device.

R rows of logits · V vocabulary · A rows that are adjusted · S requests with counters · E edits of a
request · D drafts. engine/sampling/adjust.py defines the result: both give the same bits.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moesaic.kernels.native import native

# Added once to the counter of a token that occurs in the prompt.
IN_PROMPT = 1 << 30
PACKED = struct.Struct("=qqdddqqqq")


class RowPenalty(NamedTuple):
    """How one row of logits is adjusted."""

    row: int
    request: int
    """The row of the tables."""
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    num_biases: int = 0
    """The first edits of the request; their amounts are added."""
    num_ends: int = 0
    """The edits behind all biases; these tokens are forbidden."""
    first_draft: int = 0
    num_drafts: int = 0
    """Drafts that count like tokens of the answer."""

    @staticmethod
    def pack(rows: Iterable[RowPenalty]) -> npt.NDArray[np.int64]:
        """Flat int64 numbers, nine a row; penalties are the bits of float64 numbers."""
        return np.frombuffer(b"".join(PACKED.pack(*row) for row in rows), np.int64)


@dataclass(frozen=True, slots=True)
class PenaltyTables:
    """What a device knows of requests."""

    counts_SV: Tensor
    """int32: how often a token occurs in the answer, plus IN_PROMPT."""
    edit_ids_SE: Tensor
    """int32."""
    amounts_SE: Tensor
    """float32."""


@native("moesaic.kernels.triton.penalties")
def penalise_rows(
    logits_RV: Tensor, tables: PenaltyTables, packed: Tensor, drafts_D: Tensor
) -> None:
    """Adjusts some rows of float32 logits in place. `packed`: RowPenalty.pack on the device.

    Logits [2, -2, 1, 1], where token 0 is in the prompt, token 1 twice in the answer and token 3 is
    an end token that is forbidden, with a repetition penalty of 2, a frequency penalty of 0.5, a
    presence penalty of 0.25, a bias of 1 for token 2 and a draft of token 1:
    [2 / 2, -2 * 2 - (3 * 0.5 + 0.25), 1 + 1, -inf] = [1, -5.75, 2, -inf].
    """
    data = packed.cpu().numpy().tobytes()
    for row in (RowPenalty(*fields) for fields in PACKED.iter_unpack(data)):
        x_V, words_V = logits_RV[row.row], tables.counts_SV[row.request].clone()
        drafts = drafts_D[row.first_draft : row.first_draft + row.num_drafts]
        words_V.index_add_(0, drafts, torch.ones_like(drafts, dtype=torch.int32))
        count_V = words_V % IN_PROMPT
        amount_V = (count_V.double() * row.frequency + row.presence).float()
        amount_V = amount_V.masked_fill(count_V == 0, 0.0)
        by = torch.tensor(row.repetition, dtype=torch.float32, device=x_V.device)
        penalised_V = torch.where(x_V > 0, x_V / by, x_V * by) - amount_V
        x_V.copy_(torch.where(words_V == 0, x_V, penalised_V))
        ids_E = tables.edit_ids_SE[row.request].long()
        biases, ends = ids_E[: row.num_biases], ids_E[row.num_biases :][: row.num_ends]
        x_V[biases] += tables.amounts_SE[row.request, : row.num_biases]
        x_V[ends] += -torch.inf
