"""Dispatchers of GPUs on several nodes: any backend inside of a node, a collective between them. By
the torch twins of their kernels, with windows over TCP in the place of NCCL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.errors import PeerTimeout
from moesaic.comm.launch.local_ranks import LocalRanks
from moesaic.core.step import Step
from moesaic.moe.dispatch.nodes import NodeDispatcher
from tests.distributed import moe_rounds
from tests.distributed import test_deterministic as deterministic
from tests.distributed import test_in_flight as flights
from tests.distributed.conformance import Verdict, check_all
from tests.distributed.moe_ranks import A2A, Combination
from tests.distributed.nodes import FOUR, TWO, on_nodes
from tests.distributed.test_device_dispatch import PAYLOADS, batch, each_a2a, one, padded

Nodes = tuple[int, ...]
Pools = Callable[[int], LocalRanks]
Outcomes = dict[tuple[Nodes, Combination], list[Verdict]]
PAIR, TRIO = (0, 1), (0, 1, 2)


def chosen() -> list[tuple[Nodes, Combination]]:
    """Every backend between two nodes of two ranks, and between nodes of one; by both ways back in
    turn; every payload; experts in slices, inside of a node and over two."""
    found = []
    for number, (a2a, mode) in enumerate(A2A):
        plain = Combination(a2a, mode, "triton", "bf16", "bf16", "bf16", 4, 4, device="cuda")
        for sums_pairs, nodes in ((False, TWO), (True, (FOUR, PAIR, TRIO)[number % 3])):
            is_deterministic, size = sums_pairs ^ (number % 2 == 1), len(nodes)
            changed = replace(plain, tp=size, ep=size, deterministic=is_deterministic)
            found.append((nodes, changed))
    for number, base in enumerate(PAYLOADS):
        nodes = (TWO, PAIR)[number % 2]
        found.append((nodes, Combination(*base, "bf16", *2 * [len(nodes)], device="cuda")))
    for ep in (2, 1):
        base = ("deepep", "normal", "triton", "bf16", "bf16", "bf16")
        found.append((TWO, Combination(*base, 4, ep, device="cuda")))
    return found


CHOSEN = chosen()


def check_on_nodes(group: RankGroup, nodes: Nodes, some: list[Combination]) -> list[Verdict]:
    with on_nodes(group, nodes):
        return check_all(group, some)


@pytest.fixture(scope="module")
def outcomes(pools: Pools) -> Callable[[Nodes], Outcomes]:
    """All chosen combinations on these nodes, in one run."""
    found: dict[Nodes, Outcomes] = {}

    def of(nodes: Nodes) -> Outcomes:
        if nodes not in found:
            some = [combination for there, combination in CHOSEN if there == nodes]
            by_rank = pools(len(nodes)).run(check_on_nodes, nodes, some)
            verdicts = map(list, zip(*by_rank, strict=True))
            found[nodes] = {(nodes, c): v for c, v in zip(some, verdicts, strict=True)}
        return found[nodes]

    return of


@pytest.mark.parametrize(("nodes", "combination"), CHOSEN, ids=str)
def test_combination(nodes: Nodes, combination: Combination, outcomes: Callable[[Nodes], Outcomes]):
    verdicts = outcomes(nodes)[nodes, combination]
    told = [f"rank {r}: {text}" for r, v in enumerate(verdicts) for text in v.complaints]
    assert not told, "\n".join(told)
    assert max(verdict.ratio for verdict in verdicts) > 0.1


def there(group: RankGroup, nodes: Nodes, work: Callable[..., object], *args: object) -> object:
    """What ranks do, on these nodes."""
    with on_nodes(group, nodes):
        return work(group, *args)


@flights.each_a2a
def test_two_lanes_in_flight(a2a: str, mode: str, pools: Pools):
    """In the same order on all ranks, as rails move one batch at a time."""
    assert pools(2).run(there, PAIR, flights.all_orders, a2a, mode, "cuda", 36) == [[], []]


@pytest.mark.slow
@pytest.mark.timeout(600)
@each_a2a
@pytest.mark.parametrize("nodes", [TWO, TRIO, (0, 0, 0, 0, 1, 1, 1, 1)], ids=str)
def test_a_thousand_rounds(nodes: Nodes, a2a: str, mode: str, pools: Pools):
    told = pools(len(nodes)).run(there, nodes, moe_rounds.rounds, a2a, mode, {"eager": 1000})
    assert told == [[]] * len(nodes)


@pytest.mark.parametrize(("ep", "nodes"), [(2, PAIR), (4, FOUR), (4, TWO)])
def test_bits_do_not_depend_on_nodes(ep: int, nodes: Nodes, pools: Pools):
    scenarios = [
        replace(scenario, device="cuda", runner="triton")
        for scenario in deterministic.scenarios_for(ep, "fp32")
        if not scenario.copies and not scenario.extra
    ]
    by_rank = pools(ep).run(there, nodes, deterministic.run_all, scenarios)
    for number, scenario in enumerate(scenarios):
        y_TH = torch.cat([results[number] for results in by_rank])
        wanted = deterministic.bits(scenario.dtype, scenario.weights, scenario.device)
        assert torch.equal(y_TH, wanted), str(scenario)


@each_a2a
def test_rows_that_fill_up_are_zeros(a2a: str, mode: str, pools: Pools):
    for error, behind in pools(4).run(there, TWO, padded, one(a2a, mode, 4, 4)):
        assert error < 1e-5 and behind == 0


def crossing(group: RankGroup) -> tuple[list[int], list[int]]:
    """Rows of two steps with seven rows of a rank; the bytes of a step that are counted, and those
    that this rank has sent."""
    layer = one("deepep", "normal", 4, 4).layer(group, lanes=1)
    links = group.links
    assert links is not None
    layer(*batch(5, group.rank), Step(True, 0, rows=7))
    dispatcher = layer.dispatcher
    assert isinstance(dispatcher, NodeDispatcher) and not dispatcher._routes, "no rows are kept"
    before = links.bytes_sent
    layer(*batch(5, group.rank), Step(True, 0, rows=7))
    traffic = layer.context.comm.traffic["nodes"]
    told = (traffic.dispatch_bytes + traffic.combine_bytes) // 2
    return [traffic.dispatch_rows, traffic.combine_rows], [told, links.bytes_sent - before]


def test_a_row_crosses_once_to_a_node_and_once_back(pools: Pools):
    """A frame around the rows takes some bytes more."""
    for (sent, returned), (told, measured) in pools(4).run(there, TWO, crossing):
        assert sent == returned == 2 * 7
        assert told <= measured <= told + 1000


def late_rank(group: RankGroup) -> list[int]:
    """The last rank stays away from the second step; who is missing for its peer on the rail."""
    layer = one("deepep", "normal", 4, 4).layer(group, timeout=2.0)
    layer(*batch(5, group.rank), Step(True, 0, rows=7))
    found: list[int] = []
    if group.rank == 1:
        with pytest.raises(PeerTimeout, match="nodes dispatch, layer 0") as told:
            layer(*batch(5, group.rank), Step(True, 0, rows=7))
        found = list(told.value.missing)
    group.barrier("the others know")
    return found


def test_a_missing_rank_is_named_by_its_number_in_the_service(pools: Pools):
    assert pools(4).run(there, TWO, late_rank)[1] == [3]
