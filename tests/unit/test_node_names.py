"""A node whose name is not known at the moment, as that of a lost one may be."""

from __future__ import annotations

import socket
from typing import Any
from unittest.mock import Mock

import pytest

from moesaic.comm.mesh import Mesh
from moesaic.comm.supervise import lead_search
from moesaic.comm.supervise.address import address_towards_first, numeric_or_name
from moesaic.comm.supervise.lead_search import LeadSearch
from moesaic.comm.supervise.service_spec import ServiceSpec
from moesaic.config import ServerArgs
from moesaic.server import stand_by


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    known = socket.getaddrinfo

    def find(host: str, *rest: Any, **more: Any) -> Any:
        if host == "gone":
            raise socket.gaierror(-2, "Name or service not known")
        return known(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", find)


def test_a_forgotten_name_is_kept_as_it_is() -> None:
    assert numeric_or_name("localhost") in ("127.0.0.1", "::1")
    assert numeric_or_name("gone") == "gone"
    assert address_towards_first([("gone", 1), ("127.0.0.1", 2)]) == "127.0.0.1"
    with pytest.raises(socket.gaierror):
        address_towards_first([("gone", 1)])


def test_supervisors_and_servers_start_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Mock()
    monkeypatch.setattr(lead_search, "LeadLink", link)
    mesh, heads = Mesh(tp=2, dp=2, ep=2, nnodes=2), "gone:1,127.0.0.1:2"
    spec = ServiceSpec(mesh, "a:b", node_rank=1, dist_init_addr=heads, elastic=True, keeper=1)
    LeadSearch(spec, b"", Mock(), Mock())
    assert link.call_args.args == (1, [("gone", 1)], b"")
    assert not stand_by._another_leads(ServerArgs("m", node_rank=1, dist_init_addr=heads))
