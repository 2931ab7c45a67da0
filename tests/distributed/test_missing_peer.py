"""A rank that does not come: everybody else says so in time, and names it; mooncake goes on.

T tokens · K chosen · H hidden.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.errors import PeerTimeout, RankFailed
from moesaic.comm.launch.local_ranks import LocalRanks
from moesaic.comm.lifecycle import Membership
from moesaic.core.step import Step
from moesaic.moe.context import MoeContext
from moesaic.moe.dispatch.deepep import AutoDispatcher
from moesaic.moe.dispatch.mooncake import MooncakeDispatcher
from moesaic.moe.formats import TopKOutput
from moesaic.moe.layer import FusedMoE
from moesaic.moe.quant.weights import WEIGHT_FORMATS
from moesaic.moe.registry import MoeProblem
from tests.distributed.moe_ranks import A2A
from tests.moe_oracle import Experts, config_of, random_topk, reference
from tests.pairs import every_second

EXPERTS, HIDDEN, INNER, TOP_K, LAYER, VICTIM = 12, 32, 32, 3, 7, 1
SECONDS = 0.4
# Of the ranks' own group: what takes less did not wait for that.
PEER_SECONDS = 10.0
NAMES = {
    ("deepep", "normal"): "deepep_normal",
    ("deepep", "low_latency"): "deepep_low_latency",
    ("deepep", "auto"): "deepep_normal",
}
each_a2a = pytest.mark.parametrize(("a2a", "mode"), A2A)


@pytest.fixture(scope="module")
def three() -> Iterator[LocalRanks]:
    """Ranks that may be killed."""
    with LocalRanks(3, timeout=40, peer_timeout=PEER_SECONDS) as ranks:
        yield ranks


def make_layer(
    group: RankGroup, a2a: str, mode: str, ep: int | None = None, timeout: float = SECONDS
) -> FusedMoE:
    replicated = mode == "replicated"
    problem = MoeProblem(
        a2a=a2a,
        mode="normal" if replicated else mode,
        weights=WEIGHT_FORMATS["fp32"],
        dtype="fp32",
        tp=group.size,
        ep=ep or group.size,
        phases=("decode",),
    )
    context = MoeContext.make(
        problem,
        torch.float32,
        group,
        timeout=timeout,
        max_tokens=16,
        max_decode_tokens=16,
        replicated=replicated,
    )
    experts = experts_of_all()
    layer = FusedMoE(config_of(experts, TOP_K), context, layer=LAYER)
    experts.fill(layer)
    return layer


def experts_of_all() -> Experts:
    return Experts.random(EXPERTS, HIDDEN, INNER)


def batch(seed: int) -> tuple[torch.Tensor, TopKOutput]:
    x_TH = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(seed))
    return x_TH, random_topk(5, EXPERTS, TOP_K, seed)


@dataclass(frozen=True)
class Told:
    """What a rank learned of the missing one, and when."""

    missing: tuple[int, ...]
    text: str
    seconds: float


def caught(layer: FusedMoE, seed: int) -> Told | None:
    started = time.monotonic()
    try:
        layer(*batch(seed))
    except PeerTimeout as error:
        return Told(error.missing, str(error), time.monotonic() - started)
    return None


def leave(layer: FusedMoE, fault: str, seed: int) -> None:
    """The victim's part of the step."""
    if fault == "combine":
        layer.dispatcher.dispatch(*batch(seed))
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)


def faults(group: RankGroup, fault: str) -> list[Told | None]:
    """With each dispatcher a step that works and one in which the victim fails."""
    found: list[Told | None] = []
    for a2a, mode in A2A:
        layer = make_layer(group, a2a, mode)
        seed = 0 if mode == "replicated" else group.rank
        pids = [int(pid) for pid in group.all_gather(torch.tensor([os.getpid()]), "pids")]
        layer(*batch(seed))
        group.barrier("a good step")
        if group.rank == VICTIM:
            leave(layer, fault, seed)
            found.append(None)
        else:
            found.append(caught(layer, seed))
        if group.rank == 0 and fault == "stop":
            time.sleep(0.5)  # rank 2 waits a little longer
            os.kill(pids[VICTIM], signal.SIGCONT)
        group.barrier("all are back")
    return found


def check(told: Told | None, a2a: str, mode: str, phase: str, seconds: float = SECONDS) -> None:
    assert told is not None, f"{a2a} {mode}: nobody was missed"
    name = NAMES.get((a2a, mode), a2a)
    operation = f"{name} {phase}, layer {LAYER}"
    assert told.missing == (VICTIM,)
    assert told.text.startswith(f"rank {VICTIM} did not reach {operation!r} within {seconds} s")
    assert seconds <= told.seconds < PEER_SECONDS


@pytest.mark.parametrize("fault", ["dispatch", "combine", "stop"])
def test_a_rank_that_does_not_come_is_named(fault: str, three: LocalRanks):
    """It never dispatches, dispatches and never combines, or is stopped by a signal."""
    by_rank = three.run(faults, fault)
    for rank in (0, 2):
        for (a2a, mode), told in zip(A2A, by_rank[rank], strict=True):
            waits_for_results = fault == "combine" or mode == "replicated"
            check(told, a2a, mode, "combine" if waits_for_results else "dispatch")


def until_killed(group: RankGroup, a2a: str, mode: str) -> Told | None:
    layer = make_layer(group, a2a, mode)
    seed = 0 if mode == "replicated" else group.rank
    layer(*batch(seed))
    group.barrier("a good step")
    if group.rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    return caught(layer, seed)


@each_a2a
def test_a_killed_rank_is_named(a2a: str, mode: str, three: LocalRanks):
    with pytest.raises(RankFailed) as failed:
        three.run(until_killed, a2a, mode)
    assert list(failed.value.failures) == [VICTIM]
    for rank in (0, 2):
        check(
            failed.value.results[rank],
            a2a,
            mode,
            "combine" if mode == "replicated" else "dispatch",
        )


def wait_for_the_end(group: RankGroup, seconds: float) -> Told | None:
    layer = make_layer(group, "deepep", "low_latency", timeout=seconds)
    layer(*batch(group.rank))
    if group.rank == VICTIM:
        time.sleep(30)
    return caught(layer, group.rank)


def nothing(group: RankGroup) -> None:
    group.barrier("nothing")


def test_a_rank_killed_from_outside(three: LocalRanks):
    """While the others wait for it."""
    three.run(nothing)  # all ranks are there, and connected
    timer = threading.Timer(1.0, three.kill, (VICTIM,))
    timer.start()
    with pytest.raises(RankFailed, match=rf"rank {VICTIM}: process \d+ died") as failed:
        three.run(wait_for_the_end, 2.0)
    timer.join()
    for rank in (0, 2):
        check(failed.value.results[rank], "deepep", "low_latency", "dispatch", 2.0)


def without(topk: TopKOutput, lost: range) -> TopKOutput:
    """What is left when some experts are gone."""
    gone = (topk.ids_TK >= lost.start) & (topk.ids_TK < lost.stop)
    return TopKOutput(torch.where(gone, -1, topk.ids_TK), topk.weights_TK)


def error_of(layer: FusedMoE, seed: int, lost: range, lane: int = 0) -> float:
    x_TH, topk = batch(seed)
    y_TH = layer(x_TH, topk, Step(False, lane))
    wanted = reference(experts_of_all(), x_TH, without(topk, lost))
    return float((y_TH.double() - wanted).abs().max())


def restart(layer: FusedMoE, active: list[int], generation: int) -> None:
    dispatcher = layer.dispatcher
    parts = (
        (dispatcher.normal, dispatcher.low_latency)
        if isinstance(dispatcher, AutoDispatcher)
        else (dispatcher,)
    )
    for lanes in {id(part.lanes): part.lanes for part in parts}.values():  # type: ignore[attr-defined]
        lanes.restart(Membership(generation, tuple(active)))


def elastic(group: RankGroup, a2a: str, mode: str, fault: str, ep: int) -> list[float]:
    """The victim leaves in the middle of a step; the others redo it without its experts; it comes
    back; then it leaves again in another lane. The largest error of each step."""
    # Long enough for those who do come, on a busy machine too.
    layer = make_layer(group, a2a, mode, ep, timeout=1.5)
    everyone, others = list(range(group.size)), [r for r in range(group.size) if r != VICTIM]
    block = EXPERTS // ep
    first = VICTIM // (group.size // ep) * block
    lost, none_lost = range(first, first + block), range(0)
    errors = [error_of(layer, group.rank, none_lost)]
    for generation in (1, 3):
        group.barrier("before the fault")
        if group.rank == VICTIM:
            leave(layer, fault, group.rank)
        else:
            told = caught(layer, group.rank)
            assert told is not None and told.missing == (VICTIM,), told
            restart(layer, others, generation)
            for step in range(4):
                errors.append(error_of(layer, 10 * step + group.rank, lost, step % 2))
        group.barrier("the victim comes back")
        restart(layer, everyone, generation + 1)
        errors += [error_of(layer, 5 + group.rank, none_lost, lane) for lane in (0, 1)]
    return errors


@pytest.mark.parametrize(
    ("a2a", "mode", "fault"),
    every_second([case for case in A2A if case[1] != "replicated"], ["dispatch", "combine"]),
)
def test_others_go_on_without_a_rank(
    a2a: str, mode: str, fault: str, pools: Callable[[int], LocalRanks]
):
    for rank, errors in enumerate(pools(3).run(elastic, a2a, mode, fault, 3)):
        assert len(errors) == (5 if rank == VICTIM else 13)
        assert max(errors) < 1e-5


@pytest.mark.parametrize("a2a", ["mooncake", "flashinfer"])
def test_others_go_on_without_a_rank_that_shares_experts(
    a2a: str, pools: Callable[[int], LocalRanks]
):
    """Half a result is none: both ranks of the group count as lost."""
    for errors in pools(4).run(elastic, a2a, "low_latency", "dispatch", 2):
        assert max(errors) < 1e-5


def test_the_loss_shows():
    """The comparison above tells whether lost experts were left out."""
    x_TH, topk = batch(0)
    full = reference(experts_of_all(), x_TH, topk)
    less = reference(experts_of_all(), x_TH, without(topk, range(4, 8)))
    assert (full - less).abs().max() > 0.01


def outsider(group: RankGroup) -> str:
    layer = make_layer(group, "mooncake", "low_latency")
    assert isinstance(layer.dispatcher, MooncakeDispatcher)
    try:
        layer.dispatcher.resume([r for r in (0, 1, 2) if r != group.rank], 1)
    except ValueError as error:
        return str(error)
    return ""


def test_a_rank_must_be_among_the_active(pools: Callable[[int], LocalRanks]):
    message = "active ranks [0, 2]: give some of 0..2, with 1 among them"
    assert pools(3).run(outsider)[1] == message
