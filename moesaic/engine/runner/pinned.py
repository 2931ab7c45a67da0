"""Copies of integers between host and device that block neither.

Each direction has a ring of pinned buffers; a buffer is reused once its last copy has completed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]

# More than the copies of all in-flight steps, so that no copy waits for a buffer.
DEPTH = 16
# Short compared with a step, long compared with a query.
POLL_SECONDS = 10e-6


class DeviceEvent:
    """A point in the device's stream that the host can wait for; on CPU it has always passed."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def record(self) -> None:
        if self._event is not None:
            self._event.record()

    @property
    def has_passed(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self, timeout: float, what: str) -> None:
        """Raises a TimeoutError that names `what` after `timeout` seconds."""
        limit = time.monotonic() + timeout
        while not self.has_passed:
            if time.monotonic() > limit:
                raise TimeoutError(f"{what} did not end on the GPU within {timeout:g} s")
            time.sleep(POLL_SECONDS)


class PinnedRing:
    """`DEPTH` pinned int64 buffers that grow as needed."""

    def __init__(self, device: torch.device, size: int, timeout: float) -> None:
        self.device, self._timeout = device, timeout
        self._buffers = [self._make(size) for _ in range(DEPTH)]
        self._events = [DeviceEvent(device) for _ in range(DEPTH)]
        self._next = 0

    def next_buffer(self, size: int) -> tuple[Tensor, DeviceEvent]:
        """A buffer of `size` numbers, and the event to record after its copy."""
        place = self._next = (self._next + 1) % DEPTH
        self._events[place].wait(self._timeout, f"the copy {DEPTH} copies ago")
        if self._buffers[place].numel() < size:
            self._buffers[place] = self._make(2 * size)
        return self._buffers[place][:size], self._events[place]

    def upload(self, *columns: Sequence[int] | Ints) -> list[Tensor]:
        """Copies all columns to the device in one transfer."""
        sizes = [len(column) for column in columns]
        host, event = self.next_buffer(sum(sizes))
        np.concatenate(columns, out=host.numpy(), casting="unsafe")  # an empty list has floats
        # On CPU this must be a copy, too: the buffer is reused.
        packed = host.to(self.device, non_blocking=True, copy=True)
        event.record()
        return list(packed.split_with_sizes(sizes))

    def _make(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int64, pin_memory=self.device.type == "cuda")
