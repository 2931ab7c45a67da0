"""Which GPU each rank of a node uses, where there may be more ranks than GPUs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

MOST_SHARERS: Final = 8
"""Ranks on one GPU that were tried."""
PERCENT: Final = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
SPARE: Final = 2
"""How many times its even part of a GPU's processors a rank may compute on."""
MOST_CLIENTS: Final = 60
"""Ranks of all servers on an MPS daemon; 48 up to Hopper."""
CROWD_PERCENT: Final = 50
"""Of an H200's 132 processors: more than those have."""


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


def processor_percent(sharers: int, crowded: bool = False) -> int:
    """The part of a GPU's processors that each of so many ranks on it may compute on. `crowded`:
    besides ranks of other servers, each of which may have a program that waits, on a processor of
    its own; whichever these are, some must be left.

    All at once, the kernels of ranks would come one after the other: those that read weights take
    every processor there is, and leave each other none. 8 ranks took 1.2 to 1.4 times as long for a
    step. With an even part each nobody could use what others do not; so it is more.
    """
    return max(min(100, -(-100 * SPARE // sharers)), CROWD_PERCENT if crowded else 0)


def describe_shares(devices: Sequence[int], crowded: bool = False) -> str:
    """For the log: `5 ranks share 2 GPUs under MPS (GPU 0: ranks 0-2, GPU 1: ranks 3-4); …`."""
    if not is_shared(devices):
        return f"{len(devices)} rank{'s' * (len(devices) > 1)}, a GPU each"
    used, most = sorted(set(devices)), most_on_one(devices)
    parts = ", ".join(f"GPU {gpu}: {_ranks_on(gpu, devices)}" for gpu in used)
    text = (
        f"{len(devices)} ranks share {count_gpus(len(used))} under MPS ({parts}); each has its "
        f"part of the memory, 1/{most} of a GPU or more"
    )
    if given := os.environ.get(PERCENT):
        return f"{text}, and computes on as many processors as {PERCENT}={given} says"
    if (percent := processor_percent(most, crowded)) == 100:
        return text
    return f"{text}, and computes on {percent}% of the processors at most ({PERCENT})"


def crowding(devices: Sequence[int]) -> str:
    """What to expect of more ranks on a GPU than were tried; empty: there are no more."""
    most = most_on_one(devices)
    if most <= MOST_SHARERS:
        return ""
    return (
        f"{most} ranks share a GPU, and more than {MOST_SHARERS} were not tried: CUDA may have no "
        'queues left for them, which it calls "out of memory"'
    )


def count_gpus(number: int) -> str:
    return f"{number} GPU{'s' * (number != 1)}"


def most_on_one(devices: Sequence[int]) -> int:
    """Ranks."""
    return max((devices.count(gpu) for gpu in set(devices)), default=0)


def _ranks_on(gpu: int, devices: Sequence[int]) -> str:
    ranks = [rank for rank, device in enumerate(devices) if device == gpu]
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
