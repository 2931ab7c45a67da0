"""The environment that NCCL is given."""

from __future__ import annotations

import os
import socket

import pytest

from moesaic.comm.collectives.nccl_collective import ALWAYS, set_up_nccl

HOST = socket.gethostname()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ((3, None, "127.0.0.1", False), {}),
        ((3, 1, "10.0.0.2", False), {}),
        ((3, 1, "fd00::2", False), {}),
        (
            (3, 1, "127.0.0.1", False),
            {"NCCL_HOSTID": f"{HOST} node 1", "NCCL_SOCKET_IFNAME": "=lo"},
        ),
        (
            (3, None, "127.0.0.1", True),
            {"NCCL_HOSTID": f"{HOST} node 0 rank 3", "NCCL_MAX_CTAS": "2"},
        ),
        (
            (3, 1, "10.0.0.2", True),
            {"NCCL_HOSTID": f"{HOST} node 1 rank 3", "NCCL_MAX_CTAS": "2"},
        ),
    ],
)
def test_what_is_set(place: tuple[int, int | None, str, bool], expected: dict[str, str]) -> None:
    set_up_nccl(*place)
    os.environ.pop("PYTEST_CURRENT_TEST")
    assert os.environ == {**ALWAYS, **expected}


def test_what_is_given_stays() -> None:
    given = {"NCCL_HOSTID": "a", "NCCL_SOCKET_IFNAME": "eth1", "NCCL_GRAPH_REGISTER": "1"}
    os.environ.update(given)
    set_up_nccl(0, 1, "127.0.0.1", True)
    assert {name: os.environ[name] for name in given} == given
