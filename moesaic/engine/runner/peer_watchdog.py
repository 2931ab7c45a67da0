"""Ends kernels that wait for other ranks once the supervisor rolls this rank back, or once NCCL has
lost a connection.

A kernel that waits for another rank returns when that rank arrives, when its time is over, or when
the host aborts it. One thread polls the rank's status, which the supervisor changes as soon as
another rank fails or dies, and aborts the kernels then; also NCCL's, which have no window. It polls
NCCL, too: an error of its network ends no kernel. The step fails then, and is rolled back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack

from moesaic.comm.collectives.nccl_collective import NcclCollective
from moesaic.comm.errors import ConnectionLost, WindowAborted
from moesaic.comm.lifecycle import Lifecycle
from moesaic.comm.supervise.control_page import RankStatus
from moesaic.comm.windows.device_window import DeviceWindow
from moesaic.engine.setup.rank_context import RankContext
from moesaic.moe.context import MoeContext

POLL_SECONDS = 0.02
ROLLED_BACK = "the supervisor rolls this rank back"


class PeerWatchdog:
    def __init__(
        self,
        lifecycle: Lifecycle,
        status: RankStatus | None,
        windows: Sequence[DeviceWindow] = (),
        nccl: Sequence[NcclCollective] = (),
        returns: bool = False,
    ) -> None:
        """`status`: None if no supervisor rolls the rank back. `nccl`: what dispatchers use.
        `returns`: whether the others serve while this rank starts."""
        self.lifecycle, self.windows, self._status = lifecycle, tuple(windows), status
        self._nccl, self._returns = tuple(nccl), returns
        self._lost = (-1, "")
        """The generation that has lost a connection, and what is known of it."""
        if status is not None:
            threading.Thread(
                target=self._watch, args=(status,), daemon=True, name="peer-watchdog"
            ).start()

    @classmethod
    def of(cls, moe: MoeContext, ranks: RankContext) -> PeerWatchdog:
        """Watches dispatch buffers and collectives on a device."""
        owners = [*moe.comm.buffers.values(), *ranks.device_collectives]
        found = [getattr(owner, "window", None) for owner in owners]
        windows = [window for window in found if isinstance(window, DeviceWindow)]
        nccl = [one for one in moe.comm.buffers.values() if isinstance(one, NcclCollective)]
        waits = bool(windows or ranks.device_collectives or nccl)
        status = ranks.status if waits else None
        return cls(moe.comm.group.lifecycle, status, windows, nccl, ranks.returns)

    @property
    def nbytes(self) -> int:
        """Device memory of windows, which torch's allocator does not count."""
        return sum(window.region_bytes for window in self.windows)

    def raise_cause(self, error: Exception) -> None:
        """Raises StepRolledBack or ConnectionLost if that is why kernels were aborted; a capture
        that ends so raises an error of its own."""
        causes = (error, error.__context__)
        if self._status is None or not any(isinstance(one, WindowAborted) for one in causes):
            return
        self._status.check()
        generation, lost = self._lost
        if generation == self._status.generation:
            raise ConnectionLost(lost) from error

    def waiting_longer(self, seconds: float) -> AbstractContextManager[object]:
        """Lets kernels launched inside wait at least this long for other ranks."""
        return _all(window.longer_timeout(seconds) for window in self.windows)

    def starting(self, seconds: float) -> AbstractContextManager[object]:
        """For steps that all ranks run at start: lets kernels wait at least this long for others. A
        rank that returns runs them by itself."""
        return self.alone() if self._returns else self.waiting_longer(seconds)

    def compiling_only(self) -> AbstractContextManager[object]:
        """Compiles the kernels launched inside without exchanging anything."""
        return _all(window.isolated() for window in self.windows)

    @property
    def has_nccl(self) -> bool:
        """Whether rows cross between nodes by NCCL."""
        return bool(self._nccl)

    def alone(self) -> AbstractContextManager[object]:
        """As `compiling_only`, where NCCL brings no rows either."""
        stack = ExitStack()
        stack.enter_context(self.compiling_only())
        for one in self._nccl:
            stack.enter_context(one.isolated())
        return stack

    def _watch(self, status: RankStatus) -> None:
        while True:
            time.sleep(POLL_SECONDS)
            with self.lifecycle.lock:
                if status.changed:
                    self.lifecycle.abort(ROLLED_BACK)
                elif lost := self.lifecycle.broken():
                    self._lost = status.generation, lost
                    self.lifecycle.abort(lost)


def _all(contexts: Iterable[AbstractContextManager[object]]) -> ExitStack:
    stack = ExitStack()
    for context in contexts:
        stack.enter_context(context)
    return stack
