"""Ranks that have the same tokens, each of which takes a part of them to the experts: as on a GPU,
by the torch twins of its kernels.

T rows of a group · H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import eq

import pytest
import torch

from moesaic.comm.collectives.device_collective import DeviceCollective
from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.mesh import Mesh
from moesaic.core.step import Step
from moesaic.layers.linear import LinearConfig
from moesaic.layers.parallel import Parallel
from moesaic.models.blocks import Router, SparseBlock
from moesaic.moe.formats import TopKOutput
from moesaic.moe.layer import FusedMoE
from moesaic.moe.runner.base import Workspace
from moesaic.moe.topk import TopK, TopKConfig
from tests.distributed.model_ranks import Some
from tests.distributed.moe_ranks import (
    EXPERTS,
    HIDDEN,
    TOP_K,
    Combination,
    Pools,
    experts_for,
    poison_all,
)
from tests.moe_oracle import config_of, reference
from tests.pairs import every_second

CPU, SECONDS = torch.device("cpu"), 20.0
A2A = (
    ("deepep", "auto"),
    ("deepep", "normal"),
    ("mooncake", "low_latency"),
    ("mori", "normal"),
    ("flashinfer", "normal"),
    ("ascend_fuseep", "low_latency"),
    ("none", "normal"),
)


@dataclass(frozen=True)
class Batch:
    """Rows and tokens of each attention group; those that are all tokens are told of none."""

    rows: tuple[int, ...]
    tokens: tuple[int, ...]

    def step(self, group: int, parallel: Parallel) -> Step:
        rows, tokens = self.rows[group], self.tokens[group]
        counts = (tokens, parallel.own_tokens(tokens, rows))
        told = [
            torch.tensor([count], dtype=torch.int32) if rows > tokens else None for count in counts
        ]
        prefill = any(map(eq, self.rows, self.tokens))
        return Step(prefill, 0, (), max(self.rows), *told)


# Fewer rows than ranks, uneven parts, graphs with padding, parts without tokens, groups with none.
TOGETHER = tuple(
    Batch((r,), (t,)) for r, t in ((1, 1), (3, 3), (9, 9), (1, 0), (8, 8), (8, 3), (8, 5))
)
APART = tuple(
    Batch(rows, tokens)
    for rows, tokens in (((7, 1), (7, 0)), ((8, 8), (5, 0)), ((1, 1), (0, 1)), ((1, 6), (1, 6)))
)


@dataclass(frozen=True)
class Told:
    """Of a rank: the largest error, the largest number of a row of padding, the results of each
    batch, the batches whose tokens have other bits than in a layer of one rank, and pairs that its
    experts have computed."""

    worst: float
    behind: float
    found: list[bytes]
    other_bits: list[int]
    pairs: int


def make_layer(group: RankGroup, a2a: str, mode: str, deterministic: bool) -> FusedMoE:
    size = group.size
    base = (a2a, mode, "triton", "fp32", "fp32", "fp32", size, size, deterministic, "cuda")
    context = replace(Combination(*base).context(group, lanes=1), workspace=Workspace("cpu"))
    experts = experts_for(1)
    layer = FusedMoE(config_of(experts, TOP_K), context)
    experts.fill(layer)
    return layer


def route_parts(group: RankGroup, dp: int, a2a: str, mode: str, deterministic: bool) -> Told:
    size = group.size
    place = Mesh(tp=size, dp=dp, ep=size).place(group.rank)
    layer = make_layer(group, a2a, mode, deterministic)
    alone = make_layer(RankGroup.alone(), a2a, mode, deterministic)
    context, experts = layer.context, experts_for(1)
    peers = Some(group, Mesh(tp=size, dp=dp).attention_ranks(place))
    comm = DeviceCollective.create(peers, 1 << 16, SECONDS, CPU, size)
    gate = Router(LinearConfig(HIDDEN, EXPERTS, torch.float32, deterministic=deterministic))
    gate.weight.data = torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(1))
    parallel = Parallel(attention=comm, dp=dp)
    block = SparseBlock(gate, TopK(TopKConfig(TOP_K, renormalize=True)), layer, parallel)
    worst, behind, found, other_bits = 0.0, 0.0, [], []
    for number, batch in enumerate(TOGETHER if dp == 1 else APART):
        rows, tokens = batch.rows[place.dp_rank], batch.tokens[place.dp_rank]
        generator = torch.Generator().manual_seed(10 * number + place.dp_rank)
        x_TH, step = (
            torch.randn(rows, HIDDEN, generator=generator),
            batch.step(place.dp_rank, parallel),
        )
        poison_all(group, context)
        y_TH = block(x_TH, step)
        topk = block.route(x_TH[:tokens])
        known = TopKOutput(topk.ids_TK.long(), topk.weights_TK)
        error = (y_TH[:tokens] - reference(experts, x_TH[:tokens], known)).abs()
        worst = max([worst, *error.amax(1).tolist()])
        behind = max([behind, *y_TH[tokens:].abs().amax(1).tolist()])
        found.append(y_TH.numpy().tobytes())
        if not torch.equal(y_TH[:tokens], alone(x_TH[:tokens], topk, Step(step.prefill, 0))):
            other_bits.append(number)
    context.check()
    comm.close()
    return Told(worst, behind, found, other_bits, sum(layer.load.tokens))


@pytest.mark.parametrize(("a2a", "mode", "deterministic"), every_second(A2A, [False, True]))
def test_ranks_take_parts_to_the_experts(a2a: str, mode: str, deterministic: bool, pools: Pools):
    """In deterministic mode with the bits of one rank. Twins of the experts' products are torch's,
    whose bits depend on how many rows an expert has: one rank has the same, in the same order."""
    told = pools(4).run(route_parts, 1, a2a, mode, deterministic)
    for one in told:
        assert one.worst < 1e-5 and one.behind == 0
        assert one.found == told[0].found, "what is gathered is the same on all ranks"
        assert not (deterministic and one.other_bits)
    # No row is computed twice, and none that is not a token.
    assert sum(one.pairs for one in told) == TOP_K * sum(b.tokens[0] for b in TOGETHER)


@pytest.mark.parametrize(("a2a", "mode"), A2A)
def test_so_do_those_of_several_groups(a2a: str, mode: str, pools: Pools):
    told = pools(4).run(route_parts, 2, a2a, mode, False)
    for rank, one in enumerate(told):
        assert one.worst < 1e-5 and one.behind == 0
        assert one.found == told[rank // 2 * 2].found, "the same on all ranks of a group"
    assert sum(one.pairs for one in told) == TOP_K * sum(sum(b.tokens) for b in APART)
