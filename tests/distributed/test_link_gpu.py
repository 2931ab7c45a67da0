"""The emulated link between ranks that share a GPU: bounds from below, and answers that stay."""

from __future__ import annotations

import pytest

from moesaic.comm.collectives.group import RankGroup
from moesaic.config.devices import cuda_missing
from moesaic.core.link import EmulatedLink
from tests.distributed.link_ranks import SIGNALS, device_signals
from tests.distributed.moe_rounds import flights, rounds
from tests.distributed.test_device_dispatch_gpu import Ranks, each_a2a, on_ranks, ranks

__all__ = ["ranks"]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(cuda_missing()), reason=f"needs a CUDA device: {cuda_missing()}"),
]
LINK = EmulatedLink(1.0, 200.0)


@pytest.mark.parametrize("graph", [False, True], ids=["launched", "graph"])
@on_ranks(2, 4)
def test_no_signal_arrives_before_it_is_due(size: int, graph: bool, ranks: Ranks):
    """Each leaves after the one before it has arrived."""
    nbytes = 100_000
    due = SIGNALS * 1e-9 * (LINK.ns((size - 1) * nbytes) + LINK.latency_ns)
    for seconds in ranks(size, device_signals, "cuda", LINK, nbytes, graph):
        assert seconds >= 0.999 * due


@each_a2a
@on_ranks(2)
def test_answers_stay_what_they_are(a2a: str, mode: str, size: int, ranks: Ranks):
    assert ranks(size, late_rounds, a2a, mode) == [[]] * size


def late_rounds(group: RankGroup, a2a: str, mode: str) -> list[str]:
    return rounds(group, a2a, mode, {"eager": 10, "replayed": 10}, link=EmulatedLink(5.0, 20.0))


@pytest.mark.parametrize(("a2a", "mode"), [("deepep", "low_latency"), ("deepep", "normal")])
@on_ranks(4)
def test_two_lanes_share_the_link(a2a: str, mode: str, size: int, ranks: Ranks):
    assert ranks(size, late_flights, a2a, mode) == [[]] * size


def late_flights(group: RankGroup, a2a: str, mode: str) -> list[str]:
    return flights(group, a2a, mode, 20, link=EmulatedLink(5.0, 20.0))
