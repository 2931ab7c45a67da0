"""The desk: ids are a request's own until it is over, and another's from then on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from moesaic.core.request import Request
from moesaic.core.sampling import SamplingParams
from moesaic.engine.frontend.inflight import InflightRequests
from moesaic.engine.schedule.request_state import RequestState
from moesaic.observe.spans import Spans


class Told:
    """A desk, and what it tells the engine's thread."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.commands: list[Callable[[Any], None]] = []
        self.desk = InflightRequests(self._tell, self.lock, 4, None, Spans())

    def _tell(self, command: Callable[[Any], None]) -> None:
        assert self.lock._is_owned()  # type: ignore[attr-defined]
        self.commands.append(command)

    def job(self, rid: str, part_of: Sequence[str] = (), client: object = None) -> RequestState:
        request = Request(rid, [1], SamplingParams(), 0, 3, 0)
        job = RequestState(request, None, lambda progress: self.desk.ended(progress.rid))
        job.part_of, job.client = tuple(part_of), client
        return job

    def hold(self, *jobs: RequestState) -> None:
        self.desk.hold(jobs, checked=True)


def aborted(jobs: Sequence[RequestState]) -> list[str]:
    return [job.request.rid for job in jobs if job.request.finish_reason is not None]


def test_who_leaves_takes_no_one_elses_place() -> None:
    told = Told()
    desk, first, second = told.desk, told.job("same"), told.job("same")
    told.hold(first)
    assert desk.abort("same") == 1
    assert first.request.finish_reason is not None and len(desk) == 0
    told.hold(second)
    assert desk.begin(deque([first]), 1) == 0  # it is over, though its name is held
    desk.leave([first])
    assert len(desk) == 1 and desk._held == {second}
    assert desk.begin(deque([second]), 1) == 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("job", ["job-0", "job-0-1", "job-1", "job-1-1"]),
        ("job-0", ["job-0", "job-0-1"]),
        ("job-1-1", ["job-1-1"]),
        ("team", ["team"]),
        ("team-0", []),
        ("t", []),
        ("", []),
    ],
)
def test_ids_are_matched_exactly(name: str, expected: list[str]) -> None:
    """A call of two prompts with two samples each, and requests of others with similar ids."""
    told = Told()
    call = [told.job(f"job-{i}{more}", (f"job-{i}", "job")) for i in (0, 1) for more in ("", "-1")]
    others = [told.job(rid, (rid,)) for rid in ("team", "team-0-1", "team-1", "job-2")]
    told.hold(*call)
    for other in others:
        told.hold(other)
    assert told.desk.abort(name) == len(expected)
    assert aborted([*call, *others]) == expected
    assert told.desk.abort_all() == len(call) + len(others) - len(expected)


def test_an_id_is_in_use_until_its_last_request_is_over() -> None:
    told = Told()
    call = [told.job("a", ("a",)), told.job("a-1", ("a",))]
    told.hold(*call)
    for taken in ("a", "a-1"):
        with pytest.raises(ValueError, match=f"rid '{taken}' is in use"):
            told.hold(told.job("b", (taken,)))
    told.desk.ended("a")
    with pytest.raises(ValueError, match="rid 'a' is in use"):
        told.hold(told.job("a", ("a",)))
    assert len(told.desk) == 1 and told.desk.abort("a") == 1 and aborted(call) == ["a-1"]
    told.hold(told.job("a", ("a",)))
    assert len(told.desk) == 1


def test_one_client_does_not_abort_anothers_requests() -> None:
    told = Told()
    jobs = [told.job("a", client="x"), told.job("b", client="y"), told.job("c")]
    told.hold(*jobs)
    ended = [told.desk.abort(name, "x") for name in "abc"]
    assert ended == [1, 0, 0] and aborted(jobs) == ["a"]
    assert [told.desk.abort(name) for name in "abc"] == [0, 1, 1]


def test_an_abort_finds_requests_that_are_about_to_begin() -> None:
    """Chosen and sent under one lock: an abort in between would come before the request."""
    told = Told()
    first, second = told.job("a"), told.job("b")
    told.hold(first, second)
    assert told.desk.begin(deque([first]), 1) == told.desk.begin_or_end(deque([second]), 1) == 1
    assert len(told.commands) == 2
