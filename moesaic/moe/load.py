"""How much the experts of a layer have to do on this rank."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from moesaic.moe.formats import CombineInput, DispatchOutput
from moesaic.moe.placement import EpLayout
from moesaic.observe.spans import Kind, Spans


class ExpertLoad:
    """Rows that each local slot has computed, and the time of the runner (on a GPU, to hand it its
    work). Ranks that share experts by slices compute the same rows: the first of them counts."""

    def __init__(self, layer: int, layout: EpLayout, spans: Spans, device: str = "cpu") -> None:
        self.layer, self._spans = layer, spans
        self.counts = layout.moe_tp_rank == 0
        self.runner_ns = 0
        self._slots = layout.slots_per_rank
        # A list: on CPU a tensor of so few costs ten times as much.
        self._tokens = [0] * self._slots
        # Made here and not when it is needed, which may be while a graph is captured.
        self._on_device: Tensor | None = None
        if device != "cpu":
            self._on_device = torch.zeros(self._slots, dtype=torch.int64)

    @property
    def tokens(self) -> list[int]:
        """Of each slot, since the start. Waits for a GPU that counts."""
        if self._on_device is None:
            return self._tokens
        found: list[int] = self._on_device.tolist()
        return found

    def take(self, rows: DispatchOutput, results: CombineInput, begin: int) -> None:
        """Of a run that began then and has just ended."""
        now = time.monotonic_ns()
        self.runner_ns += now - begin
        if not (self.counts or self._spans.on):
            return
        if results.count_e is not None:
            self._take_on_device(results.count_e, begin, now)
            return
        found = rows.slot_rows(self._slots)
        found = results.slot_rows(self._slots) if found is None else found
        if found is None:
            return
        if self.counts:
            self._tokens = [old + new for old, new in zip(self._tokens, found, strict=True)]
        if self._spans.on:
            self._spans.add(Kind.EXPERTS, begin, self.layer, sum(found), end=now)

    def _take_on_device(self, count_e: Tensor, begin: int, now: int) -> None:
        """Without waiting: a span of it has no number of tokens."""
        assert self._on_device is not None
        if self.counts:
            self._on_device.add_(count_e)
        if self._spans.on:
            self._spans.add(Kind.EXPERTS, begin, self.layer, 0, end=now)
