"""Copies of experts on one rank, where nothing is sent, and errors on the way."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moesaic.balance.moves import SlotMove, moves_of_layer
from moesaic.comm.collectives.group import RankGroup
from moesaic.engine.rebalance.copy_phases import ReadPhase, WritePhase
from moesaic.engine.rebalance.expert_copies import ChunkCopy, CopyBuffers, WrongExpert
from moesaic.engine.setup.expert_buffers import BufferSizes, ExpertImage
from moesaic.moe.context import MoeContext
from moesaic.moe.layer import FusedMoE
from moesaic.moe.placement import Placement
from tests.moe_oracle import Experts, config_of

CPU = torch.device("cpu")
EXPERTS = Experts.random(3, 32, 16)
OLD, NEW = (0, 1, 2, 0), (1, 1, 2, 0)


@pytest.fixture
def layer() -> FusedMoE:
    made = FusedMoE(config_of(EXPERTS, 2), MoeContext.single(torch.float32), 0, Placement(3, OLD))
    EXPERTS.fill(made)
    return made


def make_copy(layer: FusedMoE) -> tuple[ChunkCopy, CopyBuffers]:
    sizes = BufferSizes.of([layer], 1 << 20, 1)
    buffers = CopyBuffers(RankGroup.alone(), sizes, 1.0, CPU)
    buffers.staging.fill_(255)
    moves = moves_of_layer(np.array(OLD), np.array(NEW), 1, (0,))
    assert moves == [SlotMove(0, 1)]
    return ChunkCopy([layer], [moves], buffers), buffers


def test_an_expert_that_only_changes_slots_is_staged(layer: FusedMoE) -> None:
    wanted = [layer.store.checksum(slot) for slot in (1, 1, 2, 3)]
    copy, buffers = make_copy(layer)
    assert copy.rounds == 1 and buffers.rate is None
    assert WritePhase(copy, buffers, 0)(1) and ReadPhase(copy, buffers, 0)(2)
    assert buffers.rate == ExpertImage.of(layer).nbytes / buffers._seconds, "one expert was staged"
    assert [layer.store.checksum(slot) for slot in range(4)] != wanted, "only adopt changes slots"
    for _ in range(2):  # it may be repeated
        assert copy.adopt(0, [0, 3]) == 0, "nothing came from another rank"
        assert [layer.store.checksum(slot) for slot in range(4)] == wanted


def test_what_failed_is_not_taken_for_done(
    layer: FusedMoE, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, buffers = make_copy(layer)
    WritePhase(copy, buffers, 0)(1)
    reading = ReadPhase(copy, buffers, 0)
    with monkeypatch.context() as broken, pytest.raises(OSError, match="once"):
        broken.setattr(copy, "stage", lambda *_: (_ for _ in ()).throw(OSError("once")))
        reading(2)
    assert reading(2)
    copy.adopt(0, [0])
    assert layer.store.checksum(0) == layer.store.checksum(1)


def test_damage_is_told_until_it_is_forgotten(layer: FusedMoE) -> None:
    _, buffers = make_copy(layer)
    buffers.count_wrong(torch.tensor(True))
    with pytest.raises(WrongExpert, match="1 pieces"):
        buffers.check()
    buffers.forget()
    buffers.check()


def test_images_are_whole_words(layer: FusedMoE) -> None:
    image = ExpertImage((5, 16, 1))
    assert image.starts == [0, 16, 32, 48] and image.nbytes == 48
    assert BufferSizes.of([layer], 1001, 1).outbox == 992


def test_a_warm_up_leaves_no_trace(layer: FusedMoE) -> None:
    """Damage is what an unsynchronised read of another rank's outbox looks like."""
    _, buffers = make_copy(layer)

    def work() -> None:
        buffers.count_bytes(1000)
        buffers.count_wrong(torch.tensor(1))

    buffers.start(work)
    with pytest.raises(WrongExpert):
        buffers.check()
    assert buffers.rate is not None
    buffers.warm_up(work)
    buffers.check()
    assert buffers.rate is None
