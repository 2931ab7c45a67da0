"""How a matrix is stored in a checkpoint. N rows (outputs) · K columns (inputs) · E experts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm
from typing import ClassVar

import torch
from torch import Tensor

from moesaic.models.checkpoint import Checkpoint, TensorSpec, float_spec
from moesaic.moe.quant.weights import Planes, WeightFormat


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix [N, K] by its name in an unquantised checkpoint, "X.weight". With `index` it is that
    entry of a stack "X" of `experts` matrices; with `interleaved` its rows are every second one of
    the stacked rows, from this row on."""

    name: str
    shape: tuple[int, int]
    index: int | None = None
    interleaved: int | None = None
    experts: int = 0

    def tensor(self, suffix: str) -> str:
        """X.weight -> X.suffix; in a stack X -> X_suffix."""
        if self.index is None:
            return f"{self.name.removesuffix('.weight')}.{suffix}"
        return f"{self.name}_{suffix}"

    @property
    def stacked_rows(self) -> int:
        return self.shape[0] * (1 if self.interleaved is None else 2)

    def in_stack(self, rows: range) -> slice:
        if self.interleaved is None:
            return slice(rows.start, rows.stop)
        return slice(2 * rows.start + self.interleaved, 2 * rows.stop, 2)


@dataclass(frozen=True, slots=True)
class Source:
    """A matrix in an open checkpoint."""

    checkpoint: Checkpoint
    matrix: Matrix

    def has(self, suffix: str) -> bool:
        return self.matrix.tensor(suffix) in self.checkpoint

    def read(self, suffix: str, *cut: int | slice | range) -> Tensor:
        return self.checkpoint.read(self.matrix.tensor(suffix), *cut)


class Storage(ABC):
    """One way to store a matrix: reads any part of it, and writes it. `format` keeps its numbers
    unchanged; None: they are decoded. `optional_suffixes` name tensors that may accompany a matrix
    and are not needed."""

    optional_suffixes: ClassVar[frozenset[str]] = frozenset()
    shares_amax: ClassVar[bool] = False
    """Matrices that other engines fuse (gate and up) must be written with one scale."""

    @property
    @abstractmethod
    def format(self) -> WeightFormat | None: ...

    @property
    def unit(self) -> tuple[int, int]:
        """Rows and columns in one word of the file, which are read together."""
        return 1, 1

    @abstractmethod
    def tensors(self, matrix: Matrix) -> Mapping[str, TensorSpec]:
        """The tensors that a matrix needs, by full name."""

    def read(self, source: Source, rows: range, cols: range) -> Planes:
        """Planes of `format`; ranges end at multiples of `multiple` or at the matrix's ends."""
        raise NotImplementedError(f"{type(self).__name__} has no format")

    def decode(self, source: Source, rows: range, cols: range) -> Tensor:
        """The numbers themselves; ranges as in `read`."""
        assert self.format is not None
        planes = self.read(source, rows, cols)
        out = torch.empty(len(rows), len(cols), device=planes["values"].device)
        return self.format.decode(planes, out)

    def write(self, w_NK: Tensor, amax: Tensor) -> dict[str, Tensor]:
        """The tensors by suffix; `amax`: the largest magnitude in matrices that share a scale."""
        raise NotImplementedError(f"{type(self).__name__} is not written")

    @property
    def multiple(self) -> tuple[int, int]:
        block = (1, 1) if self.format is None else self.format.block
        return lcm(self.unit[0], block[0]), lcm(self.unit[1], block[1])

    def planes(self, source: Source, rows: range, cols: range) -> Planes:
        """Planes of any part that does not split blocks of `format`."""
        assert self.format is not None
        if (len(rows), len(cols)) == source.matrix.shape:
            return self.read(source, rows, cols)
        self._check_cut(source.matrix, rows, cols)
        wide_N, wide_K = self._widened(source.matrix, rows, cols)
        planes = self.read(source, wide_N, wide_K)
        if (wide_N, wide_K) == (rows, cols):
            return planes
        return self.format.slice(planes, within(rows, wide_N), within(cols, wide_K))

    def dense(self, source: Source, rows: range, cols: range) -> Tensor:
        """The numbers of any part."""
        if (len(rows), len(cols)) == source.matrix.shape:
            return self.decode(source, rows, cols)
        wide_N, wide_K = self._widened(source.matrix, rows, cols)
        return self.decode(source, wide_N, wide_K)[within(rows, wide_N), within(cols, wide_K)]

    def _widened(self, matrix: Matrix, rows: range, cols: range) -> tuple[range, range]:
        cuts = zip((rows, cols), self.multiple, matrix.shape, strict=True)
        wide_N, wide_K = (widen(cut, multiple, size) for cut, multiple, size in cuts)
        return wide_N, wide_K

    def _check_cut(self, matrix: Matrix, rows: range, cols: range) -> None:
        assert self.format is not None
        for what, cut, multiple, size in zip(
            ("rows", "columns"), (rows, cols), self.format.block, matrix.shape, strict=True
        ):
            if cut.start % multiple or (cut.stop % multiple and cut.stop != size):
                raise ValueError(
                    f"{what} {cut.start}..{cut.stop} of {matrix.name} {list(matrix.shape)} cut "
                    f"blocks of weight format {self.format.name}: cut at multiples of {multiple}"
                )


@dataclass(frozen=True)
class Unquantised(Storage):
    """Floats: [N, K] by name, or inputs first in a stack [E, K, N]."""

    @property
    def format(self) -> None:
        return None

    def tensors(self, matrix: Matrix) -> Mapping[str, TensorSpec]:
        if matrix.index is None:
            return {matrix.name: float_spec(matrix.shape)}
        return {matrix.name: float_spec((matrix.experts, matrix.shape[1], matrix.stacked_rows))}

    def dense(self, source: Source, rows: range, cols: range) -> Tensor:
        return self.decode(source, rows, cols)

    def decode(self, source: Source, rows: range, cols: range) -> Tensor:
        matrix = source.matrix
        if matrix.index is None:
            return source.checkpoint.read(matrix.name, rows, cols)
        stacked = source.checkpoint.read(matrix.name, matrix.index, cols, matrix.in_stack(rows))
        return stacked.t()


def blocks(cut: range, size: int) -> range:
    """The blocks of `size` that a range touches."""
    return range(cut.start // size, -(-cut.stop // size))


def widen(cut: range, multiple: int, size: int) -> range:
    touched = blocks(cut, multiple)
    return range(touched.start * multiple, min(touched.stop * multiple, size))


def within(cut: range, wide: range) -> slice:
    return slice(cut.start - wide.start, cut.stop - wide.start)
