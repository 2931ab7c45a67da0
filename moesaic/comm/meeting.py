"""A group of ranks that meet at a store and nowhere else: enough to make windows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]

from moesaic.comm.control import Seat
from moesaic.comm.errors import PeerTimeout
from moesaic.comm.group import LOOPBACK, Peers, RankGroup

# How long a rank sleeps between two looks at the store: short at first, as peers mostly come
# together, then long enough for the store to serve many ranks.
FIRST_PAUSE: Final = 0.001
LONGEST_PAUSE: Final = 0.03


class StoreGroup(Peers):
    """Ranks that exchange bytes through a store, operation after operation in the same order.

    Use a name once per store. A group of one needs no store. Like a wait on a window, a wait here
    ends with EpochChanged when the supervisor declares a new epoch. `timeout`: of a meeting, which
    ranks may come to at very different times while they load.
    """

    def __init__(
        self,
        store: Store | None,
        name: str,
        rank: int,
        size: int,
        timeout: float,
        nodes: Sequence[int] = (),
        seat: Seat | None = None,
    ) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} of group {name}: give one of 0..{size - 1}")
        if nodes and len(nodes) != size:
            raise ValueError(f"nodes {list(nodes)} of group {name}: give {size}, one for each rank")
        if size > 1 and store is None:
            raise ValueError(f"group {name} of {size} ranks: give the store where they meet")
        self.name, self.rank, self.size, self.timeout = name, rank, size, timeout
        self.nodes, self.seat = tuple(nodes), seat
        self._store = PrefixStore(name, store) if store is not None and size > 1 else None
        self._sequence = 0
        self._last_complete = ""
        self.host = LOOPBACK
        """The address that gloo binds, if collectives are asked for."""
        self.collective_timeout = timeout
        """Of those collectives."""
        self._collectives: RankGroup | None = None

    def collectives(self) -> RankGroup:
        if self._collectives is None:
            if self._store is None:
                self._collectives = RankGroup.alone(self.name, self.collective_timeout)
            else:
                self.barrier("form a group")
                self._collectives = RankGroup.form(
                    self._store,
                    "gloo",
                    self.rank,
                    self.size,
                    self.collective_timeout,
                    host=self.host,
                )
        return self._collectives

    def all_gather_bytes(self, data: bytes, operation: str) -> list[bytes]:
        """What each rank gave, of any length."""
        if self._store is None:
            return [data]
        self._sequence += 1
        started = time.monotonic()
        keys = [self._key(self._sequence, rank) for rank in range(self.size)]
        try:
            # It takes bytes as well, whatever its stub says.
            self._store.set(keys[self.rank], data)  # type: ignore[arg-type]
            self._await(self._store, keys, operation, started)
            parts: list[bytes] = self._store.multi_get(keys)
            # All have come here, so all have read what was given before.
            if self._sequence > 1:
                self._store.delete_key(self._key(self._sequence - 1, self.rank))
        except DistError as error:
            # The store went down with its host. Who is missing is then anybody's guess.
            raise PeerTimeout((), operation, time.monotonic() - started) from error
        self._last_complete = operation
        return parts

    def barrier(self, operation: str) -> None:
        self.all_gather_bytes(b"", operation)

    def _await(self, store: Store, keys: list[str], operation: str, started: float) -> None:
        """Until all keys are there. Looks instead of waiting: the store's own wait cannot be
        interrupted by a new epoch, and writes a warning each time that it ends without a result."""
        pause = FIRST_PAUSE
        while not store.check(keys):
            if self.seat is not None:
                self.seat.check()
            seconds = time.monotonic() - started
            if seconds >= self.timeout:
                missing = tuple(r for r, key in enumerate(keys) if not store.check([key]))
                # None, if the last one came just now.
                if not missing:
                    return
                seen = dict.fromkeys(missing, self._last_complete)
                raise PeerTimeout(missing, operation, self.timeout, seen)
            time.sleep(min(pause, self.timeout - seconds))
            pause = min(2 * pause, LONGEST_PAUSE)

    @staticmethod
    def _key(sequence: int, rank: int) -> str:
        return f"{sequence}/{rank}"
