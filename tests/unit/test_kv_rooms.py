"""Rooms of decode instances and the lobby of a prefill instance: the halves of a request meet and
part, and whoever waits in vain is told why."""

from __future__ import annotations

import os
import select
import socket
import time
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from moesaic.comm.network.connect import connect
from moesaic.comm.network.handshake import Role
from moesaic.core.disagg import KVRank, KVTarget, Room, Ticket
from moesaic.disagg import lobby as lobby_module
from moesaic.disagg import rooms as rooms_module
from moesaic.disagg.likeness import prompt_digest
from moesaic.disagg.lobby import LobbyEvent
from moesaic.disagg.messages import Announce, Offer, PromptResult, frame
from moesaic.disagg.rooms import DecodeRooms, RoomEvent
from moesaic.engine.worker.arrivals import Arrivals
from tests.server.serving import wait_until
from tests.unit.kv_instances import (
    BODY,
    HEADS,
    LAYERS,
    LOCAL,
    MODEL,
    OWN,
    PROMPT,
    SECRET,
    chunk_of,
    meet,
    next_event,
    prefill_lobby,
    receivers,
    shares,
    talk,
)


def test_two_instances_meet_and_part() -> None:
    """Also in the other order; a withdrawn room ends the request, a lost one the transfer."""
    with prefill_lobby() as (lobby, room), receivers(shares(2, 3, False)) as (_, rooms):
        assert meet(lobby, rooms, room, 2, 5).stop == 5
        assert [one["phase"] for one in lobby.state()] == ["computes and sends"]
        assert [(one["room"], one["phase"], one["peer"]) for one in rooms.state()] == [
            (7, "waits for prefill", room.address)
        ]
        rooms.release(1)
        event = next_event(lobby)
        assert event.target is None and "does not want it any more" in event.why
        assert lobby.state() == rooms.state() == []

        lobby.enter(2, 8, PROMPT)
        [waiting] = lobby.state()
        assert (waiting["phase"], waiting["peer"]) == ("waits for decode", None)
        again = Room(8, room.host, room.port)
        rooms.announce(2, again, PROMPT)
        wait_until(lambda: lobby.state()[0]["phase"].startswith("waits for pages"))
        rooms.offer(2, 0, 4)
        assert next_event(lobby).target.first == 0
        lobby.enter(3, 8, PROMPT)
        assert "has a request already" in next_event(lobby).why
        lobby.leave(2, "it was stopped")
        assert next_event(rooms) == RoomEvent(2, None, "room 8: it was stopped")
        rooms.announce(4, Room(9, room.host, room.port), PROMPT)
        wait_until(lambda: bool(lobby.state()))
        lobby.close()
        assert next_event(rooms).why.startswith("room 9: the prefill instance at 127.0.0.1:")


def test_waits_end_and_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REQUEST_SECONDS", "DECODE_SECONDS"):
        monkeypatch.setattr(lobby_module, name, 0.1)
    monkeypatch.setattr(rooms_module, "ARRIVE_SECONDS", 0.1)
    with prefill_lobby() as (lobby, room), receivers(shares(2, 1, False)) as (_, rooms):
        rooms.announce(1, room, PROMPT)
        assert "got no such request in 0.1 s" in next_event(rooms).why
        rooms.release(1)
        lobby.enter(5, 70, PROMPT)
        assert "no decode instance came to room 70" in next_event(lobby).why
        meet(lobby, rooms, Room(8, room.host, room.port), 0, 4)
        lobby.leave(1, "")
        why = next_event(rooms).why
        assert why.startswith("room 8: not all has come: keys and values of ranks [0, 1] and the ")
        rooms.release(1)
        rooms.announce(2, Room(9, "127.0.0.1", 1), PROMPT)
        assert "the prefill instance at 127.0.0.1:1 is lost" in next_event(rooms).why


def test_other_models_and_secrets_are_refused() -> None:
    with prefill_lobby() as (lobby, room), receivers(shares(1, 1, True)) as (_, rooms):
        lobby.enter(1, room.number, PROMPT)
        rooms.announce(1, room, PROMPT)
        rooms.offer(1, 0, 4)
        assert "the instances serve different models: 6 layers, 4 key" in next_event(rooms).why
        stranger = DecodeRooms([], OWN, b"of somebody else entirely", MODEL, b"", LOCAL)
        stranger.announce(2, Room(9, room.host, room.port), PROMPT)
        assert "is lost: it does not know this node's secret" in next_event(stranger).why


def test_seconds_are_those_of_the_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what has not come yet is named."""
    now = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep)
    monkeypatch.setattr(rooms_module, "time", clock)
    with prefill_lobby() as (_, room), receivers(shares(2, 1, False)) as (_, rooms):

        def told() -> tuple[str, float, str]:
            [one] = rooms.state()
            assert (one["room"], one["peer"]) == (7, room.address)
            return one["phase"], one["seconds"], one.get("why", "")

        rooms.announce(1, room, PROMPT)
        first, now[0] = rooms._transfers[1].since, 1003.0
        assert told()[:2] == ("waits for pages", round(1003.0 - first, 3))
        ticket = rooms.offer(1, 0, 4)
        now[0] = 1005.0
        assert told() == ("waits for prefill", 2.0, "")
        rooms.on_result(PromptResult(ticket, [5]))
        now[0] = 1008.0
        assert told() == ("arrives", 3.0, "not all has come: keys and values of ranks [0, 1]")


def test_seconds_of_a_prefill_half_are_those_of_the_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which begins anew when its decode half is announced, and offers pages."""
    now = [1000.0]
    monkeypatch.setattr(lobby_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with prefill_lobby() as (lobby, room), receivers(shares(1, 1, False)) as (_, rooms):

        def told(phase: str) -> float:
            wait_until(lambda: lobby.state()[0]["phase"] == phase)
            return float(lobby.state()[0]["seconds"])

        lobby.enter(1, room.number, PROMPT)
        now[0] = 1003.0
        assert told("waits for decode") == 3.0
        rooms.announce(1, room, PROMPT)
        assert told("waits for pages of the decode instance") == 0.0
        now[0] = 1005.0
        rooms.offer(1, 0, 3)
        assert told("computes and sends") == 0.0
        other = Room(8, room.host, room.port)
        rooms.announce(2, other, PROMPT)
        wait_until(lambda: 8 in lobby._rooms)
        lobby._rooms[8].since = 1001.0
        rooms.offer(2, 0, 3)
        wait_until(lambda: lobby._rooms[8].target is not None)
        assert lobby.state()[1]["phase"] == "waits for its request"
        assert lobby.state()[1]["seconds"] == 4.0, "that it is offered pages is no phase of it"


def test_a_link_is_lost_for_any_reason() -> None:
    with receivers(shares(1, 1, False)) as (_, rooms):
        rooms.announce(1, Room(9, "a..b", 9), PROMPT)
        assert "room 9: the prefill instance at a..b:9 is lost: Unicode" in next_event(rooms).why


def test_a_link_that_is_not_connected_in_time_fails_its_rooms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its lookup, or a prefill instance that is stopped and whose kernel accepts, takes longer.
    Once it is connected after all, rooms use it."""
    lookup, is_found = socket.getaddrinfo, Event()

    def look_up(host: str, *more: Any, **options: Any) -> Any:
        if host == "slow":
            is_found.wait(60)
            host = "127.0.0.1"
        return lookup(host, *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with (
        prefill_lobby() as (lobby, room),
        receivers(shares(1, 1, False)) as (_, rooms),
        socket.create_server(("127.0.0.1", 0)) as stopped,
    ):
        slow = Room(7, "slow", room.port)
        for one in (slow, Room(8, "127.0.0.1", stopped.getsockname()[1])):
            rooms.announce(1, one, PROMPT)
            link = rooms._links[one.address]
            link._begun = -float("inf")
            text = f"{one}: the prefill instance at {one.address} is not connected after 2 s"
            assert next_event(rooms) == RoomEvent(1, None, text)
            rooms.release(1)
        is_found.set()
        wait_until(lambda: not rooms._links[slow.address].is_late)
        wait_until(lambda: 7 in lobby._over)
        assert meet(lobby, rooms, Room(9, "slow", room.port), 0, 3).stop == 3


@pytest.mark.parametrize("port", [-1, 70_000])
def test_ports_out_of_range_end_the_connection(port: int) -> None:
    [one] = shares(1, 1, False)
    with prefill_lobby() as (lobby, room), receivers([one]) as (_, rooms):
        rooms._ranks = (KVRank(0, 0, 0, (one,), "127.0.0.1", port),)
        lobby.enter(1, room.number, PROMPT)
        rooms.announce(1, room, PROMPT)
        rooms.offer(1, 0, 4)
        assert "a message that cannot be read: Expected `int`" in next_event(lobby).why


def test_pages_of_no_rank_end_the_connection() -> None:
    """The request may come later, in the engine's thread."""
    with prefill_lobby() as (lobby, room):
        address = room.host, room.port
        made, _ = connect(lambda: socket.create_connection(address), Role.ROOM, OWN, SECRET, 5)
        messages = Announce(7, MODEL, PROMPT), Offer(KVTarget(Ticket(7, 1), 0, 2, ()))
        for buffer in (part for message in messages for part in frame(message)):
            made.sendall(buffer)
        wait_until(lambda: 7 in lobby._over)
        lobby.enter(1, 7, PROMPT)
        assert "pages of no rank" in next_event(lobby).why
        made.close()


@pytest.mark.parametrize("enters_first", [False, True])
@pytest.mark.parametrize(
    ("prompt", "model", "drafts", "why"),
    [
        (prompt_digest([1, 2, 4], ""), MODEL, b"", "the instances got different prompts"),
        (prompt_digest([1, 2, 3], "key"), MODEL, b"", "the instances got different prompts"),
        (PROMPT, b"another", b"", "the instances serve different models: config.json, the weight"),
        (PROMPT, MODEL, b"a head", "the decode instance makes drafts from the hidden states"),
    ],
)
def test_halves_of_others_do_not_meet(
    prompt: bytes, model: bytes, drafts: bytes, why: str, enters_first: bool
) -> None:
    """Both get told, whoever comes first; the room can then be used."""
    with prefill_lobby() as (lobby, room), receivers(shares(1, 1, False)) as (_, rooms):
        rooms._model, rooms._draft = model, drafts
        if enters_first:
            lobby.enter(1, room.number, PROMPT)
        rooms.announce(1, room, prompt)
        rooms.offer(1, 0, 3)
        if not enters_first:
            wait_until(lambda: bool(lobby.state()))
            lobby.enter(1, room.number, PROMPT)
        for source in (lobby, rooms):
            assert f"room 7: {why}" in next_event(source).why
        rooms.release(1)
        assert lobby.state() == rooms.state() == []
        rooms._model, rooms._draft = MODEL, b""
        assert meet(lobby, rooms, room, 0, 3).stop == 3


def test_a_room_has_one_request() -> None:
    """Of one instance's second request it is refused there, of a second connection's or a late
    one's in the lobby; the first is not disturbed."""
    with (
        prefill_lobby() as (lobby, room),
        receivers(shares(1, 1, False)) as (_, rooms),
        receivers(shares(1, 1, False)) as (_, others),
    ):
        meet(lobby, rooms, room, 0, 3)
        first = lobby._rooms[7].target
        rooms.announce(2, room, PROMPT)
        text = "room 7: it has a request already: choose another bootstrap_room"
        assert next_event(rooms) == RoomEvent(2, None, text)
        rooms.release(2)
        others.announce(3, room, PROMPT)
        assert "room 7 is that of another request of rank 0" in next_event(others).why
        lobby.enter(4, 7, PROMPT)
        assert "room 7 has a request already" in next_event(lobby).why
        lobby.leave(4, "")
        rooms._link(room).post(Announce(7, MODEL, PROMPT))
        assert "is that of another request" in next_event(rooms).why
        assert lobby._rooms[7].target is first and lobby._rooms[7].request_no == 1


def test_a_rank_that_dies_breaks_its_transfers() -> None:
    [one] = shares(1, 1, False)
    with prefill_lobby() as (lobby, room), receivers([one]) as ((receiver,), rooms):
        ticket = meet(lobby, rooms, room, 0, 4).ticket
        wait_until(lambda: receiver.staged_bytes > 0)
        sender = talk(receiver, frame(chunk_of(ticket), [BODY]))
        staged = receiver.staged(ticket)
        wait_until(lambda: staged.num_missing == LAYERS * 2 * HEADS)
        sender.close()
        event = next_event(rooms)
        assert event.result is None and "room 7: rank 0 of node 0 (127.0.0.1:" in event.why
        event = next_event(lobby)  # what is not computed yet need not be
        assert event.target is None and "does not want it any more" in event.why
        assert lobby.state() == []
        rooms.release(1)


@pytest.mark.parametrize("is_queued", [False, True])
def test_a_half_that_comes_late_ends_at_once(is_queued: bool) -> None:
    """Its decode instance has given up, also while it was in the queue: nobody else will come to
    this room, until one does."""
    with prefill_lobby() as (lobby, room), receivers(shares(1, 1, False)) as (_, rooms):
        if is_queued:
            lobby.expect(5, room.number)
        rooms.announce(1, room, PROMPT)
        wait_until(lambda: any(one["peer"] for one in lobby.state()))
        rooms.release(1)
        wait_until(lambda: not lobby.state())
        assert not lobby.take()
        lobby.enter(5, room.number, PROMPT)
        assert next_event(lobby) == LobbyEvent(
            5, None, "room 7: the decode instance does not want it any more"
        )
        assert meet(lobby, rooms, room, 0, 3).stop == 3


def test_events_of_requests_that_have_ended_are_taken() -> None:
    """Else the descriptor stays readable, and the leader of a group never sleeps again."""
    with receivers(shares(1, 1, False)) as (_, rooms):
        planner: Any = SimpleNamespace(states={})
        arrivals = Arrivals(planner, rooms, lambda message: None)
        assert not arrivals.advance()
        rooms.announce(1, Room(9, "127.0.0.1", 1), PROMPT)
        assert select.select([rooms.wakeup_fd], [], [], 20)[0]
        rooms.release(1)
        assert not arrivals.advance()
        assert not select.select([rooms.wakeup_fd], [], [], 0)[0]
        with pytest.raises(BlockingIOError):
            os.eventfd_read(rooms.wakeup_fd)


def test_a_decode_instance_that_is_stopped_holds_up_nobody() -> None:
    """It takes nothing, however much it is told; others meet, and its rooms end."""
    with prefill_lobby() as (lobby, room), receivers(shares(1, 1, False)) as (_, rooms):
        address = room.host, room.port
        stopped, _ = connect(lambda: socket.create_connection(address), Role.ROOM, OWN, SECRET, 5)
        for number in range(100, 164):
            lobby.enter(number, number, PROMPT)
            for buffer in frame(Announce(number, MODEL, PROMPT)):
                stopped.sendall(buffer)
        wait_until(lambda: all(one["peer"] for one in lobby.state()))
        begun = time.monotonic()
        for number in range(100, 163):
            lobby.leave(number, "x" * (1 << 20))
        assert meet(lobby, rooms, room, 0, 3).stop == 3
        assert time.monotonic() - begun < lobby_module.SILENCE_SECONDS - 0.5, (
            "nobody waits for what it does not take"
        )
        event = next_event(lobby)
        assert event.request_no == 163 and "rank 0 of node 0 (127.0.0.1" in event.why
        assert [one["room"] for one in lobby.state()] == [room.number]
        stopped.close()
