"""Dispatchers between ranks that share a GPU: eagerly, under graphs, with two lanes in flight."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch

from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.launch.local_ranks import LocalRanks
from moesaic.comm.launch.mps import start_mps
from moesaic.comm.lifecycle import Membership
from moesaic.config.devices import cuda_missing
from tests.distributed.conformance import Verdict, check_all
from tests.distributed.moe_ranks import Combination
from tests.distributed.moe_rounds import Seat, Tally, flights, rounds
from tests.distributed.test_device_dispatch import (
    CHOSEN,
    EVERY_A2A,
    SLICE,
    payloads_of,
    product_of,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    # Ranks import this too, and to ask torch would open CUDA before they know of the MPS daemon.
    pytest.mark.skipif(bool(cuda_missing()), reason=f"needs a CUDA device: {cuda_missing()}"),
]

ROUNDS = 1000
SPLITS = ((2, 2), (2, 1), (3, 3), (4, 4), (4, 2), (8, 8), (8, 4))
each_a2a = pytest.mark.parametrize(("a2a", "mode"), EVERY_A2A)
each_split = pytest.mark.parametrize(
    ("size", "ep"), SPLITS, ids=[f"ranks{size}-ep{ep}" for size, ep in SPLITS]
)
Ranks = Callable[..., list]


def on_ranks(*sizes: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("size", sizes, ids="ranks{}".format)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """ranks(n, function, …): on n ranks that share GPU 0, by a daemon of CUDA's MPS. Those of the
    last number are closed before others are made: a daemon has room for few. conftest.py sees to
    it that tests come by number."""
    pools: list[LocalRanks] = []
    with start_mps() as mps:

        def run(size: int, function: Callable, *args: object) -> list:
            if pools and pools[0].size != size:
                pools.pop().close()
            if not pools:
                pools.append(LocalRanks(size, timeout=500, peer_timeout=60.0))
            return pools[0].run(on_gpu, mps.for_ranks(size), function, *args)

        yield run
        for pool in pools:
            pool.close()


def on_gpu(group: RankGroup, environment: dict[str, str], function: Callable, *args: object):
    os.environ.update(environment)  # before this process opens CUDA
    torch.cuda.set_device(0)
    with torch.inference_mode():
        return function(group, *args)


def complaints(chosen: list[Combination], by_rank: list[list[Verdict]]) -> list[str]:
    return [
        f"{combination}, rank {rank}: {text}"
        for rank, verdicts in enumerate(by_rank)
        for combination, verdict in zip(chosen, verdicts, strict=True)
        for text in verdict.complaints
    ]


@on_ranks(2, 3)
def test_chosen_combinations(size: int, ranks: Ranks):
    chosen = [c for c in CHOSEN if c.tp == size]
    assert complaints(chosen, ranks(size, check_all, chosen)) == []


@pytest.mark.slow
@each_split
def test_every_payload(size: int, ep: int, ranks: Ranks):
    chosen = payloads_of(size, ep)
    assert complaints(chosen, ranks(size, check_all, chosen)) == []


@pytest.mark.slow
@each_split
def test_whole_product(size: int, ep: int, ranks: Ranks):
    whole = product_of(size, ep, "bf16")
    told: list[str] = []
    for start in range(0, len(whole), SLICE):
        part = whole[start : start + SLICE]
        told += complaints(part, ranks(size, check_all, part))
    assert told == []


@each_a2a
@on_ranks(2)
def test_rounds(a2a: str, mode: str, size: int, ranks: Ranks):
    counts = {"eager": 20, "replayed": 20}
    assert ranks(size, rounds, a2a, mode, counts) == [[]] * size


@pytest.mark.slow
@each_a2a
@on_ranks(2, 4, 8)
def test_thousands_of_rounds(a2a: str, mode: str, size: int, ranks: Ranks):
    counts = {"eager": ROUNDS, "replayed": ROUNDS}
    assert ranks(size, rounds, a2a, mode, counts) == [[]] * size


@each_a2a
@on_ranks(2)
def test_two_lanes_in_flight(a2a: str, mode: str, size: int, ranks: Ranks):
    assert ranks(size, flights, a2a, mode, 20) == [[]] * size


@pytest.mark.slow
@each_a2a
@on_ranks(2, 4, 8)
def test_a_thousand_flights(a2a: str, mode: str, size: int, ranks: Ranks):
    assert ranks(size, flights, a2a, mode, ROUNDS) == [[]] * size


def missing(group: RankGroup, a2a: str, mode: str) -> tuple[str, list[str]]:
    """The last rank does not come to a step: what the others are told, and what goes wrong when all
    have begun anew."""
    formats = ("triton", "bf16", "bf16", "bf16")
    plain = Combination(a2a, mode, *formats, group.size, group.size, device="cuda")
    case, last = 2, group.size - 1
    first = Seat(group, plain)
    first.layer(*first.tokens(case), first.step(case, False))  # compiles
    torch.cuda.synchronize()
    seat = Seat(group, plain, timeout=2)
    group.barrier("before one is missing")
    told = ""
    if group.rank < last:
        seat.layer(*seat.tokens(case), seat.step(case, False))
        torch.cuda.synchronize()
        try:
            seat.layer.context.check()
        except RuntimeError as error:
            told = str(error)
    group.barrier("after one was missing")
    group.lifecycle.restart(Membership(3, group.members))
    group.barrier("all have restarted")
    tally = Tally([seat])
    y_TH = seat.layer(*seat.tokens(case), seat.step(case, False))
    tally.compare("again", y_TH, seat, case)
    tally.look()
    return told, tally.wrong


@each_a2a
@on_ranks(3)
def test_a_missing_rank_is_named_and_all_go_on(a2a: str, mode: str, size: int, ranks: Ranks):
    found = ranks(size, missing, a2a, mode)
    assert all(told.startswith("rank 2 did not reach") for told, _ in found[:-1]), found
    assert [wrong for _, wrong in found] == [[]] * size
