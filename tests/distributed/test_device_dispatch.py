"""The dispatchers of a GPU between ranks, by the torch twins of their kernels.

T tokens · K chosen · H hidden.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.errors import PeerTimeout
from moesaic.comm.launch.local_ranks import LocalRanks
from moesaic.core.step import DECODE, Step
from moesaic.moe.backends import load_backends
from moesaic.moe.dispatch.device.exchange import DeviceExchange
from moesaic.moe.dispatch.device.rows import DeviceRowsDispatcher
from moesaic.moe.dispatch.mooncake import DeviceMooncake
from moesaic.moe.formats import TopKOutput
from moesaic.moe.layer import FusedMoE
from moesaic.moe.registry import A2A_REGISTRY
from tests.distributed import moe_rounds
from tests.distributed import test_deterministic as deterministic
from tests.distributed import test_in_flight as flights
from tests.distributed.conformance import (
    SPLITS,
    Verdict,
    allowed,
    check_all,
    everything,
)
from tests.distributed.moe_ranks import (
    DTYPES,
    EXPERTS,
    HIDDEN,
    MOST,
    TOP_K,
    Combination,
    experts_for,
)
from tests.moe_oracle import config_of, random_topk, reference

SLICE = 50
Outcomes = dict[Combination, list[Verdict]]
Pools = Callable[[int], LocalRanks]
EVERY_A2A = (*flights.A2A, ("none", "replicated"))
each_a2a = pytest.mark.parametrize(("a2a", "mode"), EVERY_A2A)
PAYLOADS = (
    ("deepep", "normal", "triton", "fp8", "fp8_block"),
    ("deepep", "low_latency", "triton", "int8", "bf16"),
    ("flashinfer", "normal", "flashinfer_cutlass", "nvfp4", "nvfp4"),
    ("mooncake", "low_latency", "triton_kernel", "mxfp4", "mxfp4"),
    ("none", "replicated", "triton", "fp8", "fp8_block"),
)


def chosen() -> Iterator[Combination]:
    """Every backend between two ranks, every other one also where they share all experts, by both
    ways back in turn; every payload; and an odd number of ranks."""
    for number, (a2a, mode) in enumerate(EVERY_A2A):
        for ep in (1, 2) if number % 2 == 0 else (2,):
            plain = Combination(a2a, mode, "triton", "bf16", "bf16", "bf16", 2, ep, device="cuda")
            yield replace(plain, deterministic=(number + ep) % 2 == 1)
    for number, base in enumerate(PAYLOADS):
        yield Combination(*base, "bf16", 2, 2, number % 2 == 1, "cuda")
    for number, a2a in enumerate(("none", "mori")):
        base = (a2a, "normal", "triton", "bf16", "bf16", "bf16")
        yield Combination(*base, 3, 3, number == 1, "cuda")


CHOSEN = tuple(chosen())


@pytest.fixture(scope="module")
def outcomes(pools: Pools) -> Callable[[int], Outcomes]:
    """All chosen combinations of a number of ranks, in one run."""
    found: dict[int, Outcomes] = {}

    def of(tp: int) -> Outcomes:
        if tp not in found:
            chosen = [c for c in CHOSEN if c.tp == tp]
            by_rank = pools(tp).run(check_all, chosen)
            found[tp] = dict(zip(chosen, map(list, zip(*by_rank, strict=True)), strict=True))
        return found[tp]

    return of


@pytest.mark.parametrize("combination", CHOSEN, ids=str)
def test_combination(combination: Combination, outcomes: Callable[[int], Outcomes]):
    verdicts = outcomes(combination.tp)[combination]
    told = [f"rank {r}: {text}" for r, v in enumerate(verdicts) for text in v.complaints]
    assert not told, "\n".join(told)
    assert max(verdict.ratio for verdict in verdicts) > 0.1


def test_chosen_combinations_are_allowed():
    load_backends()
    assert {c.a2a for c in CHOSEN} == set(A2A_REGISTRY)
    assert all(allowed(c) and c.device == "cuda" for c in CHOSEN)


def product_of(tp: int, ep: int, dtype: str) -> list[Combination]:
    """By one runner of each kind of weights, as all are one core; deterministic or not in turn."""
    runners: dict[tuple[str, str], str] = {}
    found = []
    for number, c in enumerate(everything("cuda", ((tp, ep),))):
        runner = runners.setdefault((c.weights, c.payload), c.runner)
        wanted = (dtype, runner, number // 2 % 2 == 0)
        if (c.dtype, c.runner, c.deterministic) == wanted:
            found.append(c)
    return sorted(found, key=lambda c: (c.weights, c.payload, c.replicated))


def payloads_of(tp: int, ep: int) -> list[Combination]:
    """Every backend and mode with every payload it takes, by weights in turn: a part of the
    product that a GPU is through with in seconds."""
    by_payload: dict[tuple[str, str, str], list[Combination]] = {}
    for c in sorted(product_of(tp, ep, "bf16"), key=lambda c: c.payload):
        by_payload.setdefault((c.payload, c.a2a, c.mode), []).append(c)
    chosen = [some[number % len(some)] for number, some in enumerate(by_payload.values())]
    return sorted(chosen, key=lambda c: (c.weights, c.payload, c.replicated))


@pytest.mark.parametrize(("tp", "ep"), [(4, 4), (8, 4)])
def test_a_part_of_the_product_has_every_payload(tp: int, ep: int):
    part = payloads_of(tp, ep)
    whole = [c for c in everything("cuda", ((tp, ep),)) if c.dtype == "bf16"]
    assert len(part) < len(product_of(tp, ep, "bf16")) / 5
    for names in (("a2a", "mode", "payload"), ("weights",), ("deterministic",)):
        wanted = {tuple(getattr(c, name) for name in names) for c in whole}
        assert {tuple(getattr(c, name) for name in names) for c in part} == wanted


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tp", "ep"), [split for split in SPLITS if split[0] > 1])
def test_whole_product(tp: int, ep: int, dtype: str, pools: Pools):
    whole = product_of(tp, ep, dtype)
    assert len(whole) > 100
    told = []
    for start in range(0, len(whole), SLICE):
        part = whole[start : start + SLICE]
        for rank, verdicts in enumerate(pools(tp).run(check_all, part)):
            for combination, verdict in zip(part, verdicts, strict=True):
                told += [f"{combination}, rank {rank}: {text}" for text in verdict.complaints]
    assert not told, "\n".join(told)


@flights.each_a2a
def test_two_lanes_in_flight(a2a: str, mode: str, pools: Pools):
    assert pools(2).run(flights.all_orders, a2a, mode, "cuda", 36) == [[], []]


@pytest.mark.parametrize(("a2a", "mode"), flights.A2A[:-1])
def test_a_busy_lane_is_refused(a2a: str, mode: str, pools: Pools):
    """Not of `ascend_fuseep`: its function has the results, so that its lane is free again."""
    for busy, unknown, same in pools(2).run(flights.third, a2a, mode, "cuda"):
        assert "dispatch, layer 0: lane 1 is still in flight since" in busy
        assert unknown == "lane 2: there are 2, numbered from 0"
        assert same


@flights.each_a2a
def test_ranks_in_orders_of_their_own(a2a: str, mode: str, pools: Pools):
    assert max(pools(3).run(flights.rounds, a2a, mode, 8, "cuda")) < 100 * 2.0**-23


@pytest.mark.slow
@pytest.mark.timeout(300)
@flights.each_a2a
def test_a_thousand_rounds(a2a: str, mode: str, pools: Pools):
    assert max(pools(3).run(flights.rounds, a2a, mode, 1000, "cuda")) < 100 * 2.0**-23


@pytest.mark.parametrize("ep", [2, 4])
def test_bits_do_not_depend_on_ranks(ep: int, pools: Pools):
    """Twins of products are torch's, whose bits depend on how many rows an expert has: the same
    tokens are dealt to ranks, without company and replicas. Their order is the same everywhere."""
    scenarios = [
        replace(scenario, device="cuda", runner="triton")
        for scenario in deterministic.scenarios_for(ep, "fp32")
        if not scenario.copies and not scenario.extra
    ]
    assert len(scenarios) == len(deterministic.A2A)
    assert deterministic.differing(pools(ep), scenarios) == []


def one(a2a: str, mode: str, tp: int, ep: int, **options: bool) -> Combination:
    return Combination(
        a2a, mode, "triton", "fp32", "fp32", "fp32", tp, ep, device="cuda", **options
    )


def batch(count: int, seed: int) -> tuple[Tensor, TopKOutput]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, HIDDEN, generator=generator), random_topk(count, EXPERTS, TOP_K, seed)


def passes(group: RankGroup, deterministic: bool) -> float:
    """Three layers that share buffers, over and over, with naps; the largest error of all."""
    combination = one("none", "replicated", group.size, group.size, deterministic=deterministic)
    experts, context = experts_for(1), combination.context(group)
    layers = [FusedMoE(config_of(experts, TOP_K), context, layer) for layer in range(3)]
    for layer in layers:
        experts.fill(layer)
    naps, worst = random.Random(group.rank), 0.0
    for number in range(12):
        for index, layer in enumerate(layers):
            x_TH, topk = batch(1 + number % 4, 10 * number + index)
            y_TH = layer(x_TH, topk, Step(False, 0, rows=len(x_TH)))
            worst = max(worst, float((y_TH - reference(experts, x_TH, topk)).abs().max()))
            time.sleep(naps.random() * 0.004)
    context.check()
    shared = context.comm.buffers.values()
    assert len([one for one in shared if isinstance(one, DeviceExchange)]) == 1
    return worst


@pytest.mark.parametrize("deterministic", [False, True])
def test_halves_of_results_take_turns(deterministic: bool, pools: Pools):
    """An odd number of layers: a pass ends with the half that the next one begins with."""
    assert max(pools(3).run(passes, deterministic)) < 1e-5


def padded(group: RankGroup, combination: Combination) -> tuple[float, float]:
    """Five rows of which two are tokens; the largest error, and the largest number behind them."""
    layer = combination.layer(group, lanes=1)
    x_TH, topk = batch(5, 0 if combination.replicated else group.rank)
    topk.ids_TK[2:] = -1
    count_1 = torch.tensor([2], dtype=torch.int32)
    y_TH = layer(x_TH, topk, Step(False, 0, rows=7, num_tokens_1=count_1))
    error = (y_TH - reference(experts_for(1), x_TH, topk)).abs()
    return float(error.max()), float(y_TH[2:].abs().max())


@each_a2a
def test_rows_that_fill_up_are_zeros(a2a: str, mode: str, pools: Pools):
    """With one lane, whose results are signalled by who waits for the others'."""
    for error, behind in pools(2).run(padded, one(a2a, mode, 2, 2)):
        assert error < 1e-5 and behind == 0


def without_last(group: RankGroup, ep: int) -> tuple[float, list[str]]:
    """The last rank leaves after a step; the others report it, and go on without it.

    They resume together, as a service does: a rank that resumes before another has reported finds
    that one out of step.
    """
    combination = one("mooncake", "low_latency", group.size, ep)
    layer = combination.layer(group, timeout=4.0)
    dispatcher = layer.dispatcher
    assert isinstance(dispatcher, DeviceMooncake)
    x_TH, topk = batch(6, group.rank)
    step, told = Step(False, 0, rows=8), []
    layer(x_TH, topk, step)
    active = list(range(group.size - 1))
    group.barrier("before the last rank leaves")
    if group.rank in active:
        layer(x_TH, topk, step)
        try:
            layer.context.check()
        except PeerTimeout as error:
            told = [str(rank) for rank in error.missing]
    group.barrier("before the others resume")
    if group.rank not in active:
        return 0.0, []
    dispatcher.resume(active, 5)
    y_TH = layer(x_TH, topk, step)
    layer.context.check()
    lost = topk.ids_TK >= EXPERTS - EXPERTS // ep
    kept = TopKOutput(topk.ids_TK.masked_fill(lost, -1), topk.weights_TK)
    assert dispatcher.active_ranks == active and bool(lost.any())
    experts = experts_for(group.size // ep)
    return float((y_TH - reference(experts, x_TH, kept)).abs().max()), told


@pytest.mark.parametrize(("tp", "ep"), [pytest.param(2, 2, marks=pytest.mark.slow), (4, 2)])
def test_mooncake_goes_on_without_a_rank(tp: int, ep: int, pools: Pools):
    """Experts of the last group add nothing, also where another rank of it is still there."""
    *others, _ = pools(tp).run(without_last, ep)
    for error, told in others:
        assert error < 1e-5 and told == [str(tp - 1)]


def complaints(group: RankGroup) -> list[str]:
    layer = one("deepep", "low_latency", group.size, group.size).layer(group)
    told = []
    for count, step in ((3, Step(False, rows=2)), (1, DECODE), (0, Step(False, rows=MOST + 1))):
        try:
            layer.dispatcher.dispatch_a(*batch(count, 0), step)
        except ValueError as error:
            told.append(str(error))
    y_TH = layer(*batch(2, 0), Step(False, counts=(2, 2)))
    return [*told, str(bool(y_TH.isfinite().all()))]


def test_rows_of_a_step_are_checked(pools: Pools):
    for more, unsettled, beyond, fine in pools(2).run(complaints):
        assert more.startswith("deepep_low_latency dispatch, layer 0: 3 tokens are more than the 2")
        assert (
            "1 tokens are more than the 0 rows of a rank in this step: give Step.rows" in unsettled
        )
        assert f"{MOST + 1} tokens of a rank are more than the {MOST}" in beyond
        assert beyond.endswith("raise --max-running-requests")
        assert fine == "True"


def taken(group: RankGroup, combination: Combination, lanes: int) -> tuple[int, int, int]:
    """Bytes that the report has, that the regions have, and how many windows there are."""
    layer = combination.layer(group, lanes=lanes)
    report = layer.context.buffers([layer.dispatcher.config])
    shared = layer.context.comm.buffers.values()
    exchanges = [one for one in shared if isinstance(one, DeviceExchange)]
    return report.total, sum(e.window.region_bytes for e in exchanges), len(exchanges)


@each_a2a
def test_buffers_are_counted_before_they_are_taken(a2a: str, mode: str, pools: Pools):
    """Symmetric memory comes in pieces, so that the report may have some MiB more; a second lane
    takes as much as the first."""
    combination = one(a2a, mode, 2, 2)
    (told, region, windows), _ = pools(2).run(taken, combination, 2)
    assert windows == (2 if mode == "auto" else 1)
    assert region <= told <= region + windows * (8 << 20)
    (_, half, _), _ = pools(2).run(taken, combination, 1)
    assert half == pytest.approx(region / 2, rel=0.02)


@each_a2a
def test_one_rank_sends_nothing(a2a: str, mode: str):
    layer = one(a2a, mode, 1, 1).layer(RankGroup.alone())
    assert layer.context.comm.buffers == {}
    assert layer.context.buffers([layer.dispatcher.config]).total == 0
    assert not isinstance(layer.dispatcher, DeviceRowsDispatcher)
    x_TH, topk = batch(5, 0)
    y_TH = layer(x_TH, topk, Step(False))
    assert float((y_TH - reference(experts_for(1), x_TH, topk)).abs().max()) < 1e-5


@each_a2a
def test_random_rounds(a2a: str, mode: str, pools: Pools):
    assert pools(2).run(moe_rounds.rounds, a2a, mode, {"eager": 6}) == [[], []]
    assert pools(2).run(moe_rounds.flights, a2a, mode, 3) == [[], []]


def noticed(group: RankGroup) -> list[str]:
    """Of rows that changed places, of one that is not a number, and of what is right."""
    seat = moe_rounds.seats_of(group, "deepep", "normal")[0]
    tally, case = moe_rounds.Tally([seat]), 2
    y_TH = seat.layer(*seat.tokens(case), seat.step(case, False))
    spoiled_TH = y_TH.index_fill(0, torch.tensor([3]), torch.nan)
    for name, result in (("good", y_TH), ("swapped", y_TH.roll(1, 0)), ("spoiled", spoiled_TH)):
        tally.compare(name, result, seat, case)
    tally.look()
    return [text.split(",")[0] for text in tally.wrong]


def test_rounds_notice_what_is_wrong(pools: Pools):
    assert pools(2).run(noticed) == [["swapped", "spoiled"]] * 2
