"""Random schedules of whole and of split steps through layers of experts, without a hang.

T tokens · H hidden.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.launch.local_ranks import LocalRanks
from moesaic.core.overlap import Overlap
from moesaic.core.step import Step
from moesaic.kernels.experts import summed
from moesaic.layers.context import ForwardContext
from moesaic.models.blocks import SparseBlock
from moesaic.overlap.executor import run_two
from moesaic.overlap.operations import YIELD, LayerState, MicroBatch, Operation
from tests.distributed.test_block_operations import make_block
from tests.distributed.test_in_flight import A2A, HIDDEN, MOST, each_a2a

SIZE, EACH, PART = 2, 150, 30
# The twins of a GPU's kernels take all kinds of steps.
AS_ON_A_GPU = (("deepep", "auto"), ("none", "normal"))


@dataclass
class BlockLayer:
    """A block with more yields than its own, as a layer from outside may have them."""

    block: SparseBlock
    more: int

    def ops(self) -> Sequence[Operation]:
        return [YIELD] * self.more + list(self.block.ops())

    def begin(self, batch: MicroBatch) -> LayerState:
        assert isinstance(batch.x_TH, Tensor)
        state = LayerState()
        state.x_TH, state.step, state.given = batch.x_TH, batch.ctx.step, None
        return state

    def end(self, state: LayerState, batch: MicroBatch) -> None:
        batch.x_TH = state.x_TH + summed(state.output)


def step(lane: int, prefill: bool, overlap: Overlap) -> Step:
    return Step(prefill, lane, rows=MOST, overlap=overlap)


def batch(x_TH: Tensor, step: Step) -> MicroBatch:
    nothing = torch.empty(0)
    return MicroBatch(ForwardContext((nothing, nothing), None, step), x_TH)  # type: ignore[arg-type]


def alone(layers: Sequence[BlockLayer], x_TH: Tensor, prefill: bool) -> Tensor:
    for layer in layers:
        x_TH = x_TH + summed(layer.block(x_TH, step(0, prefill, Overlap.OFF)))
    return x_TH


def schedules(
    group: RankGroup, a2a: str, mode: str, device: str, count: int, seed: int = 5
) -> list[str]:
    """`common` is the same on all ranks, as what they agree on; tokens are a rank's own."""
    blocks = [make_block(group, a2a, mode, device, shared) for shared in (True, False, True)]
    common, own, wrong = random.Random(seed), random.Random(f"{seed} {group.rank}"), []
    for number in range(count):
        layers = [BlockLayer(block, common.randrange(2)) for block in blocks]
        prefill, delta = common.random() < 0.5, common.randrange(4)
        counts = [own.choice((0, 0, 1, 2, own.randrange(MOST))) for _ in range(2)]
        x = [torch.randn(count, HIDDEN) for count in counts]
        expected = [alone(layers, x_TH, prefill) for x_TH in x]
        if common.random() < 0.2:
            continue  # a whole step between split ones
        halves = [batch(x_TH, step(n, prefill, Overlap.TBO)) for n, x_TH in enumerate(x)]
        run_two(layers, halves[0], halves[1], delta)
        found = [half.x_TH for half in halves]
        if not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
            wrong.append(f"{number}: {counts}, delta {delta}")
    return wrong


@each_a2a
def test_random_schedules(a2a: str, mode: str, pools: Callable[[int], LocalRanks]) -> None:
    assert pools(SIZE).run(schedules, a2a, mode, "cpu", 12) == [[]] * SIZE


@pytest.mark.parametrize(("a2a", "mode"), AS_ON_A_GPU)
def test_random_schedules_as_on_a_gpu(
    a2a: str, mode: str, pools: Callable[[int], LocalRanks]
) -> None:
    assert pools(SIZE).run(schedules, a2a, mode, "cuda", 4) == [[]] * SIZE


@pytest.mark.slow
@pytest.mark.timeout(600)
@each_a2a
def test_a_thousand_schedules(a2a: str, mode: str, pools: Callable[[int], LocalRanks]) -> None:
    """Of all backends together; in parts, as ranks must answer in time on a busy machine, too."""
    assert len(A2A) * EACH >= 1000
    for seed in range(EACH // PART):
        assert pools(3).run(schedules, a2a, mode, "cpu", PART, seed) == [[]] * 3
