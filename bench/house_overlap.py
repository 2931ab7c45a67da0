"""How new the house model's test problems are, and whether it matters.

    python -m bench.house_overlap            # 500 test problems, 500,000 training draws a task
    python -m bench.house_overlap --markdown

Every test problem's prompt was kept from training. Here as many training problems are drawn as time
allows, by the rule that the committed model was trained with, and counted is how many test problems
have the same words in their prompt (punctuation aside), and how many the same solution: the same
numbers may be asked for in another sentence. The accuracy on those whose solution was not drawn
stands beside the one on all."""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec
from tqdm import tqdm

from bench.common import RESULTS, show_table
from bench.house import MODEL, ask, start
from moesaic.evals.data import write_whole
from moesaic.evals.tasks.draw import TASKS, distinct
from moesaic.evals.tasks.problem import Problem, is_kept

TESTS, DRAWS, SEED = 500, 500_000, 0
FILE = RESULTS / "house_overlap.json"


class Overlap(msgspec.Struct, frozen=True):
    """Shares of the test problems; `accuracy_unseen` of those whose solution was not drawn."""

    task: str
    tests: int
    draws: int
    same_words: float
    same_solution: float
    accuracy: float
    accuracy_unseen: float | None


def words(prompt: str) -> str:
    return re.sub(r"[^a-z0-9]+", " ", prompt.lower()).strip()


def trained(task: str) -> Iterator[Problem]:
    rng = random.Random(f"overlap {task}")
    while True:
        problem = TASKS[task](rng)
        if not is_kept(problem.prompt):
            yield problem


def overlap(task: str, tests: list[Problem], right: list[bool], draws: int) -> Overlap:
    prompts, solutions = set[str](), set[str]()
    for problem in tqdm(islice(trained(task), draws), task, draws, mininterval=2):
        prompts.add(words(problem.prompt))
        solutions.add(problem.solution)
    unseen = [ok for one, ok in zip(tests, right, strict=True) if one.solution not in solutions]
    return Overlap(
        task,
        len(tests),
        draws,
        sum(words(problem.prompt) in prompts for problem in tests) / len(tests),
        1 - len(unseen) / len(tests),
        sum(right) / len(tests),
        sum(unseen) / len(unseen) if unseen else None,
    )


def report(rows: list[Overlap], markdown: bool) -> None:
    head = ["task", "same words", "same solution", "accuracy", "where the solution is new"]
    lines = [
        [
            row.task,
            f"{row.same_words:.1%}",
            f"{row.same_solution:.1%}",
            f"{row.accuracy:.4f}",
            "–" if row.accuracy_unseen is None else f"{row.accuracy_unseen:.4f}",
        ]
        for row in rows
    ]
    show_table(head, lines, markdown)


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m bench.house_overlap",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--markdown", action="store_true", help="print what was measured")
    if parser.parse_args().markdown:
        report(msgspec.json.decode(FILE.read_bytes(), type=list[Overlap]), True)
        return 0
    tests = {task: distinct(task, "test", SEED, TESTS) for task in TASKS}
    with start(str(MODEL), "--dtype bfloat16") as engine:
        outputs = ask(engine, [one for some in tests.values() for one in some], 256).outputs
    marks = iter(output.right for output in outputs)
    rows = [overlap(task, some, [next(marks) for _ in some], DRAWS) for task, some in tests.items()]
    report(rows, False)
    write_whole(Path(FILE), msgspec.json.format(msgspec.json.encode(rows)) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
