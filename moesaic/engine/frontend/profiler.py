"""The profiler: it records the spans of all ranks and writes a trace.

Ranks start recording at different steps. The trace has only the steps that all ranks of a replica
have recorded in full.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from moesaic.comm.mesh import Mesh
from moesaic.engine.frontend.queries import RankAnswers
from moesaic.engine.worker.rank_stats import CHUNK, RecordingState
from moesaic.observe.spans import CAPACITY, Span, SpanKind, Spans, unpack
from moesaic.observe.trace import Track, write_trace

logger = logging.getLogger(__name__)

# Names the folder of traces where --profile-dir does not; only the operator can set either.
FOLDER_VARIABLE: Final = "MOESAIC_PROFILER_DIR"
PRIVATE: Final = 0o700
POLL_SECONDS: Final = 0.1
Ask = Callable[[str, Mapping[str, Any]], RankAnswers]


class Profiler:
    """May be called from any thread. `spans` are those of this process."""

    def __init__(
        self, ask: Callable[..., Any], mesh: Mesh, spans: Spans, profile_dir: str | None = None
    ) -> None:
        self._ask, self._mesh, self._spans = ask, mesh, spans
        self._profile_dir = profile_dir
        self._lock = threading.Lock()
        self._recording: Recording | None = None
        self._path: Path | None = None
        """The last trace's file, until `stop` returns it."""
        self.steps = 0
        """Steps in the last trace, of all replicas together."""
        self._closed = threading.Event()

    def start(self, output_dir: str | Path | None, num_steps: int | None) -> None:
        if num_steps is not None and num_steps < 1:
            raise ValueError(f"num_steps is {num_steps}: record at least one step")
        folder = Path(output_dir or trace_folder(self._profile_dir))
        with self._lock:
            if self._recording is not None:
                raise ProfileRunning("a profile is being recorded already: stop it first")
            _check_folder(folder)
            recording = Recording(self._ask, self._mesh, self._spans, folder)
            recording.start(num_steps)
            self._recording, self._path = recording, None
        if num_steps is not None:
            name, target = "moesaic-profile", self._write_when_over
            threading.Thread(target=target, args=(recording,), name=name, daemon=True).start()

    def stop(self) -> Path:
        with self._lock:
            if self._recording is not None:
                self._write(self._recording)
            path, self._path = self._path, None
            if path is None:
                raise ValueError("no profile is being recorded: start one first")
            return path

    def close(self) -> None:
        """Discards a running recording."""
        self._closed.set()

    def _write_when_over(self, recording: Recording) -> None:
        try:
            while not recording.is_over():
                if self._closed.wait(POLL_SECONDS) or self._recording is not recording:
                    return
            with self._lock:
                if self._recording is recording:
                    self._write(recording)
        except Exception as error:
            if not self._closed.is_set():
                logger.warning("the profile could not be written: %s", error)

    def _write(self, recording: Recording) -> None:
        """A new recording may start even if this fails."""
        self._recording = None
        self._path = recording.write()
        self.steps = recording.num_steps


class ProfileRunning(ValueError):
    """Only one recording runs at a time."""


class Recording:
    def __init__(self, ask: Ask, mesh: Mesh, spans: Spans, folder: Path) -> None:
        self._ask, self._mesh, self._spans, self._folder = ask, mesh, spans, folder
        self._clocks: dict[int, tuple[int, int]] = {}
        """By rank: the shortest round trip, and how far the rank's clock was ahead then."""
        self._steps: int | None = None
        self._ranks: set[int] = set()
        self.num_steps = 0

    def start(self, num_steps: int | None) -> None:
        states = self._query("record")
        self._ranks = set(states)
        self._spans.start()
        self._steps = num_steps
        if num_steps is not None:
            last: dict[int, int] = {}
            for rank, state in states.items():
                replica = self._replica(rank)
                last[replica] = max(state.first, last.get(replica, 0))
            firsts = {rank: last[self._replica(rank)] for rank in states}
            self._query("record_until", {"steps": num_steps, "firsts": firsts})

    def is_over(self) -> bool:
        return not any(state.on for state in self._query("record_state").values())

    def write(self) -> Path:
        states = self._query("record_stop")
        self._spans.stop()
        missing = sorted(self._ranks - set(states))
        data = self._read(states)
        steps = self._common_steps(states, data)
        self.num_steps = sum(len(found) for found in steps.values())
        tracks = []
        for rank, spans in sorted(data.items()):
            kept = [span for span in spans if span.step in steps[self._replica(rank)]]
            name = self._mesh.describe(rank)
            tracks.append(Track(rank + 1, name, kept, self._ahead(rank)))
        tracks.insert(0, self._front(tracks))
        path = self._folder / f"moesaic-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        path = _unused(path, ".trace.json.gz")
        write_trace(path, tracks, self._facts(steps, states, missing))
        number = sum(len(track.spans) for track in tracks)
        logger.info("profile: %d spans written to %r", number, str(path))
        return path

    def _read(self, states: Mapping[int, RecordingState]) -> dict[int, list[Span]]:
        found: dict[int, list[Span]] = {rank: [] for rank in states}
        count = max((state.count for state in states.values()), default=0)
        for first in range(0, count or 1, CHUNK):
            for rank, chunk in self._query("record_read", {"first": first}).items():
                found.setdefault(rank, []).extend(unpack(chunk.data))
        return found

    def _common_steps(
        self, states: Mapping[int, RecordingState], data: Mapping[int, list[Span]]
    ) -> dict[int, set[int]]:
        """By replica: the steps that all of its ranks have recorded in full."""
        common: dict[int, set[int]] = {}
        for rank, state in states.items():
            steps = {span.step for span in data[rank] if span.kind == SpanKind.STEP}
            steps = {step for step in steps if step >= state.first}
            replica = self._replica(rank)
            common[replica] = common[replica] & steps if replica in common else steps
        return {replica: set(sorted(steps)[: self._steps]) for replica, steps in common.items()}

    def _front(self, ranks: Sequence[Track]) -> Track:
        """The spans of this process, up to the end of the last recorded step."""
        own = list(unpack(self._spans.read(0, CAPACITY)))
        self._spans.free()
        if self._steps is not None:
            steps = ((t, span) for t in ranks for span in t.spans if span.kind == SpanKind.STEP)
            end = max((span.end - track.ahead for track, span in steps), default=0)
            own = [span for span in own if span.begin <= end]
        return Track(0, "engine", own)

    def _facts(
        self,
        steps: Mapping[int, set[int]],
        states: Mapping[int, RecordingState],
        missing: list[int],
    ) -> dict[str, Any]:
        remote = [rank for rank in states if self._mesh.node_of(rank) > 0]
        return {
            "program": "moesaic",
            "steps": {str(replica): sorted(found) for replica, found in steps.items()},
            "spans_lost": {str(rank): state.lost for rank, state in states.items() if state.lost},
            "ranks_missing": missing,
            "clock": "CLOCK_MONOTONIC of node 0; clocks of other nodes are estimated from the "
            "shortest round trip of a question",
            "clock_error_us": {str(rank): self._clocks[rank][0] / 2000 for rank in sorted(remote)},
        }

    def _query(
        self, what: str, options: Mapping[str, Any] | None = None
    ) -> dict[int, RecordingState]:
        states = {}
        for rank, reply in self._ask(what, options or {}).replies.items():
            state = msgspec.convert(msgspec.to_builtins(reply.value), RecordingState)
            trip = reply.received - reply.sent
            ahead = state.now - (reply.sent + reply.received) // 2
            self._clocks[rank] = min(self._clocks.get(rank, (trip, ahead)), (trip, ahead))
            states[rank] = state
        return states

    def _ahead(self, rank: int) -> int:
        """Processes on one machine share a clock."""
        return self._clocks[rank][1] if self._mesh.node_of(rank) > 0 else 0

    def _replica(self, rank: int) -> int:
        return self._mesh.place(rank).replica


def trace_folder(profile_dir: str | None = None) -> Path:
    """The folder of --profile-dir, or the default one, which is private: the working directory may
    be served or shared."""
    if folder := profile_dir or os.environ.get(FOLDER_VARIABLE):
        return Path(folder).absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "moesaic" / "profile"


def _check_folder(folder: Path) -> None:
    """ValueError if a trace cannot be written there. New folders are private."""
    refused = f"the profile cannot be written to {str(folder)!r}"  # a client may have named it
    try:
        for parent in [*reversed(folder.parents), folder]:
            parent.mkdir(mode=PRIVATE, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{refused}: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{refused}: no permission")


def _unused(path: Path, suffix: str) -> Path:
    """A path that is new even if two recordings end in the same second."""
    number, found = 1, path.with_name(path.name + suffix)
    while found.exists():
        number += 1
        found = path.with_name(f"{path.name}-{number}{suffix}")
    return found
