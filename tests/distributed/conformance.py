"""All that the matrix allows, a small part of it that covers every pair, and its check on ranks."""

from __future__ import annotations

import gc
import random
import traceback
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import combinations, product

import torch
from torch import Tensor

from moesaic.comm.collectives.group import RankGroup
from moesaic.moe.backends import load_backends
from moesaic.moe.formats import TopKOutput
from moesaic.moe.registry import A2A_REGISTRY, combinations_of, supports
from tests.distributed.moe_ranks import (
    DTYPES,
    Combination,
    cases_for,
    experts_for,
    num_experts,
    poison_all,
)
from tests.moe_bounds import Noisy, Numerics, expected, held
from tests.moe_oracle import Experts

Split = tuple[int, int]  # tp, ep
SPLITS: tuple[Split, ...] = ((1, 1), (2, 2), (2, 1), (3, 3), (3, 1), (4, 4), (4, 2), (4, 1))
# One of each kind: alone, experts cut, experts apart, and both.
QUICK_SPLITS: tuple[Split, ...] = ((1, 1), (2, 1), (3, 3), (4, 2))
MANY = 32
Value = tuple[str, object]
Pair = tuple[Value, Value]


@cache
def everything(device: str = "cpu", splits: tuple[Split, ...] = SPLITS) -> tuple[Combination, ...]:
    """The product, as far as the matrix allows it. A mode that has the same format as another one
    of its backend is the same thing; `auto` and `replicated` are modes of their own."""
    load_backends()
    found = []
    for dtype, (tp, ep) in product(DTYPES, splits):
        fixed = {"phases": ("decode",), "dtype": dtype, "tp": tp, "ep": ep, "device": device}
        for problem, support in combinations_of(**fixed):
            if not support.ok or problem.mode not in distinct_modes(problem.a2a):
                continue
            for mode in also(problem.a2a, problem.mode):
                base = (problem.a2a, mode, problem.runner, problem.payload, problem.weights.name)
                for deterministic in (False, True):
                    found.append(Combination(*base, dtype, tp, ep, deterministic, device))
    return tuple(found)


def distinct_modes(a2a: str) -> list[str]:
    first = {format: mode for mode, format in reversed(A2A_REGISTRY[a2a].formats.items())}
    return list(first.values())


def also(a2a: str, mode: str) -> tuple[str, ...]:
    if a2a == "none":
        return mode, "replicated"
    if a2a == "deepep" and mode == "normal":
        return mode, "auto"
    return (mode,)


def values_of(combination: Combination) -> list[Value]:
    """What is paired: how rows travel and how they are split count as one value each."""
    c = combination
    single = (("runner", c.runner), ("payload", c.payload), ("weights", c.weights))
    rest = (("dtype", c.dtype), ("deterministic", c.deterministic))
    return [("a2a", (c.a2a, c.mode)), ("split", (c.tp, c.ep)), *single, *rest]


def pairs_of(combination: Combination) -> list[Pair]:
    return list(combinations(values_of(combination), 2))


@cache
def covering(splits: tuple[Split, ...] = SPLITS) -> tuple[Combination, ...]:
    """Every pair of values that any combination has, in few combinations: greedily, by the best of
    some that hold a pair not yet covered; of equally good ones, by that on the fewest ranks."""
    generator = random.Random(0)
    holders: dict[Pair, list[Combination]] = {}
    for combination in everything(splits=splits):
        for pair in pairs_of(combination):
            holders.setdefault(pair, []).append(combination)
    missing = dict.fromkeys(sorted(holders, key=lambda pair: (len(holders[pair]), repr(pair))))
    chosen = []
    while missing:
        some = holders[next(iter(missing))]
        some = generator.sample(some, min(len(some), 60))
        best = max(some, key=lambda c: (sum(pair in missing for pair in pairs_of(c)), -c.tp))
        chosen.append(best)
        for pair in pairs_of(best):
            missing.pop(pair, None)
    return tuple(sorted(chosen, key=lambda c: (c.tp, str(c))))


@dataclass
class Verdict:
    """What is wrong with a combination on one rank, and how large errors were for what is allowed:
    root mean squares of both, over all tokens."""

    complaints: list[str]
    error: float = 0.0
    allowed: float = 0.0

    @property
    def ratio(self) -> float:
        return self.error / self.allowed if self.allowed else 0.0


@lru_cache(maxsize=64)
def shards_of(numerics: Numerics) -> list[Experts]:
    return held(experts_for(numerics.moe_tp, num_experts(numerics.ep)), numerics)


@dataclass(frozen=True)
class Truth:
    """The plain oracle, and the one that rounds where the layer does."""

    plain: Noisy
    on_grid: Noisy

    def __getitem__(self, index: slice) -> Truth:
        return Truth(self.plain[index], self.on_grid[index])


@lru_cache(maxsize=64)
def truth(numerics: Numerics, tp: int, rank: int, replicated: bool) -> list[Truth]:
    """For each case; computed at once, which is faster."""
    cases = cases_for(tp, numerics.ep, replicated)
    tokens = [case.tokens(0 if replicated else rank, numerics.dtype) for case in cases]
    x_TH = torch.cat([x for x, _ in tokens])
    topk = TopKOutput(
        torch.cat([topk.ids_TK for _, topk in tokens]),
        torch.cat([topk.weights_TK for _, topk in tokens]),
    )
    shards = shards_of(numerics)
    plain = expected(shards, x_TH, topk, numerics)
    rounds = numerics.activation is not None or numerics.payload.scales is not None
    both = Truth(plain, plain)
    if rounds:
        both = Truth(plain, expected(shards, x_TH, topk, replace(numerics, on_grid=True)))
    ends = torch.tensor([len(x) for x, _ in tokens]).cumsum(0).tolist()
    return [both[slice(a, b)] for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def check(group: RankGroup, combination: Combination) -> Verdict:
    """All cases of a combination on one layer, whose buffers are poisoned before each."""
    layer = combination.layer(group)
    replicated = combination.replicated
    truths = truth(combination.numerics, combination.tp, group.rank, replicated)
    verdict = Verdict([])
    total = torch.zeros(2, dtype=torch.float64)
    for case, wanted in zip(cases_for(group.size, combination.ep, replicated), truths, strict=True):
        x_TH, topk = case.tokens(0 if replicated else group.rank, DTYPES[combination.dtype])
        poison_all(group, layer.context)
        where = combination.where
        there = TopKOutput(topk.ids_TK.to(where), topk.weights_TK.to(where))
        y_TH = layer(x_TH.to(where), there, case.step).cpu()
        layer.context.check()
        found = complaints(y_TH, wanted)
        if bool((y_TH[(topk.ids_TK < 0).all(1)] != 0).any()):
            found.append("a token without experts is not zero")
        verdict.complaints += [f"{case.name}: {text}" for text in found]
        if y_TH.shape == x_TH.shape:
            squares = (y_TH.double() - wanted.plain.exact) ** 2
            total += torch.stack((squares.sum(), wanted.plain.variance.sum()))
    verdict.error, verdict.allowed = total.sqrt().tolist()
    return verdict


def complaints(y_TH: Tensor, wanted: Truth) -> list[str]:
    """Each number must be within its bound; the mean square of each token within three times, and
    that of many tokens within what it may be."""
    exact = wanted.plain.exact
    if y_TH.shape != exact.shape:
        return [f"shape {tuple(y_TH.shape)}, not {tuple(exact.shape)}"]
    if not bool(y_TH.isfinite().all()):
        return [f"{int((~y_TH.isfinite()).any(1).sum())} of {len(y_TH)} tokens are not finite"]
    found = []
    beyond = (y_TH.double() - exact).abs() / (wanted.plain.bound + 1e-300)
    if bool((beyond > 1).any()):
        tokens = int((beyond > 1).any(1).sum())
        found.append(
            f"{tokens} of {len(y_TH)} tokens beyond their bound, by {float(beyond.max()):.1f} times"
        )
    return found + [
        text for oracle in (wanted.plain, wanted.on_grid) for text in loud(y_TH, oracle)
    ]


def loud(y_TH: Tensor, oracle: Noisy) -> list[str]:
    """Two rare events are granted to a token, and four to all of them."""
    if len(y_TH) == 0:
        return []
    squares_T = (y_TH.double() - oracle.exact).pow(2).mean(1)
    usual_T, rare_T = oracle.variance.mean(1) + 1e-300, oracle.rare.squeeze(1)
    found = []
    of_one = float((squares_T / (9 * usual_T + 2 * rare_T)).max())
    if of_one > 1:
        found.append(f"the squared error of a token is {of_one:.1f} times what it may be")
    of_all = float(squares_T.sum() / (usual_T.sum() + 4 * rare_T.max()))
    if of_all > 1 and len(y_TH) >= MANY:
        found.append(f"the mean squared error is {of_all:.1f} times what it may be")
    return found


def check_all(group: RankGroup, chosen: list[Combination]) -> list[Verdict]:
    """One after the other; what goes wrong in one does not keep the others from being checked."""
    # Whatever torch.empty gives is NaN too. The public function imports a compiler, for seconds.
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    gc.freeze()  # collecting after each combination is cheap then
    try:
        return [_checked(group, combination) for combination in chosen]
    finally:
        gc.unfreeze()
        torch._C._set_deterministic_algorithms(False)


def _checked(group: RankGroup, combination: Combination) -> Verdict:
    try:
        return check(group, combination)
    except Exception:
        return Verdict([traceback.format_exc(limit=-3)])
    finally:
        gc.collect()  # windows of the last combination


def allowed(combination: Combination) -> bool:
    return supports(combination.problem).ok
