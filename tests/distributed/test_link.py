"""The emulated link between ranks on CPU, by windows of hosts and by the twins of a GPU's kernels:
no signal arrives before it is due, answers stay, and the bytes are those that ranks receive."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moesaic.comm.launch.local_ranks import LocalRanks
from moesaic.core.link import EmulatedLink
from tests.distributed.link_ranks import SIGNALS, device_signals, host_signals, layers
from tests.distributed.moe_ranks import A2A
from tests.distributed.moe_rounds import flights

Pools = Callable[[int], LocalRanks]
LINK = EmulatedLink(0.05, 200.0)
NBYTES = 20_000
each_a2a = pytest.mark.parametrize(("a2a", "mode"), A2A)


def due_seconds(size: int) -> float:
    """Of signals of which each leaves when the one before it has arrived."""
    return SIGNALS * 1e-9 * (LINK.ns((size - 1) * NBYTES) + LINK.latency_ns)


@pytest.mark.parametrize("size", [2, 3])
def test_no_signal_of_a_host_arrives_before_it_is_due(size: int, pools: Pools):
    assert min(pools(size).run(host_signals, LINK, NBYTES)) >= due_seconds(size)


@pytest.mark.parametrize("size", [2, 3])
def test_no_signal_of_a_device_arrives_before_it_is_due(size: int, pools: Pools):
    assert min(pools(size).run(device_signals, "cpu", LINK, NBYTES)) >= due_seconds(size)


@pytest.mark.parametrize("deterministic", [False, True])
@each_a2a
def test_layers_of_hosts(a2a: str, mode: str, deterministic: bool, pools: Pools):
    """Ranks count the rows that they read themselves. Where all have the same tokens, the link
    carries all results to all."""
    found = pools(3).run(layers, a2a, mode, "cpu", LINK, deterministic)
    assert all(sent.same for sent in found)
    carried, received = (
        sum(getattr(sent, name) for sent in found) for name in ("carried", "received")
    )
    if mode == "replicated":
        assert carried >= received > 0
    else:
        assert carried == received > 0
    least = min(LINK.ns(sent.carried) for sent in found) + LINK.latency_ns
    assert min(sent.seconds for sent in found) >= least * 1e-9


@each_a2a
def test_layers_by_the_twins_of_kernels(a2a: str, mode: str, pools: Pools):
    assert all(sent.same for sent in pools(3).run(layers, a2a, mode, "cuda", LINK, False))


@pytest.mark.parametrize(("a2a", "mode"), [("deepep", "normal"), ("none", "normal")])
def test_two_lanes_share_a_link(a2a: str, mode: str, pools: Pools):
    assert pools(2).run(late_flights, a2a, mode) == [[], []]


def late_flights(group, a2a: str, mode: str) -> list[str]:  # type: ignore[no-untyped-def]
    return flights(group, a2a, mode, 8, link=EmulatedLink(1.0, 100.0))
