"""Random draws and solutions that all tasks share.

Draws cost less than those of `random.Random`: training draws millions of problems."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from moesaic.evals.tasks.problem import MARK, Problem

T = TypeVar("T")
Draw = Callable[[random.Random], Problem]


def pick(rng: random.Random, items: Sequence[T]) -> T:
    return items[int(rng.random() * len(items))]


def randint(rng: random.Random, low: int, high: int) -> int:
    """A whole number from `low` to `high`, both included."""
    return low + int(rng.random() * (high - low + 1))


def pick_two(rng: random.Random, items: Sequence[T]) -> tuple[T, T]:
    """Two items at different positions."""
    size = len(items)
    first = int(rng.random() * size)
    second = (first + 1 + int(rng.random() * (size - 1))) % size
    return items[first], items[second]


def sample(rng: random.Random, items: Sequence[T], number: int) -> list[T]:
    """Items at different positions."""
    rest = list(items)
    return [rest.pop(int(rng.random() * len(rest))) for _ in range(number)]


def evenly(kinds: Mapping[str, Draw]) -> Draw:
    """Draws every kind of problem equally often."""
    draws = tuple(kinds.values())
    return lambda rng: pick(rng, draws)(rng)


def solved(task: str, prompt: str, answer: str, work: str = "") -> Problem:
    """A problem whose solution is its worked steps, then the marked answer."""
    steps = f"{work}\n" if work else ""
    return Problem(task, prompt, answer, f"{steps}{MARK} {answer}")


def scan(names: Sequence[str], values: Sequence[str], wanted: str) -> str:
    """Steps that try entry by entry until the value fits, as in "Ana 12 no, Ben 41 yes.": a small
    model needs them to find what precedes a word, but not what follows it."""
    tried = []
    for name, value in zip(names, values, strict=True):
        tried.append(f"{name} {value} {'yes' if value == wanted else 'no'}")
        if value == wanted:
            break
    return ", ".join(tried) + "."
