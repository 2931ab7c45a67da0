"""Bit masks of allowed tokens.

R rows · M rows with a mask · V vocabulary · B bytes of a mask, eight tokens in each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

# What is added to the eight tokens of a byte, lowest bit first: 0 where the bit is set.
OFFSETS: Final = torch.tensor(
    [[0.0 if byte >> bit & 1 else -math.inf for bit in range(8)] for byte in range(256)]
)


def forbid(scores_RV: Tensor, masks: Sequence[Tensor | None]) -> Tensor:
    """Scores with -inf added for the tokens that a row's mask leaves out; NaN stays NaN."""
    rows = [number for number, mask in enumerate(masks) if mask is not None]
    if not rows:
        return scores_RV
    bytes_MB = torch.stack([mask for mask in masks if mask is not None]).to(scores_RV.device)
    offsets_MV = F.embedding(bytes_MB.int(), OFFSETS.to(scores_RV.device)).flatten(1)
    offsets_MV = offsets_MV[:, : scores_RV.shape[1]]
    if len(rows) == len(scores_RV):
        return scores_RV + offsets_MV
    return scores_RV.index_add(0, torch.tensor(rows, device=scores_RV.device), offsets_MV)
