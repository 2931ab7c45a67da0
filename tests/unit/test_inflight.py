"""In-flight requests: an id belongs to one request until it ends, and is free afterwards."""

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


class Fixture:
    """In-flight requests, and the commands that they submit to the engine's thread."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.commands: list[Callable[[Any], None]] = []
        self.inflight = InflightRequests(self, 4, None, Spans())  # type: ignore[arg-type]

    def submit(self, command: Callable[[Any], None]) -> None:
        assert self.lock._is_owned()  # type: ignore[attr-defined]
        self.commands.append(command)

    def state(self, rid: str, part_of: Sequence[str] = (), client: object = None) -> RequestState:
        request = Request(rid, [1], SamplingParams(), 0, 3, 0)
        state = RequestState(request, None, lambda progress: self.inflight.release(progress.rid))
        state.part_of, state.client = tuple(part_of), client
        return state

    def reserve(self, *states: RequestState) -> None:
        self.inflight.reserve(states, check_queue=True)


def aborted(states: Sequence[RequestState]) -> list[str]:
    return [state.request.rid for state in states if state.request.finish_reason is not None]


def test_an_abandoned_request_keeps_its_successor() -> None:
    fixture = Fixture()
    inflight, first, second = fixture.inflight, fixture.state("same"), fixture.state("same")
    fixture.reserve(first)
    assert inflight.abort("same") == 1
    assert first.request.finish_reason is not None and len(inflight) == 0
    fixture.reserve(second)
    assert inflight.start(deque([first]), 1) == 0  # it has ended although its id is reserved
    inflight.abandon([first])
    assert len(inflight) == 1 and inflight._waiting == {second}
    assert inflight.start(deque([second]), 1) == 1


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
    """One call has two prompts with two samples each; other requests have similar ids."""
    fixture = Fixture()
    call = [
        fixture.state(f"job-{i}{more}", (f"job-{i}", "job")) for i in (0, 1) for more in ("", "-1")
    ]
    others = [fixture.state(rid, (rid,)) for rid in ("team", "team-0-1", "team-1", "job-2")]
    fixture.reserve(*call)
    for other in others:
        fixture.reserve(other)
    assert fixture.inflight.abort(name) == len(expected)
    assert aborted([*call, *others]) == expected
    assert fixture.inflight.abort_all() == len(call) + len(others) - len(expected)


def test_an_id_is_in_use_until_its_last_request_is_over() -> None:
    fixture = Fixture()
    call = [fixture.state("a", ("a",)), fixture.state("a-1", ("a",))]
    fixture.reserve(*call)
    for taken in ("a", "a-1"):
        with pytest.raises(ValueError, match=f"rid '{taken}' is in use"):
            fixture.reserve(fixture.state("b", (taken,)))
    fixture.inflight.release("a")
    with pytest.raises(ValueError, match="rid 'a' is in use"):
        fixture.reserve(fixture.state("a", ("a",)))
    assert (
        len(fixture.inflight) == 1 and fixture.inflight.abort("a") == 1 and aborted(call) == ["a-1"]
    )
    fixture.reserve(fixture.state("a", ("a",)))
    assert len(fixture.inflight) == 1


def test_one_client_does_not_abort_anothers_requests() -> None:
    fixture = Fixture()
    states = [fixture.state("a", client="x"), fixture.state("b", client="y"), fixture.state("c")]
    fixture.reserve(*states)
    ended = [fixture.inflight.abort(name, "x") for name in "abc"]
    assert ended == [1, 0, 0] and aborted(states) == ["a"]
    assert [fixture.inflight.abort(name) for name in "abc"] == [0, 1, 1]


def test_an_abort_finds_requests_that_are_about_to_begin() -> None:
    """Requests are chosen and sent under one lock, so no abort overtakes its request."""
    fixture = Fixture()
    first, second = fixture.state("a"), fixture.state("b")
    fixture.reserve(first, second)
    assert (
        fixture.inflight.start(deque([first]), 1)
        == fixture.inflight.start(deque([second]), 1, errors_as_outputs=True)
        == 1
    )
    assert len(fixture.commands) == 2
