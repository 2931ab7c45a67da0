"""The totals of a rank's expert counters after each of the last forward passes.

The rows of a pass are the difference between its totals and those before it, so that one copy a
pass is all that a step pays. On a GPU the copy runs on the device, behind the step's own kernels
and behind graphs that add to the counters; rows are read on another stream.

S rows of the ring · L layers · e local slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moesaic.moe.expert_load import CounterTable, SlotLoad

# More than the steps that are in flight at once: a row's event is used again after so many rows.
EVENTS: Final = 8

Totals = npt.NDArray[np.int32]


class PassTotals:
    """A ring of `rows` rows. Counters wrap at 32 bits, and so do differences of them."""

    def __init__(self, loads: Sequence[SlotLoad], rows: int) -> None:
        self.loads, self.rows = list(loads), rows

    def write(self, row: int) -> None:
        """Keeps the present totals in a row of the ring."""
        raise NotImplementedError

    def num_written(self, rows: int) -> int:
        """How many of the first `rows` writes the device has done; it does not wait for them."""
        return rows

    def read(self, first: int, count: int) -> Totals:
        """Rows [count, L, e] of the ring, without those behind its end."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        raise NotImplementedError


class HostTotals(PassTotals):
    """Of counters on the host."""

    def __init__(self, loads: Sequence[SlotLoad], rows: int) -> None:
        super().__init__(loads, rows)
        slots = len(loads[0].tokens) if loads else 0
        self._ring_SLe = np.zeros((rows, len(loads), slots), np.int32)

    def write(self, row: int) -> None:
        self._ring_SLe[row] = [load.tokens for load in self.loads]

    def read(self, first: int, count: int) -> Totals:
        return self._ring_SLe[first : first + count].copy()

    @property
    def nbytes(self) -> int:
        return self._ring_SLe.nbytes


class DeviceTotals(PassTotals):
    """Of counters on a device: a ring for each counter table."""

    def __init__(self, loads: Sequence[SlotLoad], rows: int) -> None:
        super().__init__(loads, rows)
        tables = [load.row[0] for load in loads if load.row is not None]
        self._tables: list[CounterTable] = list(dict.fromkeys(tables))
        self._rings = [_ring_of(table, rows) for table in self._tables]
        self._places = [self._place(load) for load in loads]
        self._stream: torch.cuda.Stream | None = None
        if self._rings and self._rings[0].is_cuda:
            self._stream = torch.cuda.Stream(self._rings[0].device)
            self._events = [torch.cuda.Event() for _ in range(EVENTS)]
        self._num_writes = 0

    def _place(self, load: SlotLoad) -> int:
        """The layer's row among those of all tables."""
        assert load.row is not None, "all counters of a rank are on its device"
        table, row = load.row
        before = self._tables[: self._tables.index(table)]
        return sum(other.num_layers for other in before) + row

    def write(self, row: int) -> None:
        for table, ring_SLe in zip(self._tables, self._rings, strict=True):
            ring_SLe[row].copy_(table.counts_Le[: table.num_layers])
        if self._stream is not None:
            self._events[self._num_writes % EVENTS].record()
        self._num_writes += 1

    def num_written(self, rows: int) -> int:
        if self._stream is None:
            return rows
        while rows > max(0, self._num_writes - EVENTS) and not self._is_done(rows - 1):
            rows -= 1
        return rows

    def _is_done(self, write: int) -> bool:
        done: bool = self._events[write % EVENTS].query()
        return done

    def read(self, first: int, count: int) -> Totals:
        parts = [ring_SLe[first : first + count] for ring_SLe in self._rings]
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                parts = [_pinned(part).copy_(part, non_blocking=True) for part in parts]
            self._stream.synchronize()
        found: Totals = torch.cat(parts, 1).numpy()
        return found[:, self._places]

    @property
    def nbytes(self) -> int:
        return sum(ring_SLe.nbytes for ring_SLe in self._rings)


def make_totals(loads: Sequence[SlotLoad], rows: int) -> PassTotals:
    """`rows`: those of the ring."""
    on_device = bool(loads) and loads[0].row is not None
    return DeviceTotals(loads, rows) if on_device else HostTotals(loads, rows)


def _ring_of(table: CounterTable, rows: int) -> Tensor:
    counts_Le = table.counts_Le[: table.num_layers]
    return torch.zeros(rows, *counts_Le.shape, dtype=torch.int32, device=counts_Le.device)


def _pinned(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)
