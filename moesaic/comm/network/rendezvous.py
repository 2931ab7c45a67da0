"""A group of ranks that exchange bytes through the store only: enough to create windows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property

from moesaic.comm.collectives.group import Peers, RankGroup
from moesaic.comm.errors import PeerTimeout
from moesaic.comm.network.held_memory import HeldMemory
from moesaic.comm.network.store import StoreClient
from moesaic.comm.network.torch_store import TorchStore


class StoreGroup(Peers):
    """Ranks that run the same exchanges in the same order. Use a name once per store; a group of
    one needs none. Like a wait on a window, a wait here raises EpochChanged when the supervisor
    declares a new epoch. `timeout` covers ranks that load for different times.

    With `lasts` the store keeps all exchanges and the memory of windows: a rank that is restarted
    gets what its predecessor got, so that it starts without the others."""

    def __init__(
        self,
        store: StoreClient | None,
        name: str,
        rank: int,
        size: int,
        timeout: float,
        nodes: Sequence[int] = (),
    ) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} of group {name}: give one of 0..{size - 1}")
        if nodes and len(nodes) != size:
            raise ValueError(f"nodes {list(nodes)} of group {name}: give {size}, one for each rank")
        if size > 1 and store is None:
            raise ValueError(f"group {name} of {size} ranks: give the store that they share")
        self.name, self.rank, self.size, self.timeout = name, rank, size, timeout
        self.nodes = tuple(nodes)
        self._store = store if size > 1 else None
        self._sequence = 0
        self._last_complete = ""
        self.collective_timeout = timeout
        self.lasts = False
        self.node_store = self._store
        """The one of this node's supervisor, which keeps memory of ranks that are lost."""
        self.connect_memory: Callable[[], HeldMemory] | None = None
        """Where this node keeps memory of GPUs."""

    @cached_property
    def store(self) -> TorchStore:
        if self._store is None:
            raise RuntimeError(f"group {self.name} has one rank: it has no store")
        return TorchStore(self._store, f"{self.name}/torch", self.timeout)

    def collectives(self) -> RankGroup:
        return self._collectives

    @cached_property
    def _collectives(self) -> RankGroup:
        seconds = self.collective_timeout
        if self._store is None:
            return RankGroup.alone(self.name, seconds)
        self.barrier("form a group")
        name = f"{self.name}/gloo"
        return RankGroup.form(self._store, name, self.rank, self.size, seconds, host=self.host)

    def all_gather_bytes(self, data: bytes, operation: str) -> list[bytes]:
        if self._store is None:
            return [data]
        self._sequence += 1
        started = time.monotonic()
        keys = [self._key(self._sequence, rank) for rank in range(self.size)]
        try:
            if self.lasts:
                kept = [part for part in self._store.get_now(keys) if part is not None]
                self.repeats = len(kept) == self.size
                if self.repeats:
                    return kept
            self._store.set(keys[self.rank], data)
            check = None if self.status is None else self.status.check
            missing = self._store.wait(keys, self.timeout, check)
            parts = [] if missing else self._store.get_now(keys)
            # All ranks are here, so all have read the previous values.
            if self._sequence > 1 and not missing and not self.lasts:
                self._store.delete(self._key(self._sequence - 1, self.rank))
        except OSError as error:
            # The store ended with its host, so that the missing ranks are unknown.
            raise PeerTimeout((), operation, time.monotonic() - started) from error
        if missing:
            late = tuple(keys.index(key) for key in missing)
            seen = dict.fromkeys(late, self._last_complete)
            raise PeerTimeout(late, operation, self.timeout, seen).among(self.members)
        self._last_complete = operation
        return [part for part in parts if part is not None]

    def lasting_memory(self, name: str, length: int) -> str | None:
        if self.node_store is None or not self.lasts:
            return None
        return self.node_store.memory(f"{self.name}/memory {self._sequence}", name, length)

    def held_memory(self) -> tuple[HeldMemory, str] | None:
        if self._store is None or not self.lasts or self.connect_memory is None:
            return None
        return self.connect_memory(), f"{self.name}/{self._sequence}"

    def barrier(self, operation: str) -> None:
        self.all_gather_bytes(b"", operation)

    def _key(self, sequence: int, rank: int) -> str:
        return f"{self.name}/{sequence}/{rank}"
