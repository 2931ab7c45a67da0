"""The experts' feed-forward networks as grouped matrix products on CPU.

e local slots · H hidden · I intermediate · J = 2 * I · C rows of a slot · Y rows of all slots.
Weights stand on the left of the products and activations are transposed ([H, C]): in that order
oneDNN reads the weights without repacking them. Batched products need the activations contiguous in
that order: otherwise they read the weights up to three times as slowly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from moesaic.kernels.cpu import linear as kernel
from moesaic.kernels.cpu import widened
from moesaic.moe.quant.payload import PAYLOAD_FORMATS
from moesaic.moe.quant.weights import ExpertMatrix
from moesaic.moe.runner.base import ExpertWeights, MoeRunnerConfig, Workspace

# Up to about this many rows a product takes as long as reading its weights: padding is free.
# Deterministic mode computes in pieces of exactly this many rows.
SMALL_ROWS = 32


Product = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class SlotGroup:
    """Neighbouring slots with `rows` rows each, the first at row `start`, the next `stride` on."""

    slots: range
    start: int
    rows: int
    stride: int

    @property
    def starts(self) -> range:
        """The first row of each slot."""
        return range(self.start, self.start + len(self.slots) * self.stride, self.stride)

    def view(self, rows_YH: Tensor) -> Tensor:
        """[slots, rows, H] of [Y, H]."""
        stop = self.start + len(self.slots) * self.stride
        return rows_YH[self.start : stop].unflatten(0, (-1, self.stride))[:, : self.rows]


def round_up(rows: int) -> int:
    """To a power of two, or from SMALL_ROWS on to a multiple of it: oneDNN compiles a kernel for
    every new shape, which takes longer than the product itself. A product with one row takes
    longer than one with two."""
    if rows > SMALL_ROWS:
        return -(-rows // SMALL_ROWS) * SMALL_ROWS
    return max(2, 1 << (rows - 1).bit_length()) if rows else 0


def runs(slots: list[int]) -> list[range]:
    """Neighbours together, in powers of two: [1, 2, 3, 7, 8] -> [1..2, 3..3, 7..8]."""
    found: list[range] = []
    start = 0
    for stop in range(1, len(slots) + 1):
        if stop < len(slots) and slots[stop] == slots[stop - 1] + 1:
            continue
        while start < stop:
            length = 1 << ((stop - start).bit_length() - 1)
            found.append(range(slots[start], slots[start] + length))
            start += length
    return found


def in_pieces(groups: Iterable[SlotGroup]) -> Iterator[SlotGroup]:
    """The same rows as groups of exactly SMALL_ROWS, whose bits do not depend on their number."""
    for group in groups:
        assert group.rows % SMALL_ROWS == 0
        if group.rows == SMALL_ROWS:
            yield group
            continue
        for start in range(group.start, group.start + group.rows, SMALL_ROWS):
            yield replace(group, start=start, rows=SMALL_ROWS, stride=SMALL_ROWS)


def invariant(weight_OI: Tensor, x_IC: Tensor) -> Tensor:
    """A product whose bits depend neither on the number of threads nor on the rows beside; without
    the compiled kernel, for one number of threads and pieces of equal size."""
    if kernel.fits(weight_OI):
        return kernel.run(x_IC.t(), weight_OI).t()
    return widened.mm(weight_OI, x_IC)


@dataclass(frozen=True, slots=True)
class GroupedMLP:
    """y = down(activation(gate(x), up(x))) of each group's rows, by the weights of its slots.

    `quantized`: the rows are already on the grid of the weights' activation format.
    """

    config: MoeRunnerConfig
    weights: ExpertWeights
    workspace: Workspace

    def run(self, x_YH: Tensor, y_YH: Tensor, groups: list[SlotGroup], quantized: bool) -> None:
        together = self.weights.w13_eJH.plain is not None and not self.config.deterministic
        product = invariant if self.config.deterministic else widened.mm
        for group in groups:
            if together and len(group.slots) > 1:
                x_eHC = group.view(x_YH).transpose(1, 2).contiguous()
                which = slice(group.slots.start, group.slots.stop)
                group.view(y_YH).copy_(self._mlp(widened.bmm, which, x_eHC).transpose(1, 2))
                continue
            for slot, start in zip(group.slots, group.starts, strict=True):
                x_CH = x_YH[start : start + group.rows]
                x_CH = x_CH if quantized else self._on_grid(x_CH, self.weights.input_scale)
                y_HC = self._mlp(product, slot, x_CH.t())
                y_YH[start : start + group.rows].copy_(y_HC.t())

    def _on_grid(self, x_CH: Tensor, scale: float) -> Tensor:
        """Rows rounded to what the weights are multiplied with."""
        activation = self.weights.w13_eJH.format.activation
        if activation is None:
            return x_CH
        return PAYLOAD_FORMATS[activation].encode(x_CH, scale).dense(x_CH.dtype)

    def _mlp(self, product: Product, which: int | slice, x: Tensor) -> Tensor:
        """One slot ([H, C] -> [H, C]) or several neighbours ([e, H, C] -> [e, H, C])."""
        weights = self.weights
        gate_up = product(self._matrix(weights.w13_eJH, which), x)
        if weights.b13_eJ is not None:
            gate_up += weights.b13_eJ[which].unsqueeze(-1)
        inner = self.config.activation(*gate_up.chunk(2, dim=-2))
        if weights.w2_eHI.format.activation is not None:
            inner = self._on_grid(inner.t(), weights.inner_scale).t()
        y = product(self._matrix(weights.w2_eHI, which), inner)
        if weights.b2_eH is not None:
            y += weights.b2_eH[which].unsqueeze(-1)
        return y

    def _matrix(self, matrix: ExpertMatrix, which: int | slice) -> Tensor:
        """Quantised weights are decoded one slot at a time."""
        if matrix.plain is not None:
            return matrix.plain[which]
        assert isinstance(which, int)
        out = self.workspace.borrow("dense", matrix.shape[1:], self.config.dtype)
        return matrix.dense(which, out)
