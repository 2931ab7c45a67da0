"""One place to restart everything that ranks share after a step is rolled back.

Collectives, pipes and dispatch buffers register when they are made. All ranks of a group make them
in the same order, and they restart in that order.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Membership:
    """A generation of steps and the ranks that take part in it."""

    generation: int
    """Grows with every rollback; all ranks use the same number."""
    active: tuple[int, ...]
    """The live ranks, ascending."""
    epoch: int = 1
    """Grows when the set of live ranks changes."""

    def within(self, ranks: Sequence[int]) -> Membership:
        """The same membership in the numbering of a group whose members are `ranks`."""
        live = set(self.active)
        return replace(self, active=tuple(n for n, rank in enumerate(ranks) if rank in live))

    def check(self, rank: int, size: int, previous: int, limit: int) -> None:
        """Raises ValueError unless member `rank` of `size` can enter this generation next."""
        if not previous < self.generation < limit:
            raise ValueError(
                f"generation {self.generation}: give one above {previous} and below {limit}"
            )
        if rank not in self.active or not set(self.active) <= set(range(size)):
            raise ValueError(
                f"active ranks {list(self.active)}: give some of 0..{size - 1}, with {rank} among "
                "them"
            )


class Participant:
    """State that belongs to one generation of steps."""

    keeps_graphs: bool = True
    """Whether a CUDA graph that contains its operations can be replayed after a restart."""

    def restart(self, membership: Membership) -> None:
        """Drops what is in flight. All active ranks call it with the same membership, after all of
        them have abandoned their step; `membership` uses the numbering of the group."""
        raise NotImplementedError

    def abort(self, reason: str) -> None:
        """Ends this rank's waits on a device, now and until the restart; `check` then raises
        WindowAborted. Returns at once, from any thread, and may be repeated. Waits on the host
        end by themselves: they check the rank's status."""
        assert reason

    def broken(self) -> str:
        """Why waits on a device will never end, unless they are aborted; empty: nothing is known.
        Any thread may ask."""
        return ""

    def check(self) -> None:
        """Raises the errors that device waits have recorded so far."""


class Lifecycle:
    """The participants of one rank process, in the order in which they were registered."""

    def __init__(self, membership: Membership) -> None:
        self.membership = membership
        self.lock = threading.RLock()
        """Held during a restart: an abort of the old generation must not reach the new one."""
        self._participants: list[tuple[Callable[[], Participant | None], tuple[int, ...]]] = []

    def register(self, participant: Participant, ranks: Sequence[int]) -> None:
        """`ranks`: the members of its group. A participant leaves when it is garbage."""
        with self.lock:
            known = [entry for entry in self._participants if entry[0]() is not None]
            self._participants = [*known, (weakref.ref(participant), tuple(ranks))]

    def restart(self, membership: Membership | None = None) -> None:
        """None: the next generation of the same ranks, for a rank that computes alone."""
        with self.lock:
            last = self.membership
            self.membership = membership or replace(last, generation=last.generation + 1)
            for participant, ranks in self._live():
                participant.restart(self.membership.within(ranks))

    def abort(self, reason: str) -> None:
        with self.lock:
            for participant, _ in self._live():
                participant.abort(reason)

    def broken(self) -> str:
        """The first reason of a participant."""
        with self.lock:
            found = (participant.broken() for participant, _ in self._live())
            return next(filter(None, found), "")

    def check(self) -> None:
        for participant, _ in self._live():
            participant.check()

    @property
    def keeps_graphs(self) -> bool:
        return all(participant.keeps_graphs for participant, _ in self._live())

    def _live(self) -> Iterator[tuple[Participant, tuple[int, ...]]]:
        for find, ranks in self._participants:
            participant = find()
            if participant is not None:
                yield participant, ranks
