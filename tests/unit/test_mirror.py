"""The mirror of a journal has what the journal has, and clients see nothing that it has not."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import msgspec

from moesaic.comm.mesh import Mesh
from moesaic.comm.network.store import StoreRequest, StoreTable
from moesaic.comm.supervise.journal import HELD, Journal
from moesaic.comm.supervise.lead_supervisor import LeadSupervisor
from moesaic.comm.supervise.load_balance import LoadBalancer
from moesaic.comm.supervise.mirror import JournalMirror, MirroredService
from moesaic.comm.supervise.service_spec import ServiceSpec
from moesaic.core import messages
from moesaic.core.messages import Message, RequestDelta, StepOutput, decode, encode
from moesaic.core.request import FinishReason, NewRequest
from moesaic.core.sampling import SamplingParams

SPEC = ServiceSpec(
    Mesh(tp=2, dp=2, ep=2, nnodes=2), "a:b", dist_init_addr="h:1,h:2", elastic=True, keeper=1
)
LENGTH = FinishReason("length", length=3)
FACTS = [{"experts": [[0]], "num_experts": 1}, {}]


class Pair:
    """A journal with its client, and the node that mirrors it, with messages between in order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.journal = Journal(LoadBalancer(2, "auto", 0))
        self.store = StoreTable()
        self.sent: list[bytes] = []
        self.told: list[bytes] = []
        """What the client got."""
        self.mirror = JournalMirror(self.journal, self._send, self.told.append)
        self.there = MirroredService(SPEC)
        self._number = 0

    def _send(self, node: int, message: Message) -> None:
        assert node == 1
        self.sent.append(encode(message))

    def begin(self) -> None:
        self.mirror.begin(1, self.store, FACTS, [7])

    def deliver(self, count: int) -> None:
        """The mirror gets the next messages, and confirms them."""
        for data in self.sent[:count]:
            confirmed = self.there.take(decode(data))
            if confirmed is not None:
                self.mirror.confirm(1, confirmed)
        del self.sent[:count]

    def put(self, key: str, value: bytes) -> None:
        assert not self.store.answer(
            msgspec.msgpack.encode(StoreRequest("set", [key], value))
        ).error

    def act(self) -> None:
        open_ones = list(self.journal.open)
        what = self.random.choice(["submit", "tokens", "tokens", "end", "abort", "keep"])
        if what == "submit" or not open_ones:
            self._submit()
            return
        number = self.random.choice(open_ones)
        match what:
            case "tokens":
                deltas = [RequestDelta(number, [1, 2], [-0.5, -1.0], cached_tokens=3)]
                self.output(StepOutput(deltas, open_ones, [number % 50 for number in open_ones]))
            case "end":
                self.output(StepOutput([RequestDelta(number, [9], finish=LENGTH)]))
            case _:
                self.mirror.note(encode(messages.Abort(number, what == "keep")))
                if what == "keep":
                    self.journal.keep(number)
                self.journal.open[number].is_aborted = True

    def _submit(self) -> None:
        self._number += 1
        number, key = self._number, f"key {self._number}" if self.random.random() < 0.7 else ""
        request = NewRequest("r", [5, number], SamplingParams(), 1, 8, number, key=key)
        self.journal.assign([request])
        self.mirror.note(encode(messages.Submit([request])))

    def output(self, output: StepOutput) -> None:
        data = encode(output)
        self.journal.record(decode(data))  # type: ignore[arg-type]
        self.mirror.note(data)
        self.mirror.answer(data)


def content(journal: Journal) -> tuple[dict[int, Any], dict[str, Any]]:
    """All of a journal that does not depend on the node."""
    entries = {
        number: (
            encode(messages.Submit([one.request])),
            one.emitted,
            one.key,
            one.is_aborted,
            msgspec.msgpack.encode(one.told),
        )
        for number, one in journal.open.items()
    }
    return entries, {key: (kept.number, kept.data) for key, kept in journal.kept.items()}


def test_a_mirror_has_what_the_journal_has() -> None:
    """Whenever it begins, and however late messages come."""
    compared = 0
    for seed in range(40):
        pair = Pair(seed)
        for _ in range(pair.random.randrange(60)):
            pair.act()
        pair.put("before", b"1")
        pair.begin()
        pair.put("behind", b"2")
        for _ in range(100):
            pair.act()
            pair.deliver(pair.random.randrange(3))
        pair.deliver(len(pair.sent))
        assert pair.there.is_complete and pair.mirror.is_complete
        entries, kept = content(pair.journal)
        assert (entries, kept) == content(pair.there.journal)
        compared += len(entries) + len(kept)
        assert pair.there.store == {"before": b"1", "behind": b"2"}
        assert (pair.there.facts, pair.there.generations) == (FACTS, [7])
    assert compared > 800


def test_clients_see_what_the_mirror_has() -> None:
    """In order, and all of it; once the mirror is lost they wait for nothing."""
    for seed in range(20):
        pair, wanted = Pair(seed), list[bytes]()
        pair.begin()
        for _ in range(3):
            pair._submit()
        for token in range(60):
            output = StepOutput([], [1, 2, 3], [token] * 3)
            wanted.append(encode(output))
            pair.output(output)
            pair.deliver(pair.random.randrange(4))
            seen = len(pair.told)
            assert pair.told == wanted[:seen]
            there = pair.there.journal.open.get(1)
            assert seen == (0 if there is None else len(there.emitted))
        assert 0 < len(pair.told) <= 60
        pair.mirror.end()
        assert pair.told == wanted


def test_the_next_supervisor_keeps_what_clients_may_ask_for() -> None:
    pair = Pair(0)
    pair.begin()
    for number, key in enumerate(("a", "", "b", "c")):
        request = NewRequest("r", [5], SamplingParams(), 1, 8, number, key=key)
        pair.journal.assign([request])
        pair.mirror.note(encode(messages.Submit([request])))
    pair.output(StepOutput([RequestDelta(3, [4], finish=LENGTH)], [0], [6]))
    pair.mirror.note(encode(messages.Abort(2)))
    pair.deliver(len(pair.sent))
    journal = pair.there.journal
    journal.inherit()
    assert {number: one.group for number, one in journal.open.items()} == {0: HELD}
    again = NewRequest("r", [5], SamplingParams(), 1, 8, 9, key="a")
    found = journal.attach(again)
    assert found is not None and found[0] == 0
    told = decode(found[1])
    assert isinstance(told, StepOutput) and told.deltas[0].token_ids == [6]
    assert journal.replay(0).emitted == [6]
    assert (kept := journal.attach(msgspec.structs.replace(again, key="c"))) and kept[0] == 3
    assert journal.attach(msgspec.structs.replace(again, key="b")) is None
    # A new request has the number of none of them, or it would lose its client to another one.
    journal.open.clear()
    lead: Any = SimpleNamespace(journal=journal, mesh=SimpleNamespace(world=1), _facts=[{}])
    assert LeadSupervisor._ready(lead).facts["first_request"] == 4
    assert Journal(LoadBalancer(1, "auto", 0)).next_number == 0
