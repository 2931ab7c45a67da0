"""Lets the serving groups of a replica begin prompts in the same steps.

A step takes as long as that of the group with the most work, so prompts of several groups in one
step cost less than one after the other. A group holds new prompts back for some steps while other
groups have none. All groups decide by what the agreement on a step tells of each of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from moesaic.engine.schedule.step_budget import StepWork


class NewPrompts(IntEnum):
    """What a group tells the others about its waiting requests."""

    NONE = 0
    HELD_BACK = 1
    DUE = 2
    """They have waited long enough, or the group has little else to do."""


@dataclass(slots=True)
class PrefillDelayer:
    max_passes: int
    max_ms: float | None = None
    low_usage: float | None = None
    """Below this share of used pages a group holds nothing back."""
    holds: bool = True
    """Whether the next step begins no prompts; the same in all groups."""
    passes: int = 0
    """Steps for which prompts have been held back."""
    told: NewPrompts = NewPrompts.NONE
    """What this group tells with its plan."""
    _since: float | None = None

    def hold_back(self, waits: bool, usage: float) -> bool:
        """Whether this group begins no prompts. `waits`: it has new ones, and requests decode."""
        if not (waits and self.holds):
            self._since = None
            return False
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        late = self.max_ms is not None and 1000 * (now - self._since) >= self.max_ms
        idle = self.low_usage is not None and usage < self.low_usage
        self.told = NewPrompts.DUE if late or idle else NewPrompts.HELD_BACK
        return True

    def settle(self, told: Sequence[int], works: Sequence[StepWork]) -> None:
        """Decides on the next step. Prompts begin once all groups have some or one is due, beside
        prompts of the last step, and where no request decodes."""
        self.told = NewPrompts.NONE  # a group without requests plans nothing, and tells nothing
        if not any(told):
            self.passes = 0
            self.holds = not any(work.prompt_tokens for work in works)
            return
        self.passes += 1
        self.holds = (
            self.passes < self.max_passes
            and not all(told)
            and NewPrompts.DUE not in told
            and not any(work.prompt_tokens for work in works)
            and any(work.decode_tokens for work in works)
        )
