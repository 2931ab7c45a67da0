"""Ranks that go wrong when they are told to, for bench.faults and the tests of faults.

    python -m bench.faulty_rank generate MODEL --tp 2 ...    # the `moesaic` command with such ranks

They are the engine's own ranks, plus handlers of signals: SIGUSR1 raises in the main thread,
SIGUSR2 makes it sleep, SIGRTMIN makes it hold Python's lock meanwhile, SIGRTMIN+1 makes the next
layer that it computes raise, SIGRTMIN+2 makes it take more memory than its control group may have.
Each process bears the name of its rank, so that it is found from outside.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

from bench.memory_group import MOST_BYTES
from moesaic.comm.launch.rank_link import RankLink

TARGET: Final = "bench.faulty_rank:run"
# RANK: this one does not begin to load.
HOLD: Final = "MOESAIC_FAULT_HOLD"
# For how long SIGUSR2 and SIGRTMIN hold a rank up.
PAUSE: Final = "MOESAIC_FAULT_PAUSE"
ERROR: Final = "as it was told to"
TAKEN_BYTES: Final = MOST_BYTES


def run(link: RankLink) -> None:
    from moesaic.engine.worker import worker as rank

    signal.signal(signal.SIGUSR1, _raise)
    signal.signal(signal.SIGUSR2, _sleep)
    signal.signal(signal.SIGRTMIN, _hold_lock)
    signal.signal(signal.SIGRTMIN + 1, _raise_in_a_layer)
    signal.signal(signal.SIGRTMIN + 2, _take_memory)
    Path("/proc/self/comm").write_text(f"rank{link.rank}")
    while os.environ.get(HOLD) == str(link.rank):
        time.sleep(0.01)
    rank.run(link)


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    raise ValueError(ERROR)


def _raise_in_a_layer(number: int, frame: FrameType | None) -> None:
    from torch.nn.modules.module import register_module_forward_pre_hook

    def fail(*_: object) -> NoReturn:
        handle.remove()
        raise ValueError(ERROR)

    handle = register_module_forward_pre_hook(fail)


def _take_memory(number: int, frame: FrameType | None) -> None:
    """The kernel kills this process on the way."""
    taken = [b"\1" * TAKEN_BYTES for _ in range(4)]
    del taken


def _sleep(number: int, frame: FrameType | None) -> None:
    time.sleep(_seconds())


def _hold_lock(number: int, frame: FrameType | None) -> None:
    # PyDLL keeps the lock during the call.
    ctypes.PyDLL(None).sleep(int(_seconds()))


def _seconds() -> float:
    return float(os.environ.get(PAUSE, "5"))


def main() -> int:
    from moesaic.cli.main import main as command
    from moesaic.engine.frontend import core_client as remote

    remote.TARGET = TARGET
    return command()


if __name__ == "__main__":
    sys.exit(main())
