"""How much the experts of a layer have to do on this rank."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from moesaic.moe.formats import CombineInput, DispatchOutput
from moesaic.moe.placement import EpLayout
from moesaic.observe.spans import SpanKind, Spans


class SlotLoad:
    """Rows that each local slot has computed, and the time of the runner (on a GPU, to hand it its
    work). Ranks that share experts by slices compute the same rows: the first of them counts."""

    def __init__(self, layer: int, layout: EpLayout, spans: Spans, device: str = "cpu") -> None:
        self.layer, self._spans = layer, spans
        self.placement_version = 0
        """Which placement the counts belong to."""
        self.counts = layout.moe_tp_rank == 0
        self.runner_ns = 0
        self._slots = layout.slots_per_rank
        # A list: on CPU a tensor of so few costs ten times as much.
        self._tokens = [0] * self._slots
        # Made here and not when it is needed, which may be while a graph is captured.
        self._total_e: Tensor | None = None
        if device != "cpu":
            self._total_e = torch.zeros(self._slots, dtype=torch.int64)

    @property
    def on_device(self) -> Tensor | None:
        """What the runner adds each slot's rows to, where only the device knows them: a kernel that
        counts them anyway does, and a captured graph whenever it is replayed."""
        return self._total_e if self.counts else None

    @property
    def tokens(self) -> list[int]:
        """Of each slot, since the start. Waits for a GPU that counts."""
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
        """Of a run that began then and has just ended."""
        now = time.monotonic_ns()
        self.runner_ns += now - begin
        if not (self.counts or self._spans.on):
            return
        if results.count_e is not None:
            # They are added up already, and nobody waits for them: a span has no number of tokens.
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
