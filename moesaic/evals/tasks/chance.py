"""Draws that cost less than those of `random.Random`: training draws millions of problems."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def pick(rng: random.Random, items: Sequence[T]) -> T:
    return items[int(rng.random() * len(items))]


def upto(rng: random.Random, low: int, high: int) -> int:
    """A whole number from `low` to `high`, both of them possible."""
    return low + int(rng.random() * (high - low + 1))


def two(rng: random.Random, items: Sequence[T]) -> tuple[T, T]:
    """Two items at different places."""
    size = len(items)
    first = int(rng.random() * size)
    second = (first + 1 + int(rng.random() * (size - 1))) % size
    return items[first], items[second]


def some(rng: random.Random, items: Sequence[T], number: int) -> list[T]:
    """So many items, all at different places."""
    rest = list(items)
    return [rest.pop(int(rng.random() * len(rest))) for _ in range(number)]
