"""Two micro-batches in flight in one MoE block: its operations, interleaved at the yields.

T tokens · H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.launch.local_ranks import LocalRanks
from moesaic.core.overlap import Overlap
from moesaic.core.step import Step
from moesaic.kernels.experts import summed
from moesaic.layers.linear import Linear, LinearConfig
from moesaic.layers.mlp import GatedMLP
from moesaic.layers.parallel import Parallel
from moesaic.models.blocks import Router, SparseBlock
from moesaic.moe.topk import TopK, TopKConfig
from moesaic.overlap.operations import LayerState, Operation, YieldOperation
from tests.distributed.test_in_flight import (
    EXPERTS,
    HIDDEN,
    INNER,
    TOP_K,
    batch,
    each_a2a,
    make_layer,
    step_of,
)
from tests.moe_oracle import Experts, reference

COUNTS = ((3, 5), (0, 4), (1, 0), (9, 2))  # tokens of each micro-batch
FLOAT32_STEPS = 100 * 2.0**-23


def make_block(group: RankGroup, a2a: str, mode: str, device: str, shared: bool) -> SparseBlock:
    layer = make_layer(group, a2a, mode, Experts.random(EXPERTS, HIDDEN, INNER), device)
    gate = Router(LinearConfig(HIDDEN, EXPERTS, torch.float32))
    topk, mlp, mlp_gate = TopK(TopKConfig(TOP_K, renormalize=True)), None, None
    if shared:
        mlp = GatedMLP(LinearConfig(HIDDEN, INNER, torch.float32), Parallel(), "shared experts")
        mlp_gate = Linear(LinearConfig(HIDDEN, 1, torch.float32))
    block = SparseBlock(gate, topk, layer, None, mlp, mlp_gate)
    generator = torch.Generator().manual_seed(3)
    for parameter in block.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / HIDDEN**0.5)
    return block


def block_state(x_TH: Tensor, step: Step) -> LayerState:
    state = LayerState()
    state.x_TH, state.step, state.given = x_TH, step, None
    return state


def segments(operations: tuple[Operation, ...]) -> list[list[Operation]]:
    found: list[list[Operation]] = [[]]
    for operation in operations:
        if isinstance(operation, YieldOperation):
            found.append([])
        else:
            found[-1].append(operation)
    return found


def interleaved(block: SparseBlock, states: list[LayerState]) -> list[Tensor]:
    """At each yield the other micro-batch goes on."""
    for segment in segments(block.ops()):
        for state in states:
            for operation in segment:
                operation(state)
    return [summed(state.output) for state in states]


def expected(block: SparseBlock, x_TH: Tensor, experts: Experts) -> Tensor:
    y_TH = reference(experts, x_TH, block.route(x_TH))
    if block.shared_experts is not None and block.shared_expert_gate is not None:
        gate_T1 = torch.sigmoid(block.shared_expert_gate(x_TH).double())
        y_TH = y_TH + gate_T1 * block.shared_experts(x_TH).double()
    return y_TH


def two_batches(group: RankGroup, a2a: str, mode: str, device: str, shared: bool) -> list[str]:
    block, experts = (
        make_block(group, a2a, mode, device, shared),
        Experts.random(EXPERTS, HIDDEN, INNER),
    )
    wrong = []
    for number, counts in enumerate(COUNTS):
        seeds = [100 * number + 10 * group.rank + lane for lane in (0, 1)]
        x = [batch(count, seed)[0] for count, seed in zip(counts, seeds, strict=True)]
        plain = [summed(block(x_TH, step_of(lane))) for lane, x_TH in enumerate(x)]
        states = [block_state(x_TH, step_of(lane)) for lane, x_TH in enumerate(x)]
        together = interleaved(block, states)
        for lane, (x_TH, alone_TH, y_TH) in enumerate(zip(x, plain, together, strict=True)):
            error = (y_TH.double() - expected(block, x_TH, experts)).abs()
            if not torch.equal(y_TH, alone_TH) or bool((error > FLOAT32_STEPS).any()):
                wrong.append(f"{counts} lane {lane}")
    return wrong


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("shared", [False, True])
def test_one_rank(device: str, shared: bool) -> None:
    """With the torch twins of a GPU's kernels, too, which may defer the reduce."""
    assert two_batches(RankGroup.alone(), "none", "normal", device, shared) == []


@each_a2a
def test_two_ranks(a2a: str, mode: str, pools: Callable[[int], LocalRanks]) -> None:
    assert pools(2).run(two_batches, a2a, mode, "cpu", True) == [[], []]


@pytest.mark.parametrize(("a2a", "mode"), [("none", "normal"), ("deepep", "auto")])
def test_two_ranks_as_on_a_gpu(a2a: str, mode: str, pools: Callable[[int], LocalRanks]) -> None:
    assert pools(2).run(two_batches, a2a, mode, "cuda", True) == [[], []]


def single_batch(group: RankGroup, a2a: str, mode: str, device: str) -> list[bool]:
    """Whether shared experts beside transfers give the bits of those behind them."""
    block = make_block(group, a2a, mode, device, shared=True)
    found = []
    for count in (0, 1, 5) if device == "cpu" else (1, 5):
        x_TH, step = batch(count, group.rank)[0], step_of(0)
        plain_TH, single_TH = (
            summed(block(x_TH, replace(step, overlap=overlap)))
            for overlap in (Overlap.OFF, Overlap.SBO)
        )
        found.append(torch.equal(plain_TH, single_TH))
    return found


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@each_a2a
def test_shared_experts_beside_transfers(
    a2a: str, mode: str, device: str, pools: Callable[[int], LocalRanks]
) -> None:
    assert all(map(all, pools(2).run(single_batch, a2a, mode, device)))


def test_the_operations_and_their_order() -> None:
    """Shared experts run while the rows are on their way; the list holds two yields."""
    block = make_block(RankGroup.alone(), "none", "normal", "cpu", shared=True)
    names = [
        "yield" if isinstance(operation, YieldOperation) else operation.__name__.lstrip("_")
        for operation in block.ops()
    ]
    assert names == [
        "route", "dispatch_a", "yield", "shared_inward", "dispatch_b", "run_experts", "combine_a",
        "yield", "shared_outward", "combine_b",
    ]  # fmt: skip
    x_TH, (state,) = batch(3, 0)[0], [block_state(batch(3, 0)[0], Step())]
    for operation in block.ops():
        operation(state)  # a yield does nothing where one micro-batch runs
    assert torch.equal(summed(state.output), summed(block(x_TH, Step())))
