"""Paged attention whose bits depend on the sequence alone, for deterministic mode.

The position of a query determines the operations: positions are cut into blocks of Q, and a block
always attends to one range of keys between two multiples of RANGE. Queries of the block that are
not in this step are zeros, and keys that a query may not see are masked. A prompt in one piece, in
chunks, from the prefix cache or token by token, in any batch, runs the same operations on the same
shapes. Torch's kernel computes each sequence and head of a batch independently, so blocks with
ranges of equal length share a call.

The number of heads on a rank does not matter either. Heads that share keys are rows of one product,
which always has ROWS rows, padded with zeros; and the range of a query does not depend on the
number of positions in its block.

T tokens of the step · N query heads · M key/value heads · G = N / M · D head size · C latent size ·
B blocks of a group · Q positions of a block · L keys of its range · U units of the cache in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.kernels.attention import seen_keys
from moesaic.kernels.cpu import widened
from moesaic.layers.context import AttentionSpec, LatentSpec
from moesaic.layers.invariant import in_pieces, sigmoid
from moesaic.layers.paged_cache import Longs, PagedCache, SequenceSpan
from moesaic.layers.torch_attention import CpuAttention, causal_mask, with_sinks

# Key ranges begin and end at multiples of this.
RANGE = 128
# Rows of a product: Q positions times the G heads that share keys, or some of the heads if G is
# larger. A decoded token pays for all rows, which is cheap up to about this number. Divides RANGE.
ROWS = 32
# Limits of one call: scores (rows times keys), and gathered keys.
MAX_SCORES = 1 << 22
MAX_KEYS = 1 << 16


@dataclass(frozen=True, slots=True)
class Block:
    """Query positions [first, first + Q) of a span. The step has `count` of them from `offset` on,
    as rows from `start` on; they attend to keys [begin, end)."""

    span: SequenceSpan
    first: int
    offset: int
    start: int
    count: int
    begin: int
    end: int
    slots: Longs | None = None
    """Of the keys up to the only query's own, where they do not follow each other in the cache: it
    is a draft in a tree."""


@dataclass(frozen=True, slots=True)
class BlockBatch:
    """Blocks with ranges of equal length. `rows` of the step go to `places` among the B * Q
    positions. `units_BU` locates the keys: one line per block, or one line for all blocks."""

    rows: Tensor
    places: Tensor
    units_BU: Tensor
    last_B: Tensor
    unit: int
    """Tokens that each of these has."""
    """The newest key that each block's first query sees, relative to the range."""


class DeterministicAttention(CpuAttention):
    def __init__(self, cache: PagedCache, spans: Sequence[SequenceSpan]) -> None:
        super().__init__(cache, spans)
        self.unit = math.gcd(cache.page_size, RANGE)
        self._groups: dict[tuple[int, int | None], list[BlockBatch]] = {}

    def attend(self, spec: AttentionSpec, q_TND: Tensor, k_TMD: Tensor, v_TMD: Tensor) -> Tensor:
        return self._attend(spec, q_TND, *self.store(spec.layer, k_TMD, v_TMD))

    def attend_latent(self, spec: LatentSpec, q_TND: Tensor, latents_TC: Tensor) -> Tensor:
        """Always in the absorbed form: the two forms round differently."""
        latents, _ = self.store(spec.layer, latents_TC.unsqueeze(1))
        q_TNC = in_pieces(spec.projections.absorb, q_TND)
        return in_pieces(spec.projections.up_project, self._attend(spec, q_TNC, latents, None))

    def _attend(
        self, spec: AttentionSpec, q_TND: Tensor, keys: Tensor, values: Tensor | None
    ) -> Tensor:
        positions = _positions(q_TND.shape[1] // keys.shape[-2])
        out_TND = torch.empty_like(q_TND)
        for group in self._groups_of(positions, spec.window):
            k_BMLD = self._gather(keys, group)
            v_BMLD = k_BMLD if values is None else self._gather(values, group)
            q_BQND = q_TND.new_zeros(len(group.last_B), positions, *q_TND.shape[1:])
            q_BQND.flatten(0, 1)[group.places] = q_TND[group.rows]
            out_BQND = _attend(group, spec, q_BQND, k_BMLD, v_BMLD)
            out_TND[group.rows] = out_BQND.flatten(0, 1)[group.places]
        return out_TND

    def _gather(self, cache: Tensor, group: BlockBatch) -> Tensor:
        """[B, M, L, D] from one layer's pages [P, page, M, D]."""
        units = cache.view(-1, group.unit, *cache.shape[-2:])
        gathered = units.flatten(1).index_select(0, group.units_BU.flatten())
        return gathered.view(len(group.units_BU), -1, *cache.shape[-2:]).transpose(1, 2)

    def _groups_of(self, positions: int, window: int | None) -> list[BlockBatch]:
        """Cached for all layers with this window."""
        key = positions, window
        if key not in self._groups:
            self._groups[key] = list(self._make_groups(positions, window))
        return self._groups[key]

    def _make_groups(self, positions: int, window: int | None) -> Iterator[BlockBatch]:
        """Blocks of one sequence with the same range share its keys; other blocks are batched by
        the length of their ranges."""
        singles: list[Block] = []
        for span in self.spans:
            if span.masks is not None:
                singles += _tree_blocks(span, positions, window, self.cache.page_size)
                continue
            blocks = _blocks(span, positions, window)
            for _, same in groupby(blocks, key=lambda block: (block.begin, block.end)):
                shared = list(same)
                if len(shared) == 1:
                    singles += shared
                    continue
                units_1U = self._units(shared[:1])
                for part in _parts(shared, positions, MAX_SCORES):
                    yield _group(part, positions, units_1U, self.unit)
        singles.sort(key=_likeness)
        for _, equal in groupby(singles, key=_likeness):
            for part in _parts(list(equal), positions, min(MAX_SCORES, MAX_KEYS * ROWS)):
                if part[0].slots is None:
                    yield _group(part, positions, self._units(part), self.unit)
                else:
                    yield _group(part, positions, _slots(part), 1)

    def _units(self, blocks: Sequence[Block]) -> Tensor:
        """[B, U]: page 0, which is zero, pads the ranges behind the newest keys."""
        units = np.zeros((len(blocks), _length(blocks[0]) // self.unit), np.int64)
        for row, block in zip(units, blocks, strict=True):
            positions = range(block.begin, min(block.end, block.span.kv_len), self.unit)
            found = block.span.slots(positions, self.cache.page_size) // self.unit
            row[: len(found)] = found
        return torch.from_numpy(units)


def _positions(shared: int) -> int:
    """Positions per block: a power of two, so no block crosses a range."""
    return 1 << (max(1, ROWS // shared).bit_length() - 1)


def _slots(blocks: Sequence[Block]) -> Tensor:
    """As `_units`, of single tokens."""
    slots = np.zeros((len(blocks), _length(blocks[0])), np.int64)
    for row, block in zip(slots, blocks, strict=True):
        assert block.slots is not None
        found = block.slots[block.begin : block.end]
        row[: len(found)] = found
    return torch.from_numpy(slots)


def _tree_blocks(
    span: SequenceSpan, positions: int, window: int | None, page_size: int
) -> Iterator[Block]:
    """A block of each query, over the keys that it sees as if these followed each other."""
    assert span.masks is not None
    slots = span.slots(range(span.kv_len), page_size)
    seen_QL = seen_keys(torch.from_numpy(span.masks), span.kv_len, None).numpy()
    for row, seen_L in enumerate(seen_QL, span.start):
        own = slots[seen_L]
        first = (len(own) - 1) // positions * positions
        offset = len(own) - 1 - first
        yield Block(span, first, offset, row, 1, *_range(first, positions, window), own)


def _range(first: int, positions: int, window: int | None) -> tuple[int, int]:
    """The keys of the block that begins at this position."""
    oldest = 0 if window is None else max(0, first // ROWS * ROWS - window + 1)
    return oldest // RANGE * RANGE, -(-(first + positions) // RANGE) * RANGE


def _blocks(span: SequenceSpan, positions: int, window: int | None) -> Iterator[Block]:
    old = span.kv_len - span.length
    for first in range(old // positions * positions, span.kv_len, positions):
        begin, end = _range(first, positions, window)
        low, high = max(first, old), min(first + positions, span.kv_len)
        yield Block(span, first, low - first, span.start + low - old, high - low, begin, end)


def _length(block: Block) -> int:
    return block.end - block.begin


def _likeness(block: Block) -> tuple[int, bool]:
    return _length(block), block.slots is not None


def _parts(blocks: list[Block], positions: int, scores: int) -> Iterator[list[Block]]:
    """Splits blocks with ranges of equal length to stay within `scores`."""
    size = max(1, scores // (_length(blocks[0]) * max(positions, ROWS)))
    for start in range(0, len(blocks), size):
        yield blocks[start : start + size]


def _group(blocks: list[Block], positions: int, units_BU: Tensor, unit: int) -> BlockBatch:
    rows = [block.start + i for block in blocks for i in range(block.count)]
    places = [
        number * positions + block.offset + i
        for number, block in enumerate(blocks)
        for i in range(block.count)
    ]
    last_B = torch.tensor([block.first - block.begin for block in blocks])
    return BlockBatch(torch.tensor(rows), torch.tensor(places), units_BU, last_B, unit)


def _attend(
    group: BlockBatch, spec: AttentionSpec, q_BQND: Tensor, k_BMLD: Tensor, v_BMLD: Tensor
) -> Tensor:
    """[B, Q, N, D]. Queries and heads that share keys are rows of products with ROWS rows each."""
    blocks, positions, _, dim = q_BQND.shape
    heads, length = k_BMLD.shape[1:3]
    q_BQMGD = q_BQND.unflatten(2, (heads, -1))
    shared = q_BQMGD.shape[3]
    q_BMXD = q_BQMGD.transpose(1, 2).reshape(blocks, heads, -1, dim)
    count = q_BMXD.shape[2]
    products = -(-count // ROWS)
    filled = F.pad(q_BMXD, (0, 0, 0, products * ROWS - count))
    q = filled.reshape(blocks, heads * products, ROWS, dim)
    k, v = (
        x.unsqueeze(2).expand(blocks, -1, products, -1, -1).flatten(1, 2) for x in (k_BMLD, v_BMLD)
    )
    last_BQ = group.last_B[:, None] + torch.arange(positions)
    mask_BQL = causal_mask(last_BQ, length, spec.window, q_BQND.dtype)
    # If there are several products, a block has one position.
    position_of_row = (torch.arange(ROWS) // shared).clamp(max=positions - 1)
    mask = mask_BQL[:, position_of_row].unsqueeze(1)
    out, lse = widened.flash(q, k, v, False, mask, spec.scale)

    def by_query(x: Tensor) -> Tensor:
        x_BMX = x.reshape(blocks, heads, products * ROWS, *x.shape[3:])[:, :, :count]
        return x_BMX.unflatten(2, (positions, shared)).transpose(1, 2).flatten(2, 3)

    out_BQND = by_query(out)
    if spec.sinks_N is None:
        return out_BQND
    return with_sinks(out_BQND, sigmoid(by_query(lse) - spec.sinks_N.float()))
