"""When to plan the next step while the device computes one.

A step that is planned early misses the requests that come in until the device begins it, and these
wait for one step more. So planning waits until it will just be done before the device is.
"""

from __future__ import annotations

import time
from typing import Final

# Between the end of planning and launching, and that of the step before.
MARGIN_SECONDS: Final = 1e-3
# An early look at whether the device is done; also the least wait.
POLL_SECONDS: Final = 1e-3
# Of the steps' plans and launches, which the longest of the last ones stand for.
DECAY: Final = 0.05


class StepPace:
    """`lead`: seconds that planning and launching a step take."""

    def __init__(self) -> None:
        self.lead = 0.0
        self._end = 0.0

    def launched(self, seconds: float) -> None:
        """A step took so long to plan and to launch."""
        self.lead = max(seconds, self.lead + DECAY * (seconds - self.lead))

    def computes_until(self, end: float) -> None:
        """The device is done at this time, by the monotonic clock, at the earliest."""
        self._end = end

    def slack(self) -> float:
        """Seconds for which the next step need not be planned; 0 if it is time."""
        left = self._end - self.lead - MARGIN_SECONDS - time.monotonic()
        return min(left, POLL_SECONDS) if left >= POLL_SECONDS else 0.0
