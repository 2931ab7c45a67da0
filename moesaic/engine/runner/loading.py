"""What a rank needs before it loads a model: memory for weights and KV cache."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch

from moesaic.config import ServerArgs
from moesaic.engine.setup.device_memory import (
    GIB,
    CacheRequest,
    DeviceRoom,
    Replicas,
    check_weights_fit,
    cpu_cache_tokens,
    gpu_cache_tokens,
    gpu_sharers,
    total_memory,
)
from moesaic.engine.setup.rank_context import RankContext

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The machine's memory, which the ranks of a node share."""

    ranks: int

    def check_weights(self, name: str, nbytes: int, smaller: str, replicas: Replicas) -> None:
        """Without this check the kernel would kill the process while weights are written."""
        if nbytes * self.ranks > total_memory():
            smaller = replicas.fewer(nbytes - total_memory() // self.ranks) + smaller
            each = f" in {self.ranks} ranks" if self.ranks > 1 else ""
            raise ValueError(
                f"the weights of {name} take {nbytes * self.ranks / GIB:.1f} GiB{each} and this "
                f"machine has {total_memory() / GIB:.1f} GiB: use {smaller}"
            )

    def cache_tokens(self, args: ServerArgs, cache: CacheRequest) -> int:
        return cpu_cache_tokens(args, cache, self.ranks)


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """This rank's part of its GPU, which `sharers` ranks use."""

    device: torch.device
    sharers: int
    ranks: RankContext = field(repr=False)

    def check_weights(self, name: str, nbytes: int, smaller: str, replicas: Replicas) -> None:
        room = self._room()
        self.ranks.least(0, "look at what is free")  # before any rank allocates
        check_weights_fit(name, nbytes, room, smaller, replicas)

    def cache_tokens(self, args: ServerArgs, cache: CacheRequest) -> int:
        room = self._room().holding(cache.window_bytes)
        logger.info("memory: %s", room)
        return gpu_cache_tokens(args, cache, room)

    def _room(self) -> DeviceRoom:
        return DeviceRoom.of(self.device).part(self.sharers)


def rank_memory(
    args: ServerArgs, device: torch.device, ranks: RankContext
) -> HostMemory | GpuMemory:
    if device.type == "cuda":
        return GpuMemory(device, gpu_sharers(args, ranks.place.rank), ranks)
    return HostMemory(ranks.mesh.ranks_per_node)
