"""How often and how soon a process that is lost is started again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# A process that is lost this soon after its return may be lost for the same reason again.
SHORT_LIFE: Final = 1.0
# The pause before it starts again, doubled with each short life in a row.
FIRST_PAUSE: Final = 0.5
LONGEST_PAUSE: Final = 30.0


@dataclass(slots=True)
class Restarts:
    """Of one process."""

    total: int = 0
    short_lives: int = 0

    def next_pause(self, lived: float, limit: int) -> float | None:
        """Seconds until it may start again after it has served for `lived`; None: never, as `limit`
        short lives in a row were too many (0: there is no limit)."""
        is_short = self.total > 0 and lived < SHORT_LIFE
        self.short_lives = self.short_lives + 1 if is_short else 0
        self.total += 1
        if limit and self.short_lives >= limit:
            return None
        pause = FIRST_PAUSE * 2 ** (self.short_lives - 1) if self.short_lives else 0.0
        return min(pause, LONGEST_PAUSE)
