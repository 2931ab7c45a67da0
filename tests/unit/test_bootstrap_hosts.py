"""The hosts of prefill instances: a decode instance connects only to those that it is allowed."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from typing import Any

import pytest

from moesaic.config import ServerArgs
from moesaic.core.disagg import Room
from moesaic.disagg.allowed_hosts import LOOPBACK, PRIVATE, AllowedHosts, bootstrap_hosts
from moesaic.engine.frontend.request_options import meeting_room
from tests.unit.kv_instances import LOCAL


@dataclass
class Call:
    bootstrap_host: Any
    bootstrap_port: Any = None
    bootstrap_room: Any = 1


@pytest.mark.parametrize("host", ["a..b", ".a", "x" * 64, "x" * 64 + ".org", "a\0b", "\ud800", ""])
def test_hosts_that_no_lookup_takes(host: str) -> None:
    text = f"bootstrap_host is {host!r}: give the host of the prefill"
    with pytest.raises(ValueError, match=re.escape(text)):
        meeting_room(Call(host), "decode", LOCAL)


@pytest.mark.parametrize("host", ["node-1.example.org.", "10.0.0.7", "::1", "fe80::1%eth0", "käse"])
def test_hosts_that_a_lookup_takes(host: str) -> None:
    allowed = AllowedHosts((*PRIVATE, *LOOPBACK, "fe80::/10"))
    assert meeting_room(Call(host), "decode", allowed) == Room(1, host, 8998)


@pytest.mark.parametrize(
    ("own", "nodes", "given", "asked", "passes"),
    [
        ("127.0.0.1", 1, None, "127.0.0.9", True),
        ("127.0.0.1", 1, None, "10.0.0.7", False),
        ("127.0.0.1", 2, None, "10.0.0.7", True),
        ("0.0.0.0", 1, None, "10.0.0.7", True),
        ("0.0.0.0", 1, None, "::ffff:192.168.0.2", True),
        ("::", 1, None, "fd00::7", True),
        ("::", 1, None, "169.254.169.254", False),
        ("::", 1, None, "::ffff:8.8.8.8", False),
        ("0.0.0.0", 1, None, "fe80::1%eth0", False),
        ("0.0.0.0", 1, ("8.8.8.0/24",), "8.8.8.8", True),
        ("0.0.0.0", 1, ("8.8.8.8", "prefill-0"), "10.0.0.7", False),
        ("0.0.0.0", 1, ("0.0.0.0/0", "::/0"), "169.254.169.254", True),
    ],
)
def test_hosts_that_are_not_allowed(
    own: str, nodes: int, given: tuple[str, ...] | None, asked: str, passes: bool
) -> None:
    flags: dict[str, Any] = {"host": own, "nnodes": nodes, "disaggregation_mode": "decode"}
    args = ServerArgs(**flags, disaggregation_bootstrap_allow=given)
    allowed = AllowedHosts(bootstrap_hosts(args))
    if passes:
        assert meeting_room(Call(asked), "decode", allowed) == Room(1, asked, 8998)
        return
    text = f"bootstrap_host: this instance does not connect to {asked}, only to "
    with pytest.raises(ValueError, match=re.escape(text)):
        meeting_room(Call(asked), "decode", allowed)


def test_names_are_those_of_allowed_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name may be given to any address after it was looked up: that one is connected to."""
    found = {"inside": "127.0.0.1", "outside": "203.0.113.7", "listed": "127.0.0.1"}
    lookup = socket.getaddrinfo

    def look_up(host: str, *more: Any, **options: Any) -> Any:
        return lookup(found.pop(host, host), *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        AllowedHosts(LOOPBACK).connect("inside", port, 5).close()
        AllowedHosts(("LISTED.",)).connect("listed", port, 5).close()
        with pytest.raises(PermissionError, match=r"outside, which is 203\.0\.113\.7, only to"):
            AllowedHosts(LOOPBACK).connect("outside", port, 5)
