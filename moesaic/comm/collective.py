"""Ranks that put their parts of one tensor together. T tokens · H channels · R rows · V vocabulary."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor


class Collective(ABC):
    """Ranks that put their parts of one tensor together. All of them call the same operations in
    the same order; sums are in rank order, in float32, rounded once, so that no split of the rows
    changes a bit. `operation` is what an error names."""

    rank: int
    size: int

    @abstractmethod
    def sum_rows(self, x_NH: Tensor, rows: slice, operation: str) -> Tensor:
        """Rows `rows` of the sum over ranks; every rank brings [N, H] and may want other rows."""

    @abstractmethod
    def gather_rows(self, x_TH: Tensor, counts: Sequence[int], operation: str) -> Tensor:
        """The rows of all ranks in rank order; rank r brings counts[r] of them."""

    @abstractmethod
    def gather_columns(
        self, x_RV: Tensor, widths: Sequence[int], rows: slice, operation: str
    ) -> Tensor:
        """Rows `rows` with the columns of all ranks side by side; rank r brings widths[r] columns
        of all R rows."""

    def all_reduce(self, x_TH: Tensor, operation: str) -> Tensor:
        return self.sum_rows(x_TH, slice(0, len(x_TH)), operation)


class Alone(Collective):
    """One rank: nothing travels."""

    rank, size = 0, 1

    def sum_rows(self, x_NH: Tensor, rows: slice, operation: str) -> Tensor:
        return x_NH[rows]

    def gather_rows(self, x_TH: Tensor, counts: Sequence[int], operation: str) -> Tensor:
        return x_TH

    def gather_columns(
        self, x_RV: Tensor, widths: Sequence[int], rows: slice, operation: str
    ) -> Tensor:
        return x_RV[rows]


class Outline(Collective):
    """Stands for ranks that are not there, to count what a rank would hold; computes nothing."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def sum_rows(self, x_NH: Tensor, rows: slice, operation: str) -> Tensor:
        raise NotImplementedError("an outline does not compute")

    def gather_rows(self, x_TH: Tensor, counts: Sequence[int], operation: str) -> Tensor:
        raise NotImplementedError("an outline does not compute")

    def gather_columns(
        self, x_RV: Tensor, widths: Sequence[int], rows: slice, operation: str
    ) -> Tensor:
        raise NotImplementedError("an outline does not compute")
