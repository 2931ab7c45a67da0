"""A control group of the kernel in which a process is killed for lack of memory."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

# What a process may take beyond what it had when it came.
MOST_BYTES: Final = 16 << 20
# How long the kernel may take to forget a process that it has killed.
LEAVE_SECONDS: Final = 5.0


class MemoryGroup:
    """A group below `folder`, a memory group of version 1 or 2 in which this process may make
    others. What a process had before stays with the group that it came from."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / f"moesaic-bench-{os.getpid()}"
        self._folder.mkdir()
        name = "memory.limit_in_bytes" if self._is_old else "memory.max"
        (self._folder / name).write_text(str(MOST_BYTES))
        if (swap := self._folder / "memory.swap.max").exists():
            swap.write_text("0")

    @property
    def _is_old(self) -> bool:
        return (self._folder / "memory.limit_in_bytes").exists()

    @property
    def kills(self) -> int:
        """How many processes the kernel has killed in it."""
        name = "memory.oom_control" if self._is_old else "memory.events"
        lines = (self._folder / name).read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))

    def take(self, pid: int) -> bool:
        """Whether the process was there."""
        try:
            (self._folder / "cgroup.procs").write_text(str(pid))
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        deadline = time.monotonic() + LEAVE_SECONDS
        while (self._folder / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        self._folder.rmdir()
