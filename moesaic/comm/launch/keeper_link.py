"""What the HTTP process of an elastic server has from its keeper, and tells it."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NoReturn

import msgspec

from moesaic.comm.launch.supervisor_process import FoundSupervisor, SupervisorAddress
from moesaic.core.stats import ServiceLoss, ServiceLosses

# Requests and queries of one HTTP process: those of the next have higher numbers.
LIFE_BITS: Final = 40


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
    stands_by: bool = False
    """This node may lead the service later, and has joined the one that does."""
    leads: bool = False
    """Its supervisor leads the service from now on."""
    yields: bool = False
    """Another node leads it: the next process of this one stands by."""


@dataclass(slots=True)
class KeeperLink:
    """`life`: how many HTTP processes were lost before this one, the last at `lost`, in seconds on
    the monotonic clock. `losses`: those so far."""

    pid: int
    pipe: int
    life: int = 0
    lost: float = 0.0
    supervisor: SupervisorAddress | None = None
    losses: ServiceLosses = field(default_factory=ServiceLosses)
    meeting: int = -1
    """The descriptor of a socket that is bound to this node's part of --dist-init-addr."""
    leads: bool = True
    """The supervisor of this node leads the service, or did before the last loss."""
    has_taken_over: bool = False
    """From another node, in this life."""

    @property
    def is_start(self) -> bool:
        """Whether the service starts, with this process."""
        return not (self.life or self.has_taken_over)

    @property
    def first_number(self) -> int:
        """Above those of former processes, to which ranks may still answer."""
        return self.life << LIFE_BITS

    def tell(self, note: Note) -> None:
        data = msgspec.json.encode(note) + b"\n"
        with suppress(BrokenPipeError):  # this process ends with its keeper
            while data:
                data = data[os.write(self.pipe, data) :]

    def stand_by(self) -> NoReturn:
        """Another node leads the service: the next process of this one joins it."""
        self.tell(Note(yields=True))
        os._exit(1)

    def note_ready(self, requests: int) -> None:
        """The server accepts connections; ranks compute so many requests of the former process."""
        for process in ("http", "node"):
            self.losses.note_return(process, requests, time.monotonic() - self.lost)
        self.tell(Note(ready=True, requests=requests))

    def find(self) -> FoundSupervisor | None:
        """The supervisor of the former HTTP process, if it lives."""
        if self.supervisor is None:
            return None
        with suppress(OSError):
            return FoundSupervisor(self.supervisor)
        return None
