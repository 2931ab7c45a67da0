"""The supervisor's part in losing and restarting ranks, with ranks that are queues of messages.

A rank here does what engine/worker/worker.py does with the messages, one at a time, in an order
that a seed draws: so thousands of interleavings are tried in a second. Every token is the position
that it belongs to, which shows a lost, a repeated and a foreign one.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from moesaic.comm.mesh import Mesh
from moesaic.comm.supervise.control_page import ControlPage
from moesaic.comm.supervise.elastic import ElasticMembership
from moesaic.comm.supervise.journal import HELD, Journal
from moesaic.comm.supervise.lead_supervisor import LeadSupervisor
from moesaic.comm.supervise.load_balance import LoadBalancer
from moesaic.comm.supervise.replica import Replica
from moesaic.comm.supervise.service_spec import ServiceSpec, Timeouts
from moesaic.comm.supervise.step_rollback import StepRollbacks
from moesaic.core import messages
from moesaic.core.messages import Message, decode
from moesaic.core.rank_state import RankState
from moesaic.core.request import FinishReason, NewRequest
from moesaic.core.sampling import SamplingParams

LENGTH = 12
EXPERTS, SLOTS = 8, 3


class Rank:
    """A process: what it has received, its generation, and the requests of its group."""

    def __init__(self, service: Service, rank: int) -> None:
        self.service, self.rank = service, rank
        self.inbox: deque[Message] = deque()
        self.generation, self.epoch = 0, 1
        self.waits_for: messages.ResumeSteps | None = None
        """It adopts this one, for which all its active ranks must do the same."""
        self.abandoned = False
        self.requests: dict[int, int] = {}
        """The tokens that each has, its prompt of none included."""
        place = service.mesh.place(rank)
        self.group = service.mesh.group_of(place) if place.is_leader else None

    def take(self) -> None:
        message = self.inbox.popleft()
        match message:
            case messages.RollbackStep(generation=generation) if generation > self.generation:
                self.generation, self.abandoned, self.waits_for = generation, True, None
                self.service.tell(self, messages.StepAbandoned(self.rank, generation, 0))
            case messages.ResumeSteps(generation=generation) if generation == self.generation:
                self._resume(message)
            case messages.Submit(requests):
                for new in requests:
                    assert new.request_no not in self.requests, "it is submitted twice"
                    self.requests[new.request_no] = len(new.emitted)
            case messages.Abort(number) if self.requests.pop(number, None) is not None:
                finish = FinishReason("abort")
                delta = messages.RequestDelta(number, [], finish=finish)
                self.service.tell(self, messages.StepOutput([delta]))

    def _resume(self, message: messages.ResumeSteps) -> None:
        self.abandoned = False
        if message.epoch == self.epoch:
            return
        if self.group in message.reset:
            self.requests.clear()
        self.waits_for = message

    def adopt(self) -> None:
        """The exchange of `RankMembers.adopt` ends when all active ranks are in it, or past it."""
        order = self.waits_for
        assert order is not None
        for rank in order.active:
            peer = self.service.ranks.get(rank)
            if peer is None or peer.generation != order.generation:
                return
            if peer.epoch != order.epoch and peer.waits_for != order:
                return
        self.epoch, self.waits_for = order.epoch, None
        self.service.tell(self, messages.MembersAdopted(self.rank, self.epoch))

    @property
    def computes(self) -> bool:
        return not self.abandoned and self.waits_for is None

    def step(self) -> None:
        """One token for each request of its group."""
        ended = [number for number, count in self.requests.items() if count + 1 == LENGTH]
        output = messages.StepOutput(
            [messages.RequestDelta(n, [], finish=FinishReason("length")) for n in ended],
            list(self.requests),
            list(self.requests.values()),
        )
        for number in list(self.requests):
            self.requests[number] += 1
        for number in ended:
            del self.requests[number]
        self.service.tell(self, output)


class Service:
    """In the place of LeadSupervisor: it has the journal, and passes messages on."""

    is_serving = True
    is_away = staticmethod(lambda rank: False)

    def __init__(self, mesh: Mesh, seed: int, start: int | None = None, slots: int = SLOTS) -> None:
        self.mesh, self.random = mesh, random.Random(seed)
        self.spec = ServiceSpec(mesh, "a:b", elastic=True, restart_limit=0, start_size=start)
        self.journal = Journal(LoadBalancer(mesh.num_groups, "auto"))
        self.inbox: dict[Rank, deque[Message]] = {}
        self.ranks: dict[int, Rank] = {}
        self.starting: set[int] = set()
        self.answers: dict[int, list[int]] = {}
        self.ended: set[int] = set()
        self.failed = ""
        self.rollbacks = [
            StepRollbacks(
                number,
                mesh.ranks_of_replica(number),
                [mesh.leader(number * mesh.dp + group) for group in range(mesh.dp)],
            )
            for number in range(mesh.replicas)
        ]
        self.elastic = ElasticMembership(self, self.rollbacks)
        for rank in range(mesh.world):
            self._create(rank)
        self.elastic.note_ready({"experts": [0] * slots, "num_experts": EXPERTS})

    def _create(self, rank: int) -> None:
        self.ranks[rank] = Rank(self, rank)
        self.inbox[self.ranks[rank]] = deque()

    def tell(self, rank: Rank, message: Message) -> None:
        self.inbox[rank].append(message)

    # What ElasticMembership asks of a supervisor.

    def fail(self, message: str, ranks: Sequence[int]) -> None:
        self.failed = message

    def start_rank(self, rank: int) -> None:
        self.starting.add(rank)

    def strike(self, ranks: Sequence[int]) -> None:
        pass

    def kill_rank(self, rank: int) -> bool:
        self.starting.discard(rank)
        process = self.ranks.pop(rank, None)
        if process is not None:
            del self.inbox[process]
        return True

    def send_rank(self, rank: int, data: bytes) -> None:
        if rank in self.ranks:
            self.ranks[rank].inbox.append(decode(data))

    def roll_back(self, rollback: messages.RollbackStep, ranks: Sequence[int]) -> None:
        for rank in ranks:
            if rank in self.ranks:
                self.ranks[rank].inbox.append(rollback)

    def send_answer(self, data: bytes) -> None:
        message = decode(data)
        assert isinstance(message, messages.StepOutput)
        self._record(message)

    def note_members(self, live: Sequence[int]) -> None:
        assert set(live) <= set(range(self.mesh.world))

    def note_awake(self, replica: int) -> None:
        pass

    def answer_for(self, rank: int) -> None:
        pass

    # What happens, in any order.

    def submit(self, number: int) -> None:
        new = NewRequest("", [], SamplingParams(), 0, LENGTH, number)
        (group,) = self.journal.assign([new])
        self.answers[number] = []
        if group != HELD:
            self.send_rank(self.mesh.leader(group), messages.encode(messages.Submit([new])))

    def die(self) -> None:
        """The rank ends at once; the supervisor sees it, perhaps after some of its messages."""
        rank = self.random.choice([*self.ranks, *self.starting])
        self.elastic.on_ranks_lost(self, [rank], f"rank {rank} died")

    def fail_step(self) -> None:
        """A rank raises in a step, also while others have yet to adopt an epoch."""
        rank = self.random.choice(list(self.ranks.values()))
        rollbacks = self.rollbacks[self.mesh.place(rank.rank).replica]
        failed = messages.StepFailed(rank.rank, rank.generation, 0, "an error")
        if not rank.abandoned and (rollback := rollbacks.start(failed)) is not None:
            self.roll_back(rollback, rollbacks.ranks)

    def start(self) -> None:
        rank = self.random.choice(sorted(self.starting))
        self.starting.remove(rank)
        self._create(rank)
        self.elastic.on_ready(rank)

    def receive(self) -> None:
        rank = self.random.choice([rank for rank, inbox in self.inbox.items() if inbox])
        message = self.inbox[rank].popleft()
        match message:
            case messages.StepOutput():
                self._record(message)
            case messages.StepAbandoned():
                replica = self.mesh.place(rank.rank).replica
                resume = self.rollbacks[replica].note_abandoned(message)
                if resume is not None:
                    self.elastic.settle(replica, resume)
            case messages.MembersAdopted():
                self.elastic.on_adopted(message)

    def _record(self, output: messages.StepOutput) -> None:
        for number, token in zip(output.numbers, output.tokens, strict=True):
            self.answers[number].append(token)
        self.ended |= {delta.request_no for delta in output.deltas}
        self.journal.record(output)

    def run(self, steps: int, deaths: float) -> None:
        """`deaths`: the share of the steps in which a rank dies."""
        for _ in range(steps):
            if self.random.random() < 0.3:  # the pause before a restart is over
                self.elastic.tick(time.monotonic() + 100)
            choices = [self.step_some]
            choices += [self.receive] * 4 * any(self.inbox.values())
            choices += [self.start] * bool(self.starting)
            if self.random.random() < deaths and (self.ranks or self.starting):
                self.die()
            elif self.random.random() < deaths and self.ranks:
                self.fail_step()
            else:
                self.random.choice(choices)()

    def step_some(self) -> None:
        for rank in list(self.ranks.values()):
            if rank.inbox and self.random.random() < 0.7:
                rank.take()
            elif rank.waits_for is not None:
                rank.adopt()
            elif rank.computes and rank.requests:
                rank.step()


MESHES = {
    "each rank a group": Mesh(tp=4, dp=4, ep=4, dense_tp=1, vocab_tp=1),
    "groups of two": Mesh(tp=4, dp=2, ep=4, dense_tp=1, vocab_tp=2),
    "one group": Mesh(tp=4, ep=4, dense_tp=4, vocab_tp=4),
    "pipeline": Mesh(tp=2, pp=2, ep=2, dense_tp=2, vocab_tp=2),
    "replicas": Mesh(tp=2, ep=2, replicas=2, dense_tp=2, vocab_tp=2),
}


@pytest.mark.parametrize("name", MESHES)
def test_no_request_is_lost_and_no_token_twice(name: str) -> None:
    survived = 0
    for seed in range(60):
        service = Service(MESHES[name], seed)
        for number in range(8):
            service.submit(number)
        service.run(150, deaths=0.06)
        for number in range(8, 12):
            service.submit(number)
        service.run(150, deaths=0.03)
        service.run(800, deaths=0.0)
        assert not service.failed
        wanted = list(range(LENGTH))
        assert all(answer == wanted for answer in service.answers.values()), (seed, service.answers)
        assert service.ended == set(range(12)) and not service.journal.open
        assert service.elastic.live == list(range(service.mesh.world))
        assert service.journal.balancer.requests == [0] * service.mesh.num_groups
        stats = service.elastic.stats
        assert stats.returned == stats.lost and all(
            one.seconds is not None for one in stats.changes
        )
        survived += stats.lost
    assert survived > 200


def test_an_abort_that_a_lost_rank_had_not_heard_of() -> None:
    """Nobody computes the rest of the answer."""
    service = Service(MESHES["each rank a group"], 0)
    for number in range(4):
        service.submit(number)
    lead: Any = SimpleNamespace(journal=service.journal, mesh=service.mesh, _mirror=Mock())
    lead.send_rank, lead.send_answer = service.send_rank, service.send_answer
    lead._abort = partial(LeadSupervisor._abort, lead)
    LeadSupervisor.on_client(lead, messages.Abort(2))
    group = service.journal.open[2].group
    service.elastic.on_ranks_lost(service, [group], f"rank {group} died")
    service.run(600, deaths=0.0)
    assert not service.journal.open and service.ended == set(range(4)) and not service.failed
    assert [len(service.answers[number]) for number in range(4)] == [LENGTH, LENGTH, 0, LENGTH]


def test_requests_that_are_aborted_end_once() -> None:
    """Requests are aborted at random moments while ranks are lost: each ends with one message, and
    no rank goes on to compute it."""
    aborted = 0
    for seed in range(60):
        service = Service(MESHES["groups of two" if seed % 2 else "each rank a group"], seed)
        lead: Any = SimpleNamespace(journal=service.journal, mesh=service.mesh, _mirror=Mock())
        lead.send_rank, lead.send_answer = service.send_rank, service.send_answer
        lead._abort = partial(LeadSupervisor._abort, lead)
        for number in range(8):
            service.submit(number)
        for number in range(6):
            service.run(service.random.choice([1, 10, 40]), deaths=0.06)
            aborted += number not in service.ended
            LeadSupervisor.on_client(lead, messages.Abort(number))
        service.run(800, deaths=0.0)
        assert not service.failed and not service.journal.open
        assert service.ended == set(range(8))
        assert not any(rank.requests for rank in service.ranks.values())
        for number, answer in service.answers.items():
            assert answer == list(range(len(answer))) and (number < 6 or len(answer) == LENGTH)
    assert aborted > 200


@pytest.mark.parametrize("start", [None, 2])
def test_a_node_that_takes_over_serves_with_the_ranks_that_it_has(start: int | None) -> None:
    """Also where the service was to have fewer ranks, all of which were on the other node."""
    service = Service(MESHES["each rank a group"], 0, slots=EXPERTS)
    service.spec = ServiceSpec(service.mesh, "a:b", elastic=True, start_size=start)
    service.is_away = lambda rank: rank < 2  # type: ignore[method-assign, assignment]
    for rank in range(4):
        service.kill_rank(rank)
    service.elastic = ElasticMembership(service, service.rollbacks)
    service.journal = Journal(LoadBalancer(service.mesh.num_groups, "auto"))
    for group in range(service.mesh.num_groups):
        service.journal.balancer.set_away(group, True)
    service.elastic.inherit({"experts": [0] * EXPERTS, "num_experts": EXPERTS}, [7])
    service.submit(0)
    service.elastic.tick(time.monotonic())
    assert service.starting == {2, 3} and service.rollbacks[0].generation == 7
    service.run(400, deaths=0.0)
    assert service.answers == {0: list(range(LENGTH))} and service.elastic.live == [2, 3]
    service.is_away = lambda rank: False  # type: ignore[method-assign, assignment]
    service.run(400, deaths=0.0)
    assert service.elastic.live == [0, 1, 2, 3] and not service.failed


def test_a_rank_that_keeps_dying_ends_the_service() -> None:
    service = Service(MESHES["each rank a group"], 0)
    service.spec = ServiceSpec(service.mesh, "a:b", elastic=True, restart_limit=3)
    for _ in range(6):
        if not service.failed:
            service.elastic.on_ranks_lost(service, [2], "rank 2 died")
    assert service.failed == "rank 2 died; it was lost 3 times in a row (--restart-limit)"
    # Each pause is twice as long as the one before.
    assert service.elastic.ranks[2].restarts.total == 4


def test_a_rank_whose_device_hangs_is_lost_with_the_one_that_died() -> None:
    """It does not abandon its step: the others would wait for it."""
    service = Service(MESHES["each rank a group"], 0)
    service.spec = ServiceSpec(service.mesh, "a:b", timeouts=Timeouts(abandon=20.0), elastic=True)
    for number in range(4):
        service.submit(number)
    service.elastic.on_ranks_lost(service, [1], "rank 1 died")
    abandon(service, 0, 3)
    assert service.rollbacks[0].missing == {2}
    service.elastic.tick(time.monotonic() + 19.0)
    assert service.elastic.live == [0, 2, 3]
    service.elastic.tick(time.monotonic() + 21.0)
    assert service.elastic.live == [0, 3]
    service.spec = ServiceSpec(service.mesh, "a:b", elastic=True)  # `run` lets hours pass
    service.run(600, deaths=0.0)
    assert not service.failed and not service.journal.open
    assert service.elastic.live == [0, 1, 2, 3]
    assert all(len(answer) == LENGTH for answer in service.answers.values())


def abandon(service: Service, *ranks: int) -> None:
    """These ranks do what they are told, and the supervisor hears of it."""
    for rank in ranks:
        while service.ranks[rank].inbox:
            service.ranks[rank].take()
    while any(service.inbox.values()):
        service.receive()


def test_a_rank_that_hangs_when_a_lost_one_returns_is_watched() -> None:
    """Those that wait for a lost rank are not; those that have yet to abandon their step are."""
    service = Service(MESHES["one group"], 0)
    elastic, ranks = service.elastic, range(4)
    elastic.on_ranks_lost(service, [1], "rank 1 died")
    assert [elastic.is_watched(rank) for rank in ranks] == [True, False, True, True]
    abandon(service, 0, 2, 3)
    assert not any(map(elastic.is_watched, ranks))
    elastic.tick(time.monotonic())
    service.start()
    abandon(service, 0, 1, 3)
    assert all(map(elastic.is_watched, ranks)) and service.rollbacks[0].missing == {2}
    service.run(60, deaths=0.0)
    assert all(map(elastic.is_watched, ranks)) and not service.rollbacks[0].missing


def test_a_rank_that_hangs_as_it_starts_is_started_again() -> None:
    """The others serve meanwhile, and go on to."""
    service = Service(MESHES["each rank a group"], 0)
    service.spec = ServiceSpec(service.mesh, "a:b", elastic=True, restart_limit=2)
    elastic = service.elastic
    elastic.on_ranks_lost(service, [1], "rank 1 died")
    elastic.tick(time.monotonic())
    assert service.starting == {1}
    elastic.tick(time.monotonic() + Timeouts().start + 1)
    assert not service.failed and elastic.live == [0, 2, 3] and not service.starting
    elastic.tick(time.monotonic() + 1)
    assert service.starting == {1}
    for _ in range(3):
        elastic.tick(time.monotonic() + Timeouts().start + 10)
        elastic.tick(time.monotonic() + Timeouts().start + 10)
    assert re.match(r"rank 1 .* is not ready after 1800 s; .*--restart-limit", service.failed)


def test_a_loss_says_why_ranks_wait() -> None:
    waits = {}
    for name, mesh in MESHES.items():
        service = Service(mesh, 0)
        live = list(mesh.ranks_of_replica(0))[1:]
        waits[name] = service.elastic._cannot_serve(service.elastic._replicas[0], live)
    assert waits == {
        "each rank a group": "",
        "groups of two": "",
        "one group": "without --enable-dp-attention all ranks compute each request",
        "pipeline": "each stage of a pipeline needs all of its ranks",
        "replicas": "without --enable-dp-attention all ranks compute each request",
    }


def test_ranks_are_removed_and_come_back() -> None:
    """Beside requests and losses; what cannot be is refused."""
    removed = 0
    for seed in range(40):
        service = Service(MESHES["each rank a group"], seed)
        for number in range(8):
            service.submit(number)
        for _ in range(6):
            removed += not service.elastic.scale(3) if service.random.random() < 0.5 else 0
            service.run(40, deaths=0.02)
            service.elastic.scale(4)
            service.run(40, deaths=0.02)
        service.run(600, deaths=0.0)
        assert service.elastic.scale(4) == "" and not service.failed
        service.run(300, deaths=0.0)
        wanted = list(range(LENGTH))
        assert all(answer == wanted for answer in service.answers.values()), (seed, service.answers)
        assert service.elastic.live == [0, 1, 2, 3]
        assert not service.elastic.scaling["is_scaling_elastic_ep"]
    assert removed > 20
    service = Service(MESHES["groups of two"], 0)
    assert service.elastic.scale(3).startswith("3 ranks: give a multiple of 2 up to 4")
    assert service.elastic.scale(6).startswith("6 ranks: give a multiple of 2 up to 4")
    assert "2 ranks have 6 slots for 8 experts" in service.elastic.scale(2)
    for name in ("one group", "pipeline", "replicas"):
        assert service_refuses(name) == (
            "only attention groups (--enable-dp-attention) of one replica come and go"
        )


def test_a_service_grows_beyond_its_start_and_shrinks_to_one_rank() -> None:
    """At any moment, also while the ranks of the size before are on their way."""
    mesh = Mesh(tp=8, dp=8, ep=8, dense_tp=1, vocab_tp=1)
    for seed in range(30):
        service = Service(mesh, seed, start=2, slots=EXPERTS)
        assert service.elastic.live == [0, 1] and not service.failed
        assert service.elastic.scaling["scale_phase"] == "idle"
        for number in range(8):
            service.submit(number)
        for size in [*service.random.choices(range(1, 9), k=6), 1, 8, 1]:
            assert service.elastic.scale(size) == ""
            service.run(service.random.choice([2, 40]), deaths=0.02)
        service.run(900, deaths=0.0)
        assert service.elastic.live == [0] and list(service.ranks) == [0] and not service.starting
        wanted = list(range(LENGTH))
        assert all(answer == wanted for answer in service.answers.values()), (seed, service.answers)
        assert service.elastic.scaling["scale_phase"] == "serving_reduced" and not service.failed
    service = Service(mesh, 0, start=3)
    assert service.elastic.scale(2) == (
        "2 ranks: 2 ranks have 6 slots for 8 experts of a layer: more --ep-num-redundant-experts "
        "would do. Sizes from 3 to 8 work"
    )
    assert "fewer ranks: 1 ranks: 1 ranks have 3 slots" in Service(mesh, 0, start=1).failed


def test_ranks_that_are_away_are_not_to_blame() -> None:
    """A wait of another rank fails: one that was removed would be started again for that."""
    mesh = MESHES["each rank a group"]
    page, descriptor = ControlPage.create(mesh.world)
    os.close(descriptor)
    for rank in (0, 1):
        page.status(rank).enter(RankState.WAITING)
    page.clear(3)
    rollbacks = StepRollbacks(0, range(4), range(4))
    rollbacks.change([0, 1, 2])
    replica = Replica(range(4), range(4), rollbacks)
    lead: Any = SimpleNamespace(spec=ServiceSpec(mesh, "a:b"), _replica_of=lambda _: replica)
    seen = {rank: page.snapshot(rank) for rank in range(4)}
    assert LeadSupervisor._stalled(lead, 0, seen) == [2]  # it has done nothing yet
    page.status(2).enter(RankState.WAITING)
    seen[2] = page.snapshot(2)
    assert LeadSupervisor._stalled(lead, 0, seen) == []


def service_refuses(name: str) -> str:
    return Service(MESHES[name], 0).elastic.scale(1)
