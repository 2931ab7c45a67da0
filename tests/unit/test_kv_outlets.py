"""The senders of a rank outlive errors, do not wait for a peer that takes nothing, and tell what
they have dropped."""

from __future__ import annotations

import socket
import time
from queue import Queue
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from moesaic.comm.errors import PeerTimeout
from moesaic.comm.lifecycle import Lifecycle, Membership, Participant
from moesaic.comm.network.handshake import Role, Session
from moesaic.comm.network.listener import Listener
from moesaic.core.disagg import KVRank, KVSend, KVTarget, Room, Ticket
from moesaic.disagg import outlets as outlets_module
from moesaic.disagg.messages import Broken, Close, Opened, PromptResult, frame, receive
from moesaic.disagg.outlets import KVOutlet, StepOnDevice
from moesaic.disagg.rooms import DecodeRooms, RoomEvent
from moesaic.disagg.sender import KVSender
from tests.server.serving import wait_until
from tests.unit.kv_instances import (
    BODY,
    HEADS,
    LAYERS,
    OWN,
    PROMPT,
    SECRET,
    Group,
    chunk_of,
    is_complete,
    next_event,
    outlets_of,
    receivers,
    shares,
)


def test_an_outlet_outlives_a_host_that_no_lookup_takes(caplog: pytest.LogCaptureFixture) -> None:
    outlets = outlets_of(0, "shm")
    outlets.put("a..b", 9, Close(Ticket(1, 1)))
    wait_until(lambda: "no KV cache can be sent to a..b:9" in caplog.text)
    assert outlets.take("a..b", 9, 8) is None
    outlets._outlets["a..b", 9]._rests_until = 0.0
    outlets.put("a..b", 9, Close(Ticket(1, 1)))
    wait_until(lambda: caplog.text.count("no KV cache can be sent to a..b:9") == 2)


def test_a_sender_outlives_an_error_of_its_device(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down(*given: Any) -> None:
        raise RuntimeError("the device is lost")

    outlets, told = outlets_of(0, "shm"), "no KV cache can be sent to 127.0.0.1:9: the device"
    monkeypatch.setattr(KVOutlet, "_send", break_down)
    for number in (1, 2):
        outlets.put("127.0.0.1", 9, Close(Ticket(1, 1)))
        wait_until(lambda count=number: caplog.text.count(told) == count)
        assert outlets.take("127.0.0.1", 9, 8) is None
        outlets._outlets["127.0.0.1", 9]._rests_until = 0.0


@pytest.mark.parametrize("misses", ["chunk", "result", "what waits"])
def test_a_sender_knows_what_it_has_dropped(
    misses: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """So that the other instance does not wait for it; another transfer is complete."""
    monkeypatch.setattr(KVOutlet, "_run", lambda outlet: None)
    [one] = shares(1, 1, False)
    outlets, source = outlets_of(0, "tcp"), Group([one], 4, torch.float32, 2)
    sender = KVSender([(one,)], 0, outlets)
    ranks = (KVRank(0, 0, 0, (one,), "127.0.0.1", 9),)
    target, other = (KVTarget(Ticket(n, 1), 0, 2, ranks) for n in (1, 2))
    outlet = outlets._outlet("127.0.0.1", 9)

    def drop() -> None:
        with outlets.buffer.changed:
            outlet.drop("it took nothing")

    if misses == "chunk":
        drop()
    sender.send(KVSend(target, 0, 2), source.caches[0], source.slots(0, 2))
    if misses == "what waits":
        drop()
    if misses != "result":
        outlet._rests_until = 0.0  # it is tried again behind what was dropped
    else:
        drop()
    text = "its KV cache could not be sent to 127.0.0.1:9"
    assert sender.finish(target, PromptResult(target.ticket, [5])) == text
    outlet._rests_until = 0.0
    assert sender.finish(other, PromptResult(other.ticket, [5])) == ""


def offered(rooms: DecodeRooms) -> Ticket:
    """The ticket of two tokens in room 4, whose prefill instance stays connected."""
    link: Any = SimpleNamespace(post=lambda message: None, beat=lambda: None, is_late=False)
    rooms._links["stays:1"] = link
    rooms.announce(1, Room(4, "stays", 1), PROMPT)
    return rooms.offer(1, 0, 2)


def test_a_rank_is_told_what_was_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is reached again: the leader of the sender may not know."""
    monkeypatch.setattr(outlets_module, "REST_SECONDS", 0.05)
    [one] = shares(1, 1, False)
    with receivers([one]) as ((receiver,), rooms):
        ticket, outlets = offered(rooms), outlets_of(1, "tcp")
        outlet = outlets._outlet("127.0.0.1", receiver.port)
        with outlets.buffer.changed:
            outlet.drop("it took nothing")
            outlets.put("127.0.0.1", receiver.port, PromptResult(ticket, [5]))
        text = "room 4: the prefill instance could not send all of it"
        assert next_event(rooms) == RoomEvent(1, None, text)


def test_a_rank_is_told_what_it_has_not_read() -> None:
    """Its connection has ended before: others of its transfers may wait for this."""
    heard = Queue[Any]()

    def end_the_first(connection: Any, session: Session, name: str) -> None:
        receive(connection)
        for buffer in frame(Opened("")):
            connection.sendall(buffer)
        heard.put(receive(connection)[0])

    listening = socket.create_server(("127.0.0.1", 0))
    peer, outlets = Listener(listening, OWN, SECRET, {Role.KV: end_the_first}), outlets_of(0, "shm")
    address, chunk = ("127.0.0.1", listening.getsockname()[1]), chunk_of(Ticket(1, 1))
    place = outlets.take(*address, 256)
    outlets.put(*address, replace(chunk, place=place))
    assert heard.get(timeout=20) == replace(chunk, place=place)
    assert heard.get(timeout=20) == Broken(
        Ticket(1, 1), "the prefill instance could not send all of it"
    )
    assert outlets.buffer.free_bytes == outlets.buffer.nbytes
    peer.close()


class Failing(Participant):
    """`why`: what waits of kernels have failed with."""

    why = ""

    def check(self) -> None:
        if self.why:
            raise PeerTimeout(self.why)

    def restart(self, membership: Membership) -> None:
        self.why = ""


@pytest.mark.parametrize("end", ["whole", "failed", "rolled back"])
def test_what_an_abandoned_step_has_computed_is_not_sent(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that waited in vain end, too, and what they compute would not be replaced by what the
    repeated step computes. Until the end nobody takes the peer for one that takes nothing."""
    lifecycle, kernels, passed = Lifecycle(Membership(0, (0,))), Failing(), Event()
    lifecycle.register(kernels, (0,))
    event = SimpleNamespace(synchronize=lambda: passed.wait(60))
    step = StepOnDevice(event, lifecycle, lifecycle.membership.generation)
    monkeypatch.setattr(StepOnDevice, "recorded", lambda *given: step)
    [one] = shares(1, 1, False)
    with receivers([one]) as ((receiver,), rooms):
        ticket, outlets = offered(rooms), outlets_of(1, "tcp")
        outlet, there = outlets._outlet("127.0.0.1", receiver.port), ("127.0.0.1", receiver.port)
        outlets.buffer.device = SimpleNamespace(type="cuda")  # type: ignore[assignment]
        place = outlets.take(*there, len(BODY))
        outlets.put(*there, chunk_of(ticket, place=place))
        wait_until(lambda: outlet._awaits_step)
        with outlets.buffer.changed:
            assert outlet.held_bytes and not outlet.is_stuck(-1.0)
        kernels.why = "no rank 1" if end != "whole" else ""
        if end == "rolled back":
            lifecycle.restart()
        passed.set()
        if end == "whole":
            wait_until(lambda: is_complete(receiver, ticket))
        else:
            text = "room 4: the prefill instance could not send all of it"
            assert next_event(rooms) == RoomEvent(1, None, text)
            assert receiver.staged(ticket).num_missing == LAYERS * 2 * HEADS
        wait_until(lambda: outlets.buffer.free_bytes == outlets.buffer.nbytes)


def test_a_peer_that_takes_nothing_does_not_hold_up_steps(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor take the memory of others. What it gets later begins on a new connection."""
    monkeypatch.setattr(outlets_module, "HOLD_SECONDS", 0.2)
    monkeypatch.setattr(outlets_module, "REST_SECONDS", 0.1)
    taken = Queue[bytes]()
    begin = Event()

    def stop(connection: Any, session: Session, name: str) -> None:
        begin.wait(60)
        try:
            while True:
                taken.put(bytes([receive(connection)[0].ticket.room]))  # type: ignore[union-attr]
        except OSError:
            pass

    listening = socket.create_server(("127.0.0.1", 0))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    stopped = Listener(listening, OWN, SECRET, {Role.KV: stop})
    [one] = shares(1, 1, False)
    outlets = outlets_of(1, "tcp", 4 << 20)
    with receivers([one]) as ((receiver,), rooms):
        rooms.announce(1, Room(3, "127.0.0.1", 1), PROMPT)
        ticket = rooms.offer(1, 0, 2)
        begun = time.monotonic()
        port = listening.getsockname()[1]
        for _ in range(48):
            if (place := outlets.take("127.0.0.1", port, 1 << 20)) is not None:
                outlets.put("127.0.0.1", port, chunk_of(ticket, place=place))
            assert outlets.buffer.free_bytes >= 2 << 20
        place = outlets.take("127.0.0.1", receiver.port, len(BODY))
        assert place is not None
        outlets.buffer.at(place)[:] = torch.frombuffer(bytearray(BODY), dtype=torch.uint8)
        outlets.put("127.0.0.1", receiver.port, chunk_of(ticket, place=place))
        assert time.monotonic() - begun < 20
        wait_until(lambda: is_complete(receiver, ticket))
    assert "it took nothing for 0.2 s, and others wait" in caplog.text
    begin.set()
    wait_until(lambda: outlets.buffer.free_bytes == outlets.buffer.nbytes)

    def is_reached() -> bool:
        outlets.put("127.0.0.1", port, Close(Ticket(77, 1)))
        return not taken.empty() and taken.get() == bytes([77])

    wait_until(is_reached)
    stopped.close()
