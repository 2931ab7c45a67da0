"""Which GPU each rank of a node uses; ranks may share GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

TESTED_SHARERS: Final = 8  # most ranks on one GPU that were tested
PERCENT: Final = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
OVERSUBSCRIPTION: Final = 2  # how many times its even share of a GPU's SMs a rank may use
MAX_MPS_CLIENTS: Final = 60  # ranks of all servers on one MPS daemon; 48 up to Hopper
CROWD_PERCENT: Final = 50  # 66 of an H200's SMs: more than one for each MPS client


def share_gpus(ranks: int, gpus: int) -> tuple[int, ...]:
    """The GPU of each rank of a node: one each, or neighbouring ranks evenly on all GPUs.

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
    """The percentage of a GPU's SMs that each of `sharers` ranks may use.

    Without a limit the kernels of ranks run one after the other, as those that read weights occupy
    every SM: with 8 ranks a step took 1.2 to 1.4 times as long. An even share would leave idle SMs
    unused, so ranks get more. If `crowded` by ranks of other servers, or by many of this one, each
    rank may have a program that waits on an SM of its own, and enough SMs must remain.
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
        f"{len(devices)} ranks share {count_gpus(len(used))} under MPS ({parts}); each has "
        f"at least 1/{most} of a GPU's memory"
    )


def crowding_warning(devices: Sequence[int]) -> str:
    """A warning if more ranks share a GPU than were tested; else empty."""
    most = max_ranks_per_gpu(devices)
    if most <= TESTED_SHARERS:
        return ""
    return (
        f"{most} ranks share a GPU, and more than {TESTED_SHARERS} are untested: CUDA may run out "
        'of queues, which it reports as "out of memory"'
    )


def count_gpus(number: int) -> str:
    return f"{number} GPU{'s' * (number != 1)}"


def max_ranks_per_gpu(devices: Sequence[int]) -> int:
    return max((devices.count(gpu) for gpu in set(devices)), default=0)


def _ranks_on(gpu: int, devices: Sequence[int]) -> str:
    ranks = [rank for rank, device in enumerate(devices) if device == gpu]
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
