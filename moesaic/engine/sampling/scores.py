"""Scores of rows in blocks of the vocabulary, so that most of it is looked at once.

R rows · V vocabulary · N blocks of the vocabulary · W tokens a block · M blocks that are kept
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.kernels.sampling import weight_scale

BLOCK: Final = 128


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores in blocks; `ids_RN`: the number of each block in the vocabulary."""

    blocks_RNW: Tensor
    peaks_RN: Tensor
    best_R1: Tensor
    ids_RN: Tensor
    scale: float

    @classmethod
    def of(cls, scores_RV: Tensor) -> Scores:
        vocab = scores_RV.shape[1]
        if vocab % BLOCK:
            scores_RV = F.pad(scores_RV, (0, -vocab % BLOCK), value=-math.inf)
        blocks_RNW = scores_RV.reshape(len(scores_RV), -1, BLOCK)
        peaks_RN = blocks_RNW.amax(-1)
        ids_N = torch.arange(peaks_RN.shape[1], device=scores_RV.device)
        scale = weight_scale(vocab)
        best_R1 = peaks_RN.amax(-1, keepdim=True)
        return cls(blocks_RNW, peaks_RN, best_R1, ids_N.expand_as(peaks_RN), scale)

    def rows(self, index: Tensor) -> Scores:
        return replace(
            self,
            blocks_RNW=self.blocks_RNW[index],
            peaks_RN=self.peaks_RN[index],
            best_R1=self.best_R1[index],
            ids_RN=self.ids_RN[index],
        )

    def nearest(self, count: int) -> Scores:
        """Only the `count` blocks with the highest peaks, still in vocabulary order."""
        ids_RM = self.peaks_RN.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values
        blocks_RMW = self.blocks_RNW.gather(1, ids_RM[:, :, None].expand(-1, -1, BLOCK))
        peaks_RM = self.peaks_RN.gather(1, ids_RM)
        return replace(self, blocks_RNW=blocks_RMW, peaks_RN=peaks_RM, ids_RN=ids_RM)
