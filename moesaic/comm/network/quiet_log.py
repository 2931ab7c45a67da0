"""Rate-limited warnings about what unknown processes send."""

from __future__ import annotations

import logging
import threading
import time
from typing import Final

QUIET_SECONDS: Final = 1.0


class QuietLog:
    """At most one warning a second; the next one counts those that were left out."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lock = threading.Lock()
        self._left_out = 0
        self._last = -QUIET_SECONDS

    def warn(self, text: str) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._last < QUIET_SECONDS:
                self._left_out += 1
                return
            self._last, count, self._left_out = now, self._left_out, 0
        self._logger.warning("%s%s", text, f" (and {count} more before it)" if count else "")
