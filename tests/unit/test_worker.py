"""What a rank does with the supervisor's messages, which a script gives here."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from moesaic.core.messages import (
    AnyMessage,
    Query,
    QueryReply,
    ResumeSteps,
    RollbackStep,
    StepAbandoned,
    Wake,
)
from moesaic.engine.worker.rank_stats import RankStatsReporter
from moesaic.engine.worker.worker import Worker


class ScriptedLink:
    """Has messages for a rank, and asserts that it waits for no further one."""

    rank = 1

    def __init__(self, messages: list[AnyMessage]) -> None:
        self.status = SimpleNamespace(generation=0)
        self.sent: list[Any] = []
        self.generations: list[int] = []
        self._messages = messages
        self.send = self.sent.append

    def restart(self, generation: int, active: Sequence[int]) -> None:
        self.generations.append(generation)

    def poll(self, seconds: float) -> bool:
        return bool(self._messages)

    def receive(self, timeout: float | None = None, waits_for: str = "") -> AnyMessage:
        assert self._messages, f"waits to {waits_for or 'be woken'}"
        return self._messages.pop(0)


class Round(SimpleNamespace):
    def restart(self, number: int, suspects: list[int]) -> None:
        self.number = number


def make_worker(messages: list[AnyMessage]) -> tuple[Any, ScriptedLink]:
    """A rank of a later stage, without a model."""
    worker: Any = object.__new__(Worker)
    link = worker.link = ScriptedLink(messages)
    worker.leader = worker.planner = worker._rollback = None
    worker._wakes = deque()
    worker.members = SimpleNamespace(epoch=1)
    worker.stage = Round(number=7)
    steps = SimpleNamespace(stuck="")
    worker.runner = SimpleNamespace(abandon=lambda reason: None, steps=steps)
    worker.loop = SimpleNamespace(slack=0.0, inflight=[])
    return worker, link


def test_a_rank_that_is_woken_before_it_sleeps_does_not_sleep() -> None:
    worker, _ = make_worker([Wake(9)])
    worker._handle_received()
    worker._sleep()
    assert worker.stage.number == 9


def test_a_rollback_ends_a_wake_before_it() -> None:
    """Else the rank would step alone when the others sleep, and wait for them in vain."""
    orders = [Wake(9), RollbackStep(0, 1, 9, "an error"), ResumeSteps(1, 12, [0]), Wake(15)]
    worker, link = make_worker(orders[:1])
    worker._handle_received()
    link._messages += orders[1:]
    worker._restart(1)
    assert [(type(sent), sent.generation) for sent in link.sent] == [(StepAbandoned, 1)]
    assert (worker.stage.number, link.status.generation, link.generations) == (12, 1, [1])
    worker._sleep()
    assert worker.stage.number == 15


def test_a_question_about_a_predecessor_ends_no_rank() -> None:
    """A recording was begun before this rank took the place of one that was lost."""
    question = Query(3, "record_until", every=True, options={"steps": 4, "firsts": {0: 17}})
    worker, link = make_worker([question, Wake(9)])
    worker.mesh, worker.place = SimpleNamespace(group_of=lambda _: 0), None
    worker.stats = reporter = object.__new__(RankStatsReporter)
    reporter._rank, reporter._spans = 1, SimpleNamespace(end_after=lambda steps, first: None)
    reporter._runner = SimpleNamespace(recorder=None, balance_recorder=None)
    worker._handle_received()
    assert link.sent == [QueryReply(3, 0, None, 1, lost=True)]
