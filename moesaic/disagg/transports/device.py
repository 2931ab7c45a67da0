"""KV caches in the memory of a GPU that another process reads (CUDA IPC), on one machine."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from moesaic.disagg.messages import Place
from moesaic.disagg.send_buffer import SendBuffer, split
from moesaic.disagg.transports.cuda_ipc import CudaError, DeviceMemory
from moesaic.disagg.transports.shared import SharedHandle


class DeviceHandle(msgspec.Struct, array_like=True, frozen=True):
    """The memory of a GPU, and the host's memory with its epochs."""

    epochs: SharedHandle
    memory: bytes
    nbytes: int


def export(buffer: SendBuffer) -> bytes:
    assert buffer.memory is not None, "a send buffer of a GPU"
    shared = SharedHandle.of(buffer)
    return msgspec.msgpack.encode(DeviceHandle(shared, buffer.memory.handle, buffer.nbytes))


class DeviceSource:
    """The send buffer of a process that uses a GPU of this machine."""

    def __init__(self, handle: bytes, device: torch.device) -> None:
        found = msgspec.msgpack.decode(handle, type=DeviceHandle)
        self._epochs, _ = split(found.epochs.map())  # first: it shows that this is its machine
        if device.type != "cuda":
            raise CudaError("this rank computes on the CPU")
        self._memory = DeviceMemory.open(found.memory, found.nbytes, device)

    def read(self, place: Place) -> Tensor:
        """A view of the memory itself. Whoever reads it waits for that before `is_current`."""
        return self._memory.tensor[place.offset : place.offset + place.nbytes]

    def is_current(self, place: Place) -> bool:
        return int(self._epochs[place.entry]) == place.epoch

    def close(self) -> None:
        self._memory.close()
