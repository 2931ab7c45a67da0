"""Problems of a task, in an order that follows from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Final, Literal

from moesaic.tasks import chat, lists, lookup, tables, units, words
from moesaic.tasks.problem import Problem, is_kept, plain

Split = Literal["train", "test"]
TASKS: Final[dict[str, Callable[[random.Random], Problem]]] = {
    "words": words.draw,
    "lists": lists.draw,
    "lookup": lookup.draw,
    "units": units.draw,
    "tables": tables.draw,
    "chat": chat.draw,
}
# Other ways to put the same question, where a task has such.
FORMS: Final[dict[str, Callable[[str], tuple[str, ...]]]] = {"chat": chat.forms}
MOST_MISSES: Final = 20_000  # draws without a new problem, after which a task has no more


def split_of(problem: Problem) -> Split | None:
    """Testing has a problem if it is kept from training in all its forms, training if it is in
    none; others belong to neither, as one form would give the other away."""
    forms = FORMS.get(problem.task)
    kept = [is_kept(form) for form in (forms(problem.prompt) if forms else (problem.prompt,))]
    return "test" if all(kept) else None if any(kept) else "train"


def problems(task: str, split: Split, seed: int) -> Iterator[Problem]:
    """Without an end; the same problem may come again."""
    rng = random.Random(f"{task} {split} {seed}")
    while True:
        problem = TASKS[task](rng)
        if split_of(problem) == split:
            yield problem


def distinct(task: str, split: Split, seed: int, number: int) -> list[Problem]:
    """Spacing and case do not make another problem."""
    found: dict[str, Problem] = {}
    misses = 0
    for problem in problems(task, split, seed):
        if len(found) == number:
            break
        key = plain(problem.prompt).lower()
        misses = misses + 1 if key in found else 0
        if misses == MOST_MISSES:
            raise ValueError(f"task {task} has only {len(found)} {split} problems: ask fewer")
        found.setdefault(key, problem)
    return list(found.values())
