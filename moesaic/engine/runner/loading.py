"""What a rank needs before it loads a model: memory for weights and KV cache."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace
from typing import Final

import torch

from moesaic.config import ServerArgs
from moesaic.engine.setup.device_memory import GIB, DeviceRoom, HostRoom, gpu_sharers
from moesaic.engine.setup.rank_context import RankContext

logger = logging.getLogger(__name__)

# How long a driver may take to free the memory of a process that is gone.
FREED_SECONDS: Final = 20.0
POLL_SECONDS: Final = 0.05
# Of what a predecessor found free: the other ranks have loaded more kernels since.
ENOUGH: Final = 0.9


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The machine's memory, which the ranks of a node share."""

    ranks: RankContext = field(repr=False)

    def room(self, windows: int) -> HostRoom:
        """What is there before any rank loads weights; `windows` are not filled yet. A rank that is
        started again gets what the first start found: its own part of that is free."""
        room = self.left()
        room = replace(room, free=self.ranks.least(room.free, "look at what is free"))
        # Other replicas do not wait: what is free may already lack their weights.
        return room if self.ranks.mesh.replicas == 1 else replace(room, free=room.total)

    def left(self, windows: int = 0) -> HostRoom:
        """What is free now."""
        return HostRoom.now(self.ranks.mesh.ranks_per_node)


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """This rank's part of its GPU, which `sharers` ranks use."""

    device: torch.device
    sharers: int
    ranks: RankContext = field(repr=False)

    def room(self, windows: int) -> DeviceRoom:
        """The part before any rank loads weights, and without the `windows` allocated so far."""
        room = self.left()
        free = self.ranks.first_value(room.free, "look at what is free")
        if self.ranks.returns:
            self._await_free(int(ENOUGH * free))
        return replace(room, free=free + windows)

    def left(self, windows: int = 0) -> DeviceRoom:
        """What is free now; this rank holds `windows` outside torch's allocator."""
        room = DeviceRoom.of(self.device)
        part = room.part(self.sharers).holding(windows)
        if not self.ranks.returns:
            return part
        # The others have taken their parts already.
        return replace(part, free=min(room.free, part.total))

    def _await_free(self, wanted: int) -> None:
        """Waits until the driver has freed what this rank's predecessor held."""
        began = time.monotonic()
        while (free := torch.cuda.mem_get_info(self.device)[0]) < wanted:
            if time.monotonic() - began > FREED_SECONDS:
                logger.warning(
                    "%.1f GiB are free after %.0f s, and %.1f GiB were at the first start",
                    *(free / GIB, FREED_SECONDS, wanted / ENOUGH / GIB),
                )
                return
            time.sleep(POLL_SECONDS)


def _wait_for_all(ranks: RankContext) -> None:
    """Until all ranks of the replica have looked at what is free."""
    ranks.least(0, "look at what is free")


def rank_memory(
    args: ServerArgs, device: torch.device, ranks: RankContext
) -> HostMemory | GpuMemory:
    if device.type == "cuda":
        return GpuMemory(device, gpu_sharers(args, ranks.place.rank), ranks)
    return HostMemory(ranks)
