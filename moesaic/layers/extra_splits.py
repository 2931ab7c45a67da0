"""Extra splits of the decode kernel for a few sequences that are much longer than the others.

A batch that fills the GPU gives each sequence one split, so that one program a head would read all
of a long sequence while the others are long done. The host knows the lengths before each step, and
lists further splits of such sequences in a list of fixed room, which suits CUDA graphs.

B sequences · X the room for extra splits.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from moesaic.kernels.attention import Splits
from moesaic.layers.paged_cache import Ints

ROOM: Final = 32
# A shorter split takes no longer to read than the rest of a layer's attention.
LEAST_TOKENS: Final = 1024


def may_have_extra(splits: Splits, max_kv_len: int) -> bool:
    return max_kv_len >= (splits.count + 1) * LEAST_TOKENS


def extra_splits(kv_lens_B: Ints, splits: Splits) -> tuple[Ints, Ints, Ints]:
    """The columns of `ExtraSplits`. No split is made shorter than the mean of all sequences' or
    LEAST_TOKENS.

    Lengths [100, 4096, 200, 60, 70] with one split each: sequences_X [1, 1, 1, -1, …], counts_B
    [0, 3, 0, 0, 0] and first_B [0, 0, 0, 0, 0].
    """
    sequences_X, none_B = np.full(ROOM, -1, np.int32), np.zeros(len(kv_lens_B), np.int32)
    if not may_have_extra(splits, int(kv_lens_B.max(initial=0))):
        return sequences_X, none_B, none_B
    long, least = _long_sequences(kv_lens_B, splits.count)
    counts_B, first_B = none_B.copy(), none_B
    counts_B[long] = extra = kv_lens_B[long] // least - splits.count
    first_B[long] = np.cumsum(extra) - extra
    listed = np.repeat(long, extra)
    sequences_X[: len(listed)] = listed
    return sequences_X, counts_B, first_B


def _long_sequences(kv_lens_B: Ints, count: int) -> tuple[npt.NDArray[np.intp], int]:
    """The sequences that get more than `count` splits, and the tokens that these have at least: as
    few as the room allows."""
    least = max(LEAST_TOKENS, int(kv_lens_B.sum()) // (count * len(kv_lens_B)))
    long = np.flatnonzero(kv_lens_B >= (count + 1) * least)
    while (fitting := -(-int(kv_lens_B[long].sum()) // (ROOM + count * len(long)))) > least:
        least = fitting
        long = long[kv_lens_B[long] >= (count + 1) * least]
    return long, least
