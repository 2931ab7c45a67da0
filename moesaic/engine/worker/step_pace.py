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
# The share by which times follow one that is shorter, or of agreements longer, in a step.
DECAY: Final = 0.05


class StepPace:
    """Times are those of the last steps: the longest that the host took, and the shortest that
    ranks took to agree, as they may have waited for one that was late."""

    def __init__(self) -> None:
        self._host = self._agreement = self._end = 0.0

    @property
    def lead(self) -> float:
        """Seconds from the beginning of a plan to the end of its launch."""
        return self._host + self._agreement

    def launched(self, host: float, agreement: float = 0.0) -> None:
        """A step took the host and the ranks so long."""
        self._host = max(host, self._host + DECAY * (host - self._host))
        slower = self._agreement + DECAY * (agreement - self._agreement)
        self._agreement = min(agreement, slower)

    def computes_until(self, end: float) -> None:
        """The device is done at this time, by the monotonic clock, at the earliest."""
        self._end = end

    def slack(self) -> float:
        """Seconds for which the next step need not be planned; 0 if it is time."""
        left = self._end - self.lead - MARGIN_SECONDS - time.monotonic()
        return min(left, POLL_SECONDS) if left >= POLL_SECONDS else 0.0
