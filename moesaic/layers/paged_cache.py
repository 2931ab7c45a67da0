"""The paged KV cache, and where a step's sequences are stored in it.

B sequences of a step · R rows of the page table · P pages of the longest sequence · X tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import gcd
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moesaic.kernels.kv_rows import KVRows
from moesaic.layers.context import CacheSpec

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


class SequenceSpan(NamedTuple):
    """The new tokens of one sequence: rows [start, start + length) of the step are the last
    `length` of its `kv_len` tokens, which are stored in `pages`."""

    start: int
    length: int
    kv_len: int
    pages: Sequence[int] | Ints
    masks: Longs | None = None
    """What each new token sees of those before it, as in core/draft_tree.py; None: all."""

    @property
    def positions(self) -> range:
        """Positions of the new tokens in the sequence."""
        return range(self.kv_len - self.length, self.kv_len)

    def slots(self, positions: range, page_size: int) -> npt.NDArray[np.int64]:
        """The cache slots of these positions."""
        places = np.arange(positions.start, positions.stop, positions.step)
        first, last = positions.start // page_size, -(-positions.stop // page_size)
        pages = np.asarray(self.pages[first:last], np.int64)[places // page_size - first]
        slots: npt.NDArray[np.int64] = pages * page_size + places % page_size
        return slots


@dataclass(frozen=True, slots=True)
class Sequences:
    """The sequences of a step on the host: first row, new tokens, all tokens, and the first entry
    in the flat page table."""

    starts_B: Ints
    lengths_B: Ints
    kv_lens_B: Ints
    first_B: Ints
    masks_T: Longs | None = field(default=None, kw_only=True)
    """What each row of the step sees of the tokens before it, as in core/draft_tree.py; None: all.
    A token's position among its sequence's is where it is stored."""

    def __len__(self) -> int:
        return len(self.starts_B)

    def arrays(self) -> list[Ints]:
        return [self.starts_B, self.lengths_B, self.kv_lens_B, self.first_B]

    def select(self, chosen: npt.NDArray[np.intp]) -> Sequences:
        columns = (array[chosen] for array in self.arrays())
        return Sequences(*columns, masks_T=self.masks_T)

    def with_trees_apart(self) -> Sequences:
        """The same, but each row of a tree is a sequence: its tokens up to its own."""
        if self.masks_T is None:
            return self
        own = np.concatenate([*map(np.arange, self.starts_B, self.starts_B + self.lengths_B)])
        places = np.cumsum(self.lengths_B) - self.lengths_B
        is_tree = np.logical_or.reduceat(self.masks_T[own] != -1, places)
        trees, rest = (self.select(np.flatnonzero(some)) for some in (is_tree, ~is_tree))
        number, position = trees.positions()
        rows = np.repeat(trees.starts_B - trees.kv_lens_B + trees.lengths_B, trees.lengths_B)
        apart = (rows + position, np.ones_like(position), position + 1, trees.first_B[number])
        both = zip(rest.arrays(), apart, strict=True)
        columns = (np.concatenate(pair).astype(np.int32) for pair in both)
        return Sequences(*columns, masks_T=self.masks_T)

    def cut(self, rows: int) -> tuple[Sequences, Sequences]:
        """The sequences of the first `rows` rows, and those of the others, numbered from 0. The
        second part of a sequence that is cut follows the first."""
        assert self.masks_T is None, "drafts are verified in one batch"
        starts, stops = self.starts_B, self.starts_B + self.lengths_B
        first, second = np.flatnonzero(starts < rows), np.flatnonzero(stops > rows)
        behind = np.maximum(stops[first] - rows, 0)
        head, tail = self.select(first), self.select(second)
        inside = np.maximum(rows - starts[second], 0)
        return (
            replace(head, lengths_B=head.lengths_B - behind, kv_lens_B=head.kv_lens_B - behind),
            replace(
                tail,
                starts_B=tail.starts_B + inside - rows,
                lengths_B=tail.lengths_B - inside,
            ),
        )

    def positions(self) -> tuple[Ints, Ints]:
        """Sequence and position of all new tokens, in the order of the sequences."""
        number = np.repeat(np.arange(len(self), dtype=np.int32), self.lengths_B)
        behind = np.cumsum(self.lengths_B) - self.kv_lens_B
        return number, (np.arange(len(number)) - behind[number]).astype(np.int32)

    def tiles(self, size: int) -> Ints:
        """[X, 2]: how many tiles of `size` queries there are, then sequence and offset of each,
        longest work first."""
        counts = -(-self.lengths_B // size)
        number = np.repeat(np.arange(len(self), dtype=np.int32), counts)
        behind = (np.cumsum(counts) - counts)[number]
        offset = (np.arange(len(number)) - behind) * size
        work = (self.kv_lens_B - self.lengths_B)[number] + offset
        order = np.argsort(-work, kind="stable")
        tiles = np.stack((number[order], offset[order]), axis=1)
        return np.concatenate(([[len(tiles), 0]], tiles)).astype(np.int32)


class PageUpdate(NamedTuple):
    """The pages of a row of the table, from entry `first` on."""

    row: int
    first: int
    pages: Sequence[int]


class PageTable:
    """The pages of all running sequences, each in its own row, on the host and flat on the device.
    Only what changes is written, in the order of steps on the device, so an in-flight step reads
    what it was begun with. Entries behind a sequence's pages are of any sequence before it."""

    def __init__(self, rows: int, max_pages: int, device: torch.device | str = "cpu") -> None:
        self.max_pages = max_pages
        self.host = np.zeros(rows * max_pages, np.int32)
        # On CPU the two share their memory.
        self.pages = torch.from_numpy(self.host).to(device)

    def write(self, updates: Sequence[PageUpdate]) -> None:
        """Does not block the host."""
        if not updates:
            return
        rows, firsts, pages = zip(*updates, strict=True)
        counts, first = np.array([len(some) for some in pages]), np.array(firsts)
        most = int((first + counts).max())
        if most > self.max_pages:
            raise ValueError(
                f"a sequence of {most} pages does not fit into a table for {self.max_pages}: "
                "raise --context-length"
            )
        total = int(counts.sum())
        starts = np.array(rows) * self.max_pages + first
        index = np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(total)
        values = np.fromiter(chain.from_iterable(pages), np.int64, total)
        self.host[index] = values
        if self.pages.is_cuda:
            places, numbers = to_device(np.stack((index, values)), self.pages.device)
            self.pages.index_copy_(0, places, numbers.int())

    def put(self, spans: Sequence[SequenceSpan]) -> Sequences:
        """Writes the pages of spans to rows 0, 1, …"""
        pages = [np.asarray(span.pages).tolist() for span in spans]
        self.write([PageUpdate(row, 0, some) for row, some in enumerate(pages)])
        columns = np.array([span[:3] for span in spans], np.int32).reshape(-1, 3)
        starts_B, lengths_B, kv_lens_B = columns.T
        first_B = np.arange(len(spans), dtype=np.int32) * self.max_pages
        masks_T = None
        if any(span.masks is not None for span in spans):
            masks_T = np.full(int((starts_B + lengths_B).max()), -1, np.int64)
            for span in spans:
                if span.masks is not None:
                    masks_T[span.start : span.start + span.length] = span.masks
        return Sequences(starts_B, lengths_B, kv_lens_B, first_B, masks_T=masks_T)

    def spans(self, sequences: Sequences) -> list[SequenceSpan]:
        """The sequences with their rows of the table."""
        columns = (array.tolist() for array in sequences.arrays())
        spans = [
            SequenceSpan(start, length, kv_len, self.host[first : first + self.max_pages])
            for start, length, kv_len, first in zip(*columns, strict=True)
        ]
        masks_T = sequences.masks_T
        if masks_T is None:
            return spans
        parts = (masks_T[span.start : span.start + span.length] for span in spans)
        return [
            span._replace(masks=masks) if (masks != -1).any() else span
            for span, masks in zip(spans, parts, strict=True)
        ]

    def slots(self, page_size: int, first: Ints, position: Ints) -> Ints:
        """The cache slots of positions of the sequences whose entries begin at `first`."""
        slots: Ints = self.host[first + position // page_size] * page_size + position % page_size
        return slots


def to_device(array: npt.NDArray[np.integer], device: torch.device) -> Tensor:
    """Does not block the host: the allocator keeps the pinned memory until the copy is done."""
    return pinned(array, device).to(device, non_blocking=True)


def pinned(array: npt.NDArray[np.integer], device: torch.device) -> Tensor:
    host = torch.from_numpy(array)
    return host.pin_memory() if device.type == "cuda" else host


class PagedCache:
    """Keys and values of all layers. Page 0 pads page tables and stays zero. In float8_e4m3fn (on a
    GPU) the numbers are scaled by `k_scale` and `v_scale`."""

    def __init__(
        self,
        spec: CacheSpec,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (spec.num_layers, num_pages + 1, page_size, spec.num_heads)
        self.page_size = page_size
        self.keys = torch.empty(*shape, spec.key_dim, dtype=dtype, device=device)
        self.values = torch.empty(*shape, spec.value_dim, dtype=dtype, device=device)
        self.layers = list(zip(self.keys.unbind(), self.values.unbind(), strict=True))
        self.k_scale = self.v_scale = 1.0
        self.clear([0])

    def clear(self, pages: Sequence[int]) -> None:
        """Zeroes pages before use: NaN or infinity behind the end of a sequence would reach the
        result in spite of masks. Does nothing on a GPU, whose kernels never read them."""
        if self.keys.is_cuda:
            return
        index = torch.tensor(pages)
        self.keys.index_fill_(1, index, 0)
        self.values.index_fill_(1, index, 0)

    def move(self, slots: Sequence[tuple[int, int]]) -> None:
        """Copies the entries of all layers from one slot to another, as if all at once."""
        if not slots:
            return
        sources, targets = to_device(np.array(slots, np.int64).T.copy(), self.keys.device)
        for part in (self.keys, self.values):
            if part.numel():
                entries = part.view(torch.uint8).flatten(1, 2)
                entries.index_copy_(1, targets, entries.index_select(1, sources))

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


LANES: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def kv_rows(
    keys_LPSMD: Tensor,
    values_LPSMD: Tensor,
    layers: slice = slice(None),
    heads: slice | None = None,
) -> KVRows:
    """A part of a cache as rows of the widest numbers that make up its heads: copies then move more
    at once, and know no float8."""
    parts = (keys_LPSMD, values_LPSMD)
    kind = LANES[gcd(*(part.shape[-1] * part.element_size() for part in parts), 8)]
    found = []
    for part in parts:
        rows_LSX = part[layers].flatten(1, 2).flatten(2)
        # What has no width cannot be viewed as another type.
        rows_LSX = rows_LSX.view(kind) if part.numel() else rows_LSX.to(kind)
        width = rows_LSX.shape[2] // part.shape[3]
        if heads is not None:
            rows_LSX = rows_LSX[..., heads.start * width : heads.stop * width]
        found.append(rows_LSX)
    return KVRows(*found)
