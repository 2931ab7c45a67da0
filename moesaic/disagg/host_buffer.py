"""Bytes on their way between a connection and a device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class HostBuffer:
    """Memory of the host that is used again and again, by one thread. A GPU copies from and to it
    without another one in between."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def of(self, nbytes: int) -> Tensor:
        """Valid until the next call."""
        if nbytes > self._bytes.nbytes:
            pinned = self._stream is not None
            self._bytes = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        return self._bytes[:nbytes]

    def copy_of(self, data: Tensor) -> Tensor:
        """The same bytes on the host: themselves if they are there. Steps are not waited for."""
        if self._stream is None:
            return data
        with torch.cuda.stream(self._stream):
            found = self.of(data.nbytes).copy_(data, non_blocking=True)
        self._stream.synchronize()
        return found


def bytes_of(data: Tensor) -> memoryview:
    """Of a tensor of uint8 on the host: its memory."""
    raw: npt.NDArray[np.uint8] = data.numpy()
    return raw.data
