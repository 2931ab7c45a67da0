"""A process with limits: which ends are the question's fault, and how it restarts."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from moesaic.core.sampling import Grammar
from moesaic.engine.errors import QueueFull
from moesaic.engine.text import limited_child
from moesaic.engine.text.grammar_check import GrammarChecker
from moesaic.engine.text.grammar_child import GrammarSetup
from moesaic.engine.text.limited_child import Allowance, ChildUnresponsive, Exceeded, LimitedChild

ROOM = 16 << 20


@pytest.fixture
def child() -> Iterator[LimitedChild]:
    child = LimitedChild("tests.unit.limited_work", b"", Allowance(0.2, ROOM))
    yield child
    child.close()


def test_a_child_that_keeps_memory_ends_after_its_answer_and_no_question_is_lost(
    child: LimitedChild,
) -> None:
    pids = [child.ask(b"keep") for _ in range(9)]
    assert pids[0] == pids[1] and len(set(pids)) == 3  # a child exceeds 32 MB with its third answer


@pytest.mark.parametrize(
    ("question", "limit"),
    [
        (b"spin", "more than 0.2 s"),
        (b"take all", "more than 16 MB of memory"),
        (b"abort", "more than 16 MB of memory"),
    ],
)
def test_limits_are_named(child: LimitedChild, question: bytes, limit: str) -> None:
    with pytest.raises(Exceeded, match=limit):
        child.ask(question)
    assert child.ask(b"nothing")


@pytest.mark.parametrize(("question", "status"), [(b"be killed", -9), (b"fail", 1)])
def test_other_ends_are_no_verdict(
    child: LimitedChild, caplog: pytest.LogCaptureFixture, question: bytes, status: int
) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(ChildUnresponsive):
        child.ask(question)
    assert f"limited_work ended with status {status} without an answer" in caplog.text
    assert child.ask(b"nothing")


@pytest.mark.timeout(60)
def test_a_stopped_child_delays_a_long_question_no_longer_than_a_short_one(
    child: LimitedChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = int(child.ask(b"nothing"))
    os.kill(stopped, signal.SIGSTOP)
    monkeypatch.setattr(limited_child, "ANSWER_SECONDS", 0.05)
    with pytest.raises(ChildUnresponsive):
        child.ask(b"nothing".ljust(1 << 20))
    assert not Path(f"/proc/{stopped}").exists()
    monkeypatch.undo()
    assert int(child.ask(b"nothing".ljust(1 << 20))) != stopped


def test_a_child_has_one_arena(child: LimitedChild) -> None:
    """Each further arena would take 64 MB of the limited address space."""
    environment = Path(f"/proc/{int(child.ask(b'nothing'))}/environ").read_bytes()
    assert b"MALLOC_ARENA_MAX=1" in environment.split(b"\0")


def test_only_verdicts_on_grammars_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    checker = GrammarChecker(GrammarSetup("unused", 1, [0]), None)
    asked: list[Exception] = []
    outcomes: list[Exception] = [ChildUnresponsive(), Exceeded("a"), ChildUnresponsive()]

    def ask(question: bytes) -> bytes:
        asked.append(outcomes.pop(0))
        raise asked[-1]

    monkeypatch.setattr(checker._child, "ask", ask)
    grammar = Grammar("regex", "a+")
    try:
        for error, words in (
            (QueueFull, "could not be checked now: try again later"),
            (ValueError, "takes a to compile"),
            (ValueError, "takes a to compile"),
        ):
            with pytest.raises(error, match=words):
                checker.check(grammar)
        assert len(asked) == 2
    finally:
        checker.close()
