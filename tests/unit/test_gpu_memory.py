"""What a rank finds free on a GPU that it shares, at the first start and when it returns."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch

from moesaic.comm.collectives.group import Peers
from moesaic.engine.runner import loading
from moesaic.engine.runner.loading import GpuMemory
from moesaic.engine.setup.rank_context import RankContext

DEVICE = torch.device("cuda", 0)


@dataclass
class Kept(Peers):
    """What all ranks said at the first start."""

    rank: int = 1
    size: int = 4
    said: list[bytes] = field(default_factory=list)

    def all_gather_bytes(self, data: bytes, operation: str) -> list[bytes]:
        return self.said or [b"7", data, b"9", b"11"]


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the device has free; the last one stays."""
    values = [400]

    def look(device: torch.device) -> tuple[int, int]:
        return values.pop(0) if len(values) > 1 else values[0], 400

    monkeypatch.setattr(torch.cuda, "mem_get_info", look)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return values


def test_ranks_that_start_together_have_a_part_each(free: list[int]):
    memory = GpuMemory(DEVICE, 4, RankContext(replica=Kept()))
    room = memory.room(windows=5)
    assert (room.total, room.free, room.sharers) == (100, 105, 4)
    free[:] = [200]
    assert (memory.left(2).free, memory.left(2).held) == (50, 5)


def test_a_rank_that_returns_has_what_the_others_left(free: list[int]):
    """It decides by what its predecessor found, once the driver has freed that."""
    ranks = RankContext(replica=Kept(said=[b"80", b"100", b"80", b"80"]), returns=True)
    memory = GpuMemory(DEVICE, 4, ranks)
    free[:] = [20, 30, 89, 95]
    assert memory.room(windows=5).free == 105
    assert free == [95], "it has waited for 90"
    assert (memory.left(2).free, memory.left(2).total) == (95, 100)
    free[:] = [180]
    assert memory.left().free == 100, "no more than its part"


def test_a_driver_that_frees_nothing_holds_nobody_up(
    free: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(loading, "FREED_SECONDS", 0.1)
    ranks = replace(RankContext(), replica=Kept(said=[b"100"] * 4), returns=True)
    free[:] = [20]
    assert GpuMemory(DEVICE, 4, ranks).room(windows=0).free == 100
    assert "0.0 GiB are free after 0 s" in caplog.text
