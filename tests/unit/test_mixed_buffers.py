"""Lists of fixed lengths hold every step that graphs of mixed steps replay."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from moesaic.layers import extra_splits
from moesaic.layers.mixed_buffers import MixedBuffers, MixedSizes
from moesaic.layers.paged_cache import CacheSpec, PagedCache, PageTable, Sequences

CONTEXT = 512


def make_buffers(tokens: int, sequences: int, deterministic: bool) -> MixedBuffers:
    cache = PagedCache(CacheSpec(1, 1, 4, 4), 8, 4, torch.float32)
    table = PageTable(sequences, CONTEXT // 4)
    return MixedBuffers(cache, table, MixedSizes(tokens, sequences), deterministic)


def step_of(lengths: list[int], rng: random.Random) -> Sequences:
    kv_lens = [rng.randrange(length, CONTEXT) for length in lengths]
    starts = np.cumsum([0, *lengths])[:-1]
    first = np.arange(len(lengths)) * (CONTEXT // 4)
    return Sequences(*(np.array(x, np.int32) for x in (starts, lengths, kv_lens, first)))


def random_lengths(tokens: int, sequences: int, rng: random.Random) -> list[int]:
    most, lengths = rng.choice([1, 2, 3, 40]), list[int]()
    while len(lengths) < sequences and sum(lengths) < tokens:
        lengths.append(min(rng.randrange(1, most + 1), tokens - sum(lengths)))
    return lengths


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("sequences", [1, 7, 200])
def test_each_tile_of_a_step_has_a_place(sequences: int, deterministic: bool):
    rng, tokens = random.Random(sequences), (8, 65, 160)
    buffers = make_buffers(tokens[-1], sequences, deterministic)
    attention = {size: buffers.attention(size, sequences) for size in tokens}
    spare = list[int]()
    for size in tokens:
        cases = [random_lengths(size, sequences, rng) for _ in range(40)]
        cases += [[length] * min(sequences, size // length) for length in (1, 2, 5, 9)]
        for lengths in cases:
            sequences_B = step_of(lengths, rng)
            buffers.fill(sequences_B, sequences)
            prefill = attention[size].prefill
            assert prefill is not None
            chunk = np.flatnonzero((sequences_B.lengths_B > 1) | deterministic)
            for queries in (1, 4, 16):
                expected = sequences_B.select(chunk).tiles(queries)
                found = prefill.rows.tiles(queries).numpy()
                assert (found[: len(expected)] == expected).all()
                spare.append(len(found) - len(expected))
    assert min(spare) == 0, "no step fills its list"


def test_rows_behind_a_step_are_of_no_sequence():
    """Slots of padding are negative, single tokens that are not there too; other prompts are
    empty."""
    buffers = make_buffers(16, 5, False)
    attention = buffers.attention(16, 5)
    rng = random.Random(1)
    for lengths in ([3, 1, 4, 1, 2], [1], []):
        buffers.fill(step_of(lengths, rng), 5)
        assert attention.decode is not None and attention.prefill is not None
        chunks = [length for length in lengths if length > 1]
        assert (attention.slots_T >= 0).tolist() == [n < sum(lengths) for n in range(16)]
        singles = lengths.count(1)
        assert (attention.decode.kv_lens_B > 0).tolist() == [n < singles for n in range(5)]
        assert attention.prefill.rows.lengths_B.tolist() == chunks + [0] * (5 - len(chunks))


def test_long_single_tokens_have_extra_splits(monkeypatch: pytest.MonkeyPatch):
    """Each graph has those of its own number of single tokens."""
    monkeypatch.setattr(extra_splits, "LEAST_TOKENS", 16)
    buffers = make_buffers(16, 5, False)
    decode = buffers.attention(16, 4).decode
    assert decode is not None and decode.extra is not None
    kv_lens, lengths = [3, 100, 20], [1, 1, 4]
    columns = ([0, 1, 2], lengths, kv_lens, [0, 128, 256])
    buffers.fill(Sequences(*(np.array(x, np.int32) for x in columns)), 4)
    assert decode.splits.count == 2
    assert decode.extra.counts_B.tolist() == [0, 2, 0, 0]
    assert decode.extra.first_B.tolist() == [0, 0, 0, 0]
    assert decode.extra.sequences_X.tolist() == [1, 1] + [-1] * (extra_splits.ROOM - 2)
    buffers.fill(step_of([3], random.Random(0)), 4)
    assert not decode.extra.counts_B.any()


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_half_of_a_step_may_have_a_single_token_more(deterministic: bool):
    """A prompt that is cut may leave one: the graph of both halves needs room for it, but not for
    more than there are sequences, as no graph has that."""
    rng, buffers = random.Random(2), make_buffers(8, 3, deterministic)
    spare = set()
    for _ in range(200):
        step = step_of(random_lengths(20, 9, rng), rng)
        room = buffers.num_singles(step.lengths_B, halves=True)
        assert room <= len(step)
        for rows in range(int(step.lengths_B.sum()) + 1):
            halves = step.cut(rows)
            spare.update(room - buffers.num_singles(half.lengths_B) for half in halves)
    assert min(spare) == 0


def test_more_single_tokens_than_a_graph_has_are_refused():
    rng, buffers = random.Random(2), make_buffers(8, 3, False)
    with pytest.raises(AssertionError, match="3 single tokens in a graph of 2"):
        buffers.fill(step_of([1, 1, 1], rng), 2)
