"""Ends kernels that wait for other ranks once the supervisor rolls this rank back.

A kernel that waits for another rank returns when that rank arrives, when its time is over, or when
the host aborts it. One thread polls the rank's status, which the supervisor changes as soon as
another rank fails or dies, and aborts the kernels then; also NCCL's, which have no window.
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

POLL_SECONDS = 0.02
ROLLED_BACK = "the supervisor calls this rank back"


class WindowOwner(Protocol):
    """A dispatcher's exchange, or a collective."""

    window: DeviceWindow

    def check(self) -> None:
        """Raises the error that a kernel has found."""


class PeerWatchdog:
    """`collective`: one that waits on the device without a window."""

    def __init__(
        self,
        owners: Sequence[WindowOwner],
        status: RankStatus | None,
        collective: Collective | None = None,
    ) -> None:
        self.owners = tuple(owners)
        self._status = status if self.owners or collective is not None else None
        self._collective = SingleRank() if collective is None else collective
        self._lock = threading.Lock()
        if self._status is not None:
            threading.Thread(target=self._watch, daemon=True, name="peer-watchdog").start()

    @classmethod
    def of(cls, moe: MoeContext, ranks: RankContext) -> PeerWatchdog:
        """Watches dispatchers and collectives on a device."""
        owners = [*moe.comm.buffers.values(), ranks.on_device]
        found = [one for one in owners if isinstance(getattr(one, "window", None), DeviceWindow)]
        return cls(found, ranks.seat, None if ranks.on_device in found else ranks.on_device)

    @property
    def nbytes(self) -> int:
        """Device memory of windows, which torch's allocator does not count."""
        return sum(owner.window.region_bytes for owner in self.owners)

    def check(self) -> None:
        """Raises the error that a kernel has found."""
        for owner in self.owners:
            owner.check()
        self._collective.check()

    def raise_if_rolled_back(self, error: Exception) -> None:
        """Raises StepRolledBack if that is why kernels were aborted."""
        if isinstance(error, WindowAborted) and self._status is not None:
            self._status.check()

    def waiting_longer(self, seconds: float) -> AbstractContextManager[object]:
        """Lets kernels launched inside wait at least this long for other ranks."""
        return _all(owner.window.patient(seconds) for owner in self.owners)

    def compiling_only(self) -> AbstractContextManager[object]:
        """Compiles the kernels launched inside without exchanging anything."""
        return _all(owner.window.apart() for owner in self.owners)

    def abort(self, reason: str) -> None:
        for owner in self.owners:
            owner.window.abort(reason)
        self._collective.abandon(reason)

    @property
    def keeps_graphs(self) -> bool:
        """Whether captured graphs can be replayed after a restart."""
        return self._collective.keeps_graphs

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Windows restart inside: an earlier rollback must not abort them afterwards."""
        with self._lock:
            yield

    def _watch(self) -> None:
        assert self._status is not None
        while True:
            time.sleep(POLL_SECONDS)
            with self._lock:
                if self._status.changed:
                    self.abort(ROLLED_BACK)


def _all(contexts: Iterable[AbstractContextManager[object]]) -> ExitStack:
    stack = ExitStack()
    for context in contexts:
        stack.enter_context(context)
    return stack
