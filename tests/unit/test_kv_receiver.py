"""What comes to the receiver of a rank late, malformed or too large changes nothing, and what has
come stays as long as a step needs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moesaic.core.disagg import Ticket
from moesaic.disagg.messages import Broken, Close, Open, frame, receive
from moesaic.engine.runner.step_transfers import StepTransfers
from moesaic.engine.schedule.plan import PlanItem, StepPlan
from moesaic.layers.paged_cache import PagedCache, PageTable, PageUpdate
from tests.server.serving import wait_until
from tests.unit.kv_instances import (
    BODY,
    HEADS,
    LAYERS,
    Group,
    chunk_of,
    is_complete,
    receivers,
    shares,
    talk,
)


@pytest.mark.parametrize(
    ("chunk", "body", "text"),
    [
        (chunk_of(Ticket(1, 1)), BODY[:-4], "with 956 bytes: 960 are expected"),
        (chunk_of(Ticket(1, 1), stop=3), BODY, "this rank holds"),
        (chunk_of(Ticket(1, 1), first=-1), BODY, "this rank holds"),
        (chunk_of(Ticket(1, 1), layers=(0, LAYERS + 1)), BODY, "this rank holds"),
        (chunk_of(Ticket(1, 1), heads=(2, 2)), BODY, "this rank holds"),
        (chunk_of(Ticket(1, 1), dtype="load"), BODY, "this rank holds"),
        (chunk_of(Ticket(1, 1), cache=1), BODY, "this rank has 1 caches"),
        (Open(Ticket(2, 2), 0, 1), BODY, "bytes behind a Open"),
    ],
)
def test_malformed_frames_end_the_connection(
    chunk: Any, body: bytes, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    [one] = shares(1, 1, False)
    with receivers([one]) as ((receiver,), _):
        leader = talk(receiver, frame(Open(Ticket(1, 1), 0, 2)))
        wait_until(lambda: receiver.staged_bytes > 0)
        sender = talk(receiver, frame(chunk, [body]))
        wait_until(lambda: text in caplog.text)
        sender.close()
        assert receiver.staged(Ticket(1, 1)).num_missing == LAYERS * 2 * HEADS
        leader.close()
        wait_until(lambda: receiver.staged_bytes == 0)


def test_what_comes_late_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of an earlier epoch of the same room, and one behind the end of its transfer: at
    once, since others are behind it."""
    monkeypatch.setattr("moesaic.disagg.receiver.OPEN_SECONDS", 600)
    [one] = shares(1, 1, False)
    with receivers([one]) as ((receiver,), _):
        old, new = Ticket(9, 1), Ticket(9, 2)
        leader = talk(receiver, frame(Open(old, 0, 2)), frame(Close(old)), frame(Open(new, 0, 2)))
        wait_until(lambda: receiver.staged_bytes > 0)
        sender = talk(receiver, frame(chunk_of(old), [BODY]))
        for buffer in frame(chunk_of(new, stop=1), [BODY[: len(BODY) // 2]]):
            sender.sendall(buffer)
        staged = receiver.staged(new)
        wait_until(lambda: staged.num_missing == LAYERS * HEADS)
        assert receiver.staged(old) is None
        sender.close()
        leader.close()


def test_a_step_outlives_the_end_of_a_request_in_it() -> None:
    """The leader of a pipeline closes a transfer while the step that moves it is on its way to a
    later stage. What a stage has lost otherwise is an error: it would compute something else."""
    [one] = shares(1, 1, False)
    ended, lasting, lost = (Ticket(room, 1) for room in (1, 2, 3))
    with receivers([one]) as ((receiver,), _):
        leader = talk(receiver, *(frame(Open(ticket, 0, 2)) for ticket in (ended, lasting)))
        other = talk(receiver, frame(Open(lost, 0, 2)))
        chunks = (frame(chunk_of(ticket), [BODY]) for ticket in (ended, lasting, lost))
        sender = talk(receiver, *chunks)
        for ticket in (ended, lasting, lost):
            wait_until(lambda ticket=ticket: is_complete(receiver, ticket))
        leader.sendall(b"".join(frame(Close(ended))))
        other.close()
        wait_until(lambda: receiver._staged.keys() == {lasting})
        cache, table = PagedCache(Group._spec(one), 3, 2, torch.float32), PageTable(3, 1)
        table.write([PageUpdate(row, 0, [row + 1]) for row in range(3)])
        cache.keys.zero_()
        items = [
            PlanItem(row, [5], 2, row, kv_from=ticket)
            for row, ticket in enumerate((ended, lasting))
        ]
        transfers = StepTransfers(receiver=receiver)
        transfers.receive(StepPlan(items), [cache], table)
        found = [cache.keys[:, page].unique().tolist() for page in (1, 2)]
        assert found == [[0.0], [1.0]]
        with pytest.raises(KeyError):
            transfers.receive(StepPlan([PlanItem(2, [5], 2, 2, kv_from=lost)]), [cache], table)
        sender.close()
        leader.close()


def test_a_ticket_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with those of a rank's predecessor: what is behind their chunks is good."""
    monkeypatch.setattr("moesaic.disagg.receiver.OPEN_SECONDS", 0.01)
    [one] = shares(1, 1, False)
    with receivers([one]) as ((receiver,), _):
        old, new = Ticket(9, 1), Ticket(9, 2)
        leader = talk(receiver, frame(Open(new, 0, 2)))
        wait_until(lambda: receiver.staged_bytes > 0)
        half = frame(chunk_of(new, stop=1), [BODY[: len(BODY) // 2]])
        sender = talk(receiver, frame(chunk_of(old), [BODY]), half)
        wait_until(lambda: receiver.staged(new).num_missing == LAYERS * HEADS)
        monkeypatch.setattr("moesaic.disagg.receiver.OPEN_SECONDS", 600)
        for buffer in frame(chunk_of(old), [BODY]) + frame(chunk_of(new), [BODY]):
            sender.sendall(buffer)
        wait_until(lambda: receiver.staged(new).is_complete)
        sender.close()
        leader.close()


def test_ends_are_remembered_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk whose ticket is closed while it waits is dropped, too."""
    monkeypatch.setattr("moesaic.disagg.receiver.OPEN_SECONDS", 600)
    monkeypatch.setattr("moesaic.disagg.receiver.MOST_CLOSED", 2)
    [one] = shares(1, 1, False)
    with receivers([one]) as ((receiver,), _):
        late, new = Ticket(9, 1), Ticket(9, 2)
        sender = talk(receiver, frame(chunk_of(late), [BODY]), frame(chunk_of(new), [BODY]))
        ends = [frame(Close(Ticket(9, epoch))) for epoch in (5, 6, 7)]
        leader = talk(receiver, *ends, frame(Open(new, 0, 2)))
        wait_until(lambda: receiver.staged_bytes > 0)
        assert list(receiver._closed) == [Ticket(9, 6), Ticket(9, 7)]
        assert not receiver.staged(new).is_complete  # behind the chunk that waits
        for buffer in frame(Close(late)):
            leader.sendall(buffer)
        wait_until(lambda: receiver.staged(new).is_complete)
        sender.close()
        leader.close()


def test_a_transfer_that_cannot_fit_gets_no_memory() -> None:
    """Whoever orders it."""
    [one] = shares(1, 1, False)
    with receivers([one]) as ((receiver,), _):
        receiver._most_tokens = 6
        leader = talk(receiver, *(frame(Open(Ticket(n, 1), 0, 4)) for n in (1, 2)))
        assert receive(leader)[0] == Broken(
            Ticket(2, 1), "there is room for 2 tokens, and the transfer has 4"
        )
        for order in (Close(Ticket(1, 1)), Open(Ticket(3, 1), 9, 15)):
            leader.sendall(b"".join(frame(order)))
        wait_until(lambda: Ticket(3, 1) in receiver._staged)
        assert Ticket(1, 1) not in receiver._staged
        leader.sendall(b"".join(frame(Open(Ticket(4, 1), 4, 3))))
        with pytest.raises(ConnectionError):
            receive(leader)
        leader.close()
