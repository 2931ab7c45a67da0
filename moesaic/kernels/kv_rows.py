"""Copies of KV caches between pages and whatever has no pages.

L layers · S slots · X integers that make up the heads of a slot · T tokens.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from moesaic.kernels.native import native


class KVRows(NamedTuple):
    """Tokens of a cache: token t of each layer is in slot `slots[t]`, or in slot t. Values may have
    no width."""

    keys: Tensor
    """[L, S, X] of any integers, whose last dimension is contiguous."""
    values: Tensor
    slots: Tensor | None = None
    """int64."""


def packed_rows(data: Tensor, like: KVRows, tokens: int) -> KVRows:
    """Bytes as so many tokens of all layers: keys, and values behind them."""
    begin, found = 0, []
    for rows_LSX in (like.keys, like.values):
        shape = (len(rows_LSX), tokens, rows_LSX.shape[2])
        nbytes = prod(shape) * rows_LSX.element_size()
        found.append(data[begin : begin + nbytes].view(rows_LSX.dtype).view(shape))
        begin += nbytes
    return KVRows(*found)


@native("moesaic.kernels.triton.kv_rows")
def copy_rows(target_keys: Tensor, target: KVRows, source: KVRows, tokens: int) -> None:
    """Copies so many tokens in place; `target_keys`: those of `target`.

    Tokens 0 and 1 of slots [2, 0] of [[1, 2, 3]] to slots 0 and 1 of [[8, 8, 8]]: [[3, 1, 8]].
    """
    for to_LSX, from_LSX in ((target.keys, source.keys), (target.values, source.values)):
        for to_SX, from_SX in zip(to_LSX, from_LSX, strict=True):  # faster than all at once
            if source.slots is not None and target.slots is None:
                torch.index_select(from_SX, 0, source.slots[:tokens], out=to_SX[:tokens])
                continue
            found_TX = from_SX[:tokens]
            if source.slots is not None:
                found_TX = from_SX[source.slots[:tokens]]
            if target.slots is None:
                to_SX[:tokens] = found_TX
            else:
                to_SX.index_copy_(0, target.slots[:tokens], found_TX)
