"""Masks of tokens as bits, and what they do to scores.

R rows · M rows with a mask · V vocabulary · B bytes of a mask, eight tokens in each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

# What the eight tokens of a byte get: nothing where its bit is set, lowest bit first.
STEPS: Final = torch.tensor(
    [[0.0 if byte >> bit & 1 else -math.inf for bit in range(8)] for byte in range(256)]
)


def forbid(scores_RV: Tensor, masks: Sequence[Tensor | None]) -> Tensor:
    """-inf for the tokens that a row's mask leaves out; scores that are not finite stay so, since
    it is added: a model that gives NaN must not go unnoticed."""
    rows = [number for number, mask in enumerate(masks) if mask is not None]
    if not rows:
        return scores_RV
    bytes_MB = torch.stack([mask for mask in masks if mask is not None]).to(scores_RV.device)
    steps_MV = F.embedding(bytes_MB.int(), STEPS.to(scores_RV.device)).flatten(1)
    steps_MV = steps_MV[:, : scores_RV.shape[1]]
    if len(rows) == len(scores_RV):
        return scores_RV + steps_MV
    return scores_RV.index_add(0, torch.tensor(rows, device=scores_RV.device), steps_MV)
