"""A rank's replies to queries: its statistics, and its recorded spans."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from copy import copy
from typing import Any, Final

import msgspec

from moesaic.core.stats import GroupStats, MoveStats, RankStats
from moesaic.engine.runner.expert_recorder import DRAFT
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.moe.expert_load import tokens_of
from moesaic.moe.layer import FusedMoE

# Spans in one answer: about a third of a MiB, so that tokens do not wait behind it.
CHUNK: Final = 10_000


class RankStatsReply(msgspec.Struct, array_like=True):
    """The reply to `stats`; a leader adds its group's."""

    rank: RankStats
    group: GroupStats | None = None


class RecordingState(msgspec.Struct, array_like=True):
    """The reply to queries about a recording. `first`: the first step that it has in full; `step`:
    the rank's current step; `now`: its clock."""

    now: int
    on: bool
    first: int
    step: int
    count: int
    lost: int
    data: bytes = b""


class RankStatsReporter:
    """`group`: reads the statistics of the serving group, on its leader."""

    def __init__(
        self, runner: ModelRunner, rank: int = 0, group: Callable[[], GroupStats] | None = None
    ) -> None:
        self._runner, self._rank, self._group = runner, rank, group
        self._spans, self._layers = runner.spans, runner.moe_layers
        self._draft_layers = runner.draft_layers
        self._steps = 0
        self.busy = 0.0
        """Seconds in steps, for a rank without a control page."""

    def count_step(self, seconds: float) -> None:
        self._steps += 1
        self.busy += seconds

    def answer(self, what: str, options: dict[str, Any]) -> Any:
        spans, recorder = self._spans, self._runner.recorder
        if options.get("of") == DRAFT:
            recorder = self._runner.draft_recorder
        if recorder is not None and what.startswith("expert_record"):
            return recorder.answer(what, options, self._rank)
        if what == "balancedness" and self._runner.balance_recorder is not None:
            return self._runner.balance_recorder.sums(options["firsts"][self._rank])
        match what:
            case "stats":
                return RankStatsReply(self.stats(), self._group and self._group())
            case "record":
                spans.start()
            case "record_until":
                spans.end_after(options["steps"], options["firsts"][self._rank])
            case "record_stop":
                spans.stop()
            case "record_read":
                return self._read(options["first"])
            case "record_state":
                pass
            case "rebalance" | "rebalance_state":
                return self._rebalance(options.get("dry_run"))
            case "hold_rebalances":
                if self._runner.rebalancer is not None:
                    self._runner.rebalancer.is_held = True
            case "forget_load":
                if self._runner.rebalancer is not None:
                    self._runner.rebalancer.forget_load()
            case _:
                raise ValueError(f"unknown query {what!r}")
        return self._state()

    def _rebalance(self, dry_run: bool | None) -> dict[str, Any]:
        """`dry_run` is None if only the state is asked for. Empty where nothing moves experts."""
        rebalancer = self._runner.rebalancer
        if rebalancer is None:
            return {}
        asked = 0 if dry_run is None else rebalancer.ask(dry_run)
        return rebalancer.state() | {"asked": asked}

    def stats(self) -> RankStats:
        runner, ranks = self._runner, self._runner.ranks
        computed, waited = (self.busy, 0.0) if ranks.status is None else ranks.status.totals
        computing = self._layers + self._draft_layers
        layers = [layer for layer in computing if layer.load.counts]
        return RankStats(
            rank=self._rank,
            place=ranks.mesh.describe(self._rank),
            steps=self._steps,
            compute_seconds=computed,
            wait_seconds=waited,
            runner_seconds=sum(layer.load.runner_ns for layer in computing) / 1e9,
            traffic={name: copy(moved) for name, moved in runner.moe.comm.traffic.items()},
            layers=[self._number(layer) for layer in layers],
            experts=[list(layer.counted_experts) for layer in layers],
            expert_tokens=tokens_of([layer.load for layer in layers]),
            pid=os.getpid(),
            moves=MoveStats() if runner.rebalancer is None else runner.rebalancer.totals,
            held=[list(layer.local_experts) for layer in self._layers],
        )

    def _number(self, layer: FusedMoE) -> int:
        """Layers of a draft model follow those of the target."""
        if layer not in self._draft_layers:
            return layer.load.layer
        return layer.load.layer - self._runner.first_draft_layer + self._runner.num_layers

    def _read(self, first: int) -> RecordingState:
        """A piece of the recording; the last one frees it."""
        state = self._state(self._spans.read(first, CHUNK))
        if first + CHUNK >= self._spans.count:
            self._spans.free()
        return state

    def _state(self, data: bytes = b"") -> RecordingState:
        spans = self._spans
        first = spans.first
        if spans.lost:  # the oldest step may lack its beginning
            first = max(first, spans.oldest_step + 1)
        return RecordingState(
            time.monotonic_ns(), spans.on, first, spans.step, spans.count, spans.lost, data
        )
