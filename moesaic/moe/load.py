"""How much the experts of a layer have to do on this rank."""

from __future__ import annotations

import time

import torch

from moesaic.moe.formats import CombineInput, DispatchOutput
from moesaic.moe.placement import EpLayout
from moesaic.observe.spans import Kind, Spans


class ExpertLoad:
    """Rows that each local slot has computed, and the time of the runner. Ranks that share experts
    by slices compute the same rows: the first of them counts."""

    def __init__(self, layer: int, layout: EpLayout, spans: Spans) -> None:
        self.layer, self._spans = layer, spans
        self.counts = layout.moe_tp_rank == 0
        self.runner_ns = 0
        self._slots = layout.slots_per_rank
        self._tokens_e = torch.zeros(self._slots, dtype=torch.int64, device="cpu")

    def take(self, rows: DispatchOutput, results: CombineInput, begin: int) -> None:
        """Of a run that began then and has just ended."""
        now = time.monotonic_ns()
        self.runner_ns += now - begin
        if not (self.counts or self._spans.on):
            return
        found = rows.slot_rows(self._slots)
        found = results.slot_rows(self._slots) if found is None else found
        if found is None:
            return
        if self.counts:
            self._tokens_e += torch.tensor(found, device="cpu")
        if self._spans.on:
            self._spans.add(Kind.EXPERTS, begin, self.layer, sum(found), end=now)

    @property
    def tokens(self) -> list[int]:
        """Of each slot, since the start."""
        counted: list[int] = self._tokens_e.tolist()
        return counted
