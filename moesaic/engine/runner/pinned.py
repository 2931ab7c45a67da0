"""Numbers between host and device, without waiting for either.

A ring of pinned buffers in each direction: a buffer is used again only when the copy that was made
of it is over.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

# More than the copies of steps that may be under way: nobody waits for a buffer then.
DEPTH = 16
# Short against a step, long against asking.
PAUSE = 10e-6


class Mark:
    """A point in the work of a device that can be waited for; on CPU it is always reached."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def record(self) -> None:
        if self._event is not None:
            self._event.record()

    def wait(self, timeout: float, what: str) -> None:
        """`timeout`: in seconds; TimeoutError names `what`."""
        if self._event is None:
            return
        limit = time.monotonic() + timeout
        while not self._event.query():
            if time.monotonic() > limit:
                raise TimeoutError(f"{what} did not end on the GPU within {timeout:g} s")
            time.sleep(PAUSE)


class PinnedRing:
    """Buffers of int64 in pinned memory, `DEPTH` of them, that grow as needed."""

    def __init__(self, device: torch.device, size: int, timeout: float) -> None:
        self.device, self._timeout = device, timeout
        self._buffers = [self._make(size) for _ in range(DEPTH)]
        self._marks = [Mark(device) for _ in range(DEPTH)]
        self._next = 0

    def take(self, size: int) -> tuple[Tensor, Mark]:
        """A buffer for so many numbers, and the mark to record once it has been copied."""
        place = self._next = (self._next + 1) % DEPTH
        self._marks[place].wait(self._timeout, f"the copy {DEPTH} copies ago")
        if self._buffers[place].numel() < size:
            self._buffers[place] = self._make(2 * size)
        return self._buffers[place][:size], self._marks[place]

    def _make(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int64, pin_memory=self.device.type == "cuda")
