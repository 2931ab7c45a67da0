"""A rank's eye on the memory by which its kernels and those of other ranks exchange rows.

A kernel that waits for another rank does not come back before that is there, its time is over, or
the host gives it up. So one thread looks whether the supervisor calls the rank back, which it does
as soon as another rank has failed or died, and then makes the kernels give up. NCCL's are no
different, though it has no window.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

from moesaic.comm.collectives.collective import Collective, SingleRank
from moesaic.comm.errors import WindowAborted
from moesaic.comm.supervise.control_page import RankStatus
from moesaic.comm.windows.device_window import DeviceWindow
from moesaic.engine.worker.rank_context import RankContext
from moesaic.moe.context import MoeContext

# How soon kernels give up once the rank is called back.
LOOK_SECONDS = 0.02
CALLED_BACK = "the supervisor calls this rank back"


class Owner(Protocol):
    """A dispatcher's exchange, or a collective."""

    window: DeviceWindow

    def check(self) -> None:
        """Raises what a kernel has found wrong."""


class PeerWatchdog:
    def __init__(
        self, owners: Sequence[Owner], seat: RankStatus | None, collective: Collective | None = None
    ) -> None:
        """`collective`: what waits on the device and is no window's."""
        self.owners = tuple(owners)
        self._seat = seat if self.owners or collective is not None else None
        self._collective = SingleRank() if collective is None else collective
        self._lock = threading.Lock()
        if self._seat is not None:
            args = (self._seat,)
            threading.Thread(target=self._watch, args=args, daemon=True, name="recall").start()

    @classmethod
    def of(cls, moe: MoeContext, ranks: RankContext) -> PeerWatchdog:
        """Of dispatchers and collectives on a device."""
        owners = [*moe.comm.buffers.values(), ranks.on_device]
        found = [one for one in owners if isinstance(getattr(one, "window", None), DeviceWindow)]
        return cls(found, ranks.seat, None if ranks.on_device in found else ranks.on_device)

    @property
    def nbytes(self) -> int:
        """What windows take of the device; torch's allocator does not know of it."""
        return sum(owner.window.region_bytes for owner in self.owners)

    def check(self) -> None:
        """Raises what a kernel has found wrong."""
        for owner in self.owners:
            owner.check()
        self._collective.check()

    def explain(self, error: Exception) -> None:
        """Raises why kernels gave up where that is the error: the rank is called back."""
        if isinstance(error, WindowAborted) and self._seat is not None:
            self._seat.check()

    def patient(self, seconds: float) -> AbstractContextManager[object]:
        """Kernels that are launched inside wait so long for other ranks, if that is longer."""
        return _all(owner.window.patient(seconds) for owner in self.owners)

    def apart(self) -> AbstractContextManager[object]:
        """Kernels that are launched inside are compiled, and that is all."""
        return _all(owner.window.apart() for owner in self.owners)

    def abort(self, reason: str) -> None:
        for owner in self.owners:
            owner.window.abort(reason)
        self._collective.abandon(reason)

    @property
    def keep_graphs(self) -> bool:
        """Whether graphs captured before can be replayed once all has restarted."""
        return self._collective.keeps_graphs

    @property
    @contextmanager
    def quiet(self) -> Iterator[None]:
        """While windows restart: what was true before must not abort them after."""
        with self._lock:
            yield

    def _watch(self, seat: RankStatus) -> None:
        while True:
            time.sleep(LOOK_SECONDS)
            with self._lock:
                if seat.changed:
                    self.abort(CALLED_BACK)


def _all(contexts: Iterable[AbstractContextManager[object]]) -> ExitStack:
    stack = ExitStack()
    for context in contexts:
        stack.enter_context(context)
    return stack
