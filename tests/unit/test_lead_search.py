"""A supervisor that waits for all nodes stands by if another one leads."""

from __future__ import annotations

import os
import socket
from typing import Any
from unittest.mock import Mock

import pytest

from moesaic.comm.mesh import Mesh
from moesaic.comm.supervise import lead_search
from moesaic.comm.supervise.lead_search import LeadSearch
from moesaic.comm.supervise.service_spec import ServiceSpec
from moesaic.comm.supervise.supervisor_links import (
    Connected,
    Disconnected,
    Event,
    FollowerLinks,
    Refused,
)
from moesaic.core.messages import Beat, Hello

ADDRESSES = ("127.0.0.1", 1), ("127.0.0.1", 2)
HEADS = ",".join(f"{host}:{port}" for host, port in ADDRESSES)


class Search:
    """Of node `own`, with a connection that is a list of events."""

    def __init__(self, own: int, monkeypatch: pytest.MonkeyPatch) -> None:
        spec = ServiceSpec(
            Mesh(tp=2, dp=2, ep=2, nnodes=2),
            "a:b",
            node_rank=own,
            dist_init_addr=HEADS,
            elastic=True,
            keeper=1,
        )
        self.link, self.found = Mock(address=ADDRESSES[1 - own], connected_at=0.0), Mock()
        monkeypatch.setattr(lead_search, "LeadLink", Mock(return_value=self.link))
        self.search = LeadSearch(spec, b"", Mock(), self.found)

    def receive(self, *events: Event) -> list[Any]:
        """The addresses that are found."""
        self.link.receive.return_value = list(events)
        self.search._on_event()
        found = [call.args[0] for call in self.found.call_args_list]
        self.found.reset_mock()
        return found


@pytest.mark.parametrize("own", [0, 1])
def test_it_stands_by_for_one_that_serves(own: int, monkeypatch: pytest.MonkeyPatch) -> None:
    search, other = Search(own, monkeypatch), ADDRESSES[1 - own]
    assert search.receive(Refused(other), Connected()) == []
    assert search.receive(Hello(), Beat(1 - own, serves=True), Beat(1 - own)) == [other]


def test_of_two_that_wait_for_each_other_one_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        Search(own, monkeypatch).receive(Connected(), Beat(1 - own), Beat(1 - own))
        for own in (0, 1)
    ]
    assert found == [[], [ADDRESSES[0]]]


def test_it_looks_again_when_the_other_one_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    search = Search(0, monkeypatch)
    search.receive(Disconnected("another secret", refused=True))
    assert search.link.start.call_count == 1
    search.link.connected_at = 5.0
    assert search.receive(Connected(), Beat(1), Disconnected("closed")) == []
    assert search.link.start.call_count == 2


@pytest.mark.parametrize("kept", [False, True])
def test_callers_wait_while_a_keeper_has_the_socket(kept: bool) -> None:
    """Also once a supervisor has ended in order: refused, a mirror would take over from a node that
    lives."""
    keeper = socket.create_server(("127.0.0.1", 0))
    address, number = keeper.getsockname(), os.dup(keeper.fileno())
    spec = ServiceSpec(
        Mesh(tp=2, dp=2, ep=2, nnodes=2),
        "a:b",
        dist_init_addr="127.0.0.1:1",
        listening=number if kept else -1,
    )
    FollowerLinks(spec, socket.socket(fileno=number), b"a secret of the nodes").close()
    try:
        if kept:
            socket.create_connection(address, 10).close()
        else:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(address, 10)
    finally:
        keeper.close()
