"""How many tokens every expert gets, as the ranks that compute them count, by plain loops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.launch.local_ranks import LocalRanks
from moesaic.core.step import Step
from moesaic.moe.context import MoeContext
from moesaic.moe.formats import TopKOutput
from moesaic.moe.layer import FusedMoE
from moesaic.moe.pass_totals import make_totals
from moesaic.moe.quant.weights import WEIGHT_FORMATS
from moesaic.moe.registry import MoeProblem
from tests.distributed.moe_ranks import A2A_FLAGS
from tests.moe_oracle import Experts, config_of, random_topk

EXPERTS, HIDDEN, INNER, TOP_K, STEPS = 12, 128, 64, 3, 2
COUNTS = (13, 0, 30, 6)


@dataclass(frozen=True)
class Setting:
    a2a: str
    mode: str
    ep: int = 4
    redundant: int = 0
    replicated: bool = False
    deterministic: bool = False


@dataclass(frozen=True)
class Found:
    """What one rank tells: whether it counts, its experts, what it counted in all and in each pass,
    and the ids that it sent."""

    counts: bool
    experts: tuple[int, ...]
    tokens: list[int]
    passes: list[list[int]]
    first_slot: int
    slots: list[list[int]]
    routed: list[list[int]]
    seconds: float
    halves: tuple[int, int]


def tokens_of(rank: int, replicated: bool) -> tuple[torch.Tensor, TopKOutput]:
    """Some name no expert, or fewer than they may."""
    seed = 0 if replicated else rank
    count = COUNTS[2] if replicated else COUNTS[rank]
    topk = random_topk(count, EXPERTS, TOP_K, seed)
    topk.ids_TK[::5, 1] = -1
    topk.ids_TK[::9] = -1
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed)), topk


def serve(group: RankGroup, settings: list[Setting]) -> list[Found]:
    experts, found = Experts.random(EXPERTS, HIDDEN, INNER), []
    for setting in settings:
        problem = MoeProblem(
            a2a=setting.a2a,
            mode=setting.mode,
            weights=WEIGHT_FORMATS["fp32"],
            dtype="fp32",
            tp=group.size,
            ep=setting.ep,
            phases=("decode",),
        )
        context = MoeContext.make(
            problem,
            torch.float32,
            group,
            timeout=30.0,
            max_tokens=64,
            max_decode_tokens=64,
            redundant_experts=setting.redundant,
            replicated=setting.replicated,
            deterministic=setting.deterministic,
        )
        layer = FusedMoE(config_of(experts, TOP_K), context)
        experts.fill(layer)
        x_TH, topk = tokens_of(group.rank, setting.replicated)
        slots_TK = layer.slot_map(topk.ids_TK)
        totals = make_totals([layer.load], STEPS + 1)
        for number in range(STEPS):
            sent = TopKOutput(slots_TK, topk.weights_TK)
            layer(x_TH, sent, Step(prefill=number == 0, lane=number % 2))
            totals.write(number + 1)
        moved = context.comm.traffic.values()
        found.append(
            Found(
                layer.load.counts,
                layer.local_experts,
                layer.load.tokens,
                np.diff(totals.read(0, STEPS + 1), axis=0)[:, 0].tolist(),
                layer.layout.first_slot,
                slots_TK.tolist(),
                topk.ids_TK.tolist(),
                layer.load.runner_ns,
                (sum(m.dispatch_seconds for m in moved), sum(m.combine_seconds for m in moved)),
            )
        )
    return found


def check(pool: LocalRanks, settings: list[Setting]) -> None:
    by_rank = pool.run(serve, settings)
    for number, setting in enumerate(settings):
        found = [told[number] for told in by_rank]
        sources = found[:1] if setting.replicated else found
        by_slot = Counter(s for one in sources for token in one.slots for s in token if s >= 0)
        by_expert = Counter(e for one in sources for token in one.routed for e in token if e >= 0)
        counted: Counter[int] = Counter()
        for one in found:
            assert min(one.seconds, *one.halves) > 0, setting
            if not one.counts:
                assert sum(one.tokens) == 0, setting
                continue
            own = [by_slot[one.first_slot + place] for place in range(len(one.tokens))]
            assert one.passes == [own] * STEPS, setting
            for place, (expert, tokens) in enumerate(zip(one.experts, one.tokens, strict=True)):
                assert tokens == STEPS * by_slot[one.first_slot + place], (setting, place)
                counted[expert] += tokens
        # Each pair once, whoever has seen its token.
        assert counted == {expert: STEPS * tokens for expert, tokens in by_expert.items()}, setting
        assert counted.total() == STEPS * sum(by_expert.values()) > 0


@pytest.mark.parametrize("ep", [4, 2])
def test_every_pair_is_counted_once(ep: int, pools: Callable[[int], LocalRanks]) -> None:
    """With ep 2 two ranks share each expert."""
    check(pools(4), [Setting(a2a, mode, ep) for a2a, mode in A2A_FLAGS])


def test_replicas_and_replicated_tokens(pools: Callable[[int], LocalRanks]) -> None:
    settings = [Setting(a2a, mode, redundant=4) for a2a, mode in A2A_FLAGS]
    settings += [Setting("none", "normal", ep, replicated=True) for ep in (4, 2)]
    settings += [Setting("none", "normal", redundant=4, replicated=True)]
    settings += [Setting("deepep", "auto", deterministic=True)]
    settings += [Setting("none", "normal", replicated=True, deterministic=True)]
    check(pools(4), settings)


def test_one_rank(pools: Callable[[int], LocalRanks]) -> None:
    check(pools(1), [Setting(a2a, mode, ep=1) for a2a, mode in A2A_FLAGS])
