"""Products of parameters of which the fast run takes a part; the rest of them is slow."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def every_pair(*axes: Sequence[Any]) -> list[Any]:
    """Fast are a few combinations in which any values of two axes come together, found greedily.

    every_pair("ab", [1, 2], [True, False]) takes four of eight combinations.
    """
    chosen, missing = set[tuple[int, ...]](), set[tuple[tuple[int, int], ...]]()
    places = list(product(*(range(len(axis)) for axis in axes)))
    for place in places:
        missing |= set(combinations(enumerate(place), 2))
    while missing:
        best = max(places, key=lambda place: len(missing & set(combinations(enumerate(place), 2))))
        missing -= set(combinations(enumerate(best), 2))
        chosen.add(best)
    return [_param(axes, place, place in chosen) for place in places]


def every_second(*axes: Sequence[Any]) -> list[Any]:
    """Fast is half of the product, as the white squares of a chessboard: every value of an axis
    with some of the others.

    every_second("abc", [1, 2]) takes a1, b2 and c1.
    """
    places = list(product(*(range(len(axis)) for axis in axes)))
    return [_param(axes, place, sum(place) % 2 == 0) for place in places]


def _param(axes: Sequence[Sequence[Any]], place: Sequence[int], is_fast: bool) -> Any:
    """A tuple on an axis stands for several parameters."""
    values = list[Any]()
    for axis, number in zip(axes, place, strict=True):
        value = axis[number]
        values += value if isinstance(value, tuple) else [value]
    return pytest.param(*values, marks=() if is_fast else pytest.mark.slow)
