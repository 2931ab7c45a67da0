"""The load of a layer's experts on this rank."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from moesaic.moe.formats import CombineInput, DispatchOutput
from moesaic.moe.placement import EpLayout
from moesaic.observe.spans import SpanKind, Spans


class SlotLoad:
    """Rows that each local slot has computed, and the runner's time (on a GPU the launch time).
    Ranks that hold slices of the same experts compute the same rows: the first of them counts."""

    def __init__(self, layer: int, layout: EpLayout, spans: Spans, device: str = "cpu") -> None:
        self.layer, self._spans = layer, spans
        self.placement_version = 0
        """Which placement the counts belong to."""
        self.counts = layout.moe_tp_rank == 0
        self.runner_ns = 0
        self._slots = layout.slots_per_rank
        # A list: on CPU a tensor this small costs ten times as much.
        self._tokens = [0] * self._slots
        # Allocated here: the first use may be inside of a graph capture.
        self._total_e: Tensor | None = None
        if device != "cpu":
            self._total_e = torch.zeros(self._slots, dtype=torch.int64)

    @property
    def on_device(self) -> Tensor | None:
        """The counter that kernels add each slot's rows to, in graphs too; None on the host."""
        return self._total_e if self.counts else None

    @property
    def tokens(self) -> list[int]:
        """Rows of each slot in this window. Waits for the device if it counts."""
        if self._total_e is None:
            return self._tokens
        found: list[int] = self._total_e.tolist()
        return found

    def start_window(self) -> None:
        """Counts from zero, under the next placement."""
        self.placement_version += 1
        self.clear()

    def clear(self) -> None:
        self.runner_ns, self._tokens = 0, [0] * self._slots
        if self._total_e is not None:
            self._total_e.zero_()

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
        found = rows.slot_rows(self._slots)
        found = results.slot_rows(self._slots) if found is None else found
        if found is None:
            return
        if self.counts:
            self._tokens = [old + new for old, new in zip(self._tokens, found, strict=True)]
        if self._spans.on:
            self._spans.add(SpanKind.EXPERTS, begin, self.layer, sum(found), end=now)
