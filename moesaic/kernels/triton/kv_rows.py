"""Copies of KV caches; the twin is in kernels/kv_rows.py. A program copies tokens of a layer."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.kv_rows import KVRows

TOKENS = 8
MOST_WIDTH = 256


@triton.jit
def _copy(to_ptr, from_ptr, to_T, from_T, inside_T, X: tl.constexpr, WIDTH: tl.constexpr):
    for start in tl.static_range(0, X, WIDTH):
        x = start + tl.arange(0, WIDTH)
        mask = inside_T[:, None] & (x < X)[None, :]
        data = tl.load(from_ptr + from_T[:, None] + x[None, :], mask)
        tl.store(to_ptr + to_T[:, None] + x[None, :], data, mask)


@triton.jit(do_not_specialize=["tokens"])
def _copy_kernel(
    to_keys_ptr, to_values_ptr, from_keys_ptr, from_values_ptr, to_slots_ptr, from_slots_ptr,
    tokens, to_keys_L, to_keys_S, to_values_L, to_values_S,
    from_keys_L, from_keys_S, from_values_L, from_values_S,
    KEYS: tl.constexpr, VALUES: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    TO_SLOTS: tl.constexpr, FROM_SLOTS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    layer = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside = token < tokens
    to_T = tl.load(to_slots_ptr + token, inside, 0) if TO_SLOTS else token
    from_T = tl.load(from_slots_ptr + token, inside, 0) if FROM_SLOTS else token
    to_keys_ptr += layer * to_keys_L
    from_keys_ptr += layer * from_keys_L
    _copy(
        to_keys_ptr, from_keys_ptr, to_T * to_keys_S, from_T * from_keys_S, inside, KEYS, KEY_WIDTH
    )
    if VALUES > 0:
        to_values_ptr += layer * to_values_L
        from_values_ptr += layer * from_values_L
        _copy(
            to_values_ptr, from_values_ptr, to_T * to_values_S, from_T * from_values_S, inside,
            VALUES, VALUE_WIDTH,
        )  # fmt: skip


def copy_rows(target_keys: Tensor, target: KVRows, source: KVRows, tokens: int) -> None:
    if not tokens:
        return
    parts = (target.keys, target.values, source.keys, source.values)
    assert all(part.stride(2) == 1 or not part.numel() for part in parts), "rows are contiguous"
    layers, _, keys = target.keys.shape
    values = target.values.shape[2]
    strides = [stride for part in parts for stride in part.stride()[:2]]
    slots = [rows.keys if rows.slots is None else rows.slots for rows in (target, source)]
    widths = [min(MOST_WIDTH, triton.next_power_of_2(max(size, 1))) for size in (keys, values)]
    _copy_kernel[(triton.cdiv(tokens, TOKENS), layers)](
        *parts, *slots, tokens, *strides,
        KEYS=keys, VALUES=values, KEY_WIDTH=widths[0], VALUE_WIDTH=widths[1],
        TO_SLOTS=target.slots is not None, FROM_SLOTS=source.slots is not None, TOKENS=TOKENS,
    )  # fmt: skip
