"""Experts that move between nodes of ranks that all share one GPU, through page-locked memory of
the host. To NCCL every rank is a host of its own."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.launch.local_ranks import LocalRanks
from moesaic.comm.launch.mps import start_mps
from moesaic.comm.windows.window import SharedWindow
from moesaic.config.devices import cuda_missing
from moesaic.engine.setup.expert_buffers import OUTBOX, SUMS
from tests.distributed.nodes import FOUR, TWO
from tests.distributed.test_node_dispatch import Nodes
from tests.distributed.test_node_dispatch_gpu import as_hosts
from tests.distributed.test_rebalance import (
    RANKS,
    Bench,
    Setting,
    abandon_steps,
    check,
    check_abandoned,
    check_disturbed,
    disturb,
    serve,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(cuda_missing()), reason=f"needs a CUDA device: {cuda_missing()}"),
]

GPU = Setting(device="cuda")
SLEEP_CYCLES = 1_000_000_000  # half a second of an H200
Ranks = Callable[..., list]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """ranks(nodes, function, …): on four ranks of GPU 0, on these nodes."""
    with start_mps() as mps, LocalRanks(RANKS, timeout=500, peer_timeout=60.0) as pool:

        def run(nodes: Nodes, function: Callable, *args: object) -> list:
            return pool.run(as_hosts, mps.for_ranks(RANKS), nodes, function, *args)

        yield run


@pytest.mark.parametrize("nodes", [TWO, FOUR], ids=str)
def test_experts_move_between_nodes(nodes: Nodes, ranks: Ranks) -> None:
    settings = [
        Setting(rebalances=3, device="cuda"),
        Setting("none", step_bytes=40_000, device="cuda"),
        Setting(ep=2, redundant=8, device="cuda"),
        Setting(per_chunk=5, step_bytes=10**9, device="cuda"),
    ]
    found = ranks(nodes, serve, settings)
    check(found, settings)
    assert all(one.aborted == 0 for told in found for one in told), "nothing arrived damaged"


def test_faults_leave_nothing_half_moved(ranks: Ranks) -> None:
    check_disturbed(ranks(TWO, disturb, 4, GPU), 4)


def test_a_rank_that_missed_a_step_follows(ranks: Ranks) -> None:
    check_abandoned(ranks(TWO, abandon_steps, 6, GPU, 117))


def locks(group: RankGroup) -> tuple[bool, bool, bool]:
    """Whether pages are locked; whether they still are when the rebalancer is gone; and whether the
    next kernel runs."""
    mover = Bench(group, GPU).mover
    window = mover._copies.window
    assert isinstance(window, SharedWindow)
    planes = [window.stacked(name) for name in (OUTBOX, SUMS)]
    before = all(plane.is_pinned() for plane in planes)
    del mover, window
    gc.collect()
    after = any(plane.is_pinned() for plane in planes)
    return before, after, bool(torch.ones(3, device="cuda").sum().item() == 3)


def test_pages_are_locked_and_unlocked(ranks: Ranks) -> None:
    assert ranks(TWO, locks) == [(True, False, True)] * RANKS


def begin_copies(group: RankGroup) -> tuple[float, bool, bool, bool]:
    """While the GPU is busy: the seconds that it takes to begin a copy to the host, and whether it
    has ended by then; whether it has ended later, and the bytes are there."""
    copies = Bench(group, GPU).mover._copies
    used = copies.sizes.outbox
    torch.cuda.synchronize()
    group.barrier("all are ready")
    copies.window.plane(OUTBOX).zero_()
    copies.outbox().fill_(7)
    torch.cuda._sleep(SLEEP_CYCLES)
    begin = time.monotonic()
    copies.start(lambda: copies.copy_to_host(used))
    seconds, early = time.monotonic() - begin, copies.is_done
    torch.cuda.synchronize()
    late = copies.is_done
    return seconds, early, late, bool((copies.window.plane(OUTBOX) == 7).all())


def test_a_step_does_not_wait_for_copies(ranks: Ranks) -> None:
    for seconds, early, late, is_there in ranks(TWO, begin_copies):
        assert seconds < 0.1 and not early and late and is_there
