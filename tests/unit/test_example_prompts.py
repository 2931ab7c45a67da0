"""Example questions are those of tasks that the model was scored on."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moesaic.evals.tasks.problem import is_kept
from moesaic.server.example_prompts import ExamplePrompts, known_tasks

HOUSE = Path(__file__).parents[2] / "models" / "house-moe"
ALL = ["words", "lists", "lookup", "units", "tables", "chat"]


def test_one_of_each_task_that_was_kept_from_training() -> None:
    prompts = ExamplePrompts(SimpleNamespace(args=SimpleNamespace(model_path=str(HOUSE))))
    first, second = prompts.draw(), prompts.draw()
    assert [example["task"] for example in first] == ALL
    assert all(is_kept(example["prompt"]) for example in first + second)
    assert first != second


@pytest.mark.parametrize(
    ("record", "tasks"),
    [
        ({"scores": {"tables": {}, "words": {}, "poems": {}}}, ["words", "tables"]),
        ({"stages": [{"scores": {"chat": {}}}, {"scores": {"lists": {}}}]}, ["lists"]),
        ({"loss": [1, 2]}, []),
        ({"stages": "three"}, []),
        ([1], []),
        (None, []),
    ],
)
def test_tasks_of_a_training_record(tmp_path: Path, record: Any, tasks: list[str]) -> None:
    if record is not None:
        (tmp_path / "training.json").write_text(json.dumps(record))
    assert known_tasks(tmp_path) == tasks
