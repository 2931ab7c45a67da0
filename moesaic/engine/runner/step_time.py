"""How long steps usually take, and which took much longer."""

from __future__ import annotations

from typing import Final

SLOW_TIMES: Final = 10
SLOW_SECONDS: Final = 1.0
# Until so many steps of a kind were seen, nothing is usual.
LEARNED: Final = 8
NEWEST: Final = 0.1


class SlowStepDetector:
    """Decode steps are compared with each other; a step with prompts by its tokens, as nothing is
    as different in length as these, but it may always take as long as a decode step."""

    def __init__(self) -> None:
        self._decode, self._decodes = 0.0, 0
        self._token, self._prefills = 0.0, 0

    def observe(self, prefill: bool, tokens: int, seconds: float) -> float | None:
        """Returns the usual seconds of such a step if this one was slow."""
        usual, known = self._usual(prefill, tokens)
        slow = known and seconds > max(SLOW_SECONDS, SLOW_TIMES * usual)
        if slow:
            # One that stood still says nothing of the next, and a machine that got slower is
            # believed after some steps.
            seconds = SLOW_TIMES * usual
        if prefill:
            each = seconds / max(1, tokens)
            self._token = _mean(self._token, each, self._prefills)
            self._prefills += 1
        else:
            self._decode = _mean(self._decode, seconds, self._decodes)
            self._decodes += 1
        return usual if slow else None

    def _usual(self, prefill: bool, tokens: int) -> tuple[float, bool]:
        if not prefill:
            return self._decode, self._decodes >= LEARNED
        return max(self._decode, self._token * tokens), self._prefills >= LEARNED


def _mean(before: float, value: float, count: int) -> float:
    """All weigh alike at first, then the newest most."""
    return before + (value - before) * max(NEWEST, 1 / (count + 1))
