"""Answers do not depend on which replica a token takes: all backends, against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.launch.local_ranks import LocalRanks
from moesaic.core.step import Step
from moesaic.moe.formats import TopKOutput
from moesaic.moe.placement import Placement
from tests.distributed.moe_ranks import (
    A2A,
    EXPERTS,
    MOST,
    Case,
    Combination,
    cases_for,
    experts_for,
    poison_all,
    slots_of,
)
from tests.moe_oracle import reference

RANKS, REDUNDANT = 4, 5  # three more slots are added
ALGORITHMS = ("static", "dynamic", "lp")


@dataclass(frozen=True)
class Setting:
    a2a: str
    mode: str
    algorithm: str
    ep: int = RANKS
    device: str = "cpu"

    @property
    def combination(self) -> Combination:
        rest = (self.mode, "triton", "fp32", "fp32", "fp32", RANKS, self.ep)
        return Combination(self.a2a, *rest, device=self.device)


def settings(device: str, *a2a: tuple[str, str], ep: int = RANKS) -> list[Setting]:
    """With the same tokens everywhere no replica is nearest."""
    return [
        Setting(name, mode, algorithm, ep, device)
        for name, mode in a2a
        for algorithm in ALGORITHMS
        if (mode, algorithm) != ("replicated", "static")
    ]


@lru_cache(maxsize=64)
def truth(case: Case, rank: int, ep: int) -> Tensor:
    return reference(experts_for(RANKS // ep), *case.tokens(rank, torch.float32))


def complaint(group: RankGroup, layer, combination: Combination, case: Case) -> str:
    """What is wrong with the results of a case, and with where its pairs went."""
    x_TH, topk = case.tokens(0 if combination.replicated else group.rank, torch.float32)
    poison_all(group, layer.context)
    slots_TK = slots_of(layer, topk.ids_TK, case.step)
    holds = torch.tensor([*layer.placement.slots, -1])
    if not torch.equal(holds[slots_TK], topk.ids_TK):
        return "slots do not hold the experts"
    y_TH = layer(x_TH, TopKOutput(slots_TK, topk.weights_TK), case.step)
    layer.context.check()
    wanted = truth(case, 0 if combination.replicated else group.rank, combination.ep)
    same = torch.allclose(y_TH.double(), wanted, rtol=1e-4, atol=1e-4)
    return "" if same else "results differ"


def run_all(group: RankGroup, chosen: list[Setting]) -> list[str]:
    """What is wrong on one rank; every other layer has changed its placement before."""
    found = []
    for number, setting in enumerate(chosen):
        combination = setting.combination
        options = {"redundant_experts": REDUNDANT, "dispatch_algorithm": setting.algorithm}
        layer = combination.layer(group, max_replicas=RANKS, **options)
        assert len(layer.placement.slots) == EXPERTS + (8 if setting.ep == 4 else 6)
        if number % 2:
            first = layer.placement
            layer.update_placement(Placement(EXPERTS, first.slots[::-1]))
            slots_of(layer, torch.zeros(3, 2, dtype=torch.int64), Step(prefill=True))
            layer.update_placement(first)
        cases = cases_for(group.size, setting.ep, combination.replicated)
        for case in cases:
            if text := complaint(group, layer, combination, case):
                found.append(f"{setting}: {case.name}: {text}")
    return found


def settings_of(device: str, every: bool) -> list[Setting]:
    """All, or each backend once and each algorithm thrice."""
    if device == "cuda":
        return settings(device, *(A2A if every else (A2A[1], A2A[4])))
    if every:
        return settings(device, *A2A) + settings(device, *A2A, ep=2)
    turns = [
        settings(device, a2a, ep=2 if number % 4 == 2 else RANKS) for number, a2a in enumerate(A2A)
    ]
    return [turn[number % len(turn)] for number, turn in enumerate(turns)]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_answers_with_replicas(
    device: str, every: bool, pools: Callable[[int], LocalRanks]
) -> None:
    """Those of CUDA by the twins of their kernels."""
    chosen = settings_of(device, every)
    assert {setting.algorithm for setting in chosen} == set(ALGORITHMS)
    for rank, found in enumerate(pools(RANKS).run(run_all, chosen)):
        assert found == [], rank


def loads_of(group: RankGroup, algorithm: str, device: str) -> tuple[list[int], Tensor]:
    """The slots of this rank's pairs in steps with prompts, where expert 0 is hot; rank 2 idles."""
    combination = Setting("deepep", "normal", algorithm, device=device).combination
    options = {"redundant_experts": 12, "dispatch_algorithm": algorithm}
    layer = combination.layer(group, **options)
    count = 0 if group.rank == 2 else MOST - group.rank
    generator = torch.Generator().manual_seed(group.rank)
    ids = torch.rand(count, EXPERTS, generator=generator)
    ids[:, 0] += 0.5
    slots = slots_of(layer, ids.topk(3, dim=1).indices, Step(prefill=True))
    return list(layer.placement.slots), slots


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_split_of_all_ranks_is_one(device: str, pools: Callable[[int], LocalRanks]) -> None:
    """Every expert has two replicas, on ranks 0 and 2 or 1 and 3: ranks end up equally full, to
    a pair, only if all of them found the same quotas."""
    found = pools(RANKS).run(loads_of, "lp", device)
    slots = torch.cat([slots for _, slots in found]).flatten()
    loads = (slots // 6).bincount(minlength=4)
    assert abs(int(loads[0] - loads[2])) <= 1 and abs(int(loads[1] - loads[3])) <= 1
    even = torch.cat([s for _, s in pools(RANKS).run(loads_of, "dynamic", device)]).flatten()
    assert int((even // 6).bincount(minlength=4).sum()) == int(loads.sum())
