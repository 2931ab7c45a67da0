"""A rank's eye on the memory by which its kernels and those of other ranks exchange rows.

A kernel that waits for another rank does not come back before that is there, its time is over, or
the host gives it up. So one thread looks whether the supervisor calls the rank back, which it does
as soon as another rank has failed or died, and then makes the kernels give up. NCCL's are no
different, though it has no window.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack

from moesaic.comm.errors import WindowAborted
from moesaic.comm.lifecycle import Lifecycle
from moesaic.comm.supervise.control_page import RankStatus
from moesaic.comm.windows.device_window import DeviceWindow
from moesaic.engine.worker.rank_context import RankContext
from moesaic.moe.context import MoeContext

# How soon kernels give up once the rank is called back.
LOOK_SECONDS = 0.02
CALLED_BACK = "the supervisor calls this rank back"


class PeerWatchdog:
    def __init__(
        self, lifecycle: Lifecycle, status: RankStatus | None, windows: Sequence[DeviceWindow] = ()
    ) -> None:
        """`status`: None where no supervisor calls the rank back."""
        self.lifecycle, self.windows, self._status = lifecycle, tuple(windows), status
        if status is not None:
            threading.Thread(target=self._watch, args=(status,), daemon=True, name="recall").start()

    @classmethod
    def of(cls, moe: MoeContext, ranks: RankContext) -> PeerWatchdog:
        """Watches dispatch buffers and collectives on a device."""
        owners = [*moe.comm.buffers.values(), ranks.on_device]
        found = [getattr(owner, "window", None) for owner in owners]
        windows = [window for window in found if isinstance(window, DeviceWindow)]
        waits = windows or ranks.on_device is not None
        return cls(moe.comm.group.lifecycle, ranks.status if waits else None, windows)

    @property
    def nbytes(self) -> int:
        """What windows take of the device; torch's allocator does not know of it."""
        return sum(window.region_bytes for window in self.windows)

    def check(self) -> None:
        """Raises what a kernel has found wrong."""
        self.lifecycle.check()

    def explain(self, error: Exception) -> None:
        """Raises why kernels gave up where that is the error: the rank is called back."""
        if isinstance(error, WindowAborted) and self._status is not None:
            self._status.check()

    def patient(self, seconds: float) -> AbstractContextManager[object]:
        """Kernels that are launched inside wait so long for other ranks, if that is longer."""
        return _all(window.longer_timeout(seconds) for window in self.windows)

    def apart(self) -> AbstractContextManager[object]:
        """Kernels that are launched inside are compiled, and that is all."""
        return _all(window.isolated() for window in self.windows)

    def abort(self, reason: str) -> None:
        self.lifecycle.abort(reason)

    def _watch(self, status: RankStatus) -> None:
        while True:
            time.sleep(LOOK_SECONDS)
            with self.lifecycle.lock:
                if status.changed:
                    self.abort(CALLED_BACK)


def _all(contexts: Iterable[AbstractContextManager[object]]) -> ExitStack:
    stack = ExitStack()
    for context in contexts:
        stack.enter_context(context)
    return stack
