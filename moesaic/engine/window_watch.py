"""A rank's eye on the memory by which its kernels and those of other ranks exchange rows.

A kernel that waits for another rank does not come back before that is there, its time is over, or
the host gives it up. So one thread looks whether the supervisor calls the rank back, which it does
as soon as another rank has failed or died, and then makes the kernels give up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from moesaic.comm.control import Seat
from moesaic.comm.device_window import DeviceWindow
from moesaic.comm.errors import WindowAborted
from moesaic.engine.ranks import RankContext
from moesaic.moe.context import MoeContext

# How soon kernels give up once the rank is called back.
LOOK_SECONDS = 0.02
CALLED_BACK = "the supervisor calls this rank back"


class WindowWatch:
    def __init__(self, windows: Sequence[DeviceWindow], seat: Seat | None) -> None:
        self.windows, self._seat = tuple(windows), seat
        self._lock = threading.Lock()
        if self.windows and seat is not None:
            threading.Thread(target=self._watch, args=(seat,), daemon=True, name="recall").start()

    @classmethod
    def of(cls, moe: MoeContext, ranks: RankContext) -> WindowWatch:
        """Those of dispatchers and of collectives on a device."""
        owners = [*moe.comm.buffers.values(), ranks.on_device]
        found = (getattr(owner, "window", None) for owner in owners)
        return cls([window for window in found if isinstance(window, DeviceWindow)], ranks.seat)

    def check(self) -> None:
        """Raises what a kernel has found wrong. A rank that was called back hears that instead:
        its kernels gave up for it."""
        try:
            for window in self.windows:
                window.check()
        except WindowAborted:
            if self._seat is not None:
                self._seat.check()
            raise

    def abort(self, reason: str) -> None:
        for window in self.windows:
            window.abort(reason)

    @property
    @contextmanager
    def quiet(self) -> Iterator[None]:
        """While windows restart: what was true before must not abort them after."""
        with self._lock:
            yield

    def _watch(self, seat: Seat) -> None:
        while True:
            time.sleep(LOOK_SECONDS)
            with self._lock:
                if seat.changed:
                    self.abort(CALLED_BACK)
