"""Windows between nodes: ranks of one machine that share memory only with those of "their" node."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.launch.local_ranks import LocalRanks
from moesaic.comm.lifecycle import Membership
from moesaic.comm.windows.factory import create_window
from moesaic.comm.windows.node_window import receiver
from moesaic.comm.windows.window import PlaneSpec
from moesaic.core.step import Step
from moesaic.moe.context import MoeContext
from moesaic.moe.dispatch.host.exchange import (
    LANES,
    TAGS,
    Exchange,
    ExchangeSignal,
    Lanes,
)
from tests.distributed.moe_ranks import DTYPES, Combination, cases_for
from tests.distributed.nodes import (
    FOUR,
    LAYOUTS,
    TWO,
    UNEVEN,
    leads,
    lonely_window,
    on_nodes,
    puts,
)


@pytest.mark.parametrize("nodes", LAYOUTS)
def test_what_is_put_arrives(nodes: tuple[int, ...], pools: Callable[[int], LocalRanks]):
    assert pools(4).run(puts, nodes, 40) == [[]] * 4


def barriers(group: RankGroup, nodes: tuple[int, ...], count: int) -> int:
    """How often a rank left a barrier before another came."""
    early = 0
    with on_nodes(group, nodes):
        window = create_window(group, [PlaneSpec("n", (1,), torch.int64)], timeout=20)
        for number in range(1, count + 1):
            window.plane("n")[0] = number
            window.touch(window.plane("n"))
            window.barrier("count")
            early += int((window.stacked("n") < number).sum())
        window.barrier("end")
    return early


@pytest.mark.parametrize("nodes", LAYOUTS)
def test_barriers(nodes: tuple[int, ...], pools: Callable[[int], LocalRanks]):
    assert pools(4).run(barriers, nodes, 200) == [0] * 4


def large(group: RankGroup, nbytes: int) -> bool:
    """Both nodes send more than any buffer holds, at the same time."""
    with on_nodes(group, TWO):
        window = create_window(group, [PlaneSpec("x", (nbytes,), torch.uint8)], timeout=30)
        for turn in (1, 2):
            window.plane("x").fill_(10 * turn + group.rank)
            window.touch(window.plane("x"))
            window.signal(0, turn, "much")
            window.wait(0, turn, "much")
            whole = window.stacked("x").view(torch.int64)
            wanted = torch.tensor([(10 * turn + r) * 0x0101010101010101 for r in range(4)])
            same = bool((whole == wanted[:, None]).all())
            window.barrier("read")
        return same


def test_both_sides_send_much(pools: Callable[[int], LocalRanks]):
    assert pools(4).run(large, 48 << 20) == [True] * 4


def test_pieces_go_where_they_are_wanted():
    """Neighbours become one piece; a node that has none of the ranks gets nothing."""
    sent: dict[int, list[Any]] = {1: [], 2: []}

    def routes_of(sender: Any) -> None:
        for route, (node, kept) in zip(sender.routes, sent.items(), strict=True):
            assert route.node == node
            route.outlet.send = lambda buffers, *_, kept=kept: kept.append(list(buffers))

    specs = [PlaneSpec("x", (6, 100), torch.uint8)]
    window, sender, _ = lonely_window(specs, nodes=(0, 1, 2))
    routes_of(sender)
    x = window.plane("x")
    x.copy_(torch.arange(6)[:, None].expand(6, 100))
    for row, ranks in enumerate([(1,), (1,), (2,), (0,), None, (1, 2)]):
        window.touch(x[row], ranks)
    window.touch(x[:0])
    window.signal(0, 1, "a step")
    lengths = {node: [len(b) for b in buffers[0][1:]] for node, buffers in sent.items()}
    assert lengths == {1: [200, 200], 2: [100, 200]}
    assert [b[0] for b in sent[2][0][1:]] == [2, 4]
    window.signal(0, 2, "another")
    assert [len(buffers[1]) for buffers in sent.values()] == [1, 1]
    with pytest.raises(AssertionError, match="gaps"):
        window.touch(x[:, 3])
    with pytest.raises(AssertionError, match="not part of the window"):
        window.touch(torch.zeros(4))


def test_after_a_restart_tags_go_first():
    """So that a rank that was left behind sees them before it can see new data."""
    specs = [TAGS, PlaneSpec("x", (100,), torch.uint8)]
    window, sender, _ = lonely_window(specs, nodes=(0, 1))
    sent: list[Any] = []
    sender.routes[0].outlet.send = lambda buffers, *_: sent.append(list(buffers[1:]))
    lanes = Lanes(window)
    lanes.signal(ExchangeSignal.TOKENS_READY, 1, 5, "dispatch")
    lanes.restart(Membership(3, (0, 1)))
    window.touch(window.plane("x"))
    lanes.signal(ExchangeSignal.TOKENS_READY, 1, 6, "dispatch")
    assert [[len(piece) for piece in pieces] for pieces in sent] == [[8], [64, 100, 8]]
    tags = torch.frombuffer(sent[1][0], dtype=torch.int64)
    assert (tags >> 32).tolist() == [3] * 8


@pytest.mark.parametrize("nodes", [*LAYOUTS, (3, 3, 3, 9, 9, 9, 9, 4)])
def test_every_sender_has_one_receiver_in_each_other_node(nodes: tuple[int, ...]):
    for node in set(nodes):
        ranks = range(len(nodes))
        chosen = [receiver(nodes, r, node, ranks) for r in ranks if nodes[r] != node]
        assert all(rank is not None and nodes[rank] == node for rank in chosen)
        # Shared evenly between those who send from one node.
        for other in set(nodes) - {node}:
            of_other = [receiver(nodes, r, node, ranks) for r in ranks if nodes[r] == other]
            counts = [of_other.count(r) for r in ranks if nodes[r] == node]
            assert max(counts) - min(counts) <= 1
        # Of ranks that are lost others take the place, until none is left.
        there = [r for r in ranks if nodes[r] == node]
        for sender in set(ranks) - set(there):
            assert receiver(nodes, sender, node, there[-1:]) == there[-1]
            assert receiver(nodes, sender, node, []) is None


BACKENDS = (
    ("none", "normal", "triton"),
    ("none", "replicated", "triton"),
    ("deepep", "normal", "deep_gemm"),
    ("deepep", "low_latency", "deep_gemm"),
    ("deepep", "auto", "deep_gemm"),
    ("mooncake", "low_latency", "deep_gemm"),
    ("mori", "normal", "triton"),
    ("flashinfer", "normal", "triton"),
    ("ascend_fuseep", "low_latency", "triton"),
)


def layers_of(backend: tuple[str, str, str]) -> list[tuple[Combination, tuple[int, ...]]]:
    """Layers, and on which nodes to try them."""
    a2a, mode, runner = backend
    plain = ("bf16", "bf16", "bf16", 4)
    found = [
        (Combination(a2a, mode, runner, *plain, 4, False), TWO),
        (Combination(a2a, mode, runner, *plain, 4, True), FOUR),
        (Combination(a2a, mode, runner, *plain, 2, False), UNEVEN),
        (Combination(a2a, mode, runner, *plain, 2, True), TWO),
    ]
    if a2a != "ascend_fuseep":
        found.append((Combination(a2a, mode, runner, "fp8", "fp8_block", "bf16", 4, 4), FOUR))
    return found


def poison_node(group: RankGroup, context: MoeContext) -> None:
    """NaN, or numbers that show, in every copy of every plane."""
    group.barrier("before poison")
    for buffer in context.comm.buffers.values():
        for name in buffer.window._own if not group.nodes or leads(group) else ():
            plane = buffer.window.stacked(name)
            if plane.dtype.is_floating_point:
                plane.fill_(torch.nan)
            else:
                plane.fill_(1 if name == "ids" else 0x7F)
        if isinstance(buffer, Exchange) and buffer.spec.inbox_rows:
            for inbox in map(buffer.inbox, range(LANES)):
                for tensor in inbox.values():
                    tensor.view(torch.uint8).fill_(0xFF)
    group.barrier("after poison")


def outputs(group: RankGroup, combination: Combination) -> list[Tensor]:
    """Of all cases, and of two micro-batches under way at once."""
    layer = combination.layer(group, timeout=20.0)
    dtype, found, tokens = DTYPES[combination.dtype], [], []
    for case in cases_for(group.size, combination.ep, combination.replicated):
        x_TH, topk = case.tokens(0 if combination.replicated else group.rank, dtype)
        poison_node(group, layer.context)
        found.append(layer(x_TH, topk, case.step))
        tokens.append((x_TH, topk))
    if combination.a2a != "ascend_fuseep":
        found += in_flight(layer, tokens[-2:])
    return found


def in_flight(layer: Any, tokens: list[Any]) -> list[Tensor]:
    dispatcher, workspace = layer.dispatcher, layer.context.workspace
    lanes = range(2)
    values = [dispatcher.dispatch_a(*tokens[i], Step(i == 0, i)) for i in lanes]
    values = [dispatcher.dispatch_b(value) for value in values]
    values = [
        dispatcher.combine_a(layer.runner.run(value, layer.weights, workspace)) for value in values
    ]
    return [dispatcher.combine_b(value) for value in values]


def compare(group: RankGroup, layers: list[tuple[Combination, tuple[int, ...]]]) -> list[str]:
    """What differs between ranks of one node and the same ranks on several."""
    wrong = []
    for combination, nodes in layers:
        wanted = outputs(group, combination)
        assert all(bool(y_TH.isfinite().all()) for y_TH in wanted)
        with on_nodes(group, nodes):
            got = outputs(group, combination)
            group.barrier("compared")
        wrong += [
            f"{combination} on {nodes}: case {i}"
            for i, (a, b) in enumerate(zip(got, wanted, strict=True))
            if not torch.equal(a, b)
        ]
    return wrong


@pytest.mark.parametrize("backend", BACKENDS, ids="-".join)
def test_layers_give_the_same_bits(
    backend: tuple[str, str, str], pools: Callable[[int], LocalRanks]
):
    """The first layer of every backend, and the others of it in turn."""
    first, *others = layers_of(backend)
    other = others[BACKENDS.index(backend) % len(others)]
    assert pools(4).run(compare, [first, other]) == [[]] * 4


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS, ids="-".join)
def test_all_layers_give_the_same_bits(
    backend: tuple[str, str, str], pools: Callable[[int], LocalRanks]
):
    assert pools(4).run(compare, layers_of(backend)) == [[]] * 4


def rounds(group: RankGroup, deterministic: bool) -> bool:
    """A long sequence in rounds both ways."""
    os.environ["DEEPEP_NORMAL_LONG_SEQ_PER_ROUND_TOKENS"] = "100"
    os.environ["DEEPEP_NORMAL_LONG_SEQ_ROUND"] = "3"
    os.environ["DEEPEP_NORMAL_COMBINE_ENABLE_LONG_SEQ"] = "1"
    combination = Combination(
        "deepep", "normal", "deep_gemm", "bf16", "bf16", "bf16", 4, 4, deterministic
    )
    try:
        wanted = outputs(group, combination)
        with on_nodes(group, TWO):
            got = outputs(group, combination)
            group.barrier("compared")
    finally:
        for name in [name for name in os.environ if name.startswith("DEEPEP_NORMAL")]:
            del os.environ[name]
    return all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("deterministic", [False, True])
def test_rounds_give_the_same_bits(deterministic: bool, pools: Callable[[int], LocalRanks]):
    assert pools(4).run(rounds, deterministic) == [True] * 4


def restarted(group: RankGroup) -> list[bool]:
    """A step fails on rank 0 after it has offered; all restart and redo it."""
    combination = Combination("deepep", "normal", "deep_gemm", "bf16", "bf16", "bf16", 4, 4)
    case = cases_for(4, 4)[0]
    x_TH, topk = case.tokens(group.rank, torch.bfloat16)
    wanted = combination.layer(group)(x_TH, topk, case.step)
    same = []
    with on_nodes(group, TWO):
        layer = combination.layer(group, timeout=20.0)
        for _ in (1, 2):
            if group.rank != 0:
                layer.dispatcher.dispatch_a(x_TH, topk, case.step)
            group.barrier("failed")
            group.lifecycle.restart()
            same.append(torch.equal(layer(x_TH, topk, case.step), wanted))
        group.barrier("end")
    return same


def test_restart(pools: Callable[[int], LocalRanks]):
    assert pools(4).run(restarted) == [[True, True]] * 4


def memory_of_windows(group: RankGroup) -> tuple[int, bool]:
    """How many windows this process maps after many came and went, all but one; and whether it has
    no more of them, and of descriptors, at the end."""

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("moesaic-window")

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    gc.collect()  # what other tests left
    before, few = mapped(), descriptors()
    with on_nodes(group, TWO):
        kept = create_window(group, [PlaneSpec("x", (5000,), torch.uint8)], timeout=20)
        for _ in range(5):
            window = create_window(group, [PlaneSpec("x", (5000,), torch.uint8)], timeout=20)
            window.barrier("used")
            del window
        for _ in range(2):
            kept.barrier("others are told")
        most = mapped() - before
        del kept
        group.barrier("end")
    deadline = time.monotonic() + 10
    while descriptors() > few and time.monotonic() < deadline:
        time.sleep(0.02)  # threads end by themselves
    return most, descriptors() <= few and mapped() == before


def test_windows_are_given_back(pools: Callable[[int], LocalRanks]):
    assert pools(4).run(memory_of_windows) == [(1, True)] * 4
