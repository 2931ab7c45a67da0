"""Kills, stops and errors in the processes of a real engine: the right one is named, every request
gets an error, nothing is left behind. How long it takes is measured by bench/faults.py."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from typing import Any

import pytest

from bench.fault_cases import (
    FOLLOWER,
    SUPERVISOR,
    Case,
    Outcome,
    Victim,
    outcome,
    pause,
)
from bench.fault_commands import CLIENT, CommandCase, command_outcome
from bench.faults import COMMAND_CASES, OTHER_CASES, RANK_CASES
from moesaic.comm.supervise.run_folder import RunFolder

pytestmark = pytest.mark.timeout(400)

# tests/distributed/test_supervisor.py always has errors, also at the start, and idle ranks.
ALWAYS = [Case(FOLLOWER, "SIGSTOP", "prefill"), Case(SUPERVISOR, "SIGSTOP", "decode")]
# tests/distributed/test_supervisor.py always kills a client.
COMMANDS_ALWAYS = [CommandCase((CLIENT,), "SIGINT")]
BOTH = CommandCase((CLIENT, "supervisor"), "kill -9")
STATUS = {"SIGINT": 130, "SIGTERM": -signal.SIGTERM, "kill -9": -signal.SIGKILL}
# What is said of a rank, after its name and before its step and last operation.
TOLD = {
    "kill -9": r"was killed by signal 9 \(SIGKILL\); ",
    "SIGSTOP": r"hangs: its process \d+ has been stopped \(state T\) for \d\.\d s; ",
    "exception": r"failed: ValueError: as it was told to \(in _raise, faulty_rank.py:\d+\); ",
    "lock held": r"hangs: it has given no heartbeat for \d\.\d s; ",
    "stuck": ": ",
}
COORDINATES = {"tp 4, dp 2": r"\(tp \d, dp \d\)", "pp 3": r"\(pp \d\)", "tp 2": r"\(tp \d\)"}
SEEN = r"step \d+, (starting|idle|computing|waiting) for \d+\.\d s, last in '.+'"
PROCESS_TOLD = {
    ("supervisor", "kill -9"): "the supervisor died (exit code -9), and all ranks with it",
    ("supervisor", "SIGSTOP"): "the supervisor hangs: its process",
    ("store", "kill -9"): "the store's process was killed by signal 9 (SIGKILL)",
    ("store", "SIGSTOP"): "the store's process hangs: its process",
}


def parameters(always: Sequence[Any], every: Sequence[Any], name: Any) -> list[Any]:
    rest = [case for case in every if case not in always]
    return [
        *(pytest.param(case, id=name(case)) for case in always),
        *(pytest.param(case, id=name(case), marks=pytest.mark.slow) for case in rest),
    ]


def case_name(case: Case) -> str:
    return f"{case.victim.name}-{case.fault}-{case.phase}"


def command_name(case: CommandCase) -> str:
    return f"{case.command}-{'+'.join(case.victims)}-{case.fault}-{case.phase}"


@pytest.mark.parametrize("case", parameters(ALWAYS, [*RANK_CASES, *OTHER_CASES], case_name))
def test_fault_is_named_and_every_request_answered(case: Case) -> None:
    found = outcome(case)
    check_message(case, found)
    assert (found.pending, found.failed) == {"start": (0, 0), "idle": (1, 1)}.get(
        case.phase, (8, 8)
    )
    assert found.left == []


def check_message(case: Case, found: Outcome) -> None:
    rank = case.victim.rank
    if rank is not None:
        name = rf"rank {rank} {COORDINATES[case.victim.layout]}"
        space = "" if case.fault == "stuck" else " "
        assert re.search(f"{name}{space}{TOLD[case.fault]}{SEEN}", found.message), found.message
        others = set(re.findall(r"rank (\d)", found.message)) - {str(rank)}
        # Only who waits for a stuck rank is named beside it.
        assert not others or case.fault == "stuck", found.message
    elif case.victim.process == "fork server":
        assert "the fork server has died" in found.message
    else:
        assert found.message.startswith(PROCESS_TOLD[case.victim.process, case.fault])


@pytest.mark.parametrize(
    "case",
    parameters(COMMANDS_ALWAYS, [case for case in COMMAND_CASES if case != BOTH], command_name),
)
def test_command_ends_with_a_status_and_leaves_nothing(case: CommandCase) -> None:
    found = command_outcome(case)
    assert found.left == []
    if CLIENT in case.victims:
        assert found.status == STATUS[case.fault]
        return
    assert found.status == 1
    rank = case.victims[0].removeprefix("rank")
    told = rf"rank {rank} \(tp {rank}\) {TOLD[case.fault]}{SEEN}"
    if case.victims == ("supervisor",):
        told = r"the supervisor died \(exit code -9\), and all ranks with it"
    assert re.search(told, found.message), found.message
    assert case.command != "serve" or found.message.startswith("HTTP 503: ")


@pytest.mark.slow
def test_folder_of_a_killed_pair_goes_at_the_next_start() -> None:
    """Nobody is left who could remove it before."""
    found = command_outcome(BOTH)
    (folder,) = found.left
    other = RunFolder.create()
    try:
        assert folder.startswith(str(other.path.parent)) and folder != str(other.path)
        assert folder not in [str(path) for path in other.path.parent.iterdir()]
    finally:
        other.remove()


@pytest.mark.slow  # test_batch_log has a shorter one
def test_sleeping_rank_is_logged_and_the_service_goes_on() -> None:
    found = pause(Victim("a follower", "rank1", "tp 2"), 3)
    assert re.search(
        rf"the odd one out is rank 1 \(tp 1\): {SEEN}\. Waiting for it: rank 0 in '",
        found.told,
    ), found.told
    assert found.same
    assert found.left == []
