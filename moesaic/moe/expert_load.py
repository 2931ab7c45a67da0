"""The load of a layer's experts on this rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from moesaic.moe.formats import CombineInput, DispatchOutput
from moesaic.moe.placement import EpLayout, overwrite
from moesaic.observe.spans import SpanKind, Spans

TABLE_LAYERS: Final = 64


class CounterTable:
    """The counters of some layers on the device, so that one copy reads all of them. A row has
    those of the slots and, if experts may move, of each expert's earlier slots."""

    def __init__(self, width: int) -> None:
        self.counts_Le = torch.zeros(TABLE_LAYERS, width, dtype=torch.int64)
        self.num_layers = 0
        self._stream: torch.cuda.Stream | None = None
        if self.counts_Le.is_cuda:
            shape = self.counts_Le.shape
            self._host_Le = torch.empty(shape, dtype=torch.int64, device="cpu", pin_memory=True)
            self._stream, self._cleared = torch.cuda.Stream(), torch.cuda.Event()

    def clear(self, row: int, slots: int | None = None) -> None:
        """Clears the first `slots` counters of a row; None: all of them."""
        self.counts_Le[row, :slots].zero_()
        if self._stream is not None:
            self._cleared.record()

    def read(self) -> list[list[int]]:
        """The rows of all layers. Copies beside the steps on the device and does not wait
        for those that it has still to compute."""
        counts_Le = self.counts_Le
        if self._stream is not None:
            self._stream.wait_event(self._cleared)
            with torch.cuda.stream(self._stream):
                counts_Le = self._host_Le.copy_(counts_Le, non_blocking=True)
            self._stream.synchronize()
        found: list[list[int]] = counts_Le.tolist()
        return found


class DeviceCounters:
    """The counter tables of a model."""

    def __init__(self) -> None:
        self._tables: dict[tuple[torch.device, int], CounterTable] = {}

    def add(self, width: int) -> tuple[CounterTable, int]:
        """A row for another layer, on the default device."""
        key = torch.get_default_device(), width
        table = self._tables.get(key)
        if table is None or table.num_layers == TABLE_LAYERS:
            table = self._tables[key] = CounterTable(width)
        table.num_layers += 1
        return table, table.num_layers - 1


class SlotLoad:
    """Rows that each local slot has computed, and the runner's time (on a GPU the launch time).
    Ranks that hold slices of the same experts compute the same rows: the first of them counts.
    `counters`: those of the device, if it counts. `movable`: the number of logical experts if they
    may move: what a slot has computed with earlier placements counts for its expert."""

    def __init__(
        self,
        layer: int,
        layout: EpLayout,
        spans: Spans,
        counters: DeviceCounters | None = None,
        movable: int = 0,
    ) -> None:
        self.layer, self._spans = layer, spans
        self.placement_version = 0
        """Which placement the counts belong to."""
        self.counts = layout.moe_tp_rank == 0
        self.runner_ns = 0
        self.num_slots = layout.slots_per_rank
        self._movable = movable
        # A list: on CPU a tensor this small costs ten times as much.
        self._tokens = [0] * (self.num_slots + movable)
        # Allocated here: the first use may be inside of a graph capture.
        self.row = None if counters is None else counters.add(self.num_slots + movable)
        """The table and its row that has this layer's counts; None on the host."""
        self._total: Tensor | None = None
        self.on_device: Tensor | None = None
        """The counter that kernels add each slot's rows to, in graphs too; None on the host."""
        if self.row is not None:
            self._total = self.row[0].counts_Le[self.row[1]]
            self.on_device = self._total[: self.num_slots] if self.counts else None

    @property
    def tokens(self) -> list[int]:
        """Rows of each slot, and if experts may move, of each expert with earlier placements. Waits
        for the device if it counts."""
        if self._total is None:
            return self._tokens
        found: list[int] = self._total.tolist()
        return found

    def start_window(self, experts: Sequence[int]) -> None:
        """Counts from zero, under the next placement. `experts`: those that the slots have had."""
        self.placement_version += 1
        slots = self.num_slots
        if self.row is None or self._total is None:
            for slot, expert in enumerate(experts):
                self._tokens[slots + expert] += self._tokens[slot]
            self._tokens[:slots] = [0] * slots
            return
        table, row = self.row
        index = torch.empty(len(experts), dtype=torch.int64, device=self._total.device)
        overwrite(index, torch.tensor(experts))
        self._total[slots:].index_add_(0, index, self._total[:slots])
        table.clear(row, slots)

    def clear(self) -> None:
        """As at the start: what was counted, and under which placement."""
        self.runner_ns, self._tokens = 0, [0] * len(self._tokens)
        self.placement_version = 0
        if self.row is not None:
            table, row = self.row
            table.clear(row)

    def record(self, rows: DispatchOutput, results: CombineInput, begin: int) -> None:
        """Counts a run that started at `begin` and has just ended."""
        now = time.monotonic_ns()
        self.runner_ns += now - begin
        if not (self.counts or self._spans.on):
            return
        if results.count_e is not None:
            # The device has counted; the span gets no number of tokens, as that would wait for it.
            if self._spans.on:
                self._spans.add(SpanKind.EXPERTS, begin, self.layer, 0, end=now)
            return
        found = rows.slot_rows(self.num_slots)
        found = results.slot_rows(self.num_slots) if found is None else found
        if found is None:
            return
        if self.counts:
            rest = self._tokens[self.num_slots :]
            self._tokens = [a + b for a, b in zip(self._tokens, found, strict=False)] + rest
        if self._spans.on:
            self._spans.add(SpanKind.EXPERTS, begin, self.layer, sum(found), end=now)


def tokens_of(loads: Sequence[SlotLoad]) -> list[list[int]]:
    """The `tokens` of several layers, without those of steps that the device still computes."""
    tables = {id(load.row[0]): load.row[0] for load in loads if load.row is not None}
    read = {key: table.read() for key, table in tables.items()}
    return [
        load.tokens if load.row is None else read[id(load.row[0])][load.row[1]] for load in loads
    ]
