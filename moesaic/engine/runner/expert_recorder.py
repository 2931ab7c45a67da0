"""Records which experts the forward passes of this rank have used.

After each pass one row of counts goes into a ring, with the pass's number and the versions of the
placements that it followed; in mode `per_token` another ring gets the experts of each token.
Nothing waits for the device: a row is read when the device has written it, between later steps.

S rows of the ring · L MoE layers of this rank · e local slots · P slots of a layer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from moesaic.config import ServerArgs
from moesaic.engine.runner.recorded_tokens import (
    INPUT_BYTES,
    SLOT_BYTES,
    RecordedTokens,
    StepTokens,
    TokenRing,
    TokenSpan,
)
from moesaic.engine.schedule.plan import StepAgreement, StepPlan
from moesaic.models.blocks import takes_all_rows
from moesaic.moe.layer import FusedMoE
from moesaic.moe.pass_totals import RowEvents, Totals, make_totals

if TYPE_CHECKING:
    from moesaic.engine.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)

MIB: Final = 1 << 20
GIB: Final = 1 << 30
# Counts of all ranks together: a dump gathers them in the server's process.
LARGEST_BYTES: Final = 4 * GIB
# Counts that a rank keeps at most where --expert-distribution-recorder-buffer-size is -1.
MOST_BYTES: Final = 256 * MIB
# Tokens that a rank keeps in mode per_token, with their experts in all layers.
TOKEN_RING_BYTES: Final = 64 * MIB
# Bytes in one reply, so that tokens do not wait behind it.
CHUNK_BYTES: Final = 256 << 10
# Passes that a rank keeps unless it is told how many; else --eplb-rebalance-num-iterations if more.
LEAST_PASSES: Final = 1000
# Passes that a rank keeps for the report of balancedness.
REPORT_PASSES: Final = 256
# The value of a query's option `of` that asks for the recorder of a draft model.
DRAFT: Final = "draft"
# The number of a row that is no pass: the totals from which the next pass is counted.
NO_PASS: Final = -1


class RecordedSlots(msgspec.Struct, array_like=True):
    """The logical expert of each slot of a layer, in one version of its placement."""

    layer: int
    """Among the rank's MoE layers."""
    version: int
    slots: list[int]


class RecorderState(msgspec.Struct, array_like=True):
    """Rows from `first` up to `end` can be read; `pending` more are still being computed. `told`:
    passes since the start that dumps have written or reported as lost. `layers`: the rank's MoE
    layers; `counts`: whether it counts their rows, as the first of the ranks that share experts by
    slices does."""

    on: bool = False
    first: int = 0
    end: int = 0
    pending: int = 0
    told: int = 0
    layers: list[int] = []
    counts: bool = False
    first_slot: int = 0
    num_local: int = 0
    num_experts: int = 0
    top_k: int = 0
    placements: list[RecordedSlots] = []


class RecordedPass(msgspec.Struct, array_like=True):
    """`lengths`: the new tokens of each sequence of the rank's attention group; `prefill`: whether
    any group prefilled."""

    number: int
    prefill: bool
    lengths: list[int] = []
    tokens: TokenSpan | None = None
    """None unless the mode is `per_token`."""
    index: int = 0
    """How many passes were recorded before it since the start. Passes whose indices are missing
    among those that were read have been overwritten by newer ones."""


class RecordedRows(msgspec.Struct, array_like=True):
    """Passes in the order in which they ran. `next`: the first row that was not read; `versions`:
    int32 [passes, L]; `counts`: int32 [passes, L, e]."""

    next: int
    passes: list[RecordedPass]
    versions: bytes
    counts: bytes


class PassSums(msgspec.Struct, array_like=True):
    """The rows that this rank has computed in each pass: `sums` are int64 [passes, L]. `layers` is
    empty where another rank counts."""

    next: int
    numbers: list[int]
    layers: list[int]
    sums: bytes


class ExpertRecorder:
    def __init__(
        self,
        runner: ModelRunner,
        passes: int,
        keeps_tokens: bool = False,
        layers: Sequence[FusedMoE] | None = None,
        first_layer: int = 0,
    ) -> None:
        """`passes`: the most that are kept; -1 for as many as MOST_BYTES hold, and LARGEST_BYTES
        for all ranks. `layers`: unset, the target's; `first_layer`: which of them is told as 0."""
        self._runner, self._first_layer = runner, first_layer
        self._layers = runner.moe_layers if layers is None else list(layers)
        self._loads = [layer.load for layer in self._layers]
        row_bytes = 4 * sum(layer.layout.slots_per_rank for layer in self._layers)
        self.passes = _num_passes(passes, row_bytes, runner.ranks.mesh.world)
        # The rows of a pass are the difference to the row before it.
        self._size = self.passes + 1
        self._totals = make_totals(self._loads, self._size)
        self._events = RowEvents(runner.device)
        self._passes = [RecordedPass(NO_PASS, False)] * self._size
        self._versions_SL = np.zeros((self._size, len(self._layers)), np.int32)
        self._slots: dict[tuple[int, int], list[int]] = {}
        """By layer and version of its placement."""
        self._newest: list[int] | None = None
        """The version of each layer's placement in the last row."""
        self._on, self._first, self._next = False, 0, 0
        self._recorded, self._told = 0, 0
        self._tokens = self._make_token_ring() if keeps_tokens else None

    def _make_token_ring(self) -> TokenRing | None:
        """Ranks of an attention group that route the same rows leave them to the first."""
        runner, layers = self._runner, len(self._layers)
        if not layers or (self._takes_all_rows and runner.parallel.attention.rank > 0):
            return None
        capacity = TOKEN_RING_BYTES // (layers * runner.top_k * SLOT_BYTES + INPUT_BYTES)
        return TokenRing(capacity, layers, runner.top_k, runner.device)

    @property
    def _takes_all_rows(self) -> bool:
        return takes_all_rows(self._runner.parallel, self._runner.moe)

    @classmethod
    def of(cls, args: ServerArgs, runner: ModelRunner) -> ExpertRecorder | None:
        """None where the flags ask for no recorder."""
        mode = args.expert_distribution_recorder_mode
        if mode is None:
            return None
        default = max(LEAST_PASSES, args.eplb_rebalance_num_iterations)
        passes = args.expert_distribution_recorder_buffer_size or default
        recorder = cls(runner, passes, keeps_tokens=mode == "per_token")
        tokens = recorder._tokens
        logger.info(
            "the expert distribution recorder (mode %s) keeps the last %d passes%s: %.1f MiB on "
            "each rank",
            mode,
            recorder.passes,
            "" if tokens is None else f" and the last {tokens.capacity} tokens",
            recorder.nbytes / MIB,
        )
        return recorder

    @classmethod
    def of_draft(cls, args: ServerArgs, runner: ModelRunner) -> ExpertRecorder | None:
        """That of a draft model, which may have other experts than the target; it keeps no tokens.
        What it computes behind a pass of the target counts to that pass."""
        mode = args.expert_distribution_recorder_mode
        if mode is None or runner.draft is None:
            return None
        default = max(LEAST_PASSES, args.eplb_rebalance_num_iterations)
        passes = args.expert_distribution_recorder_buffer_size or default
        return cls(runner, passes, False, runner.draft_layers, runner.first_draft_layer)

    @classmethod
    def for_report(cls, args: ServerArgs, runner: ModelRunner) -> ExpertRecorder | None:
        """The recorder of the last passes for the report of balancedness, if there is one."""
        if args.expert_balancedness_report_mode == "off":
            return None
        recorder = cls(runner, REPORT_PASSES)
        recorder.start()
        return recorder

    @property
    def nbytes(self) -> int:
        tokens = 0 if self._tokens is None else self._tokens.nbytes
        return self._totals.nbytes + self._versions_SL.nbytes + tokens

    @property
    def needs_tokens(self) -> bool:
        """Whether the next pass is recorded with the experts of its tokens."""
        return self._on and self._tokens is not None

    def answer(self, what: str, options: Mapping[str, Any], rank: int) -> Any:
        """Carries out a query of the frontend."""
        match what:
            case "expert_record_start":
                self.start()
            case "expert_record_stop":
                self._on = False
            case "expert_record_state":
                return self.state()
            case "expert_record_discard":
                self._discard(options["ends"][rank])
            case "expert_record_read":
                return self.read(options["firsts"][rank], options["ends"][rank])
            case "expert_record_tokens":
                return self._read_tokens(options["firsts"][rank], options["ends"][rank])
            case _:
                raise ValueError(f"unknown query {what!r}")
        return self.state(has_placements=False)

    def start(self) -> None:
        """Forgets what was recorded before."""
        self._on, self._newest = True, None
        self._recorded, self._told = 0, 0
        self._slots.clear()
        self._write(RecordedPass(NO_PASS, False))
        self._first = self._next

    def record(
        self, plan: StepPlan, agreement: StepAgreement, tokens: StepTokens | None = None
    ) -> None:
        """Keeps the counts of the pass that has just been launched; `tokens`: its rows, if
        `needs_tokens`."""
        if not self._on:
            return
        made = RecordedPass(agreement.number, agreement.prefill)
        if self._tokens is not None:
            made.lengths, made.tokens = plan.lengths.tolist(), TokenSpan(self._tokens.end)
            if tokens is not None:
                made.tokens = self._keep_tokens(self._tokens, tokens)
        self._write(made)

    def _keep_tokens(self, ring: TokenRing, tokens: StepTokens) -> TokenSpan:
        """Keeps those that this rank takes to the experts."""
        first, count = 0, tokens.count
        if not self._takes_all_rows:
            parallel, rows = self._runner.parallel, len(tokens.ids_R)
            first, count = parallel.own_rows(rows).start, parallel.own_tokens(count, rows)
        return ring.write(tokens, first, count) if count else TokenSpan(ring.end)

    def restart(self) -> None:
        """Separates what a failed pass has counted from the next pass."""
        if self._on:
            self._write(RecordedPass(NO_PASS, False))

    def _write(self, made: RecordedPass) -> None:
        place = self._next % self._size
        if self._next - self._first == self.passes:
            self._first += 1
        self._totals.write(place)
        self._events.record()
        made.index = self._recorded
        self._recorded += int(made.number != NO_PASS)
        self._passes[place] = made
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
        end = max(self._first, self._events.num_written())
        state = RecorderState(self._on, self._first, end, self._next - end, self._told)
        if self._layers:
            layer = self._layers[0]
            state.layers = [load.layer - self._first_layer for load in self._loads]
            state.counts, state.first_slot = layer.load.counts, layer.layout.first_slot
            state.num_local = layer.layout.slots_per_rank
            state.num_experts = layer.config.num_experts
            state.top_k = layer.config.routed_top_k
        if has_placements:
            found = self._slots.items()
            state.placements = [RecordedSlots(*key, slots) for key, slots in found]
        return state

    def read(self, first: int, end: int) -> RecordedRows:
        """Some of the rows in front of `end`: as many as fit into a reply, at least one."""
        first = max(first, self._first)
        row_bytes = max(1, self._totals.nbytes // self._size)
        end = max(first, min(end, first + max(1, CHUNK_BYTES // row_bytes)))
        passes = [self._passes[place] for place in self._places(first, end)]
        kept = [n for n, one in enumerate(passes) if one.number != NO_PASS]
        return RecordedRows(
            end,
            [passes[n] for n in kept],
            self._versions_SL[self._places(first, end)][kept].tobytes(),
            self._counts(first, end)[kept].tobytes(),
        )

    def sums(self, first: int) -> PassSums:
        """The passes from row `first` on, as far as they are there."""
        first, end = max(first, self._first), self.state(has_placements=False).end
        passes = [self._passes[place].number for place in self._places(first, end)]
        kept = [n for n, number in enumerate(passes) if number != NO_PASS]
        loads = [load for load in self._loads if load.counts]
        sums_nL = self._counts(first, end)[kept].sum(2, dtype=np.int64)
        return PassSums(
            end,
            [passes[n] for n in kept],
            [load.layer for load in loads],
            sums_nL[:, : len(loads)].tobytes(),
        )

    def _read_tokens(self, first: int, end: int) -> RecordedTokens:
        if self._tokens is None:
            return RecordedTokens(end, end)
        each = max(1, self._tokens.nbytes // self._tokens.capacity)
        return self._tokens.read(first, end, max(1, CHUNK_BYTES // each))

    def _counts(self, first: int, end: int) -> Totals:
        """What each row has more than the one before it, or than zero if the layer's counters
        began anew with another placement."""
        if first >= end:
            return np.zeros((0, len(self._loads), 0), np.int32)
        totals = np.concatenate([self._read(first - 1, first), self._read(first, end)])
        moved_nL = np.diff(self._versions_SL[self._places(first - 1, end)], axis=0) != 0
        before_nLe = np.where(moved_nL[:, :, None], np.int32(0), totals[:-1])
        return totals[1:] - before_nLe

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
        """Frees the passes whose index is below `end`: they have been written to a file or
        reported as lost. Later ones that were overwritten meanwhile are for the next dump to
        report."""
        self._told = max(self._told, end)
        while self._first < self._next and self._passes[self._first % self._size].index < end:
            self._first += 1
        rows = self._places(max(0, self._first - 1), self._next)
        oldest = self._versions_SL[rows].min(0, initial=np.iinfo(np.int32).max)
        self._slots = {key: slots for key, slots in self._slots.items() if key[1] >= oldest[key[0]]}


def _num_passes(asked: int, row_bytes: int, ranks: int) -> int:
    """The passes that a rank keeps, at `row_bytes` each; ValueError if all ranks would keep too
    much for the process that a dump gathers them in."""
    most = LARGEST_BYTES // max(1, row_bytes * ranks)
    if asked < 0:
        return max(1, min(most, MOST_BYTES // max(1, row_bytes)))
    if asked > most:
        total = asked * row_bytes * ranks / GIB
        raise ValueError(
            f"--expert-distribution-recorder-buffer-size {asked} would take {total:.1f} GiB on "
            f"{ranks} ranks, which a dump gathers in one process: give at most {most}"
        )
    return asked
