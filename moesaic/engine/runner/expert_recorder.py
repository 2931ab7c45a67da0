"""Records which experts the forward passes of this rank have used.

After each pass one row of counts goes into a ring, with the pass's number and the versions of the
placements that it followed. Nothing waits for the device: a row is read when the device has written
it, between two later steps.

S rows of the ring · L MoE layers of this rank · e local slots · P slots of a layer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from moesaic.config import ServerArgs
from moesaic.moe.pass_totals import Totals, make_totals

if TYPE_CHECKING:
    from moesaic.engine.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)

MIB: Final = 1 << 20
# Counts that a rank may keep where --expert-distribution-recorder-buffer-size is -1.
MOST_BYTES: Final = 256 * MIB
# Bytes in one reply, so that tokens do not wait behind it.
CHUNK_BYTES: Final = 256 << 10
# A row that begins a recording, and no pass.
NO_PASS: Final = -1


class RecordedSlots(msgspec.Struct, array_like=True):
    """The logical expert of each slot of a layer, in one version of its placement."""

    layer: int
    """Among the rank's MoE layers."""
    version: int
    slots: list[int]


class RecorderState(msgspec.Struct, array_like=True):
    """Rows from `first` up to `end` can be read; `pending` more are still being computed. `lost`:
    passes that newer ones have overwritten. `layers`: the numbers of the MoE layers whose experts
    this rank counts; none where another rank counts for it."""

    on: bool = False
    first: int = 0
    end: int = 0
    pending: int = 0
    lost: int = 0
    layers: list[int] = []
    first_slot: int = 0
    num_local: int = 0
    num_experts: int = 0
    placements: list[RecordedSlots] = []


class RecordedRows(msgspec.Struct, array_like=True):
    """Passes in the order in which they ran. `next`: the first row that was not read; `versions`:
    int32 [passes, L]; `counts`: int32 [passes, L, e]."""

    next: int
    numbers: list[int]
    prefills: list[bool]
    versions: bytes
    counts: bytes


class ExpertRecorder:
    def __init__(self, runner: ModelRunner, passes: int) -> None:
        """`passes`: the most that are kept; -1 for as many as MOST_BYTES hold."""
        layers = [layer for layer in runner.moe_layers if layer.load.counts]
        self._layers, self._loads = layers, [layer.load for layer in layers]
        row_bytes = 4 * sum(layer.layout.slots_per_rank for layer in layers)
        self.passes = passes if passes > 0 else max(1, MOST_BYTES // max(1, row_bytes))
        # The rows of a pass are the difference to the row before it.
        self._size = self.passes + 1
        self._totals = make_totals(self._loads, self._size)
        self._numbers = np.full(self._size, NO_PASS, np.int64)
        self._prefills = np.zeros(self._size, bool)
        self._versions_SL = np.zeros((self._size, len(layers)), np.int32)
        self._slots: dict[tuple[int, int], list[int]] = {}
        """By layer and version of its placement."""
        self._newest: list[int] | None = None
        """The version of each layer's placement in the last row."""
        self._on, self._first, self._next, self._lost = False, 0, 0, 0

    @classmethod
    def of(cls, args: ServerArgs, runner: ModelRunner) -> ExpertRecorder | None:
        """None where the flags ask for no recorder."""
        if args.expert_distribution_recorder_mode is None:
            return None
        passes = args.expert_distribution_recorder_buffer_size or args.eplb_rebalance_num_iterations
        recorder = cls(runner, passes)
        logger.info(
            "the expert distribution recorder (mode %s) keeps the last %d passes: %.1f MiB on "
            "each rank",
            args.expert_distribution_recorder_mode,
            recorder.passes,
            recorder.nbytes / MIB,
        )
        return recorder

    @property
    def nbytes(self) -> int:
        return self._totals.nbytes + self._versions_SL.nbytes

    def answer(self, what: str, options: Mapping[str, Any], rank: int) -> Any:
        """Carries out a query of the frontend."""
        match what:
            case "expert_record_start":
                self.start()
            case "expert_record_stop":
                self._on = False
            case "expert_record_state":
                pass
            case "expert_record_discard":
                self._discard(options["ends"][rank])
            case "expert_record_read":
                return self.read(options["firsts"][rank], options["ends"][rank])
            case _:
                raise ValueError(f"unknown query {what!r}")
        return self.state(has_placements=what == "expert_record_state")

    def start(self) -> None:
        """Forgets what was recorded before."""
        self._on, self._lost = True, 0
        self._slots.clear()
        self._newest = None
        self._write(NO_PASS, False)
        self._first = self._next

    def record(self, number: int, prefill: bool) -> None:
        """Keeps the counts of the pass that has just been launched."""
        if self._on:
            self._write(number, prefill)

    def restart(self) -> None:
        """Separates what a failed pass has counted from the next pass."""
        if self._on:
            self._write(NO_PASS, False)

    def _write(self, number: int, prefill: bool) -> None:
        place = self._next % self._size
        if self._next - self._first > self.passes - 1:
            oldest = self._first % self._size
            self._lost += int(self._numbers[oldest] != NO_PASS)
            self._first += 1
        self._totals.write(place)
        self._numbers[place], self._prefills[place] = number, prefill
        versions = [load.placement_version for load in self._loads]
        if versions != self._newest:
            self._keep_placements(versions)
        self._versions_SL[place] = versions
        self._next += 1

    def _keep_placements(self, versions: list[int]) -> None:
        self._newest = versions
        for key, layer in zip(enumerate(versions), self._layers, strict=True):
            self._slots.setdefault(key, list(layer.placement.slots))

    def state(self, has_placements: bool = True) -> RecorderState:
        slots = self._slots if has_placements else {}
        end = max(self._first, self._totals.num_written(self._next))
        layer = self._layers[0] if self._layers else None
        return RecorderState(
            on=self._on,
            first=self._first,
            end=end,
            pending=self._next - end,
            lost=self._lost,
            layers=[load.layer for load in self._loads],
            first_slot=0 if layer is None else layer.layout.first_slot,
            num_local=0 if layer is None else layer.layout.slots_per_rank,
            num_experts=0 if layer is None else layer.config.num_experts,
            placements=[RecordedSlots(*key, found) for key, found in slots.items()],
        )

    def read(self, first: int, end: int) -> RecordedRows:
        """Some of the rows in front of `end`: as many as fit into a reply, at least one."""
        first = max(first, self._first)
        row_bytes = max(1, self._totals.nbytes // self._size)
        end = min(end, first + max(1, CHUNK_BYTES // row_bytes))
        rows = self._places(first, end)
        numbers = self._numbers[rows]
        passes = np.flatnonzero(numbers != NO_PASS)
        counts_nLe = self._counts(first, end)[passes]
        return RecordedRows(
            max(first, end),
            numbers[passes].tolist(),
            self._prefills[rows][passes].tolist(),
            self._versions_SL[rows][passes].tobytes(),
            counts_nLe.tobytes(),
        )

    def _counts(self, first: int, end: int) -> Totals:
        """What each row has more than the one before it, or than zero if the layer's counters
        began anew with another placement."""
        if first >= end:
            return np.zeros((0, len(self._loads), 0), np.int32)
        totals = np.concatenate([self._read(first - 1, first), self._read(first, end)])
        rows = self._places(first - 1, end)
        moved_nL = np.diff(self._versions_SL[rows], axis=0) != 0
        before_nLe = np.where(moved_nL[:, :, None], 0, totals[:-1])
        return totals[1:] - before_nLe.astype(np.int32)

    def _read(self, first: int, end: int) -> Totals:
        """Rows of the ring, whose end may be between them."""
        place, count = first % self._size, end - first
        front = self._totals.read(place, count)
        if len(front) == count:
            return front
        return np.concatenate([front, self._totals.read(0, count - len(front))])

    def _places(self, first: int, end: int) -> npt.NDArray[np.int64]:
        return np.arange(first, end) % self._size

    def _discard(self, end: int) -> None:
        """Frees the rows in front of `end`, which have been written to a file."""
        self._first, self._lost = max(self._first, min(end, self._next)), 0
        rows = self._places(max(0, self._first - 1), self._next)
        oldest = self._versions_SL[rows].min(0, initial=np.iinfo(np.int32).max)
        self._slots = {key: slots for key, slots in self._slots.items() if key[1] >= oldest[key[0]]}
