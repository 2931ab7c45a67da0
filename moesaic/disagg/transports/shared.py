"""KV caches in shared memory, between ranks on CPUs of one machine."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from moesaic.comm.windows.shared_memory import map_memory
from moesaic.disagg.messages import Place
from moesaic.disagg.send_buffer import SendBuffer, split


class SharedHandle(msgspec.Struct, array_like=True, frozen=True):
    """The memory behind /proc/PID/fd/N has a random name: no other machine has one like it."""

    path: str
    name: str
    nbytes: int

    @classmethod
    def of(cls, buffer: SendBuffer) -> SharedHandle:
        return cls(buffer.path, buffer.name, buffer.shared_bytes)

    def map(self) -> Tensor:
        return torch.frombuffer(map_memory(self.path, self.name, self.nbytes), dtype=torch.uint8)


def export(buffer: SendBuffer) -> bytes:
    return msgspec.msgpack.encode(SharedHandle.of(buffer))


class SharedSource:
    """The send buffer of a process on this machine."""

    def __init__(self, handle: bytes, device: torch.device) -> None:
        shared = msgspec.msgpack.decode(handle, type=SharedHandle)
        self._epochs, self._data = split(shared.map())

    def read(self, place: Place) -> Tensor:
        """A view of the memory itself."""
        return self._data[place.offset : place.offset + place.nbytes]

    def is_current(self, place: Place) -> bool:
        return int(self._epochs[place.entry]) == place.epoch

    def close(self) -> None:
        """It is unmapped with the last view of it."""
