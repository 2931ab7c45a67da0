"""Problems of a task, in an order that follows from a seed."""

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
# Other ways to put the same question, where a task has such.
FORMS: Final[dict[str, Callable[[str], tuple[str, ...]]]] = {"chat": chat.forms}
# A task is given up when so many draws, and so many for each problem found, were not enough.
FREE_DRAWS: Final = 2_000
DRAWS_EACH: Final = 4


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


def distinct(
    task: str, split: Split, seed: int, number: int, progress: bool = False
) -> list[Problem]:
    """Spacing and case do not make another problem. A bar, if wanted, is for what takes long."""
    found: dict[str, Problem] = {}
    with tqdm(total=number, desc=task, delay=1, leave=False, disable=not progress) as bar:
        for draws, problem in enumerate(problems(task, split, seed)):
            if len(found) == number:
                break
            if draws > FREE_DRAWS + DRAWS_EACH * len(found):
                raise ValueError(
                    f"task {task}: only {len(found)} distinct {split} problems came in {draws} "
                    f"draws, and {number} are wanted: ask fewer"
                )
            key = plain(problem.prompt).lower()
            bar.update(key not in found)
            found.setdefault(key, problem)
    return list(found.values())
