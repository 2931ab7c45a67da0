"""Statistics of scores: confidence intervals and significance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

Z95: Final = 1.959963984540054  # standard deviations around 95% of a normal distribution


def wilson(right: int, number: int) -> tuple[float, float]:
    """Wilson's 95% score interval: stays within 0..1, and valid if all or none are right."""
    if number == 0:
        return 0.0, 1.0
    share, square = right / number, Z95 * Z95
    middle = share + square / (2 * number)
    reach = Z95 * math.sqrt(share * (1 - share) / number + square / (4 * number * number))
    scale = 1 + square / number
    # At the ends the bound is exact; the formula leaves rounding errors.
    low = 0.0 if right == 0 else (middle - reach) / scale
    return low, 1.0 if right == number else (middle + reach) / scale


def mcnemar(lost: int, won: int) -> float:
    """McNemar's exact two-sided test: the probability of flips at least this uneven by chance."""
    flips = lost + won
    tail = sum(math.comb(flips, k) for k in range(min(lost, won) + 1))
    return min(1.0, 2 * tail / 2**flips)


class Latency(msgspec.Struct, frozen=True):
    """In seconds; all None without replies."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency:
        if not seconds:
            return cls()
        p50, p90, p99 = (float(value) for value in np.percentile(seconds, (50, 90, 99)))
        return cls(float(np.mean(seconds)), p50, p90, p99)
