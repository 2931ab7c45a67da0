"""Which sequences get extra splits, and how many."""

from __future__ import annotations

import numpy as np
import pytest

from moesaic.kernels.attention import Splits
from moesaic.layers.extra_splits import LEAST_TOKENS, ROOM, extra_splits, may_have_extra


def plan(lengths: list[int], count: int = 1) -> tuple[list[int], list[int], list[int]]:
    columns = extra_splits(np.array(lengths, np.int32), Splits(count, 128))
    assert all(column.dtype == np.int32 for column in columns)
    sequences_X, counts_B, first_B = (column.tolist() for column in columns)
    assert len(sequences_X) == ROOM
    return sequences_X, counts_B, first_B


def test_the_example():
    sequences_X, counts_B, first_B = plan([100, 4096, 200, 60, 70])
    assert sequences_X == [1, 1, 1] + [-1] * (ROOM - 3)
    assert counts_B == [0, 3, 0, 0, 0]
    assert first_B == [0] * 5


def test_a_full_room_is_shared_by_length():
    """Splits of both have about 10,000 tokens."""
    sequences_X, counts_B, first_B = plan([262_144, 65_536, *[100] * 200])
    assert counts_B[:2] == [26, 5]
    assert first_B[:2] == [0, 26]
    assert sequences_X == [0] * 26 + [1] * 5 + [-1]


@pytest.mark.parametrize(
    "lengths", [[], [1], [LEAST_TOKENS * 2 - 1] * 3, [16384] * 8, [5000] * 256]
)
def test_equal_and_short_sequences_have_none(lengths: list[int]):
    assert plan(lengths) == ([-1] * ROOM, [0] * len(lengths), [0] * len(lengths))


def test_several_splits_count():
    assert plan([8192, 100, 100, 100], count=4)[1] == [4, 0, 0, 0]
    assert not may_have_extra(Splits(4, 128), 5 * LEAST_TOKENS - 1)
    assert may_have_extra(Splits(4, 128), 5 * LEAST_TOKENS)


@pytest.mark.parametrize("seed", range(20))
def test_any_batch_fits_and_is_listed_whole(seed: int):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 2000, rng.integers(1, 300))
    longer = rng.integers(0, len(lengths), rng.integers(1, 40))
    lengths[longer] = rng.integers(0, 200_000, len(longer))
    count = int(rng.integers(1, 4))
    sequences_X, counts_B, first_B = plan(lengths.tolist(), count)
    assert sum(counts_B) <= ROOM
    for number, (extra, first) in enumerate(zip(counts_B, first_B, strict=True)):
        if extra:
            assert sequences_X[first : first + extra] == [number] * extra
    assert sequences_X[sum(counts_B) :] == [-1] * (ROOM - sum(counts_B))
    extra = np.array(counts_B)
    parts, least = lengths / (count + extra), max(LEAST_TOKENS, lengths.mean() // count)
    assert (parts[extra > 0] >= least).all()
    before, longest = max(lengths) / count, max(parts)
    if before >= 8 * LEAST_TOKENS and (lengths > 4 * LEAST_TOKENS).sum() <= ROOM // 8:
        assert longest < before / 2


def test_the_room_is_used():
    for longer in range(1, ROOM + 1):
        found, fair = set(plan([200_000] * longer + [100] * 500)[1][:longer]), ROOM // longer
        assert found <= {fair - 1, fair} - {0}
