"""Example questions for models that were trained on the project's tasks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec

from moesaic.evals.tasks.draw import TASKS, problems
from moesaic.models.folder import read_as
from moesaic.server.context import Context

SEEDS = 2**32


class TrainingStage(msgspec.Struct, frozen=True):
    scores: dict[str, Any] = {}
    """By task."""


class TrainingRecord(TrainingStage, frozen=True):
    """training.json, which examples/train writes beside a model; joined runs are its stages."""

    stages: list[TrainingStage] = []


class ExamplePrompts:
    """Draws problems that were kept from training, one of each task that the model knows."""

    def __init__(self, context: Context) -> None:
        self._tasks = known_tasks(Path(context.args.model_path))

    def draw(self) -> list[dict[str, str]]:
        seed = random.randrange(SEEDS)
        drawn = (next(problems(task, "test", seed)) for task in self._tasks)
        return [{"task": problem.task, "prompt": problem.prompt} for problem in drawn]


def known_tasks(folder: Path) -> list[str]:
    """The tasks that the model was scored on after training; none for other models."""
    try:
        record = read_as(folder / "training.json", TrainingRecord)
    except ValueError:  # another program's file
        return []
    scored = (record.stages[-1] if record.stages else record).scores
    return [task for task in TASKS if task in scored]
