"""Detects steps that take much longer than usual."""

from __future__ import annotations

from typing import Final

SLOW_TIMES: Final = 10
SLOW_SECONDS: Final = 1.0
# Steps of a kind before their usual time is known.
MIN_STEPS: Final = 8
NEWEST_WEIGHT: Final = 0.1


class SlowStepDetector:
    """Compares decode steps with each other, and steps with prompts by their tokens, as these
    differ the most in length; each of these may take as long as a decode step."""

    def __init__(self) -> None:
        self._decode, self._decodes = 0.0, 0
        self._token, self._prefills = 0.0, 0

    def observe(self, prefill: bool, tokens: int, seconds: float) -> float | None:
        """Returns the usual seconds of such a step if this one was slow."""
        usual, known = self._usual(prefill, tokens)
        slow = known and seconds > max(SLOW_SECONDS, SLOW_TIMES * usual)
        if slow:
            # One stall must not become usual; a slower machine becomes so after some steps.
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
            return self._decode, self._decodes >= MIN_STEPS
        return max(self._decode, self._token * tokens), self._prefills >= MIN_STEPS


def _mean(before: float, value: float, count: int) -> float:
    """The plain mean at first, later an exponential one."""
    return before + (value - before) * max(NEWEST_WEIGHT, 1 / (count + 1))
