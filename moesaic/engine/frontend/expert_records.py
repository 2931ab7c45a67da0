"""The expert distribution recorder: starts, stops and writes the recordings of all ranks.

Ranks reply between two steps with pieces of what they have; the files are written here, so that no
step waits for a disk. Ranks forget what was written only when it is.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from moesaic.balance.files import write_dump
from moesaic.balance.recording import (
    RankPasses,
    common_passes,
    last_placement,
    pass_content,
    stat_content,
)
from moesaic.comm.mesh import Mesh
from moesaic.config import ServerArgs
from moesaic.config.speculation import speculation_of
from moesaic.engine.frontend.queries import ANSWER_SECONDS, QueryTimeout
from moesaic.engine.frontend.recorded_details import RankRead, TokenBuffer, token_details
from moesaic.engine.runner.expert_recorder import DRAFT, RecordedRows, RecorderState
from moesaic.engine.runner.recorded_tokens import RecordedTokens

logger = logging.getLogger(__name__)

# SGLang's variable for the folder of dumps.
FOLDER_VARIABLE: Final = "SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR"
DEFAULT_FOLDER: Final = "/tmp"
POLL_SECONDS: Final = 0.02
STAT: Final = ("stat", "stat_approx")
PER_TOKEN: Final = "per_token"
NO_RECORDER: Final = (
    "there is no expert distribution recorder: start the server with "
    "--expert-distribution-recorder-mode stat, per_pass or per_token"
)
ALREADY_ON: Final = (
    "the expert distribution was being recorded already: what was recorded so far is dropped; send "
    "/stop_expert_distribution_record and /dump_expert_distribution_record first to keep it"
)
NOT_ON: Final = (
    "the expert distribution was not being recorded: send /start_expert_distribution_record first"
)

Reply = TypeVar("Reply")


class RecordNotWritten(RuntimeError):
    """A dump could not be written; nothing that was recorded is lost."""


@dataclass(frozen=True)
class RecordDump:
    """The files of a dump. `lost`: passes that the buffer had no room for, on the rank that lost
    most; `incomplete`: passes that only some ranks have recorded, which are left out;
    `tokens_dropped`: tokens whose experts are missing in mode `per_token`."""

    files: list[str]
    passes: int
    lost: int
    incomplete: int = 0
    tokens_dropped: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "files": self.files,
            "passes": self.passes,
            "passes_lost": self.lost,
            "passes_incomplete": self.incomplete,
            "tokens_dropped": self.tokens_dropped,
        }


class ExpertRecords:
    """The recordings of the target and of a draft model. May be called from any thread."""

    def __init__(
        self, ask: Callable[..., Any], args: ServerArgs, mesh: Mesh, num_layers: int
    ) -> None:
        self._lock, mode = threading.Lock(), args.expert_distribution_recorder_mode
        self._target = ModelRecords(ask, mode, mesh, num_layers)
        self._models = [self._target]
        if (speculation := speculation_of(args)) is not None and speculation.makes.on_ranks:
            self._models.append(ModelRecords(ask, mode, mesh, None))

    def start(self) -> None:
        """Records from now on and drops what was recorded before."""
        with self._lock:
            if any(state.on for state in self._target.states().values()):
                logger.warning("%s", ALREADY_ON)
            for model in self._models:
                model.start()

    def stop(self) -> None:
        """Stops recording; what was recorded stays until it is dumped or a new start."""
        with self._lock:
            if not all(state.on for state in self._target.states().values()):
                logger.warning("%s", NOT_ON)
            for model in self._models:
                model.stop()

    def dump(self) -> RecordDump:
        """Writes what was recorded since the start or the last dump. A recording goes on; a pass
        that only some ranks have recorded yet is in the next dump."""
        with self._lock:
            dumps = [model.dump() for model in self._models]
        files = [path for dump in dumps for path in dump.files]
        logger.info("wrote %d recorded passes to %s", dumps[0].passes, ", ".join(files))
        return replace(dumps[0], files=files)


class ModelRecords:
    """Those of one model. `num_layers`: None for a draft model, whose layers the ranks tell, if any
    has experts; its files are in a folder of their own."""

    def __init__(
        self, ask: Callable[..., Any], mode: str | None, mesh: Mesh, num_layers: int | None
    ) -> None:
        self._ask, self._mesh, self._mode = ask, mesh, mode
        self._is_draft, self._num_layers = num_layers is None, num_layers or 0

    def start(self) -> None:
        self._query("expert_record_start", RecorderState)

    def stop(self) -> None:
        self._query("expert_record_stop", RecorderState)

    def states(self) -> dict[int, RecorderState]:
        return self._query("expert_record_state", RecorderState)

    def dump(self) -> RecordDump:
        states = self._settled_states()
        if self._is_draft:
            layers = [layer for state in states.values() for layer in state.layers]
            self._num_layers = 1 + max(layers, default=-1)
            if not layers:
                return RecordDump([], 0, 0)
        reads = self._read(states)
        common = common_passes([(one.replica, one.numbers) for one in reads])
        lost = max(one.lost(common.last[one.replica]) for one in reads)
        ends = {one.rank: one.end(common.last[one.replica]) for one in reads}
        reads = [one.only(common.numbers[one.replica]) for one in reads]
        if self._mode == PER_TOKEN and not self._is_draft:
            self._read_tokens({one.rank: one for one in reads})
        dump = self._write(reads, lost, common.incomplete)
        self._query("expert_record_discard", RecorderState, {"ends": ends})
        return dump

    def _settled_states(self) -> dict[int, RecorderState]:
        """The states once devices have finished all recorded passes, unless these go on."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            states = self.states()
            late = [r for r, state in states.items() if state.pending and not state.on]
            if not late:
                return states
            if time.monotonic() > deadline:
                raise QueryTimeout(f"{self._names(late)} did not finish the recorded passes")
            time.sleep(POLL_SECONDS)

    def _read(self, states: Mapping[int, RecorderState]) -> list[RankRead]:
        pieces: dict[int, list[RecordedRows]] = {rank: [] for rank in states}
        firsts = {rank: state.first for rank, state in states.items()}
        ends = {rank: state.end for rank, state in states.items()}
        while any(firsts[rank] < ends[rank] for rank in states):
            options = {"firsts": firsts, "ends": ends}
            for rank, rows in self._query("expert_record_read", RecordedRows, options).items():
                firsts[rank] = rows.next
                pieces[rank].append(rows)
        return [
            RankRead.of(self._mesh.place(rank), states[rank], pieces[rank])
            for rank in sorted(states)
        ]

    def _read_tokens(self, reads: Mapping[int, RankRead]) -> None:
        buffers = {rank: TokenBuffer(read.passes, read.state) for rank, read in reads.items()}
        firsts = {rank: buffer.first for rank, buffer in buffers.items()}
        ends = {rank: buffer.end for rank, buffer in buffers.items()}
        while any(firsts[rank] < ends[rank] for rank in buffers):
            options = {"firsts": firsts, "ends": ends}
            for rank, found in self._query("expert_record_tokens", RecordedTokens, options).items():
                firsts[rank] = found.next
                buffers[rank].add(found)
        for rank, read in reads.items():
            read.details = token_details(read, buffers[rank], self._num_layers)

    def _write(self, reads: list[RankRead], lost: int, incomplete: int) -> RecordDump:
        num_experts = max(read.state.num_experts for read in reads)
        stem = str(
            _new_folder(DRAFT if self._is_draft else "")
            / f"expert_distribution_recorder_{time.time()}"
        )
        ranks = [read.rank_passes() for read in reads]
        passes = len({(rank.replica, number) for rank in ranks for number in rank.numbers})
        if self._mode in STAT:
            content = stat_content(ranks, self._num_layers, num_experts)
            _write_file(Path(f"{stem}.pt"), content)
            return RecordDump([f"{stem}.pt"], passes, lost, incomplete)
        files = self._write_ranks(stem, ranks, num_experts)
        dropped = sum(one["tokens_dropped"] for rank in ranks for one in rank.details)
        return RecordDump(files, passes, lost, incomplete, dropped)

    def _write_ranks(self, stem: str, ranks: list[RankPasses], num_experts: int) -> list[str]:
        """Writes the files of all ranks or none: the next dump has the same passes again if this
        one fails, and files that stayed would count them twice."""
        written: list[Path] = []
        try:
            for rank in ranks:
                path = Path(f"{stem}_{rank.rank}.pt")
                _write_file(path, self._content(rank, ranks, num_experts))
                written.append(path)
        except BaseException:
            for path in written:
                path.unlink(missing_ok=True)
            raise
        return list(map(str, written))

    def _content(
        self, rank: RankPasses, ranks: list[RankPasses], num_experts: int
    ) -> dict[str, Any]:
        peers = [other for other in ranks if other.replica == rank.replica]
        last_LP = last_placement(peers, self._num_layers, num_experts)
        numbers = [other.rank for other in ranks]
        return pass_content(rank, last_LP, numbers, self._mesh.replicas)

    def _query(
        self, what: str, kind: type[Reply], options: Mapping[str, Any] | None = None
    ) -> dict[int, Reply]:
        """The replies of all ranks."""
        if self._mode is None:
            raise ValueError(NO_RECORDER)
        given = dict(options or {}) | ({"of": DRAFT} if self._is_draft else {})
        replies = self._ask(what, given).replies
        if missing := sorted(set(range(self._mesh.world)) - set(replies)):
            raise QueryTimeout(
                f"{self._names(missing)} did not answer within {ANSWER_SECONDS:g} s: a long step "
                "runs there; send the request again"
            )
        return {
            rank: msgspec.convert(msgspec.to_builtins(reply.value), kind)
            for rank, reply in replies.items()
        }

    def _names(self, ranks: list[int]) -> str:
        return ", ".join(map(self._mesh.describe, ranks))


def _new_folder(inner: str) -> Path:
    folder = Path(os.environ.get(FOLDER_VARIABLE) or DEFAULT_FOLDER) / inner
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecordNotWritten(_refused(folder, error)) from error
    return folder


def _write_file(path: Path, content: Mapping[str, Any]) -> None:
    try:
        write_dump(path, content)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError for a full disk
        raise RecordNotWritten(_refused(path, error)) from error


def _refused(path: Path, error: Exception) -> str:
    reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
    return (
        f"the recorded experts cannot be written to {path}: {reason}; nothing is lost: free space "
        f"or let the server's user write there, and dump again ({FOLDER_VARIABLE} names the folder "
        "at the start)"
    )
