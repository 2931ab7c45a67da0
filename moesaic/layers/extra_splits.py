"""Extra splits of the decode kernel for a few sequences that are much longer than the others.

A batch that fills the GPU gives each sequence one split, so that one program a head would read all
of a long sequence while the others are long done. The host knows the lengths before each step, and
lists further splits of such sequences in a list of fixed room, which suits CUDA graphs.

B sequences · X the room for extra splits.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from moesaic.kernels.attention import Splits
from moesaic.layers.paged_cache import Ints

ROOM: Final = 32
# A shorter split takes no longer to read than the rest of a layer's attention.
LEAST_TOKENS: Final = 1024
# How much longer splits become until all fit into the room.
LONGER: Final = 1.25


def may_have_extra(splits: Splits, max_kv_len: int) -> bool:
    return max_kv_len >= (splits.count + 1) * LEAST_TOKENS


def extra_splits(kv_lens_B: Ints, splits: Splits) -> tuple[Ints, Ints, Ints]:
    """The columns of `ExtraSplits`. No split is made shorter than the mean of all sequences' or
    LEAST_TOKENS.

    Lengths [100, 4096, 200, 60, 70] with one split each: sequences_X [1, 1, 1, -1, …] and counts_B
    [0, 3, 0, 0, 0].
    """
    sequences_X = np.full(ROOM, -1, np.int32)
    counts_B, first_B = np.zeros((2, len(kv_lens_B)), np.int32)
    longest = int(kv_lens_B.max(initial=0))
    if not may_have_extra(splits, longest):
        return sequences_X, counts_B, first_B
    least = max(LEAST_TOKENS, float(kv_lens_B.mean()) / splits.count)
    while True:
        counts_B = np.maximum(kv_lens_B // int(least) - splits.count, 0).astype(np.int32)
        total = int(counts_B.sum())
        if total <= ROOM:
            break
        least *= LONGER
    first_B = (np.cumsum(counts_B) - counts_B).astype(np.int32)
    sequences_X[:total] = np.repeat(np.arange(len(kv_lens_B), dtype=np.int32), counts_B)
    return sequences_X, counts_B, first_B
