"""How clients share connections, and which are closed when there are too many."""

from __future__ import annotations

import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from moesaic.server import run
from moesaic.server.connections import (
    ConnectionQuotas,
    ConnectionState,
    ConnectionTable,
    ConnectionWeights,
    network_of,
)
from tests.server.echo import GET, HALF_BODY, HALF_HEAD, POST, PROBE, Echo, answer_of, connect
from tests.server.serving import hear, status_of, talk, wait_until


@pytest.fixture
def make() -> Iterator[Callable[..., Echo]]:
    """Servers with few connections, which end with the test."""
    with ExitStack() as stack:

        def serve(connections: int, for_probes: int = 1, **others: Any) -> Echo:
            others = {"heads": connections, "grace_seconds": 0} | others
            echo, quotas = Echo(), ConnectionQuotas(connections, for_probes, **others)
            stack.enter_context(echo.serve(connections=quotas))
            stack.callback(echo.go_on.set)
            return echo

        yield serve


@pytest.mark.parametrize("half", [b"", HALF_HEAD, HALF_BODY], ids=["nothing", "head", "body"])
def test_the_largest_holder_gives_way(make: Callable[..., Echo], half: bytes) -> None:
    """Its oldest connection first; who holds one keeps it."""
    echo = make(6)
    with ExitStack() as stack:
        one = stack.enter_context(connect(echo, HALF_HEAD, "127.0.0.2"))
        echo.wait_for(1)
        many = []
        for number in range(5):
            many.append(stack.enter_context(connect(echo, half)))
            echo.wait_for(2 + number)
        for late, first in enumerate(many[:3]):
            host = f"127.0.0.{3 + late}"
            link = stack.enter_context(connect(echo, GET, host))
            assert answer_of(hear(link))["client"] == host
            assert status_of(hear(first)) == 503 and first.recv(1) == b""
        one.sendall(b"localhost\r\n\r\n")
        assert answer_of(hear(one))["client"] == "127.0.0.2"
        if half == HALF_BODY:
            many[-1].sendall(b"cde")
            assert answer_of(hear(many[-1]))["body"] == "abcde"


def test_unfinished_heads_of_one_address_are_few(make: Callable[..., Echo]) -> None:
    """Connections that have asked for something before do not count."""
    echo = make(20, heads=3)
    with ExitStack() as stack:
        kept = []
        for _ in range(8):
            kept.append(stack.enter_context(connect(echo, GET)))
            assert answer_of(hear(kept[-1]))["body"] == ""
        many = []
        for number in range(1, 6):
            many.append(stack.enter_context(connect(echo, HALF_HEAD)))
            if number > 3:
                assert status_of(hear(many[number - 4])) == 503
            echo.wait_for(8 + min(number, 3))
        for link in kept:
            link.sendall(GET)
            assert answer_of(hear(link))["body"] == ""
        for link in many[2:]:
            link.sendall(b"localhost\r\n\r\n")
            assert answer_of(hear(link))["body"] == ""


def test_many_requests_at_once_are_no_attack(make: Callable[..., Echo]) -> None:
    """Their connections are there before the server has read any of them."""
    echo = make(20, heads=3, grace_seconds=60)
    hold = GET.replace(b"/echo", b"/hold")
    with ExitStack() as stack:
        links = [stack.enter_context(connect(echo)) for _ in range(20)]
        echo.wait_for(20)
        for link in links[1:]:
            link.sendall(hold)
        wait_until(lambda: len(echo.server.server_state.tasks) == 19)
        assert answer_of(talk(echo.port, PROBE))["body"] == ""
        assert status_of(hear(links[0])) == 503
        echo.go_on.set()
        assert [answer_of(hear(link))["body"] for link in links[1:]] == [""] * 19


def test_probes_find_a_connection(make: Callable[..., Echo]) -> None:
    """When requests that are computed have taken all others, which are not cut off."""
    echo = make(6, for_probes=2)
    hold = GET.replace(b"/echo", b"/hold")
    with ExitStack() as stack:
        held = [stack.enter_context(connect(echo, hold)) for _ in range(4)]
        wait_until(lambda: len(echo.server.server_state.tasks) == 4)
        for _ in range(3):
            assert answer_of(talk(echo.port, PROBE))["body"] == ""
            assert status_of(talk(echo.port, GET)) == 503
            stack.enter_context(connect(echo, HALF_HEAD))
        with connect(echo, PROBE + GET) as both:  # one that may, and one that may not
            heard = b""
            while piece := both.recv(1 << 16):
                heard += piece
        assert [part[:3] for part in heard.split(b"HTTP/1.1 ")] == [b"", b"200", b"503"]
        echo.go_on.set()
        assert [answer_of(hear(link))["body"] for link in held] == [""] * 4
        assert answer_of(talk(echo.port, GET))["body"] == ""


def test_requests_with_half_a_body_give_way_to_whole_ones(make: Callable[..., Echo]) -> None:
    echo = make(6, for_probes=2)
    with ExitStack() as stack:
        halves = []
        for number in range(1, 5):
            halves.append(stack.enter_context(connect(echo, HALF_BODY)))
            wait_until(lambda number=number: len(echo.server.server_state.tasks) == number)
        link = stack.enter_context(connect(echo, GET, "127.0.0.2"))
        assert answer_of(hear(link))["body"] == ""
        assert status_of(hear(halves[0])) == 503
        for half in halves[1:]:
            half.sendall(b"cde")
            assert answer_of(hear(half))["body"] == "abcde"


def test_requests_whose_answer_is_not_read_give_way(make: Callable[..., Echo]) -> None:
    """The oldest of the client with most of them."""
    echo = make(5, for_probes=2)
    endless, states = GET.replace(b"/echo", b"/endless"), (ConnectionState.UNREAD,) * 3
    with ExitStack() as stack:
        links = []
        for number, host in enumerate(("127.0.0.2", "127.0.0.1", "127.0.0.1"), start=1):
            links.append(stack.enter_context(connect(echo, endless, host)))
            wait_until(lambda number=number: states_of(echo) == states[:number])
        other = stack.enter_context(connect(echo, GET, "127.0.0.3"))
        assert answer_of(hear(other))["body"] == ""
        wait_until(lambda: len(echo.server.server_state.tasks) == 2)
        clients = [link.client for link in echo.server.server_state.connections]
        assert sorted(host for host, _ in clients) == ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
        assert links[2].getsockname() in clients


def states_of(echo: Echo) -> tuple[ConnectionState, ...]:
    return tuple(link._state for link in list(echo.server.server_state.connections))


def test_unread_answers_give_way(make: Callable[..., Echo]) -> None:
    """They are complete, and only their client holds them."""
    echo = make(3)
    body = b"a" * (4 << 20)
    with ExitStack() as stack:
        for number in range(3):
            link = stack.enter_context(connect(echo))
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            link.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            wait_until(lambda count=number + 1: echo.server.server_state.total_requests == count)
        assert len(echo.server.server_state.connections) == 3
        other = stack.enter_context(connect(echo, GET, "127.0.0.2"))
        assert answer_of(hear(other))["client"] == "127.0.0.2"
        echo.wait_for(3)


def test_what_is_held_of_bodies_has_a_limit(make: Callable[..., Echo]) -> None:
    """In all; the client that holds most loses its oldest, and others do not notice."""
    echo = make(10, body_bytes=100_000)
    head = POST + b"Content-Length: 50000\r\n\r\n"
    with ExitStack() as stack:
        other = stack.enter_context(connect(echo, head + b"a" * 10_000, "127.0.0.2"))
        wait_until(lambda: held_bytes(echo) == 10_000)
        first = stack.enter_context(connect(echo, head + b"b" * 45_000))
        wait_until(lambda: held_bytes(echo) == 55_000)
        second = stack.enter_context(connect(echo, head + b"c" * 40_000))
        wait_until(lambda: held_bytes(echo) == 95_000)
        other.sendall(b"a" * 20_000)
        assert status_of(hear(first)) == 503
        for link, size, sign in ((other, 20_000, "a"), (second, 10_000, "c")):
            link.sendall(sign.encode() * size)
            assert answer_of(hear(link))["body"] == sign * 50_000
        wait_until(lambda: held_bytes(echo) == 0)


def held_bytes(echo: Echo) -> int:
    table: ConnectionTable = echo.server.config.http_protocol_class.table  # type: ignore[union-attr]
    return table._body_bytes.total


class Link:
    def __init__(self, address: str) -> None:
        self.address, self.since, self.closed = address, 0.0, False

    def evict(self) -> None:
        self.closed = True


def test_weights_by_address() -> None:
    weights, links = ConnectionWeights(), [Link(address) for address in "abbacb"]
    assert weights.oldest_of_largest() is None
    for link in links:
        weights.set(link, 1)
    assert (weights.total, weights.weight_of("b"), weights.weight_of("x")) == (6, 3, 0)
    assert weights.oldest_of_largest() is links[1]
    weights.set(links[4], 9)
    assert weights.oldest_of_largest() is links[4] and weights.total == 14
    for link in links:
        weights.set(link, 0)
        weights.set(link, 0)
    assert weights.total == 0 and weights._by_address == {} == weights._weights


def test_nothing_is_kept_of_connections_that_are_gone() -> None:
    table = ConnectionTable(ConnectionQuotas(4, 1, 2))
    links = [Link(str(number % 3)) for number in range(30)]
    for number, link in enumerate(links):
        table.register(link, min(5, number + 1))
        if not link.closed and table.admit_request(link):
            table.update(link, ConnectionState.BODY, 10)
    for link in links:
        table.unregister(link)
    assert sum(link.closed for link in links) == 27  # one of four is for probes
    assert table._waiting.total == table._body_bytes.total == len(table._requests) == 0


def test_whose_connection_it_is() -> None:
    assert network_of("10.1.2.3") == "10.1.2.3" == network_of("::ffff:10.1.2.3")
    assert (
        network_of("2001:db8::1") == network_of("2001:db8::ffff:0:1") != network_of("2001:db8:1::")
    )
    assert network_of("fe80::1%eth0") == "fe80::"


# --- descriptors ---


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "found"),
    [
        (1024, 4096, 500, 1024),
        (256, 4096, 500, 500),
        (256, 300, 500, 300),
        (256, resource.RLIM_INFINITY, 500, 500),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 500, None),
    ],
)
def test_descriptors_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, wanted: int, found: int | None
) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    number = run._raise_file_limit(wanted)
    if found is None:
        assert number > 1 << 40 and len(limits) == 1
    else:
        assert number == found == limits[-1][0] and limits[-1][1] == hard


def test_too_few_descriptors_are_told_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    with pytest.raises(ValueError, match=r"may open 256 files and the server needs 320.*ulimit -n"):
        run._check_file_limit()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (320, 320))
    run._check_file_limit()
    assert run.max_connections(4096) == run.FEWEST_CONNECTIONS == 64
