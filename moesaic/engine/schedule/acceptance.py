"""How many of the drafts that steps verify are accepted."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Final

from moesaic.engine.schedule.inflight import InflightStep
from moesaic.engine.schedule.plan import StepResult

logger = logging.getLogger(__name__)

# Verified drafts of a look at acceptance.
LOOK: Final = 100
# Acceptance has collapsed below this share of the best look, and is back above twice as much.
COLLAPSE: Final = 0.3


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Of one step: how many drafts it verified, and how many of them had a token, and an accepted
    one, at each position; of a tree the positions are its rows."""

    verified: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, step: InflightStep, result: StepResult, most: int) -> Acceptance:
        verified, drafted, accepted = 0, [0] * most, [0] * most
        for item, found in zip(step.items, result.items, strict=True):
            if item.drafts:
                verified += 1
                for position in range(len(item.drafts)):
                    drafted[position] += 1
                for row in item.accepted_rows(found.token_ids):
                    accepted[row - 1] += 1
        return cls(verified, drafted, accepted)


class AcceptanceAlarm:
    """Warns once when acceptance falls far below what it was, as it does when text, or what makes
    the drafts, is no longer what it was."""

    def __init__(self) -> None:
        self._verified = self._drafted = self._accepted = 0
        self._best = 0.0
        self.is_on = False

    def observe(self, seen: Acceptance) -> None:
        self._verified += seen.verified
        self._drafted += sum(seen.drafted)
        self._accepted += sum(seen.accepted)
        if self._verified >= LOOK:
            self._look(self._accepted / self._drafted)
            self._verified = self._drafted = self._accepted = 0

    def _look(self, rate: float) -> None:
        self._best = max(self._best, rate)
        if self.is_on:
            self.is_on = rate < 2 * COLLAPSE * self._best
        elif rate < COLLAPSE * self._best:
            self.is_on = True
            logger.warning(
                "speculative decoding: of the last drafts %.0f%% of the tokens were accepted, at "
                "best %.0f%%",
                100 * rate,
                100 * self._best,
            )
