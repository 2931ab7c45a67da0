"""Problems of a task, in an order that follows from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Final, Literal

from moesaic.tasks import chat, lists, lookup, tables, units, words
from moesaic.tasks.problem import Problem

Split = Literal["train", "test"]
TASKS: Final[dict[str, Callable[[random.Random], Problem]]] = {
    "words": words.draw,
    "lists": lists.draw,
    "lookup": lookup.draw,
    "units": units.draw,
    "tables": tables.draw,
    "chat": chat.draw,
}
MOST_MISSES: Final = 20_000  # draws without a new problem, after which a task has no more


def problems(task: str, split: Split, seed: int) -> Iterator[Problem]:
    """Without an end; the same problem may come again."""
    rng = random.Random(f"{task} {split} {seed}")
    while True:
        problem = TASKS[task](rng)
        if problem.is_test == (split == "test"):
            yield problem


def distinct(task: str, split: Split, seed: int, number: int) -> list[Problem]:
    found: dict[str, Problem] = {}
    misses = 0
    for problem in problems(task, split, seed):
        if len(found) == number:
            break
        if problem.prompt in found:
            misses += 1
            if misses == MOST_MISSES:
                raise ValueError(f"task {task} has only {len(found)} {split} problems: ask fewer")
        else:
            found[problem.prompt] = problem
            misses = 0
    return list(found.values())
