"""The totals of a rank's expert counters after each of the last forward passes.

The rows of a pass are the difference between its totals and those before it, so that one copy a
pass is all that a step pays. On a GPU the copy runs on the device, behind the step's own kernels
and behind graphs that add to the counters; rows are read on another stream.

S rows of the ring · L layers · e local slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moesaic.moe.expert_load import CounterTable, SlotLoad

# A row's event is used again after this many rows, which is more than the steps in flight at once.
EVENTS: Final = 8

Totals = npt.NDArray[np.int32]


class SideStream:
    """Copies tensors of a device to the host beside the steps. Copies of what the device has still
    to compute are garbage: `RowEvents` says what it has computed."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def to_host(self, parts: Sequence[Tensor]) -> list[Tensor]:
        if self._stream is None:
            return [part.clone() for part in parts]
        with torch.cuda.stream(self._stream):
            found = [_pinned(part).copy_(part, non_blocking=True) for part in parts]
        self._stream.synchronize()
        return found


class RowEvents:
    """Which of the rows that were launched in turn the device has written."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._events = [torch.cuda.Event() for _ in range(EVENTS)] if is_cuda else []
        self._device, self._num_rows = device, 0

    def record(self) -> None:
        """Marks the next row as launched, on the stream of the steps."""
        if self._events:
            event = self._events[self._num_rows % EVENTS]
            event.record(torch.cuda.current_stream(self._device))
        self._num_rows += 1

    def num_written(self) -> int:
        """It does not wait for the others."""
        rows, oldest = self._num_rows, max(0, self._num_rows - EVENTS)
        while self._events and rows > oldest and not self._events[(rows - 1) % EVENTS].query():
            rows -= 1
        return rows


class PassTotals:
    """A ring of `rows` rows. Counters wrap at 32 bits, and so do differences of them."""

    nbytes = 0

    def write(self, row: int) -> None:
        """Keeps the present totals in a row of the ring."""
        raise NotImplementedError

    def read(self, first: int, count: int) -> Totals:
        """Rows [count, L, e] of the ring, without those behind its end."""
        raise NotImplementedError


class HostTotals(PassTotals):
    """The totals of counters on the host."""

    def __init__(self, loads: Sequence[SlotLoad], rows: int) -> None:
        self._loads, self._slots = loads, loads[0].num_slots if loads else 0
        self._ring_SLe = np.zeros((rows, len(loads), self._slots), np.int32)
        self.nbytes = self._ring_SLe.nbytes

    def write(self, row: int) -> None:
        tokens = chain.from_iterable(load.tokens[: self._slots] for load in self._loads)
        totals = np.fromiter(tokens, np.int64, self._ring_SLe[row].size)
        self._ring_SLe[row] = totals.reshape(self._ring_SLe.shape[1:])  # wraps

    def read(self, first: int, count: int) -> Totals:
        return self._ring_SLe[first : first + count].copy()


class DeviceTotals(PassTotals):
    """The totals of counters on a device: a ring for each counter table."""

    def __init__(self, loads: Sequence[SlotLoad], rows: int) -> None:
        tables = [load.row[0] for load in loads if load.row is not None]
        self._tables: list[CounterTable] = list(dict.fromkeys(tables))
        self._slots = loads[0].num_slots
        self._rings = [_ring_of(table, self._slots, rows) for table in self._tables]
        self._places = [self._place(load) for load in loads]
        self._stream = SideStream(self._rings[0].device)
        self.nbytes = sum(ring_SLe.nbytes for ring_SLe in self._rings)

    def _place(self, load: SlotLoad) -> int:
        """The layer's row among those of all tables."""
        assert load.row is not None, "all counters of a rank are on its device"
        table, row = load.row
        before = self._tables[: self._tables.index(table)]
        return sum(other.num_layers for other in before) + row

    def write(self, row: int) -> None:
        for table, ring_SLe in zip(self._tables, self._rings, strict=True):
            ring_SLe[row].copy_(table.counts_Le[: table.num_layers, : self._slots])

    def read(self, first: int, count: int) -> Totals:
        parts = self._stream.to_host([ring[first : first + count] for ring in self._rings])
        found: Totals = torch.cat(parts, 1).numpy()
        return found[:, self._places]


def make_totals(loads: Sequence[SlotLoad], rows: int) -> PassTotals:
    """`rows`: those of the ring."""
    on_device = bool(loads) and loads[0].row is not None
    return DeviceTotals(loads, rows) if on_device else HostTotals(loads, rows)


def _ring_of(table: CounterTable, slots: int, rows: int) -> Tensor:
    counts_Le = table.counts_Le[: table.num_layers, :slots]
    return torch.zeros(rows, *counts_Le.shape, dtype=torch.int32, device=counts_Le.device)


def _pinned(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)
