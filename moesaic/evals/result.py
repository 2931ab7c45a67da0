"""The result of an evaluation, as written to a file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from moesaic.evals.figures import Latency, wilson
from moesaic.evals.tasks.problem import ChatTurn, Problem


class TaskScore(msgspec.Struct, frozen=True):
    """Shares of all n replies; a failed request is neither right nor invalid."""

    accuracy: float
    invalid: float
    n: int
    ci_low: float
    ci_high: float
    failed: int


class GradedReply(msgspec.Struct, frozen=True):
    """One problem, with `prompt` or `messages`, and its reply, or the `error`."""

    task: str
    id: str
    answer: str
    reply: str
    found: str | None
    right: bool
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    latency_s: float
    prompt: str | msgspec.UnsetType = msgspec.UNSET
    messages: tuple[ChatTurn, ...] | msgspec.UnsetType = msgspec.UNSET
    error: str | msgspec.UnsetType = msgspec.UNSET

    @property
    def failed(self) -> bool:
        return self.error is not msgspec.UNSET

    @property
    def asked(self) -> str:
        """The problem as one text."""
        if self.messages is msgspec.UNSET:
            return "" if self.prompt is msgspec.UNSET else self.prompt
        return "\n".join(f"{message.role}: {message.content}" for message in self.messages)


class Result(msgspec.Struct, frozen=True, kw_only=True):
    tasks: dict[str, TaskScore]
    accuracy: float
    seed: int
    num: int | None  # problems of each task; None: all of a file
    temperature: float
    top_p: float = 1.0
    system: str | None = None
    max_new_tokens: int
    target: str
    arguments: dict[str, Any]
    seconds: float
    output_throughput: float
    requests_per_second: float
    latency: Latency
    version: str
    data: str  # digest of the problems
    complete: bool  # no problem is missing
    outputs: list[GradedReply]

    @property
    def failed(self) -> int:
        return sum(score.failed for score in self.tasks.values())

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1)


def score(outputs: Sequence[GradedReply]) -> TaskScore:
    number, right = len(outputs), sum(output.right for output in outputs)
    failed = sum(output.failed for output in outputs)
    invalid = sum(output.found is None for output in outputs) - failed
    low, high = wilson(right, number)
    return TaskScore(right / max(number, 1), invalid / max(number, 1), number, low, high, failed)


def by_task(outputs: Sequence[GradedReply]) -> dict[str, list[GradedReply]]:
    """Replies by task, in the order of their first problems."""
    found: dict[str, list[GradedReply]] = {}
    for output in outputs:
        found.setdefault(output.task, []).append(output)
    return found


def digest(problems: Sequence[Problem]) -> str:
    """The sha256 of all prompts and answers, without the system message."""
    found = hashlib.sha256()
    for problem in problems:
        found.update(msgspec.json.encode((problem.conversation, problem.answer)) + b"\n")
    return found.hexdigest()
