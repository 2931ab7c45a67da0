"""Detects processes of this node that are stopped or silent."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moesaic.comm.supervise.control_page import ControlPage
from moesaic.comm.supervise.service_spec import Timeouts
from moesaic.core.rank_state import RankState

logger = logging.getLogger(__name__)

# A supervisor that was stalled this long cannot judge what it sees.
LATE: Final = 1.0
# Loading a model, or an overloaded machine, may hold the GIL for long.
PATIENT_FACTOR: Final = 6
# A silence is examined from this share of the limit on.
SUSPECT_SHARE: Final = 0.2
# It is judged once it has been examined for this share of the limit: a supervisor that was stalled
# sees the silence of a starved rank only after the limit.
EXAMINED_SHARE: Final = 0.6
# A rank that waited for a core for this share of its silence is starved and does not hang.
STARVED_SHARE: Final = 0.5
# The exit code that multiprocessing reports when the fork server is gone.
LOST: Final = 255


@dataclass(slots=True)
class Silence:
    """The start of an examination, and how long each thread had waited for a core until then."""

    since: float
    delays: Mapping[str, float]
    is_logged: bool = False


class ProcessWatch:
    """Checks all ranks of the node, about every 0.1 s."""

    def __init__(self, page: ControlPage, timeouts: Timeouts) -> None:
        self._page, self._timeouts = page, timeouts
        self._stopped: dict[int, float] = {}
        self._silent: dict[int, Silence] = {}
        self._looked = 0.0
        self.was_late = False
        """Whether this process was stalled, so that the silence of others proves nothing."""
        self._fair_from = 0.0
        self.is_fair = False
        """Whether that was long enough ago to judge a silence."""

    def look(
        self, pids: Mapping[int, int], now: float, *, starting: Callable[[int], bool]
    ) -> tuple[int, str] | None:
        """The first rank that hangs, and the evidence. `starting`: whether a rank still starts."""
        self.was_late = now - self._looked > LATE
        if self.was_late:
            self._stopped.clear()
            self._silent.clear()
            self._fair_from = now + LATE
        self._looked = now
        self.is_fair = now >= self._fair_from
        if not self.is_fair:
            return None
        for rank, pid in pids.items():
            why = self._stopped_for(rank, pid, now)
            why = why or self._silent_for(rank, pid, now, starting(rank))
            if why:
                return rank, why
        return None

    def _stopped_for(self, rank: int, pid: int, now: float) -> str:
        if process_state(pid) != "T":
            self._stopped.pop(rank, None)
            return ""
        seconds = now - self._stopped.setdefault(rank, now)
        if seconds < self._timeouts.stopped:
            return ""
        return f"hangs: its process {pid} has been stopped (state T) for {seconds:.1f} s"

    def _silent_for(self, rank: int, pid: int, now: float, starting: bool) -> str:
        seen, limit = self._page.snapshot(rank), self._timeouts.beat
        if seen.state == RankState.ABSENT or seen.beat_age < SUSPECT_SHARE * limit:
            self._silent.pop(rank, None)
            return ""
        silence = self._silent.setdefault(rank, Silence(now, run_delays(pid)))
        patience = limit * (PATIENT_FACTOR if starting else 1)
        if seen.beat_age < patience or now - silence.since < EXAMINED_SHARE * limit:
            return ""
        if seen.beat_age < limit * PATIENT_FACTOR and self._is_starved(rank, pid, silence, now):
            return ""
        return f"hangs: it has given no heartbeat for {seen.beat_age:.1f} s"

    def _is_starved(self, rank: int, pid: int, silence: Silence, now: float) -> bool:
        """Whether the machine, and not the rank, delays the heartbeat."""
        delays, seconds = run_delays(pid), now - silence.since
        waited = max((delays[t] - silence.delays.get(t, 0.0) for t in delays), default=0.0)
        if waited < STARVED_SHARE * seconds:
            return False
        if not silence.is_logged:
            silence.is_logged = True
            logger.warning(
                "rank %d has waited for a core for %.1f s of the last %.1f s: the machine has too "
                "much to do",
                rank,
                waited,
                seconds,
            )
        return True


def process_state(pid: int) -> str:
    """The letter of /proc/PID/stat: R, S, D, T (stopped), t (traced), Z; empty if it is gone."""
    return _stat(pid, 0)


def started_at(pid: int) -> str:
    """Distinguishes a process from a later one with the same number; empty if it is gone."""
    return _stat(pid, 19)


def run_delays(pid: int) -> dict[str, float]:
    """Seconds for which each thread of a process was runnable without a core, if reported."""
    found = {}
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            found[file.parent.name] = int(file.read_bytes().split()[1]) / 1e9
        except (OSError, IndexError):
            continue
    return found


def _stat(pid: int, field: int) -> str:
    """A field of /proc/PID/stat, counted from the one after the name."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return ""
    # The name is in parentheses and may contain any character.
    return stat.rpartition(b")")[2].split()[field].decode()


def describe_exit(exit_code: int | None) -> str:
    if exit_code is None:
        return "is gone"
    if exit_code == LOST:
        return "is lost: the fork server has died, and all of its processes with it"
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        name = f" ({signal.Signals(-exit_code).name})"
    except ValueError:
        name = ""
    return f"was killed by signal {-exit_code}{name}"
