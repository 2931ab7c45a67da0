"""Attention on a GPU: the kernels' inputs, made from a step's spans in one copy to the device.

A decode step reads static buffers only, which are filled between the runs of a CUDA graph
(`DecodeBuffers`). A mixed step is made from its spans: single tokens go to the decode kernel, which
splits a long context over many programs; chunks go to the prefill kernel, whose tiles a single
token would leave empty.

In deterministic mode one kernel takes all rows (`invariant_attention`), so the bits of a row depend
on its sequence alone, and latents are always absorbed.

T tokens of the step · B sequences · N query heads · D head size · V value size · C latent size · R
latent channels that are not rotated · L tokens of sequences · X tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache as cached

import numpy as np
import torch
from torch import Tensor

from moesaic.kernels.attention import (
    FP8,
    FP8_HEADS,
    HEADS,
    LATENTS,
    DecodeRows,
    ExtraSplits,
    HeadEntry,
    LatentEntry,
    LayerPages,
    PrefillRows,
    Queries,
    Softmax,
    Splits,
    choose_splits,
    decode_attention,
    enter_and_decode,
    enter_heads,
    enter_latent,
    invariant_attention,
    prefill_attention,
)
from moesaic.kernels.experts import Rows
from moesaic.kernels.quantise import FP8_GROUP
from moesaic.layers.context import (
    Angles,
    AttentionSpec,
    AttentionStep,
    HeadSpec,
    LatentProjections,
    LatentSpec,
)
from moesaic.layers.extra_splits import ROOM, extra_splits, may_have_extra
from moesaic.layers.paged_cache import (
    Ints,
    PagedCache,
    PageTable,
    Sequences,
    SequenceSpan,
    pinned,
    to_device,
)

# Counters of the decode kernel per row: one for each tile of heads.
COUNTERS = 256
# Latents that are expanded at once; longer sequences are absorbed.
MAX_EXPANDED = 1 << 15


@cached
def processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


class Prefill:
    """Sequences of a mixed step for the prefill kernel."""

    def __init__(
        self, host: Sequences, pages: Tensor, arrays: Sequence[Tensor] | None = None
    ) -> None:
        """`arrays`: those of `host` on the device, if they are there."""
        self.host, self.pages = host, pages
        self._tiles: dict[int, Tensor] = {}
        if arrays is None:
            arrays = to_device(np.stack(host.arrays()), pages.device).unbind()
        starts_B, lengths_B, kv_lens_B, first_B = arrays
        self.rows = PrefillRows(starts_B, lengths_B, kv_lens_B, first_B, pages, self.tiles)

    def tiles(self, size: int) -> Tensor:
        if size not in self._tiles:
            self._tiles[size] = to_device(self.host.tiles(size), self.pages.device)
        return self._tiles[size]


@dataclass(frozen=True, slots=True)
class Expansion:
    """Sequences whose latents are expanded, and their pages in order."""

    prefill: Prefill
    pages: Tensor


class GpuAttention(AttentionStep):
    """`slots_T`: the cache slot of each token, -1 for padding; `positions_T`: its position in the
    sequence; both int32. Each row is in `decode` or in `prefill`."""

    def __init__(
        self,
        cache: PagedCache,
        slots_T: Tensor,
        positions_T: Tensor,
        decode: DecodeRows | None,
        prefill: Prefill | None = None,
        deterministic: bool = False,
    ) -> None:
        self.cache, self.slots_T, self.positions_T = cache, slots_T, positions_T
        self.decode, self.prefill = decode, prefill
        self.deterministic = deterministic
        self._prefill_kernel = invariant_attention if deterministic else prefill_attention
        self.fused = True
        """Whether one kernel may store and attend: no row reads what another row stores."""
        self._latent_groups: tuple[Prefill | None, list[Expansion]] | None = None
        self._angles: tuple[Angles, Angles] | None = None

    @classmethod
    def of(
        cls, cache: PagedCache, sequences: Sequences, table: PageTable, deterministic: bool = False
    ) -> GpuAttention:
        assert sequences.masks_T is None or not deterministic, (
            "no kernel for trees has the same bits"
        )
        sequences = sequences.with_trees_apart()
        number, position = sequences.positions()
        row = sequences.starts_B[number] + position
        row -= (sequences.kv_lens_B - sequences.lengths_B)[number]
        slot = table.slots(cache.page_size, sequences.first_B[number], position)
        order = np.argsort(row, kind="stable")
        single = (sequences.lengths_B == 1) & (not deterministic)
        decoding, chunks = (sequences.select(np.flatnonzero(part)) for part in (single, ~single))
        longest = int(decoding.kv_lens_B.max(initial=0))
        splits = decode_splits(cache, len(decoding), longest)
        singles = decode_columns(decoding, splits)
        masks = np.empty(0, np.int32)
        if sequences.masks_T is not None:
            masks = sequences.masks_T[decoding.starts_B].view(np.int32)
        # Masks first, for their alignment.
        columns = [masks, slot[order], position[order], *singles, *chunks.arrays()]
        parts = to_device(np.concatenate(columns), table.pages.device).split(
            [len(column) for column in columns]
        )
        masks_B, slots_T, positions_T, *rest = parts
        decode = None
        if len(decoding):
            # By the longest of any step: what was compiled for one serves all.
            most = table.max_pages * cache.page_size
            decode = decode_rows(rest[: len(singles)], table.pages, splits, most)
            if len(masks):
                decode = replace(decode, masks_B=masks_B.view(torch.int64))
        prefill = Prefill(chunks, table.pages, rest[len(singles) :]) if len(chunks) else None
        made = cls(cache, slots_T, positions_T, decode, prefill, deterministic)
        made.fused = sequences.masks_T is None
        return made

    @classmethod
    def from_spans(
        cls, cache: PagedCache, spans: Sequence[SequenceSpan], deterministic: bool = False
    ) -> GpuAttention:
        """A step whose sequences are in no table of a runner."""
        longest = max(len(span.pages) for span in spans)
        table = PageTable(len(spans), longest, cache.keys.device)
        return cls.of(cache, table.put(spans), table, deterministic)

    def attend_heads(self, spec: HeadSpec, qkv_TX: Tensor, angles: Angles) -> Tensor | Rows:
        entry, pages, softmax = *self._head_entry(spec, angles), _softmax(spec)
        rows = (qkv_TX, entry, pages, self.slots_T)
        if self.decode is None or self.prefill is not None:
            return self._attend_rows(softmax, Queries(enter_heads(*rows)), pages, self.prefill)
        out = self._output(spec, qkv_TX, pages)
        if self.fused:
            return enter_and_decode(*rows, self.decode, softmax, out)
        return decode_attention(Queries(enter_heads(*rows)), pages, self.decode, softmax, out)

    def store_heads(self, spec: HeadSpec, qkv_TX: Tensor, angles: Angles) -> None:
        enter_heads(qkv_TX, *self._head_entry(spec, angles), self.slots_T)

    def _head_entry(self, spec: HeadSpec, angles: Angles) -> tuple[HeadEntry, LayerPages]:
        q_norm, k_norm = spec.q_norm, spec.k_norm
        cos_TR, sin_TR = self._head_angles(angles)
        entry = HeadEntry(
            spec.num_heads,
            cos_TR,
            sin_TR,
            spec.rope.interleaved,
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            0.0 if q_norm is None else q_norm.eps,
        )
        keys, values = self.cache.layers[spec.layer]
        scales = self.cache.k_scale, self.cache.v_scale
        return entry, LayerPages(keys, values, values.shape[-1], *scales)

    def store_latents(self, spec: LatentSpec, latents_TC: Tensor, angles: Angles) -> None:
        q_T1R = latents_TC.new_zeros(len(latents_TC), 1, spec.rope_dim)
        enter_latent(q_T1R, latents_TC, *self._latent_entry(spec, angles), self.slots_T)

    def _latent_entry(self, spec: LatentSpec, angles: Angles) -> tuple[LatentEntry, LayerPages]:
        cos, sin = self._head_angles(angles)
        norm, interleaved = spec.norm, spec.rope.interleaved
        entry = LatentEntry(cos, sin, interleaved, norm.weight, norm.eps)
        keys, _ = self.cache.layers[spec.layer]
        return entry, LayerPages(keys, None, keys.shape[-1] - spec.rope_dim, self.cache.k_scale)

    def attend_latents(
        self, spec: LatentSpec, q_TND: Tensor, latents_TC: Tensor, angles: Angles
    ) -> Tensor:
        entry, pages = self._latent_entry(spec, angles)
        plain, rope = q_TND.split([q_TND.shape[-1] - spec.rope_dim, spec.rope_dim], dim=-1)
        rope = enter_latent(rope, latents_TC, entry, pages, self.slots_T)
        return self._attend_latent_rows(spec, Queries(plain, rope), pages)

    def _head_angles(self, angles: Angles) -> Angles:
        """Drops the dimension of heads; cached for all layers."""
        if self._angles is None or self._angles[0][0] is not angles[0]:
            cos, sin = angles
            self._angles = angles, (cos.squeeze(1), sin.squeeze(1))
        return self._angles[1]

    def _output(self, spec: HeadSpec, qkv_TX: Tensor, pages: LayerPages) -> Tensor | Rows:
        """Float8 rows if the output projection multiplies these: only the decode kernel quantises
        its output, and only heads of whole groups."""
        if spec.output is not None and pages.value_dim % FP8_GROUP == 0:
            rows = spec.output.quantised_input(qkv_TX)
            if rows is not None:
                return rows
        return qkv_TX.new_empty(len(qkv_TX), spec.num_heads, pages.value_dim)

    def _attend_rows(
        self, softmax: Softmax, q: Queries, pages: LayerPages, prefill: Prefill | None
    ) -> Tensor:
        out_TNV = q.values.new_empty(*q.values.shape[:2], pages.value_dim)
        if self.decode is not None:
            decode_attention(q, pages, self.decode, softmax, out_TNV)
        if prefill is not None:
            self._prefill_kernel(q, pages, prefill.rows, softmax, out_TNV)
        return out_TNV

    def _attend_latent_rows(self, spec: LatentSpec, q: Queries, pages: LayerPages) -> Tensor:
        """Absorbs the queries of all rows, unless the latents of every sequence are expanded."""
        projections = spec.projections
        absorbing, expansions = self._latent_batches(projections)
        softmax, mixed_TNV = _softmax(spec), None
        if self.decode is not None or absorbing is not None:
            absorbed = Queries(projections.absorb_nope(q.values), q.rest)
            mixed_TNR = self._attend_rows(softmax, absorbed, pages, absorbing)
            mixed_TNV = projections.up_project(mixed_TNR)
        for expansion in expansions:
            expanded = _expand(pages, expansion.pages, projections, q.values.dtype)
            if mixed_TNV is None:
                mixed_TNV = q.values.new_empty(*q.values.shape[:2], expanded.value_dim)
            prefill_attention(q, expanded, expansion.prefill.rows, softmax, mixed_TNV)
        assert mixed_TNV is not None, "a step without rows"
        return mixed_TNV

    def _latent_batches(
        self, projections: LatentProjections
    ) -> tuple[Prefill | None, list[Expansion]]:
        """Chunks with absorbed queries, and those with expanded latents; cached for all layers."""
        if self.prefill is None:
            return None, []
        if self._latent_groups is None:
            self._latent_groups = _latent_groups(self.prefill, projections, self)
        return self._latent_groups


def _softmax(spec: AttentionSpec) -> Softmax:
    return Softmax(spec.scale, spec.window, spec.sinks_N)


def decode_splits(cache: PagedCache, batch: int, max_kv_len: int) -> Splits:
    heads = FP8_HEADS if cache.keys.dtype == FP8 else HEADS
    policy = heads if cache.values.shape[-1] else LATENTS
    kv_heads, count = cache.keys.shape[-2], processors(cache.keys.device)
    return choose_splits(batch, kv_heads, max_kv_len, count, policy)


def decode_columns(decoding: Sequences, splits: Splits) -> list[Ints]:
    """What `decode_rows` takes, of the sequences of a step."""
    return [
        *(decoding.starts_B, decoding.kv_lens_B, decoding.first_B),
        *extra_splits(decoding.kv_lens_B, splits),
    ]


def decode_rows(
    columns: Sequence[Tensor], pages: Tensor, splits: Splits, max_kv_len: int
) -> DecodeRows:
    """`columns`: those of `decode_columns`, on the device; `max_kv_len`: of all steps with them."""
    rows_B, kv_lens_B, first_B, sequences_X, counts_B, first_extra_B = columns
    counters = torch.zeros(len(rows_B) * COUNTERS, dtype=torch.int32, device=pages.device)
    extra = None
    if may_have_extra(splits, max_kv_len):
        extra = ExtraSplits(sequences_X, counts_B, first_extra_B)
    return DecodeRows(rows_B, kv_lens_B, first_B, pages, splits, counters, extra)


def _latent_groups(
    prefill: Prefill, projections: LatentProjections, step: GpuAttention
) -> tuple[Prefill | None, list[Expansion]]:
    host, page_size = prefill.host, step.cache.page_size
    absorbed = np.array(
        [
            step.deterministic
            or kv > MAX_EXPANDED
            or projections.prefers_absorbed(int(new), int(kv))
            for new, kv in zip(host.lengths_B, host.kv_lens_B, strict=True)
        ],
        np.bool_,
    )
    if absorbed.all():
        return prefill, []
    absorbing = None
    if absorbed.any():
        absorbing = Prefill(host.select(np.flatnonzero(absorbed)), prefill.pages)
    pieces: list[list[int]] = []
    room = 0
    for number in np.flatnonzero(~absorbed):
        tokens = int(host.kv_lens_B[number])
        if not pieces or tokens > room:
            pieces.append([])
            room = MAX_EXPANDED
        pieces[-1].append(int(number))
        room -= tokens
    return absorbing, [
        _expansion(host.select(np.array(piece)), prefill, page_size) for piece in pieces
    ]


def _expansion(host: Sequences, prefill: Prefill, page_size: int) -> Expansion:
    """The pages of expanded keys and values are numbered from 0."""
    counts = -(-host.kv_lens_B // page_size)
    behind = (np.cumsum(counts) - counts).astype(np.int32)
    own = np.arange(counts.sum(), dtype=np.int32)
    device = prefill.pages.device
    sources = to_device(own + np.repeat(host.first_B - behind, counts), device)
    moved = Sequences(host.starts_B, host.lengths_B, host.kv_lens_B, behind)
    return Expansion(Prefill(moved, to_device(own, device)), prefill.pages.index_select(0, sources))


def _expand(
    latents: LayerPages, pages: Tensor, projections: LatentProjections, dtype: torch.dtype
) -> LayerPages:
    keys = latents.keys
    if keys.dtype == FP8:
        # index_select does not support float8.
        gathered = keys.view(torch.uint8).index_select(0, pages).view(FP8)
    else:
        gathered = keys.index_select(0, pages)
    latents_LC = gathered.to(dtype).flatten(0, 2)
    if latents.k_scale != 1.0:
        latents_LC = latents_LC * latents.k_scale
    k_LND, v_LNV = (x.unflatten(0, (len(pages), -1)) for x in projections.expand(latents_LC))
    return LayerPages(k_LND, v_LNV, v_LNV.shape[-1])


class DecodeBuffers:
    """Static tensors of a CUDA graph that decodes up to `rows` new tokens of a page table's
    sequences. `attention` reads them and the table in every run of the graph; rows without a token
    become zeros and store nothing.

    The decode kernel takes each token as its own sequence. `shares`: several tokens may be of one
    sequence, and share its pages. All tokens are stored before any is read then, so that each token
    sees those before it. `trees`: only those that its mask has.
    """

    def __init__(
        self,
        cache: PagedCache,
        rows: int,
        table: PageTable,
        deterministic: bool = False,
        shares: bool = False,
        trees: bool = False,
    ) -> None:
        assert not (trees and deterministic), "no kernel for trees has the same bits"
        self.cache, self.rows, self.table = cache, rows, table
        device, pages = cache.keys.device, table.pages
        max_kv_len = table.max_pages * cache.page_size
        self._splits = decode_splits(cache, rows, max_kv_len)
        # Masks first, for their alignment.
        self._num_masks = 2 * rows if trees else 0
        self._sizes = [self._num_masks, *[rows] * 4, ROOM, rows, rows]
        self._padding = to_device(self._pack([np.empty(0, np.int32)] * 8), device)
        self._packed = self._padding.clone()
        masks_T, slots_T, positions_T, kv_lens_T, first_T, *extra = self._packed.split(self._sizes)
        if deterministic:
            prefill = _single_queries(kv_lens_T, first_T, pages)
            self.attention = GpuAttention(cache, slots_T, positions_T, None, prefill, True)
            return
        rows_T = torch.arange(rows, dtype=torch.int32, device=device)
        columns = [rows_T, kv_lens_T, first_T, *extra]
        decode = decode_rows(columns, pages, self._splits, max_kv_len)
        if trees:
            decode = replace(decode, masks_B=masks_T.view(torch.int64))
        self.attention = GpuAttention(cache, slots_T, positions_T, decode)
        self.attention.fused = not shares

    @property
    def positions_T(self) -> Tensor:
        return self.attention.positions_T

    def fill(self, sequences: Sequences) -> None:
        """The sequences' rows follow each other from row 0 on. Does not block the host."""
        number, position = sequences.positions()
        if len(position) > self.rows:
            raise ValueError(
                f"{len(position)} tokens do not fit into buffers for {self.rows}: use larger ones"
            )
        first = sequences.first_B[number]
        slots = self.table.slots(self.cache.page_size, first, position)
        masks = np.empty(0, np.int32)
        if sequences.masks_T is not None:
            assert self._num_masks, "these buffers are for chains"
            masks = sequences.masks_T.view(np.int32)
        extra = extra_splits(position + 1, self._splits)
        columns = [masks, slots, position, position + 1, first, *extra]
        packed = pinned(self._pack(columns), self._packed.device)
        self._packed.copy_(packed, non_blocking=True)

    def _pack(self, columns: Sequence[Ints]) -> Ints:
        return packed_columns(columns, self._sizes, [-1, -1, 0, 0, 0, -1, 0, 0])

    def fill_singles(self, positions_B: Tensor, first_B: Tensor) -> None:
        """A token of each sequence at positions that only the device may know; `first_B`: the first
        entries of the sequences in the page table. None has extra splits."""
        size = self.cache.page_size
        slots_B = self.table.pages[first_B + positions_B // size] * size + positions_B % size
        self._packed.copy_(self._padding)
        columns_T = self._packed[self._num_masks :][: 4 * self.rows].view(4, self.rows)
        columns_B = torch.stack((slots_B, positions_B, positions_B + 1, first_B))
        columns_T[:, : len(positions_B)].copy_(columns_B)


def packed_columns(columns: Sequence[Ints], sizes: Sequence[int], rest: Sequence[int]) -> Ints:
    """The columns, each filled up to its size with an entry of `rest`."""
    packed, start = np.empty(sum(sizes), np.int32), 0
    for column, size, filler in zip(columns, sizes, rest, strict=True):
        stop = start + len(column)
        packed[start:stop] = column
        start += size
        if stop < start:
            packed[stop:start] = filler
    return packed


def _single_queries(kv_lens_B: Tensor, first_B: Tensor, pages: Tensor) -> Prefill:
    """One query per row; the host does not need the lengths."""
    rows, ones = np.arange(len(kv_lens_B), dtype=np.int32), np.ones(len(kv_lens_B), np.int32)
    starts_B, lengths_B = to_device(np.stack((rows, ones)), pages.device)
    host = Sequences(rows, ones, ones, 0 * rows)
    return Prefill(host, pages, (starts_B, lengths_B, kv_lens_B, first_B))
