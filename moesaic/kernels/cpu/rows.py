"""Plans of rows and sums of rows: C if it can be compiled, else torch.

P ranks · C tokens of a rank at most · T tokens of this rank · N tokens of all · K slots of a token
· G groups of slots · R rows of this rank's group · S results of a token · H hidden.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, repeat
from typing import Any, ClassVar

import torch
from torch import Tensor

from moesaic.kernels.cpu.build import load_library
from moesaic.kernels.cpu.threads import threads

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# One bit for each group.
MOST_GROUPS = 64
# Smaller sums do not pay for waking other threads.
THREAD_ELEMENTS = 1 << 21


@dataclass(frozen=True, slots=True)
class GatheredTokens:
    """The tokens of all ranks: their slots, -1 for none, and weights. Group g has `slots` slots
    from g * slots on; `group` is this rank's."""

    ids_PCK: Tensor
    weights_PCK: Tensor
    counts: list[int]
    rank: int
    slots: int
    groups: int
    group: int

    @property
    def stride(self) -> int:
        """Rows between the first tokens of two neighbouring ranks."""
        return self.ids_PCK.stride(0) // self.ids_PCK.shape[2]


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Tokens that go to this rank's group, by rank and token."""

    rows_R: Tensor
    """Rows of these tokens, counted in strides of a rank."""
    ids_RK: Tensor
    weights_RK: Tensor
    places_TS: Tensor
    """Positions of this rank's own tokens in the groups they go to ([T, G], or with pairs [T, K]);
    -1 for none."""
    ends: list[int]
    """Rows of each group."""
    own: int
    """Rows of R that belong to this rank's tokens."""


@dataclass(frozen=True, slots=True)
class PairPlan:
    """Rows of this rank's group by slot, the number of rows of each slot, and the positions of this
    rank's own pairs in their slots."""

    rows_R: Tensor
    filled: list[int]
    places_TK: Tensor
    own: int


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms of each token's sum: the owner of each result (None: 0), its row there (-1: none) and
    its weight (None: 1)."""

    owners_TS: Tensor | None
    places_TS: Tensor
    weights_TS: Tensor | None


def plan_rows(tokens: GatheredTokens, starts: list[int], pairs: bool, everywhere: bool) -> RowPlan:
    """`starts`: rows that each group already has. `everywhere`: all tokens go to all groups.

    Example: two ranks of one slot each, two tokens each with ids [[0], [1]]: rank 0 gets rows 0 and
    (with a stride of 2) 2, its own tokens are at places [[0, -1], [-1, 0]], ends are [2, 2].
    """
    kernel = library()
    if kernel is None or tokens.groups > MOST_GROUPS:
        return reference_plan_rows(tokens, starts, pairs, everywhere)
    total, top_k = sum(tokens.counts), tokens.ids_PCK.shape[2]
    rows_R = torch.empty(total, dtype=torch.int64)
    ids_RK = torch.empty(total, top_k, dtype=torch.int64)
    weights_RK = torch.empty(total, top_k)
    count = tokens.counts[tokens.rank]
    places_TS = torch.empty(count, top_k if pairs else tokens.groups, dtype=torch.int64)
    cursors = (ctypes.c_int64 * tokens.groups)(*starts)
    own = ctypes.c_int64()
    found = kernel.plan_rows(
        _tokens(tokens),
        pairs,
        everywhere,
        cursors,
        rows_R.data_ptr(),
        ids_RK.data_ptr(),
        weights_RK.data_ptr(),
        places_TS.data_ptr(),
        ctypes.byref(own),
    )
    _check_ids(found, tokens)
    return RowPlan(
        rows_R[:found], ids_RK[:found], weights_RK[:found], places_TS, list(cursors), own.value
    )


def plan_pairs(tokens: GatheredTokens) -> PairPlan:
    """Example: two ranks with slots 0..1 and 2..3, one token each with ids [[0, 2]] and [[0, 1]]:
    rank 0 gets rows [0, 1, 1] for its slots, filled [2, 1]; its own pairs are at [[0, 0]]."""
    kernel = library()
    if kernel is None:
        return reference_plan_pairs(tokens)
    total, top_k = sum(tokens.counts), tokens.ids_PCK.shape[2]
    rows_R = torch.empty(total * top_k, dtype=torch.int64)
    places_TK = torch.empty(tokens.counts[tokens.rank], top_k, dtype=torch.int64)
    cursors = (ctypes.c_int64 * (tokens.groups * tokens.slots))()
    filled = (ctypes.c_int64 * tokens.slots)()
    own = ctypes.c_int64()
    found = kernel.plan_pairs(
        _tokens(tokens), cursors, rows_R.data_ptr(), filled, places_TK.data_ptr(), ctypes.byref(own)
    )
    _check_ids(found, tokens)
    return PairPlan(rows_R[:found], list(filled), places_TK, own.value)


def _check_ids(found: int, tokens: GatheredTokens) -> None:
    if found < 0:
        raise ValueError(f"a rank sent a slot id of {tokens.groups * tokens.slots} or more")


def sum_rows(
    y_YH: Tensor,
    terms: Terms,
    stride: int = 0,
    width: int = 1,
    rank: int = 0,
    out: Tensor | None = None,
) -> tuple[Tensor, int]:
    """out[t] = sum over s of weights[t, s] * the owner's row at the place; also returns the number
    of rows of ranks other than `rank`.

    Rank r's rows begin at r * stride; an owner is a group of `width` ranks whose rows are summed.
    Sums are in float32, in the order of s and ranks.
    """
    kernel = library()
    places_TS = terms.places_TS
    if kernel is None or y_YH.dtype not in TYPES or len(places_TS) == 0:
        y_TH, foreign = reference_sum_rows(y_YH, terms, stride, width, rank)
        return (y_TH if out is None else out.copy_(y_TH)), foreign
    out_TH = torch.empty(len(places_TS), y_YH.shape[1], dtype=y_YH.dtype) if out is None else out
    assert out_TH.is_contiguous() and out_TH.dtype == y_YH.dtype
    owners, places, weights = (
        None if tensor is None else tensor.contiguous()
        for tensor in (terms.owners_TS, places_TS, terms.weights_TS)
    )
    assert places is not None and places.dtype == torch.int64 and y_YH.is_contiguous()
    assert weights is None or weights.dtype == torch.float32
    arguments = ctypes.pointer(
        _Sums(
            y=y_YH.data_ptr(),
            owners=None if owners is None else owners.data_ptr(),
            places=places.data_ptr(),
            weights=None if weights is None else weights.data_ptr(),
            out=out_TH.data_ptr(),
            terms=places.shape[1],
            hidden=y_YH.shape[1],
            stride=stride,
            width=width,
            rank=rank,
            type=TYPES[y_YH.dtype],
        )
    )
    foreign = _in_parts(kernel.sum_rows, arguments, len(places), out_TH.shape[1] * places.shape[1])
    return out_TH, foreign


def _in_parts(function: Callable[..., int], arguments: object, tokens: int, each: int) -> int:
    parts = torch.get_num_threads() if tokens * each >= THREAD_ELEMENTS else 1
    cuts = [tokens * part // parts for part in range(parts + 1)]
    firsts, lasts = zip(*pairwise(cuts), strict=True)
    foreign = [ctypes.c_int64() for _ in firsts]
    calls = (repeat(arguments), firsts, lasts, map(ctypes.byref, foreign))
    failed = map(function, *calls) if parts == 1 else threads(parts).map(function, *calls)
    if any(failed):
        raise MemoryError("no memory to sum rows")
    return sum(count.value for count in foreign)


class _Tokens(ctypes.Structure):
    """struct tokens of rows.c."""

    _fields_: ClassVar = [
        ("ids", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("counts", ctypes.POINTER(ctypes.c_int64)),
        *((name, ctypes.c_int64) for name in ("ranks", "stride", "top_k", "rank")),
        *((name, ctypes.c_int64) for name in ("slots", "groups", "group")),
    ]


class _Sums(ctypes.Structure):
    """struct sums of rows.c."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("y", "owners", "places", "weights", "out")),
        *((name, ctypes.c_int64) for name in ("terms", "hidden", "stride", "width", "rank")),
        ("type", ctypes.c_int32),
    ]


def _tokens(tokens: GatheredTokens) -> Any:
    ids, weights = tokens.ids_PCK, tokens.weights_PCK
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    assert ids.stride() == weights.stride() and ids[0].is_contiguous()
    return ctypes.byref(
        _Tokens(
            ids=ids.data_ptr(),
            weights=weights.data_ptr(),
            counts=(ctypes.c_int64 * len(tokens.counts))(*tokens.counts),
            ranks=len(tokens.counts),
            stride=tokens.stride,
            top_k=ids.shape[2],
            rank=tokens.rank,
            slots=tokens.slots,
            groups=tokens.groups,
            group=tokens.group,
        )
    )


@cache
def library() -> Any | None:
    """None if it cannot be compiled."""
    # Without contraction a product is rounded before it is added, as in torch.
    loaded = load_library("rows", ("-march=native", "-ffp-contract=off"))
    if loaded is None:
        return None
    pointer, whole = ctypes.c_void_p, ctypes.c_int64
    loaded.plan_rows.argtypes = [pointer, ctypes.c_int, ctypes.c_int, *[pointer] * 6]
    loaded.plan_pairs.argtypes = [pointer] * 6
    loaded.sum_rows.argtypes = [pointer, whole, whole, pointer]
    for function in (loaded.plan_rows, loaded.plan_pairs, loaded.sum_rows):
        function.restype = whole
    return loaded


def reference_plan_rows(
    tokens: GatheredTokens, starts: list[int], pairs: bool, everywhere: bool
) -> RowPlan:
    """Computes `plan_rows` in torch."""
    rows_N, ids_NK, weights_NK, own = _flatten(tokens)
    groups = tokens.groups
    owners_NK = torch.div(ids_NK, tokens.slots, rounding_mode="floor")
    wanted_NG = torch.ones(len(ids_NK), groups, dtype=torch.bool)
    if not everywhere:
        padded = torch.zeros(len(ids_NK), groups + 1, dtype=torch.bool)
        wanted_NG = padded.scatter_(1, owners_NK.remainder(groups + 1), True)[:, :groups]
    starts_G = torch.tensor(starts)
    if pairs:
        chosen = owners_NK.flatten().unsqueeze(1) == torch.arange(groups)
        before = (starts_G + chosen.cumsum(0) - 1).gather(
            1, owners_NK.flatten().clamp(min=0).unsqueeze(1)
        )
        places = torch.where(owners_NK < 0, -1, before.view_as(owners_NK))
        ends = starts_G + chosen.sum(0)
    else:
        places = torch.where(wanted_NG, starts_G + wanted_NG.cumsum(0) - 1, -1)
        ends = starts_G + wanted_NG.sum(0)
    mine_R = wanted_NG[:, tokens.group].nonzero().squeeze(1)
    local_RK = ids_NK[mine_R] - tokens.group * tokens.slots
    local_RK = torch.where((local_RK >= 0) & (local_RK < tokens.slots), local_RK, -1)
    return RowPlan(
        rows_N[mine_R],
        local_RK,
        weights_NK[mine_R],
        places[own],
        ends.tolist(),
        int(wanted_NG[own, tokens.group].sum()),
    )


def reference_plan_pairs(tokens: GatheredTokens) -> PairPlan:
    """Computes `plan_pairs` in torch."""
    rows_N, ids_NK, _, own = _flatten(tokens)
    top_k, flat = ids_NK.shape[1], ids_NK.flatten()
    places_NK = rank_within(flat).view_as(ids_NK).masked_fill(ids_NK < 0, -1)
    local = flat - tokens.group * tokens.slots
    mine = ((local >= 0) & (local < tokens.slots)).nonzero().squeeze(1)
    order = mine[local[mine].argsort(stable=True)]
    filled: list[int] = torch.bincount(local[mine], minlength=tokens.slots).tolist()
    owned = (order // top_k >= own.start) & (order // top_k < own.stop)
    return PairPlan(rows_N[order // top_k], filled, places_NK[own], int(owned.sum()))


def rank_within(keys: Tensor) -> Tensor:
    """The number of equal keys before each key: [5, 3, 5, 5] -> [0, 0, 1, 2]."""
    order = keys.argsort(stable=True)
    ordered = keys[order]
    first = torch.searchsorted(ordered, ordered)
    return torch.empty_like(order).index_copy_(0, order, torch.arange(len(keys)) - first)


def _flatten(tokens: GatheredTokens) -> tuple[Tensor, Tensor, Tensor, slice]:
    counts, rank = tokens.counts, tokens.rank
    parts = list(enumerate(counts))
    start = sum(counts[:rank])
    return (
        torch.cat([torch.arange(count) + p * tokens.stride for p, count in parts]),
        torch.cat([tokens.ids_PCK[p, :count] for p, count in parts]).long(),
        torch.cat([tokens.weights_PCK[p, :count] for p, count in parts]),
        slice(start, start + counts[rank]),
    )


def reference_sum_rows(
    y_YH: Tensor, terms: Terms, stride: int = 0, width: int = 1, rank: int = 0
) -> tuple[Tensor, int]:
    """Computes `sum_rows` in torch with the same bits, term by term."""
    places_TS = terms.places_TS
    sums_TH = torch.zeros(len(places_TS), y_YH.shape[1])
    foreign = 0
    for s in range(places_TS.shape[1]):
        tokens = (places_TS[:, s] >= 0).nonzero().squeeze(1)
        for w in range(width):
            ranks = torch.full_like(tokens, w)
            if terms.owners_TS is not None:
                ranks += terms.owners_TS[tokens, s] * width
            foreign += int((ranks != rank).sum())
            part = y_YH[ranks * stride + places_TS[tokens, s]].float()
            if terms.weights_TS is not None:
                part = terms.weights_TS[tokens, s, None] * part
            sums_TH[tokens] += part
    return sums_TH.to(y_YH.dtype), foreign
