"""What the HTTP process of an elastic server has from its keeper, and tells it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from moesaic.comm.launch.supervisor_process import FoundSupervisor, SupervisorAddress
from moesaic.core.stats import ServiceLoss


class Note(msgspec.Struct, omit_defaults=True):
    """One line to the keeper; it keeps what the next HTTP process needs."""

    starting: int = 0
    """The process of a supervisor that starts."""
    supervisor: SupervisorAddress | None = None
    """One that has started."""
    ready: bool = False
    """The server accepts connections."""
    requests: int = 0
    """With `ready`: those of the former HTTP process that ranks still compute."""
    ended: bool = False
    """The server ends, and is not to be started again."""
    loss: ServiceLoss | None = None


@dataclass(slots=True)
class KeeperLink:
    """`life`: how many HTTP processes were lost before this one, the last at `lost`, in seconds on
    the monotonic clock. `losses`: those so far."""

    pid: int
    pipe: int
    life: int = 0
    lost: float = 0.0
    supervisor: SupervisorAddress | None = None
    losses: list[ServiceLoss] = field(default_factory=list)

    def tell(self, note: Note) -> None:
        with suppress(BrokenPipeError):  # this process ends with its keeper
            os.write(self.pipe, msgspec.json.encode(note) + b"\n")

    def note_ready(self, requests: int) -> None:
        """The server accepts connections; ranks compute so many requests of the former process."""
        note_return(self.losses, requests, time.monotonic() - self.lost)
        self.tell(Note(ready=True, requests=requests))

    def find(self) -> FoundSupervisor | None:
        """The supervisor of the former HTTP process, if it lives."""
        if self.supervisor is None:
            return None
        with suppress(OSError):
            return FoundSupervisor(self.supervisor)
        return None


def note_return(losses: Sequence[ServiceLoss], requests: int, seconds: float) -> None:
    """Completes the losses after which an HTTP process is here again."""
    for loss in losses:
        if loss.process == "http" and loss.seconds is None:
            loss.requests, loss.seconds = requests, seconds
