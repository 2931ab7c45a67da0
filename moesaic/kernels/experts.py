"""The experts of a layer on a GPU: the interface of the kernels, and their torch twins.

R rows · K chosen · N = R * K pairs of row and slot · E slots · P places · H hidden · I intermediate
· J = 2 * I · X tiles at most.

    group_pairs      sorts pairs by expert (sort_pairs with the planned block)
    gate_up          h = activation(x · w13), by place; quantised if the next product needs it
    down             y = h · w2, weighted, by pair
    sum_pairs        one sum for each row of x; for few rows a PairSum defers it to the next norm
    down_row         replaces both for a single row
    weigh_pairs      weights and sums unweighted pairs

`gate_up_down` is both products. A *place* is a row of the sorted order. With a fixed block of rows
for each slot (the masked layout) rows are places already; `blocks` describes them in the same
terms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.kernels.a2a import SignalPlanes
from moesaic.kernels.cpu.experts import SwigluSpec
from moesaic.kernels.formats import FOUR_BITS
from moesaic.kernels.native import native
from moesaic.kernels.quantise import FP8_GROUP, quantise_rows
from moesaic.kernels.tuning import BLOCK_SCALED, FP8_FORMATS, block_for

SORT = "moesaic.kernels.triton.sort"
EXPERTS = "moesaic.kernels.triton.experts"
ROW = "moesaic.kernels.triton.experts_row"
PAIRS = "moesaic.kernels.triton.pairs"


@dataclass(frozen=True, slots=True)
class Groups:
    """Places of each expert, and tiles of `block` of them; all int32, on the device."""

    order_P: Tensor | None
    """The pair at each place, undefined after the last valid one; None if rows are places."""
    first_E: Tensor
    count_E: Tensor
    """An expert's places are the `count_E` from `first_E` on."""
    tile_expert_X: Tensor
    tile_place_X: Tensor
    """Expert and first place of each tile; only the first `num_tiles_1` tiles are valid."""
    num_tiles_1: Tensor
    block: int
    top_k: int
    """Pairs of a row."""
    num_places: int
    """Upper bound; the actual number is on the device."""
    counters: Tensor | None = None
    """Zeros, one for each tile and two more, for kernels that count finished tiles. Each kernel
    resets them to zero."""
    ids_K: Tensor | None = None
    """Ids of a single row, whose pairs are a tile each. `gate_up` and `down` use pairs as places,
    and `gate_up` fills the lists for other kernels."""
    load_E: Tensor | None = None
    """With `ids_K`: `gate_up` adds the counts to it."""
    expected: int = 0
    """Number of places likely to be used, for plans; 0: all."""
    fixed: bool = False
    """Plans depend on the block alone, not on the number of places or experts. A row's bits then
    depend neither on the other rows nor on the placement of experts."""

    @property
    def planned_places(self) -> int:
        return self.expected or self.num_places

    @property
    def lists(self) -> tuple[Tensor | None, ...]:
        """Arguments of the kernels, in this order."""
        tiles = (self.tile_expert_X, self.tile_place_X, self.num_tiles_1)
        return self.order_P, self.first_E, self.count_E, *tiles


@dataclass(frozen=True, slots=True)
class RemoteRows:
    """Rows stored on several ranks, `count` on each: row p * count + t is row t of the planes in
    rank p's region, at the byte offsets `values` and, for rows with scales, `scales`."""

    signals: SignalPlanes
    count: int
    values: int
    scales: int = 0


@dataclass(frozen=True, slots=True)
class Rows:
    """Activations in a float type, or quantised: float8_e4m3fn with a float32 scale for each 128
    channels of a row, or int8 with one scale for each row."""

    values: Tensor
    scales: Tensor | None = None
    scale: float = 1.0
    """An additional factor of all values."""
    remote: RemoteRows | None = None
    """The location of rows that are not in `values` and `scales`. Those then belong to this rank
    and only define types and shapes. Only `gate_up` accepts such rows."""


@dataclass(frozen=True, slots=True)
class Matrices:
    """One projection of all slots."""

    format: str
    """A name of WEIGHT_FORMATS, or of FP8_WEIGHT_ONLY if fp8 matrices are multiplied with
    unquantised rows."""
    planes: dict[str, Tensor]
    """[E, parts, …] as in moe.quant.weights: `values`, then `scales`, `zeros` or `global` as the
    format requires."""
    shape: tuple[int, int, int]
    """(E, rows, columns) of all parts together."""
    parts: int
    bias_EN: Tensor | None = None
    group: int = 0
    """Columns of a scale, for formats with groups."""


@dataclass(frozen=True, slots=True)
class FeedForward:
    """The experts' two projections and the activation between them."""

    w13: Matrices
    w2: Matrices
    activation: SwigluSpec


@native(SORT)
def sort_pairs(
    ids_RK: Tensor, num_experts: int, block: int, load_E: Tensor | None = None
) -> Groups:
    """Sorts pairs by expert, in no particular order within one; ids below 0 have no expert. Adds
    each expert's count to `load_E` (int64).

    ids [[1, 0], [1, -1]], two experts, block 2: counts [1, 2], first [0, 1], order [1, 0, 2, …],
    two tiles: expert 0 at place 0, expert 1 at place 1.
    """
    flat = ids_RK.flatten()
    keys = torch.where(flat < 0, num_experts, flat).long()
    order = keys.argsort(stable=True).int()
    counts = torch.bincount(keys, minlength=num_experts + 1)[:num_experts].int()
    first = counts.cumsum(0).int() - counts
    if load_E is not None:
        load_E += counts
    return _groups(order, first, counts, block, ids_RK.shape[1], flat.numel())


@native(SORT)
def group_pairs(ids_RK: Tensor, w2: Matrices, load_E: Tensor | None = None) -> Groups:
    """`sort_pairs` with the planned block, only for `gate_up` and `down` of these experts: it may
    leave the pairs of a single row for `gate_up` to sort."""
    block = block_for(w2.format, *w2.shape, ids_RK.numel(), ids_RK.device)
    return sort_pairs.twin(ids_RK, w2.shape[0], block, load_E)


@native(SORT)
def blocks(count_E: Tensor, rows: int, block: int, load_E: Tensor | None = None) -> Groups:
    """Describes the first `count_E` rows of each expert's block of `rows` as places."""
    if load_E is not None:
        load_E += count_E
    experts = count_E.numel()
    first = torch.arange(experts, dtype=torch.int32, device=count_E.device) * rows
    return _groups(None, first, count_E.int(), block, 1, experts * rows)


def max_tiles(num_places: int, num_experts: int, block: int) -> int:
    """The last tile of each expert may be partly filled."""
    return min(num_places, num_places // block + num_experts)


def _groups(
    order: Tensor | None,
    first: Tensor,
    counts: Tensor,
    block: int,
    top_k: int,
    num_places: int,
) -> Groups:
    device = first.device
    size = max(1, max_tiles(num_places, len(counts), block))
    tile_expert = torch.zeros(size, dtype=torch.int32, device=device)
    tile_place = torch.zeros(size, dtype=torch.int32, device=device)
    used = 0
    for expert, (start, count) in enumerate(zip(first.tolist(), counts.tolist(), strict=True)):
        for offset in range(0, count, block):
            tile_expert[used], tile_place[used] = expert, start + offset
            used += 1
    num_tiles = torch.tensor([used], dtype=torch.int32, device=device)
    return Groups(
        order, first, counts, tile_expert, tile_place, num_tiles, block, top_k, num_places
    )


@native(SORT)
def sum_pairs(y_NH: Tensor, ids_RK: Tensor, out_RH: Tensor, add_RH: Tensor | None = None) -> Tensor:
    """out[r] = sum over k with ids[r, k] >= 0 of y[r * K + k], in float32, in the order of k, then
    plus add[r]. Values of pairs without an expert are undefined. `out_RH` may be `add_RH`; with one
    pair per row it may be `y_NH`, where rows without an expert become zeros.

    y [[1], [2], [4], [nan]], ids [[3, 0], [5, -1]], add [[10], [20]]: out [[13], [24]].
    """
    total_RH = _add_pairs(y_NH, ids_RK)
    if add_RH is not None:
        total_RH += add_RH.float()
    return out_RH.copy_(total_RH)


@native(PAIRS)
def weigh_pairs(y_NH: Tensor, ids_RK: Tensor, weights_RK: Tensor, out_RH: Tensor) -> Tensor:
    """out[r] = sum over k with ids[r, k] >= 0 of weights[r, k] * y[r * K + k], in float32, in the
    order of k; each product is rounded before it is added, as in `collect_pairs`. Values of pairs
    without an expert are undefined.

    y [[1], [2], [4], [nan]], ids [[3, 0], [5, -1]], weights [[10, 1], [0.5, 1]]: out [[12], [2]].
    """
    return out_RH.copy_(_add_pairs(y_NH, ids_RK, weights_RK))


def _add_pairs(y_NH: Tensor, ids_RK: Tensor, weights_RK: Tensor | None = None) -> Tensor:
    y_RKH = y_NH.view(*ids_RK.shape, y_NH.shape[1])
    total_RH = torch.zeros_like(y_RKH[:, 0], dtype=torch.float32)
    for k in range(ids_RK.shape[1]):
        part_RH = y_RKH[:, k].float()
        if weights_RK is not None:
            part_RH = part_RH * weights_RK[:, k, None]
        total_RH += torch.where(ids_RK[:, k, None] >= 0, part_RH, 0.0)
    return total_RH


@dataclass(frozen=True, slots=True)
class PairSum:
    """A deferred `sum_pairs`. `add_rms_norm` computes it along with the norm, which saves a kernel
    for few rows; all other code calls `summed`."""

    values: Tensor
    """[N, H]"""
    ids_RK: Tensor

    def __len__(self) -> int:
        return len(self.ids_RK)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the sums."""
        return self.ids_RK.shape[0], self.values.shape[1]


def summed(x_RH: Tensor | PairSum) -> Tensor:
    if isinstance(x_RH, Tensor):
        return x_RH
    y_NH, ids_RK = x_RH.values, x_RH.ids_RK
    return sum_pairs(y_NH, ids_RK, y_NH.new_empty(len(ids_RK), y_NH.shape[1]))


@native(EXPERTS)
def gate_up(x: Rows, w13: Matrices, groups: Groups, activation: SwigluSpec, h: Rows) -> Rows:
    """h[place] = activation of the products of its row of x with the expert's two halves of w13.

    Writes only assigned places of `h.values` [P, I]; with `h.scales` (float32, [P, I / 128]) it is
    float8_e4m3fn, quantised by groups of 128 channels. Products are summed in float32 and rounded
    once, when h is written. For weights in FP8_FORMATS `quantise_rows` first quantises rows in a
    float type; `down` does the same with h.
    """
    x_RH = dense(operand(gather_remote(x), w13))
    for expert, places in expert_places(groups):
        product = x_RH[rows_of(groups, places)] @ dense_matrix(w13, expert).T
        if w13.bias_EN is not None:
            product += w13.bias_EN[expert].float()
        store_rows(h, places, activation.reference(*product.chunk(2, dim=-1)))
    return h


@native(EXPERTS)
def down(h: Rows, w2: Matrices, groups: Groups, weights_RK: Tensor | None, y: Tensor) -> Tensor:
    """y[pair] = weight * (h[place] · w2 + bias), or y[place] if rows are places; writes only
    assigned pairs. Without `weights_RK` (float32) all weights are 1."""
    h_PI = dense(operand(h, w2))
    for expert, places in expert_places(groups):
        product = h_PI[places] @ dense_matrix(w2, expert).T
        if w2.bias_EN is not None:
            product += w2.bias_EN[expert].float()
        to = places if groups.order_P is None else groups.order_P[places].long()
        if weights_RK is not None:
            product *= weights_RK.flatten()[to, None]
        y[to] = product.to(y.dtype)
    return y


@native(ROW)
def down_row(h: Rows, w2: Matrices, ids_K: Tensor, weights_RK: Tensor, y_1H: Tensor) -> Tensor:
    """y[0] = sum over k with ids[k] >= 0 of weights[0, k] * (h[k] · w2 + bias), in float32; other
    h[k] are undefined. w2 has a float type.

    h [[1], [2], [nan]], experts [[3]] and [[5]], ids [1, 0, -1], weights [[1, 10, 1]]: y [[65]].
    """
    h_KI = dense(h)
    total = torch.zeros(w2.shape[1], dtype=torch.float32, device=y_1H.device)
    for k, expert in enumerate(ids_K.tolist()):
        if expert < 0:
            continue
        product = dense_matrix(w2, expert) @ h_KI[k]
        if w2.bias_EN is not None:
            product += w2.bias_EN[expert].float()
        total += product * weights_RK[0, k]
    return y_1H.copy_(total[None])


@native(EXPERTS)
def gate_up_down(
    x: Rows, experts: FeedForward, groups: Groups, weights_RK: Tensor | None, h: Rows, y: Tensor
) -> Tensor:
    """`gate_up`, then `down`; one kernel may compute both if that is faster."""
    gate_up.twin(x, experts.w13, groups, experts.activation, h)
    return down.twin(h, experts.w2, groups, weights_RK, y)


def expert_places(groups: Groups) -> Iterator[tuple[int, Tensor]]:
    """Yields each expert with places, and its places."""
    pairs = zip(groups.first_E.tolist(), groups.count_E.tolist(), strict=True)
    for expert, (first, count) in enumerate(pairs):
        if count:
            yield expert, torch.arange(first, first + count, device=groups.first_E.device)


def rows_of(groups: Groups, places: Tensor) -> Tensor:
    """The row of x at each place."""
    if groups.order_P is None:
        return places
    return groups.order_P[places].long() // groups.top_k


def gather_remote(x: Rows) -> Rows:
    """Copies remote rows."""
    remote = x.remote
    if remote is None:
        return x

    def copied(like: Tensor, offset: int) -> Tensor:
        shape, signals = (remote.count, like.shape[1]), remote.signals
        # By bytes: not every device can concatenate float8.
        planes = [signals.plane(rank, offset, shape, like.dtype) for rank in range(signals.size)]
        return torch.cat([plane.view(torch.uint8) for plane in planes]).view(like.dtype)

    scales = None if x.scales is None else copied(x.scales, remote.scales)
    return Rows(copied(x.values, remote.values), scales, x.scale)


def operand(x: Rows, matrices: Matrices) -> Rows:
    """The rows as they are multiplied with the matrices."""
    if x.scales is not None or matrices.format not in FP8_FORMATS:
        return x
    return Rows(*quantise_rows(x.values, "fp8"), x.scale)


def dense(x: Rows) -> Tensor:
    """Decodes to float32."""
    values = x.values.float()
    if x.scales is not None:
        group = FP8_GROUP if x.values.dtype == torch.float8_e4m3fn else values.shape[-1]
        spread = x.scales.repeat_interleave(group, -1)
        values = values * spread[..., : values.shape[-1]]
    return values * x.scale


def store_rows(h: Rows, places: Tensor, product: Tensor) -> None:
    if h.scales is None:
        h.values[places] = product.to(h.values.dtype)
        return
    assert h.values.dtype == torch.float8_e4m3fn
    values, scales = quantise_rows.twin(product, "fp8")
    # By bytes: not every device can scatter float8.
    h.values.view(torch.uint8)[places] = values.view(torch.uint8)
    h.scales[places] = scales


def dense_matrix(matrices: Matrices, expert: int) -> Tensor:
    """Decodes [rows, columns] of all parts to float32."""
    if matrices.format in FOUR_BITS:
        planes = {name: plane[expert] for name, plane in matrices.planes.items()}
        return FOUR_BITS[matrices.format](planes).flatten(0, 1)
    values = matrices.planes["values"][expert].float()
    if "scales" in matrices.planes:
        scales = matrices.planes["scales"][expert]
        blocks = matrices.format in BLOCK_SCALED
        rows, columns = (FP8_GROUP, FP8_GROUP) if blocks else (1, values.shape[-1])
        spread = scales.repeat_interleave(rows, -2).repeat_interleave(columns, -1)
        values = values * spread[..., : values.shape[-2], : values.shape[-1]]
    return values.flatten(0, 1)
