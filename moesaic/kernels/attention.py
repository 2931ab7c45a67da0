"""Attention over a paged cache on a GPU: the interface of its kernels, and their torch twins.

T rows of the step · B sequences · N query heads · M key/value heads · D key size · V value size ·
R rotated channels · C latent size · X tiles.

    enter_heads        normed and rotated queries; new keys and values into the cache
    enter_latent       the same where the cache holds latents (MLA)
    decode_attention   one query of each sequence over all its cached tokens, in splits
    enter_and_decode   enter_heads and decode_attention of a step that only decodes
    prefill_attention  many queries of each sequence
    invariant_attention  any number of queries of each sequence, for deterministic mode

One list holds the pages of all sequences, those of a sequence from its `first` on: pages [4, 7, 2]
with first [0, 2] give pages 4 and 7 to the first sequence. Slots behind a sequence's last token and
unused pages may hold anything: they never affect a result.
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
MASK_BITS = 64
# Up to this many single tokens, each split of the decode kernel norms and rotates its inputs, which
# takes less time than another kernel launch.
MAX_FUSED_ENTRIES = 32
# Query heads times positions of a tile in prefill.
PREFILL_ROWS = 128
Out = TypeVar("Out", bound=Tensor | Rows)


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer of the cache: keys [pages, page, M, D] and values [pages, page, M, V]."""

    keys: Tensor
    values: Tensor | None
    """None: the first V channels of the keys are the values (latents)."""
    value_dim: int
    k_scale: float = 1.0
    """In float8_e4m3fn, a cached number times its scale is the real one."""
    v_scale: float = 1.0

    @property
    def page_size(self) -> int:
        return self.keys.shape[1]


@dataclass(frozen=True, slots=True)
class Queries:
    """[T, N, D], or two parts of the channels: `values`, then `rest`."""

    values: Tensor
    rest: Tensor | None = None

    def whole(self) -> Tensor:
        return self.values if self.rest is None else torch.cat((self.values, self.rest), dim=-1)


@dataclass(frozen=True, slots=True)
class Softmax:
    scale: float
    window: int | None = None
    """Tokens that a query sees, its own included."""
    sinks_N: Tensor | None = None
    """One more logit of each head, with a value of zero."""


@dataclass(frozen=True, slots=True)
class Splits:
    """Decoding cuts a sequence into at most `count` splits of at least `chunk` tokens. If count *
    chunk covers every context, splits always have `chunk` tokens, and no bit of a result depends on
    the batch."""

    count: int
    chunk: int
    lone: bool = False
    """Whether no processor runs more than one split."""


def tokens_at_once(num_heads: int, device: torch.device) -> int:
    """Prompt tokens whose tiles fill the processors of a GPU once; on others one."""
    if device.type != "cuda":
        return 1
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, PREFILL_ROWS * processors // num_heads)


@dataclass(frozen=True, slots=True)
class SplitPolicy:
    """How `choose_splits` determines the number of splits."""

    programs: int
    """Target number for each processor of the GPU."""
    chunk: int
    """Fewer tokens than this do not repay the merge of a split."""
    lone: int = 0
    """If up to this many splits a sequence keep nearly all processors busy, each runs only one."""
    at_once: int = 0
    """Sequences that a processor runs concurrently. With slightly more, the last few would run
    nearly alone, so that all get two splits; 0 disables this."""


HEADS = SplitPolicy(programs=2, chunk=128, lone=1, at_once=3)
FP8_HEADS = SplitPolicy(programs=2, chunk=64)
# Many heads share a latent, and its values are wide: merging costs more.
LATENTS = SplitPolicy(programs=2, chunk=128)
# Factor above `at_once` that counts as slightly more.
FEW_MORE = 4 / 3
# Share of the processors that may idle while each of the others runs one program.
LONE_IDLE = 0.1


def choose_splits(
    batch: int, kv_heads: int, max_kv_len: int, processors: int, cut: SplitPolicy = HEADS
) -> Splits:
    """Enough programs to fill the GPU. All replays of a graph use those of its largest context."""
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
class ExtraSplits:
    """Splits that a few long sequences have beyond `Splits.count`, all int32: one for each entry of
    `sequences_X`, in which those of a sequence follow each other. -1 fills up the rest.

    Sequences of 5, 900 and 7 tokens, the second with 2 extra splits and room for 4: sequences_X
    [1, 1, -1, -1], counts_B [0, 2, 0] and first_B [0, 0, 0]."""

    sequences_X: Tensor
    counts_B: Tensor
    """Extra splits of each sequence."""
    first_B: Tensor
    """Where its extra splits begin in `sequences_X`, if it has any."""


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Sequences with one query each, all int32. All but the counters is written before the step's
    first kernel."""

    rows_B: Tensor
    kv_lens_B: Tensor
    """Tokens including the query's own; 0 sets the row to zero, -1 leaves it as it is."""
    first_B: Tensor
    pages: Tensor
    splits: Splits
    counters: Tensor
    """At least B * N zeros; the kernel resets them."""
    extra: ExtraSplits | None = None
    masks_B: Tensor | None = None
    """int64: what the query sees of the tokens before it, as in `seen_keys`; None: all."""


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """Sequences with any number of queries, all int32: rows [start, start + length) of the step are
    the last `length` of the sequence's `kv_len` tokens."""

    starts_B: Tensor
    lengths_B: Tensor
    kv_lens_B: Tensor
    first_B: Tensor
    pages: Tensor
    tiles: Callable[[int], Tensor] = field(repr=False)
    """tiles(n): on the device, [X, 2]: in row 0 how many tiles of n queries there are, in the rows
    behind it sequence and offset of each. X may be larger: the rest is ignored."""


@dataclass(frozen=True, slots=True)
class HeadEntry:
    """How rows of query, key and value heads, in this order, are normed and rotated. cos and sin:
    float32 [T, D / 2]."""

    num_heads: int
    cos_TR: Tensor
    sin_TR: Tensor
    interleaved: bool = False
    q_norm_D: Tensor | None = None
    k_norm_D: Tensor | None = None
    eps: float = 0.0


@dataclass(frozen=True, slots=True)
class LatentEntry:
    """cos and sin: float32 [T, R / 2]; the norm excludes the R rotated channels."""

    cos_TR: Tensor
    sin_TR: Tensor
    interleaved: bool
    norm_D: Tensor
    eps: float


@native(ENTER)
def enter_heads(qkv_TX: Tensor, entry: HeadEntry, cache: LayerPages, slots_T: Tensor) -> Tensor:
    """Norms and rotates queries and keys in float32, rounded once; writes keys and values to their
    slots (skips negative ones) and returns the queries [T, N, D].

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
    """Rotates and returns the queries [T, N, R]; rotates R channels of the latents, norms the
    others and writes both to their slots (skips negative ones).

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
    """Writes only the rows of the sequences. `Rows`: float8 [T, N * V] of heads of whole groups,
    with the bits of `quantise_rows` of a result [T, N, V]; scales may be stored by column.

    Query [1, 0], scale 1, keys [ln 3, 0] and [0, 0] with values [4, 0] and [0, 8]: the weights are
    3/4 and 1/4, and the result is [3, 2].
    """
    if isinstance(out, Rows):
        mixed_TNV = q.values.new_empty(*q.values.shape[:2], cache.value_dim)
        decode_attention.twin(q, cache, batch, softmax, mixed_TNV)
        rows_B = batch.rows_B.long()
        store_rows(out, rows_B, mixed_TNV[rows_B].flatten(1))
        return out
    columns = (batch.rows_B, torch.ones_like(batch.rows_B), batch.kv_lens_B, batch.first_B)
    return _attend_all(q, cache, softmax, columns, batch.pages, out, batch.masks_B)


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
    """`enter_heads`, then `decode_attention`, bit for bit. Every row belongs to one sequence, and
    its slot to that sequence's newest token. Slots and all older tokens are written before the
    step's first kernel.

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
    """Writes only the rows of the sequences. Each query sees the tokens up to its own.

    Two queries [1, 0] over the keys and values of the example above: [4, 0] and [3, 2].
    """
    columns = (batch.starts_B, batch.lengths_B, batch.kv_lens_B, batch.first_B)
    return _attend_all(q, cache, softmax, columns, batch.pages, out_TNV)


@native(PREFILL)
def invariant_attention(
    q: Queries, cache: LayerPages, batch: PrefillRows, softmax: Softmax, out_TNV: Tensor
) -> Tensor:
    """`prefill_attention`; on a GPU no bit of a row depends on other sequences or on the number of
    queries. Queries of a sequence without tokens get zeros.

    One query [1, 0] over both keys and values of the example above: [3, 2].
    """
    return prefill_attention.twin(q, cache, batch, softmax, out_TNV)


def _attend_all(
    q: Queries,
    cache: LayerPages,
    softmax: Softmax,
    columns: tuple[Tensor, ...],
    pages: Tensor,
    out_TNV: Tensor,
    masks_B: Tensor | None = None,
) -> Tensor:
    """`columns`: start, length, kv_len and first page of each sequence. `masks_B`: of their only
    queries."""
    for n, (start, length, kv_len, first) in enumerate(torch.stack(columns, dim=1).tolist()):
        rows = slice(start, start + length)
        if kv_len >= 0:
            out_TNV[rows] = 0
        if kv_len > 0:
            masks = None if masks_B is None else masks_B[n : n + 1]
            out_TNV[rows] = _attend(q, cache, softmax, rows, kv_len, pages[first:], masks)
    return out_TNV


def seen_keys(masks_Q: Tensor, length: int, window: int | None) -> Tensor:
    """[Q, L]: whether each of the last queries of `length` tokens sees a key. Bit n of its mask is
    the token n before it; it sees all those that are further away. Of all that it sees, a window
    has the newest.

    The masks -1, -1 and -3 with 4 tokens: [1 1 0 0], [1 1 1 0] and [1 1 0 1]; with a window of 2
    the last is [0 1 0 1].
    """
    count, keys_L = len(masks_Q), torch.arange(length, device=masks_Q.device)
    back_QL = keys_L[length - count :, None] - keys_L
    bits_QL = masks_Q[:, None] >> back_QL.clamp(0, MASK_BITS - 1) & 1
    seen_QL = (back_QL >= 0) & ((bits_QL == 1) | (back_QL >= MASK_BITS))
    if window is not None:
        seen_QL &= seen_QL.flip(-1).cumsum(-1).flip(-1) <= window
    return seen_QL


def _attend(
    q: Queries,
    cache: LayerPages,
    softmax: Softmax,
    rows: slice,
    kv_len: int,
    pages: Tensor,
    masks_Q: Tensor | None = None,
) -> Tensor:
    """Attends one sequence, in float32. `masks_Q`: as in `seen_keys`; None: all."""
    q_QND = q.whole()[rows].float()
    k_LMD = _gather(cache.keys, pages, kv_len) * cache.k_scale
    v_LMV = k_LMD[..., : cache.value_dim]
    if cache.values is not None:
        v_LMV = _gather(cache.values, pages, kv_len) * cache.v_scale
    per_kv = q_QND.shape[1] // k_LMD.shape[1]
    k_LND, v_LNV = (x.repeat_interleave(per_kv, dim=1) for x in (k_LMD, v_LMV))
    scores_NQL = torch.einsum("qnd,lnd->nql", q_QND, k_LND) * softmax.scale
    if masks_Q is None:
        masks_Q = torch.full((len(q_QND),), -1, device=q_QND.device)
    seen_QL = seen_keys(masks_Q, kv_len, softmax.window)
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
