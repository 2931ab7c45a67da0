"""Copies of experts on one rank, where nothing is sent, and errors on the way."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from moesaic.balance.moves import SlotMove, moves_of_layer
from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.windows.window import SharedWindow
from moesaic.config import ServerArgs
from moesaic.config.resolve import resolve
from moesaic.engine.rebalance.copy_phases import ReadPhase, WritePhase
from moesaic.engine.rebalance.expert_copies import ChunkCopy, CopyBuffers, WrongExpert, word_sum
from moesaic.engine.setup.device_memory import total_memory
from moesaic.engine.setup.expert_buffers import BufferSizes, ExpertImage, buffer_sizes
from moesaic.engine.setup.memory_plan import plan_memory
from moesaic.models.locate import model_folder
from moesaic.moe.context import MoeContext
from moesaic.moe.layer import FusedMoE
from moesaic.moe.placement import Placement
from moesaic.moe.shape_only import ShapeOnlyGroup
from tests.moe_oracle import Experts, config_of
from tests.server.serving import wait_until

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


@pytest.mark.parametrize("words", [0, 1, 511, 512, 1024, 1600])
def test_sums_are_those_of_numbered_words(words: int) -> None:
    data_N = torch.arange(words) * 7919 - 5
    wanted = sum((2 * n + 1) * (7919 * n - 5) for n in range(words))
    assert int(word_sum(data_N.view(torch.uint8))) == wanted
    assert int(word_sum(torch.tensor([5, 6, 7]).view(torch.uint8))) == 58


def test_sums_tell_words_that_have_changed_places() -> None:
    """Also across a diagonal, where the sums of rows and columns change by opposite numbers."""
    data_N = torch.arange(3 * 512 + 40) ** 2
    places = (0, 1, 511, 512, 513, 1024, 1536, 1537, 1575)
    for one, other in itertools.combinations(places, 2):
        swapped_N = data_N.clone()
        swapped_N[[one, other]] = data_N[[other, one]]
        assert word_sum(swapped_N.view(torch.uint8)) != word_sum(data_N.view(torch.uint8))


def test_images_are_whole_words(layer: FusedMoE) -> None:
    image = ExpertImage((5, 16, 1))
    assert image.starts == [0, 16, 32, 48] and image.nbytes == 48
    assert BufferSizes.of([layer], 1001, 1).outbox == 992


def test_buffers_between_nodes_are_in_host_memory(layer: FusedMoE) -> None:
    image, gpu = ExpertImage.of(layer).nbytes, torch.device("cuda", 0)
    sizes = BufferSizes.of([layer], 4096, 1, nodes=3, on_gpu=True)
    planes = 4096 + 4 * 8
    assert sizes.through_host and sizes.window_bytes(6, gpu) == 0
    assert sizes.nbytes(6, gpu) == planes + 4 * image, "the rank's outbox and its staging area"
    assert sizes.host_bytes == 3 * planes, "two ranks of a node have the outboxes of six"
    on_cpu = BufferSizes.of([layer], 4096, 1, nodes=3)
    assert on_cpu.nbytes(6, CPU) == 3 * planes + 4 * image
    assert on_cpu.host_bytes == BufferSizes.of([layer], 4096, 1, on_gpu=True).host_bytes == 0


def test_a_step_between_nodes_copies_what_a_network_carries(layer: FusedMoE) -> None:
    args = ServerArgs(model_path="tiny", enable_eplb=True)
    on_gpu = replace(layer.context.resolved, device="cuda")
    layer.context = replace(layer.context, resolved=on_gpu)
    one = buffer_sizes(args, [layer], ShapeOnlyGroup(0, 4))
    two = buffer_sizes(args, [layer], ShapeOnlyGroup(0, 4, (0, 0, 1, 1)))
    assert (one.nodes, two.nodes) == (1, 2) and two.through_host and not one.through_host
    own = replace(args, eplb_max_bytes_per_step=2048)
    assert buffer_sizes(own, [layer], ShapeOnlyGroup(0, 4, (0, 0, 1, 1))).outbox == 2048


def test_the_plan_of_a_node_counts_all_outboxes() -> None:
    flags = {"tp_size": 4, "ep_size": 4, "nnodes": 2, "dist_init_addr": "127.0.0.1:29500"}
    args = resolve(ServerArgs(model_path="tiny:qwen3_moe", enable_eplb=True, **flags))
    plan = plan_memory(replace(args, model_path=model_folder(args)))
    assert all(share.moving_bytes and not share.host_bytes for share in plan.ranks), "on CPU"
    plan._check_host_memory()
    much = tuple(replace(share, host_bytes=total_memory()) for share in plan.ranks)
    with pytest.raises(ValueError, match=r"of each node's memory .*--eplb-max-bytes-per-step"):
        replace(plan, ranks=much)._check_host_memory()


class FailedSend(RuntimeError):
    pass


def test_what_cannot_be_sent_is_told(layer: FusedMoE, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the phase that has begun to send; the outbox is not written again before that."""
    copy, buffers = make_copy(layer)
    window, may_end = buffers.window, threading.Event()
    assert isinstance(window, SharedWindow)

    def signal(*_: object) -> None:
        assert may_end.wait(10)
        raise FailedSend

    monkeypatch.setattr(window, "spans_nodes", True)
    monkeypatch.setattr(window, "signal", signal)
    writing = WritePhase(copy, buffers, 0)
    assert not writing(1) and not writing(1), "another thread sends"
    with pytest.raises(AssertionError, match="still being written or sent"):
        buffers.publish(2, 0)
    after = WritePhase(copy, buffers, 0)
    assert not after(2) and after._used == -1, "it waits for what was dropped"
    may_end.set()
    wait_until(lambda: buffers._sending is not None and buffers._sending.done())
    with pytest.raises(FailedSend):
        writing(1)


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
