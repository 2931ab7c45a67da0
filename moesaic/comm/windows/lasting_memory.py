"""Memory of ranks that outlives their processes: the supervisor of their node holds it.

A rank that is started again finds what its predecessor has written, and ranks that go on without it
can read that, too. The kernel frees the memory with the service.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Final

import torch
from torch import Tensor

from moesaic.comm.network.store import StoreClient
from moesaic.comm.windows.shared_memory import map_memory

NAME: Final = "moesaic-weights"


class LastingMemory:
    """What a rank asks the store of its node for. `name`: of one of a rank's pieces of memory."""

    def __init__(self, store: StoreClient, rank: int) -> None:
        self._store, self._rank = store, rank

    def own(self, name: str, length: int) -> Tensor:
        """This rank's memory in bytes: zeros, or what its predecessor has left. ValueError if that
        has another length."""
        key = _key(name, self._rank)
        known = self._length(key)
        if known is None:
            self._store.set(key, str(length).encode())
        elif known != length:
            raise ValueError(f"it has {known} bytes, not {length}")
        return self._map(key, length)

    def of(self, name: str, rank: int) -> Tensor | None:
        """The memory of another rank, if it has some."""
        key = _key(name, rank)
        length = self._length(key)
        return None if length is None else self._map(key, length)

    def _length(self, key: str) -> int | None:
        (value,) = self._store.get_now([key])
        return None if value is None else int(value)

    def _map(self, key: str, length: int) -> Tensor:
        memory = map_memory(self._store.memory(key, NAME, length), NAME, length)
        with contextlib.suppress(OSError):  # where the system has no large pages for it
            memory.madvise(mmap.MADV_HUGEPAGE)
        with torch.inference_mode(False):
            return torch.frombuffer(memory, dtype=torch.uint8)


def _key(name: str, rank: int) -> str:
    return f"lasting {name} {rank}"
