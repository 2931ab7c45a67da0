"""Problems of a task, in an order that a seed determines."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Final, Literal

from tqdm import tqdm

from moesaic.evals.tasks import chat, lists, lookup, tables, units, words
from moesaic.evals.tasks.common import Draw
from moesaic.evals.tasks.problem import Problem, is_kept, plain

Split = Literal["train", "test"]
TASKS: Final[dict[str, Draw]] = {
    "words": words.draw,
    "lists": lists.draw,
    "lookup": lookup.draw,
    "units": units.draw,
    "tables": tables.draw,
    "chat": chat.draw,
}
# Other forms of the same question, if a task has any.
FORMS: Final[dict[str, Callable[[str], tuple[str, ...]]]] = {"chat": chat.forms}
# Drawing stops with an error after this many draws, plus this many for each problem found.
FREE_DRAWS: Final = 2_000
DRAWS_EACH: Final = 4


def split_of(problem: Problem) -> Split | None:
    """Test if all forms of the problem are kept for testing, train if none is, else neither: one
    form would give another away."""
    forms = FORMS.get(problem.task)
    kept = [is_kept(form) for form in (forms(problem.prompt) if forms else (problem.prompt,))]
    return "test" if all(kept) else None if any(kept) else "train"


def problems(task: str, split: Split, seed: int) -> Iterator[Problem]:
    """An endless stream, in which problems may repeat."""
    rng = random.Random(f"{task} {split} {seed}")
    while True:
        problem = TASKS[task](rng)
        if split_of(problem) == split:
            yield problem


def distinct(
    task: str, split: Split, seed: int, number: int, progress: bool = False
) -> list[Problem]:
    """Problems that differ in more than spacing and case."""
    found: dict[str, Problem] = {}
    with tqdm(total=number, desc=task, delay=1, leave=False, disable=not progress) as bar:
        for draws, problem in enumerate(problems(task, split, seed)):
            if len(found) == number:
                break
            if draws > FREE_DRAWS + DRAWS_EACH * len(found):
                raise ValueError(
                    f"task {task}: only {len(found)} distinct {split} problems in {draws} "
                    f"draws, not {number}: ask for fewer"
                )
            key = plain(problem.prompt).lower()
            bar.update(key not in found)
            found.setdefault(key, problem)
    return list(found.values())
