"""Under torchrun, which starts one process per rank: the first process of each node launches, and
the others wait for its end.

The launcher and its supervisor start the ranks, so that they are watched, named and ended as usual.
torchrun's own store is at MASTER_ADDR:MASTER_PORT; nodes connect to the next port.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moesaic.comm.launch.node_place import NodePlace
from moesaic.comm.supervise.run_folder import held, mark_of, user_folder
from moesaic.core.addresses import host_and_port

NAMES: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
POLL_SECONDS: Final = 0.1
LAST_PORT: Final = 65535


@dataclass(frozen=True, slots=True)
class Torchrun:
    """torchrun's environment; `place` overrides the flags of nodes."""

    world: int
    local_rank: int
    nnodes: int
    node_rank: int
    dist_init_addr: str | None
    restarts: int

    @classmethod
    def find(cls, environment: Mapping[str, str] = os.environ) -> Torchrun | None:
        """None if torchrun did not start this process."""
        if "TORCHELASTIC_RUN_ID" not in environment:
            return None
        missing = [name for name in NAMES if not environment.get(name, "").isdigit()]
        if missing:
            raise ValueError(f"TORCHELASTIC_RUN_ID is set, but {missing} are not: use torchrun")
        _, local_rank, world, local_world, node_rank = (int(environment[name]) for name in NAMES)
        if world % local_world:
            raise ValueError(
                f"{world} processes of torchrun, {local_world} of them here: give each node as many"
            )
        nnodes = world // local_world
        return cls(
            world=world,
            local_rank=local_rank,
            nnodes=nnodes,
            node_rank=node_rank,
            dist_init_addr=_meeting_point(environment) if nnodes > 1 else None,
            restarts=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )

    @property
    def place(self) -> NodePlace:
        return NodePlace("torchrun", self.nnodes, self.node_rank, self.dist_init_addr)

    @property
    def is_launcher(self) -> bool:
        return self.local_rank == 0

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Holds a lock while the service lives; the kernel drops it when the launcher dies."""
        path = self._path()
        with held(path.parent):
            file = path.open("w", encoding="ascii")
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(str(os.getpid()))
            file.flush()
        try:
            yield
        finally:
            file.close()

    def wait_for_launcher(self) -> None:
        """For the other processes: returns when the launcher has ended."""
        parent = os.getppid()
        path = self._path()
        while not _is_written(path):
            if os.getppid() != parent:
                return  # torchrun itself is gone
            time.sleep(POLL_SECONDS)
        with suppress(FileNotFoundError), path.open(encoding="ascii") as file:
            fcntl.flock(file, fcntl.LOCK_SH)

    def _path(self) -> Path:
        """All processes of one torchrun on a node have the same parent."""
        return user_folder() / mark_of("torchrun", os.getppid(), self.restarts)


def _is_written(path: Path) -> bool:
    """Whether the launcher has started: it writes the file under its lock."""
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False


def _meeting_point(environment: Mapping[str, str]) -> str:
    port = int(environment["MASTER_PORT"])
    return host_and_port(environment["MASTER_ADDR"], port + 1 if port < LAST_PORT else port - 1)
