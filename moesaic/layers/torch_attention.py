"""Paged attention with torch's fused kernel on CPU.

T tokens of the step · N query heads · M key/value heads · G = N / M · D head size · B sequences of
a group · Q new tokens of each · L gathered tokens · P pages.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.kernels.attention import MASK_BITS, seen_keys
from moesaic.kernels.cpu import widened
from moesaic.layers.context import Angles, AttentionSpec, AttentionStep, HeadSpec, LatentSpec
from moesaic.layers.paged_cache import Longs, PagedCache, SequenceSpan

# Largest share of padding in a batch of gathered sequences.
MAX_PADDING = 0.25


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Sequences of one kernel call: B with one new token each, or one with Q."""

    rows: slice | Tensor
    queries: int
    kv_len: int
    table_BP: Tensor
    mask: Tensor | None
    causal: bool = False


class CpuAttention(AttentionStep):
    """Norms, rotates and stores in separate operations; subclasses attend."""

    def __init__(self, cache: PagedCache, spans: Sequence[SequenceSpan]) -> None:
        self.cache, self.spans = cache, spans
        slots = [span.slots(span.positions, cache.page_size) for span in spans]
        self.slots_T = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *slots]))

    @abstractmethod
    def attend(self, spec: AttentionSpec, q_TND: Tensor, k_TMD: Tensor, v_TMD: Tensor) -> Tensor:
        """Stores the new keys and values, then returns the mixed values [T, N, D]."""

    @abstractmethod
    def attend_latent(self, spec: LatentSpec, q_TND: Tensor, latents_TC: Tensor) -> Tensor:
        """Stores the new latents, then returns the mixed values [T, N, V]."""

    def attend_heads(self, spec: HeadSpec, qkv_TX: Tensor, angles: Angles) -> Tensor:
        q_TND, k_TMD, v_TMD = _heads(spec, qkv_TX)
        if spec.q_norm is not None:
            q_TND = spec.q_norm(q_TND)
        q_TND = spec.rope.rotate(q_TND, *angles)
        return self.attend(spec, q_TND, _keys(spec, k_TMD, angles), v_TMD)

    def store_heads(self, spec: HeadSpec, qkv_TX: Tensor, angles: Angles) -> None:
        rows = len(self.slots_T)
        _, k_TMD, v_TMD = _heads(spec, qkv_TX)
        self.store(spec.layer, _keys(spec, k_TMD, angles)[:rows], v_TMD[:rows])

    def attend_latents(
        self, spec: LatentSpec, q_TND: Tensor, latents_TC: Tensor, angles: Angles
    ) -> Tensor:
        q_plain, q_rope = q_TND.split([q_TND.shape[-1] - spec.rope_dim, spec.rope_dim], dim=-1)
        q_TND = torch.cat((q_plain, spec.rope.rotate(q_rope, *angles)), dim=-1)
        return self.attend_latent(spec, q_TND, _latents(spec, latents_TC, angles))

    def store_latents(self, spec: LatentSpec, latents_TC: Tensor, angles: Angles) -> None:
        latents_T1C = _latents(spec, latents_TC, angles).unsqueeze(1)
        self.store(spec.layer, latents_T1C[: len(self.slots_T)])

    def store(
        self, layer: int, k_TMD: Tensor, v_TMD: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Writes the new keys and values; returns the layer's pages of both."""
        keys, values = self.cache.layers[layer]
        keys.flatten(0, 1).index_copy_(0, self.slots_T, k_TMD)
        if v_TMD is not None:
            values.flatten(0, 1).index_copy_(0, self.slots_T, v_TMD)
        return keys, values


def _heads(spec: HeadSpec, qkv_TX: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values by head."""
    dim, queries, kv = spec.head_dim, spec.num_heads, spec.num_kv_heads
    split = qkv_TX.split([queries * dim, kv * dim, kv * dim], dim=-1)
    return tuple(part.unflatten(-1, (-1, dim)) for part in split)


def _keys(spec: HeadSpec, k_TMD: Tensor, angles: Angles) -> Tensor:
    """As they are stored."""
    if spec.k_norm is not None:
        k_TMD = spec.k_norm(k_TMD)
    return spec.rope.rotate(k_TMD, *angles)


def _latents(spec: LatentSpec, latents_TC: Tensor, angles: Angles) -> Tensor:
    """As they are stored."""
    plain = latents_TC.shape[-1] - spec.rope_dim
    latent, k_rope = latents_TC.split([plain, spec.rope_dim], dim=-1)
    k_rope = spec.rope.rotate(k_rope.unsqueeze(1), *angles).squeeze(1)
    return torch.cat((spec.norm(latent), k_rope), dim=-1)


class TorchAttention(CpuAttention):
    def __init__(self, cache: PagedCache, spans: Sequence[SequenceSpan]) -> None:
        super().__init__(cache, spans)
        self._groups: dict[int | None, list[AttentionBatch]] = {}

    def attend(self, spec: AttentionSpec, q_TND: Tensor, k_TMD: Tensor, v_TMD: Tensor) -> Tensor:
        keys, values = self.store(spec.layer, k_TMD, v_TMD)
        out_TND = torch.empty_like(q_TND)
        for group in self.groups(spec.window):
            k_BLMD, v_BLMD = _gather(keys, group), _gather(values, group)
            out_TND[group.rows] = _attend(group, spec, q_TND[group.rows], k_BLMD, v_BLMD)
        return out_TND

    def attend_latent(self, spec: LatentSpec, q_TND: Tensor, latents_TC: Tensor) -> Tensor:
        latents, _ = self.store(spec.layer, latents_TC.unsqueeze(1))
        projections, outputs = spec.projections, list[Tensor]()
        for group in self.groups(spec.window):
            gathered_BL1C, q_RND = _gather(latents, group), q_TND[group.rows]
            if group.queries == 1 or projections.prefers_absorbed(group.queries, group.kv_len):
                q_RNC = projections.absorb(q_RND)
                mixed_RNC = _attend(group, spec, q_RNC, gathered_BL1C, gathered_BL1C)
                outputs.append(projections.up_project(mixed_RNC))
            else:
                k_LND, v_LNV = projections.expand(gathered_BL1C[0, :, 0])
                outputs.append(_attend_padded(group, spec, q_RND, k_LND, v_LNV))
        out_TNV = q_TND.new_empty(*q_TND.shape[:2], outputs[0].shape[-1])
        for group, output in zip(self.groups(spec.window), outputs, strict=True):
            out_TNV[group.rows] = output
        return out_TNV

    def groups(self, window: int | None) -> list[AttentionBatch]:
        """Cached for all layers with this window."""
        if window not in self._groups:
            self._groups[window] = list(self._make_groups(window))
        return self._groups[window]

    def _make_groups(self, window: int | None) -> Iterator[AttentionBatch]:
        views = [_visible(span, window, self.cache.page_size) for span in self.spans]
        decoding = sorted((view for view in views if view.length == 1), key=attrgetter("kv_len"))
        for view in views:
            if view.length > 1:
                yield _prefill_group(view, window, self.cache.keys.dtype)
        for batch in _batches(decoding):
            yield _decode_group(batch, window, self.cache.keys.dtype)


def _visible(span: SequenceSpan, window: int | None, page_size: int) -> SequenceSpan:
    """The span without the pages before its window; `kv_len` counts from the first page kept."""
    first = 0
    if window is not None:
        hidden = 0 if span.masks is None else MASK_BITS
        first = max(0, span.kv_len - span.length - window - hidden + 1) // page_size
    last = -(-span.kv_len // page_size)
    return span._replace(pages=span.pages[first:last], kv_len=span.kv_len - first * page_size)


def _batches(views: list[SequenceSpan]) -> Iterator[list[SequenceSpan]]:
    """Splits sequences sorted by length into batches with little padding."""
    batch: list[SequenceSpan] = []
    used = 0
    for view in views:
        if batch and used + view.kv_len < (1 - MAX_PADDING) * view.kv_len * (len(batch) + 1):
            yield batch
            batch, used = [], 0
        batch.append(view)
        used += view.kv_len
    if batch:
        yield batch


def _decode_group(
    batch: list[SequenceSpan], window: int | None, dtype: torch.dtype
) -> AttentionBatch:
    width, longest = len(batch[-1].pages), batch[-1].kv_len
    table_BP = torch.zeros(len(batch), width, dtype=torch.int64)
    for row_P, view in zip(table_BP.numpy(), batch, strict=True):
        row_P[: len(view.pages)] = view.pages
    rows = torch.tensor([v.start for v in batch])
    last_B1 = torch.tensor([[v.kv_len - 1] for v in batch])
    mask = causal_mask(last_B1, longest, window, dtype).unsqueeze(1)
    for view, own in zip(batch, mask, strict=True):
        if view.masks is not None:
            own[..., : view.kv_len] = tree_mask(view.masks, view.kv_len, window, dtype)
    return AttentionBatch(rows, 1, longest, table_BP, mask)


def _prefill_group(span: SequenceSpan, window: int | None, dtype: torch.dtype) -> AttentionBatch:
    length, kv_len = span.length, span.kv_len
    table_BP = torch.from_numpy(np.array([span.pages], np.int64))
    rows = slice(span.start, span.start + length)
    if span.masks is None and kv_len == length and (window is None or window >= length):
        return AttentionBatch(rows, length, kv_len, table_BP, None, causal=True)
    last_1Q = torch.arange(kv_len - length, kv_len).unsqueeze(0)
    if span.masks is None:
        mask = causal_mask(last_1Q, kv_len, window, dtype)
    else:
        mask = tree_mask(span.masks, kv_len, window, dtype)
    return AttentionBatch(rows, length, kv_len, table_BP, mask.unsqueeze(1))


def tree_mask(masks_Q: Longs, length: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """As `causal_mask` of one sequence, whose last queries see what their masks say."""
    seen_QL = seen_keys(torch.from_numpy(masks_Q), length, window)
    hidden_1QL = ~seen_QL.unsqueeze(0)
    return torch.zeros(hidden_1QL.shape, dtype=dtype).masked_fill_(hidden_1QL, -math.inf)


def causal_mask(last_BQ: Tensor, length: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """[B, Q, L]: 0 where a query sees a key, -inf elsewhere; `last` is the newest visible key."""
    keys_L, last_BQ1 = torch.arange(length), last_BQ.unsqueeze(-1)
    hidden = keys_L > last_BQ1
    if window is not None:
        hidden |= keys_L <= last_BQ1 - window
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -math.inf)


def _attend(
    group: AttentionBatch, spec: AttentionSpec, q_RND: Tensor, k_BLMD: Tensor, v_BLMD: Tensor
) -> Tensor:
    k_BMLD, v_BMLD = k_BLMD.transpose(1, 2), v_BLMD.transpose(1, 2)
    q_RMGD = q_RND.unflatten(1, (k_BMLD.shape[1], -1))
    if group.queries == 1:
        # Heads that share keys are rows of one product, so each key is read once.
        q = q_RMGD
    else:
        q = q_RMGD.permute(2, 1, 0, 3)
        k_BMLD = k_BMLD.expand(q.shape[0], -1, -1, -1)
        v_BMLD = v_BMLD.expand(q.shape[0], -1, -1, -1)
    out, lse = widened.flash(q, k_BMLD, v_BMLD, group.causal, group.mask, spec.scale)
    if group.queries > 1:
        out, lse = out.permute(2, 1, 0, 3), lse.permute(2, 1, 0)
    out_RND = out.flatten(1, 2)
    if spec.sinks_N is None:
        return out_RND
    return with_sinks(out_RND, torch.sigmoid(lse.flatten(1, 2) - spec.sinks_N.float()))


def with_sinks(out: Tensor, kept: Tensor) -> Tensor:
    """A sink is one more logit with a value of zero: `kept` is the share of the other logits."""
    return (out.float() * kept.unsqueeze(-1)).to(out.dtype)


def _attend_padded(
    group: AttentionBatch, spec: AttentionSpec, q_RND: Tensor, k_LND: Tensor, v_LNV: Tensor
) -> Tensor:
    """Pads keys and values to one size, which the kernel needs."""
    size = max(k_LND.shape[-1], v_LNV.shape[-1])
    q, k, v = (F.pad(x, (0, size - x.shape[-1])) for x in (q_RND, k_LND, v_LNV))
    out_RND = _attend(group, spec, q, k.unsqueeze(0), v.unsqueeze(0))
    return out_RND[..., : v_LNV.shape[-1]]


def _gather(cache: Tensor, group: AttentionBatch) -> Tensor:
    """[B, L, M, D] from one layer's pages [P, page, M, D]."""
    pages = cache.flatten(1).index_select(0, group.table_BP.flatten())
    gathered = pages.view(group.table_BP.shape[0], -1, *cache.shape[-2:])
    return gathered[:, : group.kv_len]
