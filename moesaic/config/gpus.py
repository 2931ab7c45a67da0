"""Which GPU each rank of a node uses, where there may be more ranks than GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

MOST_SHARERS: Final = 8
"""Ranks on one GPU that were tried."""


def share_gpus(ranks: int, gpus: int) -> tuple[int, ...]:
    """The GPU of each rank of a node: one each, or as many on each as on any other, give or take
    one, neighbours together.

    5 ranks on 2 GPUs: (0, 0, 0, 1, 1).
    """
    if ranks < 1:
        raise ValueError(f"{ranks} ranks: give 1 or more")
    if gpus < 1:
        raise ValueError(f"{ranks} ranks and {gpus} GPUs: give --device cpu where there is none")
    return tuple(range(ranks)) if ranks <= gpus else tuple(r * gpus // ranks for r in range(ranks))


def is_shared(devices: Sequence[int]) -> bool:
    """Whether ranks need MPS."""
    return len(set(devices)) < len(devices)


def share_of(rank: int, devices: Sequence[int]) -> float:
    """The part of its GPU's memory that a rank may count on."""
    return 1 / devices.count(devices[rank])


def describe_shares(devices: Sequence[int]) -> str:
    """For the log: `5 ranks share 2 GPUs under MPS (GPU 0: ranks 0-2, GPU 1: ranks 3-4); …`."""
    if not is_shared(devices):
        return f"{len(devices)} rank{'s' * (len(devices) > 1)}, a GPU each"
    used = sorted(set(devices))
    parts = ", ".join(f"GPU {gpu}: {_ranks_on(gpu, devices)}" for gpu in used)
    return (
        f"{len(devices)} ranks share {count_gpus(len(used))} under MPS ({parts}); each has its "
        f"part of the memory, 1/{_most_on_one(devices)} of a GPU or more"
    )


def crowding(devices: Sequence[int]) -> str:
    """What to expect of more ranks on a GPU than were tried; empty: there are no more."""
    most = _most_on_one(devices)
    if most <= MOST_SHARERS:
        return ""
    return (
        f"{most} ranks share a GPU, and more than {MOST_SHARERS} were not tried: CUDA may have no "
        'queues left for them, which it calls "out of memory"'
    )


def count_gpus(number: int) -> str:
    return f"{number} GPU{'s' * (number != 1)}"


def _most_on_one(devices: Sequence[int]) -> int:
    return max((devices.count(gpu) for gpu in set(devices)), default=0)


def _ranks_on(gpu: int, devices: Sequence[int]) -> str:
    ranks = [rank for rank, device in enumerate(devices) if device == gpu]
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
