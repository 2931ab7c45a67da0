"""The memory of a prefill instance's rank in which KV caches wait for ranks that fetch them.

Nobody but its owner writes to it: a rank of another instance reads a region, and then looks whether
the region still has the epoch that it was told. So what comes too late is never taken for something
else, whoever is slow, stopped or dead.
"""

from __future__ import annotations

import os
import secrets
import threading
from bisect import insort
from typing import Final

import numpy as np
import torch
from torch import Tensor

from moesaic.comm.windows.shared_memory import create_memory, map_memory, round_up
from moesaic.disagg.messages import Place
from moesaic.disagg.transports.cuda_ipc import DeviceMemory

# Of regions that are in use at the same time.
ENTRIES: Final = 1024
EPOCH_BYTES: Final = 8
ALIGNMENT: Final = 256
MIB: Final = 1 << 20
# By the kind of the device: the most that a send buffer takes, and that a region does.
MOST_BYTES: Final = {"cpu": 256 * MIB, "cuda": 1024 * MIB}
MOST_REGION: Final = {"cpu": 8 * MIB, "cuda": 256 * MIB}


def send_buffer_bytes(cache_bytes_per_token: int, context_length: int, device: str) -> int:
    """As much as a prompt can have, within bounds. `device`: cpu or cuda."""
    wanted = cache_bytes_per_token * context_length
    return round_up(min(max(wanted, MIB), MOST_BYTES[device]), MIB)


class SendBuffer:
    """`data` is on `device`, the epochs of its regions are in shared memory of the host."""

    def __init__(self, nbytes: int, device: torch.device | str = "cpu") -> None:
        self.nbytes, self.device = nbytes, torch.device(device)
        self.largest = min(MOST_REGION[self.device.type], nbytes // 4)
        """The bytes of a region, so that one does not hold up others for long."""
        on_host = self.device.type == "cpu"
        self.name = f"moesaic-kv-{secrets.token_hex(16)}"
        self.shared_bytes = ENTRIES * EPOCH_BYTES + nbytes * on_host
        descriptor = create_memory(self.name, self.shared_bytes)
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
        self.shared = torch.frombuffer(
            map_memory(self.path, self.name, self.shared_bytes), dtype=torch.uint8
        )
        self.epochs, self.data = split(self.shared)
        self.memory: DeviceMemory | None = None
        if not on_host:
            self.memory = DeviceMemory.allocate(nbytes, self.device)
            self.data = self.memory.tensor
        self.changed = threading.Condition()
        self._holes = [(0, nbytes)]
        """Offset and size of what is free, in order."""
        self._entries = list(range(ENTRIES))

    def take(self, nbytes: int) -> Place | None:
        """A region, if there is room for it now."""
        assert 0 < nbytes <= self.largest, f"a region of {nbytes} bytes in {self.nbytes}"
        size = round_up(nbytes, ALIGNMENT)
        with self.changed:
            number = next((n for n, hole in enumerate(self._holes) if hole[1] >= size), None)
            if number is None or not self._entries:
                return None
            offset, room = self._holes[number]
            self._holes[number : number + 1] = [(offset + size, room - size)] * (room > size)
            entry = self._entries.pop()
            return Place(offset, nbytes, entry, int(self.epochs[entry]))

    def give_back(self, place: Place) -> None:
        """Whoever still reads it finds another epoch afterwards."""
        size = round_up(place.nbytes, ALIGNMENT)
        with self.changed:
            assert self.epochs[place.entry] == place.epoch, f"{place} was given back"
            self.epochs[place.entry] += 1
            self._entries.append(place.entry)
            insort(self._holes, (place.offset, size))
            merged: list[tuple[int, int]] = []
            for offset, room in self._holes:
                if merged and sum(merged[-1]) == offset:
                    offset, room = merged[-1][0], merged.pop()[1] + room
                merged.append((offset, room))
            self._holes = merged
            self.changed.notify_all()

    def at(self, place: Place) -> Tensor:
        """The bytes of a region."""
        return self.data[place.offset : place.offset + place.nbytes]

    @property
    def free_bytes(self) -> int:
        with self.changed:
            return sum(size for _, size in self._holes)


def split(shared: Tensor) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], Tensor]:
    """The epochs, and what is behind them."""
    epochs = shared[: ENTRIES * EPOCH_BYTES].numpy().view(np.int64)
    return epochs, shared[ENTRIES * EPOCH_BYTES :]
