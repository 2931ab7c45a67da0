"""Attention over a paged cache on a GPU: what its kernels take and give, and the same in torch.

T rows of the step · B sequences · N query heads · M key/value heads · D key size · V value size ·
R rotated channels · C latent size · X tiles.

    enter_heads        normed and rotated queries; new keys and values into the cache
    enter_latent       the same where the cache holds latents (MLA)
    decode_attention   one query of each sequence over all its cached tokens, in splits
    enter_and_decode   enter_heads and decode_attention of a step that only decodes
    prefill_attention  many queries of each sequence
    invariant_attention  any number of queries of each sequence, whose bits depend on that alone

The pages of all sequences stand in one list, those of a sequence from its `first` on: pages [4, 7,
2] with first [0, 2] give pages 4 and 7 to the first sequence. What lies behind a sequence's last
token, or in pages of nobody, may be anything: it never reaches a result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from moesaic.kernels.experts import Rows, store_rows
from moesaic.kernels.native import native
from moesaic.kernels.quantise import FP8_MAX

ENTER = "moesaic.kernels.triton.rotary"
DECODE = "moesaic.kernels.triton.attention_decode"
PREFILL = "moesaic.kernels.triton.attention_prefill"
FP8 = torch.float8_e4m3fn
MAX_SPLITS = 128
Out = TypeVar("Out", bound=Tensor | Rows)


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer of the cache: keys [pages, page, M, D] and values [pages, page, M, V]. Without
    values the first V channels of the keys serve (latents). In float8_e4m3fn the real numbers are
    those of the cache times the scales."""

    keys: Tensor
    values: Tensor | None
    value_dim: int
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def page_size(self) -> int:
        return self.keys.shape[1]


@dataclass(frozen=True, slots=True)
class Queries:
    """[T, N, D], or in two parts whose channels follow each other: `values` and `rest`."""

    values: Tensor
    rest: Tensor | None = None

    def whole(self) -> Tensor:
        return self.values if self.rest is None else torch.cat((self.values, self.rest), dim=-1)


@dataclass(frozen=True, slots=True)
class Softmax:
    """`window`: how many tokens a query sees, its own among them. `sinks_N`: one more logit of each
    head, whose value is zero."""

    scale: float
    window: int | None = None
    sinks_N: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Splits:
    """How a sequence is cut for decoding: into at most `count` parts of at least `chunk` tokens. If
    count * chunk holds every context, parts are always of `chunk` tokens, and the bits of a result
    do not depend on the batch. `lone`: no processor has more than one part."""

    count: int
    chunk: int
    lone: bool = False


@dataclass(frozen=True, slots=True)
class SplitPolicy:
    """How many parts are wanted. `programs` for each processor of a GPU, if contexts are long
    enough; parts of fewer than `chunk` tokens are not worth it, as what they find must be merged.
    One for each processor is enough where sequences in at most `lone` parts keep nearly all of
    them busy. Of more sequences than a processor runs `at_once`, the last few would run nearly
    alone: two parts of each are better, unless this is 0."""

    programs: int
    chunk: int
    lone: int = 0
    at_once: int = 0


HEADS = SplitPolicy(programs=2, chunk=128, lone=1, at_once=3)
FP8_HEADS = SplitPolicy(programs=2, chunk=64)
# Many heads share a latent, and its values are wide, so that there it is more to merge.
LATENTS = SplitPolicy(programs=2, chunk=128)
# How many more than run at once are few.
FEW_MORE = 4 / 3
# Processors that may be idle where each of the others has one program.
LONE_IDLE = 0.1


def choose_splits(
    batch: int, kv_heads: int, max_kv_len: int, processors: int, cut: SplitPolicy = HEADS
) -> Splits:
    """Enough programs to fill the GPU with `batch` sequences. All runs of a graph use those of its
    largest context."""
    heads = max(1, batch * kv_heads)
    lone = processors // heads
    if 1 <= lone <= cut.lone and lone * heads >= (1 - LONE_IDLE) * processors:
        return Splits(lone, cut.chunk, lone=True)
    wanted = cut.programs * processors // heads
    at_once = cut.at_once * processors
    if at_once < heads <= FEW_MORE * at_once:
        wanted = 2
    count = min(max(1, wanted), max(1, -(-max_kv_len // cut.chunk)), MAX_SPLITS)
    return Splits(count, cut.chunk)


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Sequences with one query each, all int32: its row of the step, tokens with itself (0: none,
    the row becomes zero), where its pages begin. These and `pages` are written before the step's
    first kernel, not by kernels of the step. `counters`: zeros, B * N of them at least; they are
    zeros again when the kernel has ended."""

    rows_B: Tensor
    kv_lens_B: Tensor
    first_B: Tensor
    pages: Tensor
    splits: Splits
    counters: Tensor


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """Sequences with any number of queries, all int32: rows [start, start + length) of the step are
    the last `length` of its `kv_len` tokens. `tiles(n)` gives [X, 2], sequence and offset of each
    piece of n queries, on the device."""

    starts_B: Tensor
    lengths_B: Tensor
    kv_lens_B: Tensor
    first_B: Tensor
    pages: Tensor
    tiles: Callable[[int], Tensor] = field(repr=False)


@dataclass(frozen=True, slots=True)
class HeadEntry:
    """How rows of query, key and value heads, one after the other, go into attention. cos and sin:
    float32 [T, D / 2]. Norm weights [D], or none."""

    num_heads: int
    cos_TR: Tensor
    sin_TR: Tensor
    interleaved: bool = False
    q_norm_D: Tensor | None = None
    k_norm_D: Tensor | None = None
    eps: float = 0.0


@dataclass(frozen=True, slots=True)
class LatentEntry:
    """cos and sin: float32 [T, R / 2]; the norm is that of the latent without its R channels."""

    cos_TR: Tensor
    sin_TR: Tensor
    interleaved: bool
    norm_D: Tensor
    eps: float


@native(ENTER)
def enter_heads(qkv_TX: Tensor, entry: HeadEntry, cache: LayerPages, slots_T: Tensor) -> Tensor:
    """Norms and rotates queries and keys, writes keys and values at their slots (below 0: nowhere)
    and gives the queries [T, N, D]. All in float32, rounded once.

    One query, one key, one value head of 2 channels, no norms, cos 0 and sin 1: the row
    [1, 2, 3, 4, 5, 6] at slot 0 gives the query [-2, 1], the key [-4, 3] and the value [5, 6].
    """
    heads = entry.num_heads
    kv_heads, dim = cache.keys.shape[-2:]
    x_THD = qkv_TX.float().unflatten(-1, (heads + 2 * kv_heads, dim))
    q, k, v = x_THD.split([heads, kv_heads, kv_heads], dim=1)
    q = _rotated(_normed(q, entry.q_norm_D, entry.eps), entry)
    k = _rotated(_normed(k, entry.k_norm_D, entry.eps), entry)
    assert cache.values is not None
    _write(cache.keys, slots_T, k, cache.k_scale)
    _write(cache.values, slots_T, v, cache.v_scale)
    return q.to(qkv_TX.dtype)


@native(ENTER)
def enter_latent(
    q_TNR: Tensor, latents_TC: Tensor, entry: LatentEntry, cache: LayerPages, slots_T: Tensor
) -> Tensor:
    """Rotates the R channels of all queries, which it gives back, and of the latents, norms the
    others of the latents, and writes these at their slots (below 0: nowhere).

    The query [1, 2], the latent [3, 4, 5, 6] with R = 2, norm weights of 1, eps 0, cos 0 and sin 1:
    gives [-2, 1], and [0.8485, 1.1314, -6, 5] goes into the cache.
    """
    rope = q_TNR.shape[-1]
    plain, k_rope = latents_TC.float().split([latents_TC.shape[-1] - rope, rope], dim=-1)
    k_rope = _rotated(k_rope.unsqueeze(1), entry).squeeze(1)
    latents = torch.cat((_normed(plain, entry.norm_D, entry.eps), k_rope), dim=-1)
    _write(cache.keys, slots_T, latents.unsqueeze(1), cache.k_scale)
    return _rotated(q_TNR.float(), entry).to(q_TNR.dtype)


@native(DECODE)
def decode_attention(
    q: Queries, cache: LayerPages, batch: DecodeRows, softmax: Softmax, out: Out
) -> Out:
    """out[row] for each sequence's row, and no other. `Rows`: float8, [T, N * V], of heads of whole
    groups; the same bits as `quantise_rows` makes of what a tensor [T, N, V] would get. Their
    scales may lie by column.

    Query [1, 0], scale 1, keys [ln 3, 0] and [0, 0] with values [4, 0] and [0, 8]: the weights are
    3/4 and 1/4, and the result is [3, 2].
    """
    if isinstance(out, Rows):
        mixed_TNV = q.values.new_empty(*q.values.shape[:2], cache.value_dim)
        decode_attention.twin(q, cache, batch, softmax, mixed_TNV)
        rows_B = batch.rows_B.long()
        store_rows(out, rows_B, mixed_TNV[rows_B].flatten(1))
        return out
    sequences = (batch.rows_B.tolist(), batch.kv_lens_B.tolist(), batch.first_B.tolist())
    for row, kv_len, first in zip(*sequences, strict=True):
        out[row] = 0
        if kv_len:
            part = slice(row, row + 1)
            out[part] = _attend(q, cache, softmax, part, kv_len, batch.pages[first:])
    return out


@native(DECODE)
def enter_and_decode(
    qkv_TX: Tensor,
    entry: HeadEntry,
    cache: LayerPages,
    slots_T: Tensor,
    batch: DecodeRows,
    softmax: Softmax,
    out: Out,
) -> Out:
    """`enter_heads` and then `decode_attention`, with the bits of the two. Every row is that of one
    sequence, and its slot that of the sequence's newest token; slots, and all older tokens, are
    written before the step's first kernel, as `batch` is.

    One head of 2 channels, scale 1, no norms, cos 0 and sin 1: the row [0, -1, 0, ln 3, 4, 0] has
    the query [1, 0] and the key [-ln 3, 0]. Behind a token with key [0, 0] and value [0, 8] the
    weights are 1/4 and 3/4, and the result is [1, 6].
    """
    q_TND = enter_heads.twin(qkv_TX, entry, cache, slots_T)
    return decode_attention.twin(Queries(q_TND), cache, batch, softmax, out)


@native(PREFILL)
def prefill_attention(
    q: Queries, cache: LayerPages, batch: PrefillRows, softmax: Softmax, out_TNV: Tensor
) -> Tensor:
    """out of all rows of the sequences, and no other: each query sees what stands up to itself.

    Two queries [1, 0] over the keys and values of the example above: [4, 0] and [3, 2].
    """
    sequences = (batch.starts_B, batch.lengths_B, batch.kv_lens_B, batch.first_B)
    for start, length, kv_len, first in torch.stack(sequences, dim=1).tolist():
        part = slice(start, start + length)
        out_TNV[part] = _attend(q, cache, softmax, part, kv_len, batch.pages[first:])
    return out_TNV


@native(PREFILL)
def invariant_attention(
    q: Queries, cache: LayerPages, batch: PrefillRows, softmax: Softmax, out_TNV: Tensor
) -> Tensor:
    """`prefill_attention`; on a GPU no bit of a row depends on the other sequences, nor on how
    many queries of its own come with it. A sequence may have queries and no tokens: zeros.

    One query [1, 0] over both keys and values of the example above: [3, 2].
    """
    some = torch.nonzero(batch.kv_lens_B > 0).flatten()
    columns = (batch.starts_B, batch.lengths_B, batch.kv_lens_B, batch.first_B)
    for start, length in zip(batch.starts_B.tolist(), batch.lengths_B.tolist(), strict=True):
        out_TNV[start : start + length] = 0
    chosen = PrefillRows(*(column[some] for column in columns), batch.pages, batch.tiles)
    return prefill_attention.twin(q, cache, chosen, softmax, out_TNV)


def _attend(
    q: Queries, cache: LayerPages, softmax: Softmax, rows: slice, kv_len: int, pages: Tensor
) -> Tensor:
    """Of one sequence, in float32."""
    q_QND = q.whole()[rows].float()
    k_LMD = _gather(cache.keys, pages, kv_len) * cache.k_scale
    v_LMV = k_LMD[..., : cache.value_dim]
    if cache.values is not None:
        v_LMV = _gather(cache.values, pages, kv_len) * cache.v_scale
    per_kv = q_QND.shape[1] // k_LMD.shape[1]
    k_LND, v_LNV = (x.repeat_interleave(per_kv, dim=1) for x in (k_LMD, v_LMV))
    scores_NQL = torch.einsum("qnd,lnd->nql", q_QND, k_LND) * softmax.scale
    keys_L = torch.arange(kv_len, device=q_QND.device)
    last_Q = keys_L[kv_len - len(q_QND) :, None]
    seen_QL = keys_L <= last_Q
    if softmax.window is not None:
        seen_QL &= keys_L > last_Q - softmax.window
    scores_NQL.masked_fill_(~seen_QL, -math.inf)
    if softmax.sinks_N is not None:
        sinks = softmax.sinks_N.float()[:, None, None].expand(-1, len(q_QND), 1)
        scores_NQL = torch.cat((scores_NQL, sinks), dim=-1)
    weights_NQL = scores_NQL.softmax(-1)[..., :kv_len]
    return torch.einsum("nql,lnv->qnv", weights_NQL, v_LNV).to(q.values.dtype)


def _gather(cache: Tensor, pages: Tensor, kv_len: int) -> Tensor:
    used = -(-kv_len // cache.shape[1])
    return cache[pages[:used].long()].flatten(0, 1)[:kv_len].float()


def _normed(x: Tensor, weight_D: Tensor | None, eps: float) -> Tensor:
    if weight_D is None:
        return x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight_D.float()


def _rotated(x_THD: Tensor, entry: HeadEntry | LatentEntry) -> Tensor:
    cos, sin = entry.cos_TR.unsqueeze(1), entry.sin_TR.unsqueeze(1)
    a, b = (x_THD[..., 0::2], x_THD[..., 1::2]) if entry.interleaved else x_THD.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _write(cache: Tensor, slots_T: Tensor, x_THD: Tensor, scale: float) -> None:
    kept = slots_T >= 0
    x_THD = x_THD[kept] / scale
    if cache.dtype == FP8:
        x_THD = x_THD.clamp(-FP8_MAX, FP8_MAX)
    cache.view(-1, *cache.shape[2:])[slots_T[kept].long()] = x_THD.to(cache.dtype)
