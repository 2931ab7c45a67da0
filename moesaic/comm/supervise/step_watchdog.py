"""Compares the step and the operation of all ranks, and finds the one that stalls a step."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from moesaic.comm.mesh import Mesh
from moesaic.core.messages import SlowStep
from moesaic.core.rank_state import RankSnapshot, RankState

logger = logging.getLogger(__name__)

HANG_STEPS: Final = 20
"""A step may take this many times its usual time."""
SLOW_STEPS: Final = 3
"""The same, before it is logged."""
NAMED_RANKS: Final = 8
KEPT_BEGINS: Final = 16


@dataclass(frozen=True, slots=True)
class Suspicion:
    """`ranks` have stalled the others for `seconds`."""

    ranks: tuple[int, ...]
    seconds: float
    text: str


class StepWatchdog:
    def __init__(self, mesh: Mesh, patience: float, hang: float) -> None:
        self._mesh, self._patience, self._hang = mesh, patience, hang
        self._usual: dict[int, float] = {}
        """How many seconds a step of each replica usually takes."""
        self._last: dict[int, tuple[int, float]] = {}
        """The last step of each replica, and when it was first seen."""
        self._logged: dict[int, tuple[object, ...]] = {}
        self._begins: dict[int, dict[int, dict[int, float]]] = {}
        """What the ranks of each replica had computed by the last steps. Several steps are kept, as
        the next one may start before the report of a slow one arrives."""

    def look(self, seen: Mapping[int, RankSnapshot], now: float) -> Suspicion | None:
        """Logs a new suspicion once, and returns the first that has lasted too long."""
        for replica in range(self._mesh.replicas):
            ranks = self._mesh.ranks_of_replica(replica)
            here = {rank: seen[rank] for rank in ranks if rank in seen}
            if len(here) < 2:
                continue
            leader = here[min(here)]
            self._time_steps(replica, leader.step, leader.state != RankState.IDLE, now)
            self._note_begin(replica, leader.step, here)
            hung = self._judge(replica, here)
            if hung is not None:
                return hung
        return None

    def pause(self) -> None:
        """Replaces `look` while the supervisor cannot judge."""
        self._last.clear()

    def explain_slow(self, slow: SlowStep, seen: Mapping[int, RankSnapshot]) -> str:
        """Describes which rank computed longest in a step that has just ended."""
        text = f"step {slow.step} took {slow.seconds:.1f} s, usually {slow.usual:.2f} s"
        before = self._begins.get(slow.replica, {}).get(slow.step, {})
        spent = {rank: seen[rank].computed_so_far - before[rank] for rank in before if rank in seen}
        if not spent:
            return text
        longest = max(spent, key=spent.__getitem__)
        return (
            f"{text}: {self._mesh.describe(longest)} computed longest, for {spent[longest]:.1f} s, "
            f"the others for at most {sorted([0.0, *spent.values()])[-2]:.1f} s"
        )

    def _time_steps(self, replica: int, step: int, stepping: bool, now: float) -> None:
        last_step, last_time = self._last.get(replica, (step, now))
        if step > last_step and stepping:
            seconds = (now - last_time) / (step - last_step)
            usual = self._usual.get(replica, seconds)
            self._usual[replica] = 0.8 * usual + 0.2 * seconds
        if step != last_step or not stepping:
            last_time = now
        self._last[replica] = (step, last_time)

    def _note_begin(self, replica: int, step: int, seen: Mapping[int, RankSnapshot]) -> None:
        """Records what was computed when a step is seen for the first time."""
        begins = self._begins.setdefault(replica, {})
        if step not in begins:
            begins[step] = {rank: one.computed_so_far for rank, one in seen.items()}
            while len(begins) > KEPT_BEGINS:
                del begins[next(iter(begins))]

    def suspect(self, seen: Mapping[int, RankSnapshot], patience: float) -> Suspicion | None:
        """The ranks of one replica that the others wait for."""
        waiting = {r: s for r, s in seen.items() if s.state == RankState.WAITING}
        busy = {r: s for r, s in seen.items() if s.state != RankState.WAITING}
        seconds = min(s.state_age for s in seen.values())
        if not waiting or seconds < patience:
            return None
        odd = busy or self._behind(waiting)
        return Suspicion(tuple(odd), seconds, self._describe(odd, waiting))

    def _judge(self, replica: int, seen: Mapping[int, RankSnapshot]) -> Suspicion | None:
        usual = self._usual.get(replica, 0.0)
        found = self.suspect(seen, max(self._patience, SLOW_STEPS * usual))
        if found is None:
            self._logged.pop(replica, None)
            return None
        episode = (found.ranks, *(s.progress for s in seen.values()))
        if self._logged.get(replica) != episode:
            self._logged[replica] = episode
            logger.warning("%s", found.text)
        return found if found.seconds >= max(self._hang, HANG_STEPS * usual) else None

    def _behind(self, waiting: Mapping[int, RankSnapshot]) -> dict[int, RankSnapshot]:
        """Where all ranks wait: those in an earlier step than others of their stage, else those in
        another operation than most, else all."""
        stages: dict[int, dict[int, RankSnapshot]] = {}
        for rank, sight in waiting.items():
            stages.setdefault(self._mesh.place(rank).stage, {})[rank] = sight
        behind = {
            rank: sight
            for stage in stages.values()
            for rank, sight in stage.items()
            if sight.step < max(s.step for s in stage.values())
        }
        if behind:
            return behind
        for stage in stages.values():
            counts = Counter(s.operation for s in stage.values())
            common = counts.most_common(1)[0][0]
            behind |= {r: s for r, s in stage.items() if s.operation != common}
        return behind or dict(waiting)

    def _describe(
        self, odd: Mapping[int, RankSnapshot], waiting: Mapping[int, RankSnapshot]
    ) -> str:
        names = "; ".join(f"{self._mesh.describe(r)}: {s}" for r, s in _first(odd))
        others = {r: s for r, s in waiting.items() if r not in odd}
        if not others:
            return f"a step makes no progress, and all ranks wait: {names}"
        waits = ", ".join(
            f"rank {r} in {s.operation!r} of step {s.step} for {s.state_age:.1f} s"
            for r, s in _first(others)
        )
        return f"a step makes no progress: the odd one out is {names}. Waiting for it: {waits}"


def _first(seen: Mapping[int, RankSnapshot]) -> list[tuple[int, RankSnapshot]]:
    return sorted(seen.items())[:NAMED_RANKS]
