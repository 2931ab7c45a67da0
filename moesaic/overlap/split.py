"""Where a batch is cut into two micro-batches.

A decode batch is cut between sequences, so that each half has as many. A batch with prompts is cut
between the sequences that balance the tokens best; where these leave one half too small, it is cut
in the middle of its tokens, inside of a sequence (two-chunk): the second half then attends to the
tokens of the first, which is ahead of it in every layer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Lengths = npt.NDArray[np.integer]


class BatchCut(NamedTuple):
    """`sequences`: whole ones in the first half; with `tokens` beyond them the next one is cut."""

    sequences: int
    tokens: int


def cut_decodes(lengths: Lengths) -> BatchCut:
    """`lengths`: new tokens of each sequence."""
    sequences = len(lengths) // 2
    return BatchCut(sequences, int(lengths[:sequences].sum()))


def cut_prompts(lengths: Lengths, threshold: float) -> BatchCut:
    """`threshold`: the least share of the tokens that a half must have where no sequence is cut; 0
    never cuts one.

    >>> cut_prompts(np.array([498, 502]), 0.48), cut_prompts(np.array([42, 999]), 0.48)
    (BatchCut(sequences=1, tokens=498), BatchCut(sequences=1, tokens=520))
    """
    ends = np.concatenate(([0], np.cumsum(lengths)))
    total = int(ends[-1])
    away = np.abs(2 * ends - total)
    sequences = len(ends) - 1 - int(np.argmin(away[::-1]))  # of two that are alike the later one
    cut = BatchCut(sequences, int(ends[sequences]))
    least = min(cut.tokens, total - cut.tokens)
    if not total or least >= threshold * total or total // 2 == 0:
        return cut
    return BatchCut(int(np.searchsorted(ends, total // 2, side="right")) - 1, total // 2)
