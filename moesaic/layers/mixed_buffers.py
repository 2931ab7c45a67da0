"""Attention of mixed steps over static buffers, for CUDA graphs of fixed numbers of tokens.

Lists have a fixed length and a count, or entries that the kernels skip, so that one graph serves
every step with up to as many tokens and sequences. T tokens · S sequences with one new token · B
sequences with more · X tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moesaic.kernels.attention import PrefillRows, Splits
from moesaic.layers.extra_splits import ROOM
from moesaic.layers.gpu_attention import (
    GpuAttention,
    Prefill,
    decode_columns,
    decode_rows,
    decode_splits,
    packed_columns,
)
from moesaic.layers.paged_cache import PagedCache, PageTable, Sequences, pinned


@dataclass(frozen=True, slots=True)
class MixedSizes:
    """The largest step that the buffers hold."""

    tokens: int
    sequences: int

    @property
    def columns(self) -> list[int]:
        """Lengths of the packed columns: slots and positions; row, tokens and first page of single
        tokens, and their extra splits; start, new tokens, tokens and first page of prompts."""
        sequences = self.sequences
        return [*[self.tokens] * 2, *[sequences] * 3, ROOM, *[sequences] * 6]


class StaticPrefill(Prefill):
    """Prompts in buffers that are filled before each step; attention looks at no host values."""

    def __init__(
        self, arrays: Sequence[Tensor], pages: Tensor, tiles: Callable[[int], Tensor]
    ) -> None:
        starts_B, lengths_B, kv_lens_B, first_B = arrays
        self.rows = PrefillRows(starts_B, lengths_B, kv_lens_B, first_B, pages, tiles)


class MixedBuffers:
    """Static tensors of all graphs of mixed steps, which use their first entries. In deterministic
    mode all sequences are prompts."""

    def __init__(
        self, cache: PagedCache, table: PageTable, sizes: MixedSizes, deterministic: bool = False
    ) -> None:
        self._cache, self._table, self._sizes = cache, table, sizes
        self._deterministic, device = deterministic, cache.keys.device
        self._longest = table.max_pages * cache.page_size
        self._packed = torch.zeros(sum(sizes.columns), dtype=torch.int32, device=device)
        self._columns = self._packed.split(sizes.columns)
        self._tiles: dict[int, Tensor] = {}
        self.fill(Sequences(*[np.empty(0, np.int32)] * 4), 0)

    def attention(self, tokens: int, singles: int) -> GpuAttention:
        """Attention of a graph of `tokens` rows, up to `singles` of them single tokens."""
        slots_T, positions_T, *parts = self._columns
        rows_S, kv_lens_S, first_S, sequences_X, *extra, _, _, _, _ = parts
        prompts, decode, pages = parts[-4:], None, self._table.pages
        if not self._deterministic:
            of_singles = [column_S[:singles] for column_S in (rows_S, kv_lens_S, first_S, *extra)]
            of_singles.insert(3, sequences_X)
            decode = decode_rows(of_singles, pages, self._splits(singles), self._longest)
        prefill = StaticPrefill(prompts, pages, lambda size: self._tiles_within(size, tokens))
        parts_T = slots_T[:tokens], positions_T[:tokens]
        return GpuAttention(self._cache, *parts_T, decode, prefill, self._deterministic)

    def _splits(self, singles: int) -> Splits:
        return decode_splits(self._cache, singles, self._longest)

    def num_singles(self, lengths: npt.NDArray[np.integer], halves: bool = False) -> int:
        """`lengths`: new tokens of the sequences. `halves`: the most that either half of the step
        may have, wherever that is cut: of a prompt it may have a single token."""
        if self._deterministic:
            return 0
        return min(int((lengths == 1).sum()) + halves, len(lengths))

    def fill(self, sequences: Sequences, singles: int) -> None:
        """The sequences' rows follow each other from row 0 on. `singles`: those that the graph has
        room for. Does not block the host."""
        number, position = sequences.positions()
        slots = self._table.slots(self._cache.page_size, sequences.first_B[number], position)
        single = (sequences.lengths_B == 1) & (not self._deterministic)
        decoding, chunks = (sequences.select(np.flatnonzero(part)) for part in (single, ~single))
        assert len(decoding) <= singles, f"{len(decoding)} single tokens in a graph of {singles}"
        columns = decode_columns(decoding, self._splits(singles))
        columns = [slots, position, *columns, *chunks.arrays()]
        packed = packed_columns(columns, self._sizes.columns, [-1, 0, 0, -1, *[0] * 8])
        self._packed.copy_(pinned(packed, self._packed.device), non_blocking=True)
        self._chunks = chunks
        for size in self._tiles:
            self._fill_tiles(size)

    def _tiles_within(self, size: int, tokens: int) -> Tensor:
        """Room for the tiles of so many tokens, behind their number."""
        if size not in self._tiles:
            shape = (1 + self._most_tiles(size, self._sizes.tokens), 2)
            self._tiles[size] = torch.zeros(shape, dtype=torch.int32, device=self._packed.device)
            self._fill_tiles(size)
        return self._tiles[size][: 1 + self._most_tiles(size, tokens)]

    def _most_tiles(self, size: int, tokens: int) -> int:
        """Each prompt may begin a tile; all `size` tokens beyond that fill another one."""
        shortest = 1 if self._deterministic else 2
        prompts = min(self._sizes.sequences, tokens // shortest)
        return prompts + (tokens - prompts) // size

    def _fill_tiles(self, size: int) -> None:
        tiles = self._chunks.tiles(size)
        place = self._tiles[size][: len(tiles)]
        place.copy_(pinned(tiles, place.device), non_blocking=True)
