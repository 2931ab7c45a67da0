"""What node 0 makes of the messages of other nodes, with connections that are lists of messages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import pytest

from moesaic.comm.mesh import Mesh
from moesaic.comm.supervise import follower_nodes
from moesaic.comm.supervise.config_check import facts_of
from moesaic.comm.supervise.follower_nodes import FollowerNodes
from moesaic.comm.supervise.follower_supervisor import FollowerSupervisor
from moesaic.comm.supervise.poll_loop import PollLoop
from moesaic.comm.supervise.service_spec import ServiceSpec
from moesaic.comm.supervise.supervisor_links import Disconnected, Event
from moesaic.core import messages
from moesaic.core.messages import AnyMessage, Message, encode
from moesaic.core.rank_state import RankSnapshot, RankState

MESH = Mesh(tp=4, dp=4, ep=4, nnodes=2)
BUSY = RankSnapshot(RankState.COMPUTING, 7, "layer 0", 0.0, 0.0, 1)


class Links:
    """In the place of FollowerLinks."""

    store = table = close = None
    missing: tuple[int, ...] = ()

    def __init__(self, spec: ServiceSpec, listening: object, secret: bytes) -> None:
        self.inbox, self.wakeup_fd = self, 0
        self.sent: list[Message] = []
        self.events: list[Event] = []
        self.silent: tuple[int, float] | None = None

    def send(self, node: int, message: Message) -> None:
        assert node == 1
        self.sent.append(message)

    def broadcast(self, message: Message) -> None:
        assert isinstance(message, messages.Beat)

    def receive(self, now: float) -> list[tuple[int, Event]]:
        events, self.events = self.events, []
        return [(1, event) for event in events]

    def lost(self, now: float) -> tuple[int, float] | None:
        return self.silent

    def host_of(self, node: int) -> str:
        return "10.0.0.2"

    def welcome(self, node: int, *, serves: bool) -> None:
        self.sent.append(messages.Hello(facts={"serves": serves}))

    def cut(self, node: int) -> None:
        self.silent = None
        self.sent.append(messages.Stop("cut"))

    def forget(self, node: int) -> None:
        self.sent.append(messages.Stop("forgotten"))


class Host:
    """In the place of LeadSupervisor: it notes what it is told."""

    mesh, secret = MESH, b""
    is_serving = True

    def __init__(self, elastic: bool = True) -> None:
        self.spec = ServiceSpec(
            MESH, "a:b", {"page_size": 1}, dist_init_addr="h:1", elastic=elastic
        )
        self.goes_on = elastic
        self.loop: Any = type("Loop", (PollLoop,), {"add": lambda *_: None})()
        self.told: list[tuple[Any, ...]] = []

    def fail(self, message: str, ranks: Sequence[int]) -> None:
        self.told.append(("fail", message))

    def lose_ranks(self, ranks: Sequence[int], cause: str) -> None:
        self.told.append(("lost", list(ranks), cause))

    def on_joined(self, node: int) -> None:
        self.told.append(("joined", node))

    def on_left(self, node: int) -> None:
        self.told.append(("left", node))

    def yields_to(self, node: int, why: str) -> bool:
        return False

    def on_mirrored(self, node: int, number: int) -> None:
        self.told.append(("mirrored", node, number))

    def on_rank(self, rank: int, message: AnyMessage, data: bytes) -> None:
        self.told.append((rank, message))


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def nodes(host: Host, monkeypatch: pytest.MonkeyPatch) -> FollowerNodes:
    monkeypatch.setattr(follower_nodes, "FollowerLinks", Links)
    listening: Any = None
    return FollowerNodes(host, listening)


def receive(nodes: FollowerNodes, *events: Event) -> None:
    links: Any = nodes._links
    links.events += events
    nodes._on_inbox()


def sent(nodes: FollowerNodes) -> list[Message]:
    links: Any = nodes._links
    found, links.sent = links.sent, []
    return list(found)


def relay(rank: int) -> messages.Relay:
    return messages.Relay(rank, encode(messages.Asleep(0, rank)))


def test_what_a_lost_rank_still_sends_is_dropped(nodes: FollowerNodes, host: Host) -> None:
    """Until the answer that it is gone; its successor is heard again."""
    receive(nodes, messages.Beat(1, {2: BUSY, 3: BUSY}), relay(2), relay(0))
    assert host.told == [(2, messages.Asleep(0, 2))], "rank 0 is not of that node"
    nodes.end_rank(2)
    assert nodes.snapshots(time.monotonic())[2].state == RankState.ABSENT
    receive(nodes, relay(2), messages.RanksLost([2], "rank 2 died"), relay(3))
    nodes.start_rank(2)
    nodes.end_rank(2)  # it was lost again before the first end was reported
    receive(nodes, messages.RankEnded(2), relay(2), messages.RankEnded(2), relay(2))
    assert sent(nodes) == [messages.EndRank(2), messages.StartRank(2), messages.EndRank(2)]
    assert [told[0] for told in host.told] == [2, 3, 2]


def test_ranks_that_a_node_has_lost(nodes: FollowerNodes, host: Host) -> None:
    nodes.end_rank(3)
    receive(nodes, messages.RanksLost([2, 3], "both died"))
    assert host.told == [("lost", [2], "both died")]


@pytest.mark.parametrize("how", ["its connection ends", "it leaves", "it is silent"])
def test_a_node_is_lost_once_and_comes_again(nodes: FollowerNodes, host: Host, how: str) -> None:
    cause = {"its connection ends": "reset", "it leaves": "it left", "it is silent": "silent for 4"}
    nodes.end_rank(2)
    if how == "its connection ends":
        receive(nodes, Disconnected("reset"))
    elif how == "it leaves":
        receive(nodes, messages.Fault("it left"), relay(3), Disconnected("closed"))
    else:
        links: Any = nodes._links
        links.silent = 1, 4.0
        nodes.tick(time.monotonic(), was_late=False)
        receive(nodes, relay(3), messages.Beat(1, {3: BUSY}), Disconnected("closed"))
    left, (what, ranks, text) = host.told
    assert left == ("left", 1)
    assert (what, ranks) == ("lost", [2, 3])
    assert text.startswith(f"node 1 (10.0.0.2, ranks 2 to 3) is lost: {cause[how]}")
    told = [one.reason for one in sent(nodes) if isinstance(one, messages.Stop)]
    assert told == ["cut", "forgotten"]
    assert nodes.is_away(2) and not nodes.is_away(1)
    nodes.end_rank(3)
    assert sent(nodes) == [], "nobody is there to be told"
    assert {one.state for one in nodes.snapshots(0.0).values()} == {RankState.ABSENT}
    receive(nodes, messages.Hello(1, facts_of(host.spec)))
    assert sent(nodes) == [messages.Hello(facts={"serves": True})]
    assert not nodes.is_away(2)
    receive(nodes, relay(2))
    assert host.told[2:] == [("joined", 1), (2, messages.Asleep(0, 2))]


def test_a_node_that_comes_again_with_other_flags_is_refused(
    nodes: FollowerNodes, host: Host
) -> None:
    receive(nodes, Disconnected("reset"))
    sent(nodes)
    other = {**facts_of(host.spec), "flags": {"page_size": 4}}
    receive(nodes, messages.Hello(1, other))
    refusal, cut = sent(nodes)
    assert refusal == messages.Fault(
        "nodes 0 and 1 have different settings: --page-size is 1 on node 0 and 4 on node 1"
    )
    assert cut == messages.Stop("cut") and nodes.is_away(2)
    assert [told[0] for told in host.told] == ["left", "lost"]


def test_a_mirror_that_takes_over_looks_no_more_for_the_node_that_led() -> None:
    """And leaves it without a sign: it may only have slept, and would go on alone."""
    former: Any = Mock(_lost="node 0 is lost", _name="node 1")
    former.mirrored.journal.open = {}
    FollowerSupervisor._take_over(former)
    former._search.close.assert_called_once_with()
    former._lead.close.assert_not_called()
    assert former.takes_over and former.exit_code == 0
    former.send_client.assert_called_once_with(messages.TakeOver("node 0 is lost"))
