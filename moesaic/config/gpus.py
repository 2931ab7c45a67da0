"""Which GPU each rank of a node uses, where there may be more ranks than GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

TESTED_SHARERS: Final = 8
"""Ranks on one GPU that were tried."""
PERCENT: Final = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
OVERSUBSCRIPTION: Final = 2
"""How many times its even part of a GPU's processors a rank may compute on."""
MAX_MPS_CLIENTS: Final = 60
"""Ranks of all servers on an MPS daemon; 48 up to Hopper."""
CROWD_PERCENT: Final = 50
"""66 of an H200's processors: more than hold a program of each of those."""


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
    there may be ranks of other servers. Many ranks are a crowd as well: each may have a program
    that waits, on a processor of its own; whichever these are, some must be left.

    All at once, the kernels of ranks would come one after the other: those that read weights take
    every processor there is, and leave each other none. 8 ranks took 1.2 to 1.4 times as long for a
    step. With an even part each nobody could use what others do not; so it is more.
    """
    percent = min(100, -(-100 * OVERSUBSCRIPTION // sharers))
    return max(percent, CROWD_PERCENT) if crowded or sharers > TESTED_SHARERS else percent


def describe_shares(devices: Sequence[int]) -> str:
    """For the log: `5 ranks share 2 GPUs under MPS (GPU 0: ranks 0-2, GPU 1: ranks 3-4); …`."""
    if not is_shared(devices):
        return f"{len(devices)} rank{'s' * (len(devices) > 1)}, a GPU each"
    used, most = sorted(set(devices)), max_ranks_per_gpu(devices)
    parts = ", ".join(f"GPU {gpu}: {_ranks_on(gpu, devices)}" for gpu in used)
    return (
        f"{len(devices)} ranks share {count_gpus(len(used))} under MPS ({parts}); each has its "
        f"part of the memory, 1/{most} of a GPU or more"
    )


def crowding_warning(devices: Sequence[int]) -> str:
    """What to expect of more ranks on a GPU than were tried; empty: there are no more."""
    most = max_ranks_per_gpu(devices)
    if most <= TESTED_SHARERS:
        return ""
    return (
        f"{most} ranks share a GPU, and more than {TESTED_SHARERS} were not tried: CUDA may have no "
        'queues left for them, which it calls "out of memory"'
    )


def count_gpus(number: int) -> str:
    return f"{number} GPU{'s' * (number != 1)}"


def max_ranks_per_gpu(devices: Sequence[int]) -> int:
    """Ranks."""
    return max((devices.count(gpu) for gpu in set(devices)), default=0)


def _ranks_on(gpu: int, devices: Sequence[int]) -> str:
    ranks = [rank for rank, device in enumerate(devices) if device == gpu]
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
