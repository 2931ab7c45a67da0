"""A decode instance's requests whose prompts come from elsewhere get pages again, whatever ends or
is retracted around them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moesaic.core.disagg import Room, Ticket
from moesaic.core.request import Request, RequestPhase
from moesaic.core.sampling import SamplingParams
from moesaic.disagg.messages import PromptResult
from moesaic.disagg.rooms import RoomEvent
from moesaic.engine.schedule.kv_manager import KVManager
from moesaic.engine.schedule.scheduler import Scheduler, SchedulerConfig
from moesaic.engine.worker.arrivals import Arrivals

TOKENS = 100


class Rooms:
    """In place of DecodeRooms: every prefill instance takes what it is offered."""

    def __init__(self) -> None:
        self.events: list[RoomEvent] = []
        self.offered: list[int] = []
        self.released: list[int] = []

    def announce(self, request_no: int, room: Room, prompt: bytes) -> None:
        pass

    def offer(self, request_no: int, first: int, stop: int) -> Ticket:
        self.offered.append(request_no)
        return Ticket(request_no, 1)

    def release(self, request_no: int) -> None:
        self.released.append(request_no)

    def state(self) -> list[Any]:
        return []

    def take(self) -> list[RoomEvent]:
        found, self.events = self.events, []
        return found


class Group:
    """The scheduler of a serving group, with pages of one token, and its arrivals."""

    def __init__(self) -> None:
        kv = KVManager(TOKENS, 1, False, lambda pages: None)
        self.scheduler = Scheduler(SchedulerConfig(max_running=8, chunk_tokens=256), kv)
        self.rooms, self.states = Rooms(), dict[int, Any]()
        counts = SimpleNamespace(prompts_arrived=0, prompts_recomputed=0)
        planner: Any = SimpleNamespace(
            scheduler=self.scheduler,
            facts=SimpleNamespace(cache_tokens=TOKENS),
            states=self.states,
            metrics=SimpleNamespace(counts=counts),
            begin_answer=lambda state, found, finish: state.token_ids.extend(found.token_ids),
        )
        rooms: Any = self.rooms
        self.arrivals = Arrivals(planner, rooms, lambda message: None)

    def add(self, number: int, length: int, arrives: bool = True) -> Request:
        params = SamplingParams(max_new_tokens=1)
        request = Request("r", [number] * length, params, 0, 1, number)
        self.states[number] = request
        if arrives:
            request.room = Room(number, "127.0.0.1", 1)
            self.arrivals.expect(request)
        self.scheduler.add(request)
        return request

    def finish(self, request: Request) -> None:
        self.scheduler.finish(request)
        del self.states[request.request_no]


@pytest.mark.parametrize("is_here", [False, True])
def test_a_prompt_that_was_retracted_begins_again(is_here: bool) -> None:
    """Its tokens count once among those on their way, though there is no room for them twice. It
    is not offered again, and those behind it get their turn."""
    group = Group()
    running = group.add(1, 30, arrives=False)
    group.scheduler.schedule()
    retracted, younger = group.add(2, 60), group.add(3, 30)
    group.arrivals.advance()
    assert group.rooms.offered == [2]
    group.scheduler._retract(retracted)
    if is_here:
        result = PromptResult(Ticket(2, 1), [7])
        group.rooms.events.append(RoomEvent(2, result))
    group.finish(running)
    group.arrivals.advance()
    assert retracted.phase is RequestPhase.RUNNING and retracted.awaits_prompt is not is_here
    assert retracted.num_computed == (60 if is_here else 0)
    assert len(retracted.pages) == (61 if is_here else 60)
    assert group.rooms.offered == [2, 3] and younger.phase is RequestPhase.RUNNING


def test_many_prompts_that_were_retracted_begin_again() -> None:
    """None of them fits twice, and together they are nearly all that may be on its way."""
    group = Group()
    requests = [group.add(number, 24) for number in range(4)]
    group.arrivals.advance()
    for request in requests[:0:-1]:
        group.scheduler._retract(request)
    group.finish(requests[0])
    group.arrivals.advance()
    assert [request.phase for request in requests[1:]] == [RequestPhase.RUNNING] * 3
    assert group.rooms.offered == [0, 1, 2, 3]


def test_the_end_of_a_request_gives_its_room_to_the_next_one_at_once() -> None:
    """Nothing else may happen in this group that would look again."""
    group = Group()
    first, second = group.add(1, 60), group.add(2, 60)
    group.arrivals.advance()
    assert group.rooms.offered == [1] and second.phase is RequestPhase.WAITING
    group.finish(first)
    group.arrivals.advance()
    assert group.rooms.released == [1] and group.rooms.offered == [1, 2]
    assert second.phase is RequestPhase.RUNNING


def test_what_is_computed_after_all_is_told_until_its_first_token() -> None:
    group = Group()
    request, other = group.add(1, 30), group.add(2, 30)
    group.arrivals.advance()
    group.rooms.events += [RoomEvent(1, None, "it is lost"), RoomEvent(2, None, "it is lost")]
    group.arrivals.advance()
    told = [{**one, "seconds": None} for one in group.arrivals.state()]
    where = {"phase": "is computed here", "peer": "127.0.0.1:1", "seconds": None}
    assert told == [{"room": 1} | where, {"room": 2} | where]
    request.token_ids.append(9)
    group.finish(other)
    group.arrivals.advance()
    assert group.arrivals.state() == []
