"""Experts that move between nodes: of CPUs, and of GPUs, which send them through host memory. By
the twins of kernels, with copies that end late, as those of a GPU do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.launch.local_ranks import LocalRanks
from moesaic.comm.windows.node_window import NodeWindow
from moesaic.engine.rebalance import rebalancer
from moesaic.engine.rebalance.copy_phases import ReadPhase
from moesaic.engine.rebalance.expert_copies import CopyBuffers
from moesaic.engine.setup.expert_buffers import OUTBOX, SUMS
from tests.distributed.nodes import FOUR, TWO
from tests.distributed.test_node_dispatch import Nodes, there
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

Pools = Callable[[int], LocalRanks]
GPU = Setting(device="cuda")
LATE_POLLS = 2


class LateCopies(CopyBuffers):
    """What is started ends some polls later, as on a GPU. Until then others would read garbage."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._late: list[Callable[[], None]] = []
        self._polls = 0

    def start(self, work: Callable[[], None]) -> None:
        self._polls = LATE_POLLS
        if getattr(work, "__func__", None) is ReadPhase._stage:
            self._late.append(partial(super().start, work))
        else:
            super().start(work)

    def copy_to_host(self, used: int) -> None:
        for name in (OUTBOX, SUMS):
            self.window.plane(name).fill_(0x55)
        self._late.append(partial(super().copy_to_host, used))

    @property
    def is_done(self) -> bool:
        if self._late and self._polls:
            self._polls -= 1
            return False
        late, self._late = self._late, []
        for end in late:
            end()
        return super().is_done


def with_late_copies(group: RankGroup, work: Callable[..., object], *args: object) -> object:
    with patch.object(rebalancer, "CopyBuffers", LateCopies):
        return work(group, *args)


@pytest.mark.parametrize("nodes", [TWO, pytest.param(FOUR, marks=pytest.mark.slow)], ids=str)
def test_experts_move_between_nodes(nodes: Nodes, pools: Pools) -> None:
    settings = [Setting(rebalances=2), Setting("none", device="cuda")]
    check(pools(RANKS).run(there, nodes, serve, settings), settings)


def test_no_outbox_is_sent_or_overwritten_early(pools: Pools) -> None:
    """Two ranks on each of two nodes; experts travel in parts, so that outboxes are used again."""
    settings = [
        Setting(step_bytes=90_000, device="cuda"),
        Setting(ep=2, redundant=8, device="cuda"),
    ]
    found = pools(RANKS).run(there, TWO, with_late_copies, serve, settings)
    check(found, settings)
    assert all(one.aborted == 0 for told in found for one in told), "nothing arrived damaged"


@pytest.mark.slow
def test_faults_leave_nothing_half_moved(pools: Pools) -> None:
    check_disturbed(pools(RANKS).run(there, TWO, with_late_copies, disturb, 4, GPU), 4)


@pytest.mark.slow  # that of test_rebalance.py is always run
def test_a_rank_that_missed_a_step_follows(pools: Pools) -> None:
    """A rebalance that is dropped leaves copies behind, which the next one waits for."""
    check_abandoned(pools(RANKS).run(there, TWO, with_late_copies, abandon_steps, 6, GPU, 117))


def memory(group: RankGroup) -> tuple[bool, int, int, int]:
    """Whether outboxes are in host memory, and what is counted on the device and on the host."""
    mover = Bench(group, GPU).mover
    copies, sizes = mover._copies, mover._copies.sizes
    assert copies.outbox().data_ptr() != copies.window.plane(OUTBOX).data_ptr()
    is_shared = isinstance(copies.window, NodeWindow) and sizes.through_host
    own = copies.staging.nbytes + copies.outbox().nbytes + copies.sums().nbytes
    return (
        is_shared,
        mover.window_bytes,
        sizes.nbytes(group.size, torch.device("cpu")) - own,
        sizes.host_bytes,
    )


def test_host_memory_is_not_counted_on_the_device(pools: Pools) -> None:
    slots = 4
    outbox = Setting().step_bytes // 16 * 16
    expected = (True, 0, 0, 2 * (outbox + slots * torch.int64.itemsize))
    assert pools(RANKS).run(there, TWO, memory) == [expected] * RANKS
