"""Streams beside that of the steps, on which the transfers of two micro-batches run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from moesaic.moe.dispatch.base import CommContext

# Other ranks wait for transfers: they start before the programs of a product that runs.
HIGH_PRIORITY: Final = -1


class SideStreams:
    """One for each lane, and the same for all layers, as a GPU that ranks share has few queues.
    Without a GPU, or where no step overlaps, there are none: what is launched beside the steps runs
    at once.

    Memory that is allocated inside of `beside` is used again only there, behind all that the steps
    have launched by then. Memory from outside is the caller's to keep until `join`."""

    def __init__(self, lanes: int, device: torch.device) -> None:
        self.exist = lanes > 0 and device.type == "cuda"
        count = lanes if self.exist else 0
        self._streams = [torch.cuda.Stream(device, priority=HIGH_PRIORITY) for _ in range(count)]

    @classmethod
    def of(cls, comm: CommContext, lanes: int) -> SideStreams:
        """Those that the dispatchers of all layers share, on the default device."""
        device = torch.get_default_device()
        count = lanes if lanes > 1 or comm.overlaps else 0
        return comm.shared(("side streams", count), lambda: cls(count, device))

    @contextmanager
    def beside(self, lane: int) -> Iterator[None]:
        """Launches inside go to the lane's stream, behind all earlier launches of the current
        one."""
        if not self.exist:
            yield
            return
        stream = self._streams[lane]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield

    def join(self, lane: int) -> None:
        """The current stream waits for the lane's."""
        if self.exist:
            torch.cuda.current_stream().wait_stream(self._streams[lane])
