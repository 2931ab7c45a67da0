"""Experts that move while layers compute, against the float64 einsum; faults leave nothing half
moved."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count

import msgspec
import pytest
import torch

from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.launch.local_ranks import LocalRanks
from moesaic.comm.mesh import Mesh
from moesaic.config import ServerArgs
from moesaic.core.step import Step
from moesaic.engine.rebalance.orders import RankReport
from moesaic.engine.rebalance.planner_child import PlannerProcess
from moesaic.engine.rebalance.rebalancer import Rebalancer
from moesaic.engine.setup.expert_buffers import OUTBOX
from moesaic.engine.setup.rank_context import RankContext
from moesaic.moe.context import MoeContext
from moesaic.moe.formats import TopKOutput
from moesaic.moe.layer import FusedMoE
from moesaic.moe.quant.weights import WEIGHT_FORMATS
from moesaic.moe.registry import MoeProblem
from moesaic.moe.runner.base import Workspace
from moesaic.observe.spans import SpanKind, unpack
from tests.distributed.moe_ranks import A2A_FLAGS
from tests.moe_oracle import Experts, config_of, random_topk, reference

EXPERTS, HIDDEN, INNER, TOP_K, LAYERS, RANKS = 12, 128, 64, 3, 2, 4
# Of a last layer that is another model's: its experts are smaller, too.
OTHER_EXPERTS, OTHER_INNER, OTHER_REDUNDANT = 6, 32, 2
TOKENS = (5, 0, 9, 1)
# In each rank: a process takes longer to start than to plan.
PLANNERS: dict[str, PlannerProcess] = {}


@dataclass(frozen=True)
class Setting:
    a2a: str = "deepep"
    mode: str = "auto"
    ep: int = RANKS
    redundant: int = 4
    algorithm: str = "deepseek"
    weights: str = "fp32"
    deterministic: bool = False
    dispatch: str = "dynamic"
    per_chunk: int | None = None
    step_bytes: int = 170_000
    """An expert has 98,304: some travel in two parts."""
    has_other: bool = False
    """Whether the last layer is another model's."""
    rebalances: int = 1
    tolerance: float = 1e-4
    device: str = "cpu"
    """Whose providers; without a GPU those of CUDA compute on CPU, by the twins of kernels."""

    @property
    def where(self) -> torch.device:
        on_gpu = self.device == "cuda" and torch.cuda.is_available()
        return torch.device("cuda", 0) if on_gpu else torch.device("cpu")


@dataclass(frozen=True)
class Found:
    """What one rank has found."""

    worst: float
    """The largest difference from the oracle."""
    wrong_slots: int
    """Slots whose bytes are not those of their expert as it was loaded."""
    slots: list[tuple[int, ...]]
    moved_bytes: int
    rebalances: int
    aborted: int
    steps: int
    counted: list[int]
    """Tokens of each expert of the first layer."""
    routed: list[int]
    bits_changed: int
    """Steps whose results differ from those of the first placement, of the same tokens."""
    traced_bytes: int
    """What the spans of moves tell."""


class Bench:
    """The layers of a rank, its part in moving their experts, and a step of both."""

    def __init__(self, group: RankGroup, setting: Setting) -> None:
        self.group, self.setting = group, setting
        self.experts = [Experts.random(EXPERTS, HIDDEN, INNER, seed) for seed in range(LAYERS)]
        if setting.has_other:
            self.experts[-1] = Experts.random(OTHER_EXPERTS, HIDDEN, OTHER_INNER, LAYERS)
        self.layers = [self._layer(number) for number in range(LAYERS)]
        self.loaded = {
            (n, expert): layer.store.checksum(slot)
            for n, layer in enumerate(self.layers)
            for slot, expert in enumerate(layer.local_experts)
        }
        mesh = Mesh(tp=RANKS, dp=RANKS, ep=setting.ep)
        ranks = RankContext(mesh, mesh.place(group.rank), stage_peers=group, timeout=30.0)
        args = ServerArgs(
            model_path="tiny",
            enable_eplb=True,
            eplb_algorithm=setting.algorithm,
            eplb_max_bytes_per_step=setting.step_bytes,
            eplb_rebalance_layers_per_chunk=setting.per_chunk,
            eplb_rebalance_num_iterations=2,
        )
        self.mover = Rebalancer(args, self.layers, ranks, setting.where)
        self.mover._planner = PLANNERS.setdefault("shared", self.mover._planner)
        if setting.device == "cuda":
            self.mover.warm_up()
        self.all_sums = self._gather_sums()
        self.steps, self.worst, self.routed = 0, 0.0, [0] * EXPERTS
        self.spans = self.layers[0].context.comm.spans
        self.spans.start()

    def _layer(self, number: int) -> FusedMoE:
        setting = self.setting
        is_other = setting.has_other and number == LAYERS - 1
        redundant = OTHER_REDUNDANT if is_other else setting.redundant
        problem = MoeProblem(
            a2a=setting.a2a,
            mode=setting.mode,
            weights=WEIGHT_FORMATS[setting.weights],
            dtype="fp32",
            tp=RANKS,
            ep=setting.ep,
            phases=("decode",),
            device=setting.device,
        )
        context = MoeContext.make(
            problem,
            torch.float32,
            self.group,
            timeout=30.0 if setting.where.type == "cpu" else 60.0,  # others may compile
            max_tokens=64,
            max_decode_tokens=64,
            redundant_experts=redundant,
            max_replicas=redundant + 1,
            dispatch_algorithm=setting.dispatch,
            deterministic=setting.deterministic,
        )
        context = replace(context, workspace=Workspace(setting.where.type))
        with setting.where:
            layer = FusedMoE(config_of(self.experts[number], TOP_K), context, number)
        self.experts[number].fill(layer)
        return layer

    def _gather_sums(self) -> dict[tuple[int, int, int], int]:
        """The checksum of every expert's slice on any rank, by layer, expert and slice."""
        own = [
            (*key, self.layers[0].layout.moe_tp_rank, total) for key, total in self.loaded.items()
        ]
        packed = self.group.all_gather_bytes(msgspec.msgpack.encode(own), "gather checksums")
        return {(n, e, part): total for data in packed for n, e, part, total in decode(data)}

    def step(self, seed: int, exchange: bool = True) -> list[torch.Tensor]:
        """Moves what there is to move and computes both layers; returns their results."""
        if exchange:
            own = msgspec.msgpack.encode(list(self.mover.report(0)))
            packed = self.group.all_gather_bytes(own, "agree on a step")
            self.mover.advance([RankReport(*msgspec.msgpack.decode(data)) for data in packed])
        self.steps += 1
        results = []
        for number, (layer, experts) in enumerate(zip(self.layers, self.experts, strict=True)):
            tokens = TOKENS[(self.group.rank + seed) % RANKS]
            count = layer.config.num_experts
            topk = random_topk(tokens, count, TOP_K, 7 * seed + self.group.rank)
            topk.ids_TK[: tokens // 2] = (torch.arange(TOP_K) + seed // 20) % count  # hot ones
            x_TH = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))
            prefill, where = self.setting.dispatch == "lp", self.setting.where
            rows = max(TOKENS) if self.setting.device == "cuda" else 0
            step = Step(prefill, lane=seed % 2, rows=rows)
            slots_TK = (layer.split_of(step) or layer.slot_map)(topk.ids_TK.to(where))
            y_TH = layer(x_TH.to(where), TopKOutput(slots_TK, topk.weights_TK.to(where)), step)
            assert isinstance(y_TH, torch.Tensor)
            y_TH = y_TH.cpu().clone()
            results.append(y_TH)
            wanted = reference(experts, x_TH, topk)
            if tokens:
                off_TH = (y_TH.double() - wanted).abs().nan_to_num(torch.inf)
                self.worst = max(self.worst, float(off_TH.max()))
            for expert in topk.ids_TK.flatten().tolist() if number == 0 else []:
                self.routed[expert] += 1
        self.mover.count_step(
            100.0
        )  # so that every gain pays, however slowly a busy machine copies
        return results

    def rebalance(self, steps: int = 400) -> None:
        """Steps until the next rebalance has ended."""
        before = self.ended
        for _ in range(steps):
            self.step(self.steps)
            time.sleep(0.002 if self.mover.is_busy else 0)  # the planner needs the processor
            if self.ended > before:
                return
        raise AssertionError(f"no end after {steps} steps: {self.mover.state()}")

    @property
    def ended(self) -> int:
        return 0 if self.mover.last is None else self.mover.last.number

    def wrong_slots(self) -> int:
        part = self.layers[0].layout.moe_tp_rank
        return sum(
            layer.store.checksum(slot) != self.all_sums[n, expert, part]
            for n, layer in enumerate(self.layers)
            for slot, expert in enumerate(layer.local_experts)
        )

    def found(self, bits_changed: int = 0) -> Found:
        layer, totals = self.layers[0], self.mover.totals
        assert not self.spans.lost
        spans = list(unpack(self.spans.read(0, self.spans.count)))
        counted = [0] * EXPERTS
        for expert, tokens in zip(layer.counted_experts, layer.load.tokens, strict=True):
            counted[expert] += tokens
        return Found(
            self.worst,
            self.wrong_slots(),
            [layer.placement.slots for layer in self.layers],
            totals.bytes,
            totals.rebalances,
            totals.aborted,
            self.steps,
            counted,
            self.routed,
            bits_changed,
            sum(span.nbytes for span in spans if span.kind == SpanKind.MOVE),
        )


decode = msgspec.msgpack.decode


def serve(group: RankGroup, settings: list[Setting]) -> list[Found]:
    found = []
    for setting in settings:
        bench = Bench(group, setting)
        first = bench.step(3, exchange=False) if setting.deterministic else []
        for _ in range(setting.rebalances):
            bench.rebalance()
        again = bench.step(3, exchange=False) if setting.deterministic else []
        found.append(
            bench.found(sum(not torch.equal(a, b) for a, b in zip(first, again, strict=True)))
        )
    return found


def check(by_rank: list[list[Found]], settings: list[Setting]) -> None:
    for number, setting in enumerate(settings):
        found = [told[number] for told in by_rank]
        assert max(one.worst for one in found) < setting.tolerance, setting
        assert [one.wrong_slots for one in found] == [0] * RANKS, setting
        assert len({tuple(one.slots) for one in found}) == 1, "one placement on all ranks"
        assert {one.rebalances + one.aborted for one in found} == {setting.rebalances}, setting
        assert sum(one.moved_bytes for one in found) > 0, setting
        for one in found:  # some of an aborted rebalance may have come without being used
            assert one.moved_bytes <= one.traced_bytes, setting
            assert one.aborted or one.moved_bytes == one.traced_bytes, setting
        assert [one.bits_changed for one in found] == [0] * RANKS, setting
        routed = [sum(one.routed[e] for one in found) for e in range(EXPERTS)]
        counted = [sum(one.counted[e] for one in found) for e in range(EXPERTS)]
        # Ranks that share an expert by slices count it once; tokens of all placements count.
        assert counted == routed, setting


def test_every_backend_computes_the_same_while_experts_move(
    pools: Callable[[int], LocalRanks],
) -> None:
    settings = [Setting(a2a, mode) for a2a, mode in A2A_FLAGS if a2a != "deepep" or mode == "auto"]
    check(pools(RANKS).run(serve, settings), settings)


def test_slices_formats_chunks_and_bits(pools: Callable[[int], LocalRanks]) -> None:
    settings = [
        # Two ranks with many replicas: some experts change slots on their own rank only.
        Setting(ep=2, redundant=8, rebalances=3),
        Setting(dispatch="lp", redundant=8),
        Setting(weights="fp8_channel", tolerance=0.5),
        Setting(redundant=0, step_bytes=40_000),
        Setting(per_chunk=5, step_bytes=10**9),
        Setting(algorithm="auto", rebalances=2),
        Setting(deterministic=True),
        Setting("none", deterministic=True),
    ]
    check(pools(RANKS).run(serve, settings), settings)


def test_layers_of_another_model_move_with_plans_of_their_own(
    pools: Callable[[int], LocalRanks],
) -> None:
    settings = [
        Setting(has_other=True, per_chunk=2, rebalances=2),
        Setting(has_other=True, ep=2, redundant=8, algorithm="incremental"),
    ]
    by_rank = pools(RANKS).run(serve, settings)
    check(by_rank, settings)
    for found in by_rank[0]:
        first, other = found.slots
        assert other != tuple(n % OTHER_EXPERTS for n in range(8)), "it has moved"
        assert set(other) == {*range(OTHER_EXPERTS)} and set(first) == {*range(EXPERTS)}


def disturb(group: RankGroup, rebalances: int, setting: Setting = Setting()) -> Found:
    """In turn: a rebalance as it should be; one whose planner was killed before; one that sends
    damaged experts; one without a plan."""
    bench = Bench(group, setting)
    mover, copies = bench.mover, bench.mover._copies
    args, publish = mover._args, copies.publish

    def damage(number: int, used: int) -> None:
        words = copies.window.plane(OUTBOX).view(torch.int64)
        words[:2] = words[:2].flip(0)  # the next expert's have changed places
        publish(number, used)

    bench.rebalance()  # starts the planner's process
    for number in range(rebalances):
        fault = number % 4
        if fault == 1 and mover.is_leader:
            assert mover._planner.pid is not None
            os.kill(mover._planner.pid, signal.SIGKILL)
        copies.publish = damage if fault == 2 else publish  # type: ignore[method-assign]
        mover._args = replace(args, eplb_algorithm="unknown") if fault == 3 else args
        bench.rebalance()
    return bench.found()


def check_disturbed(found: list[Found], rebalances: int) -> None:
    check([[one] for one in found], [Setting(rebalances=rebalances + 1)])
    # A planner that was killed is started again, but for one whose end is noticed too late.
    (aborted,) = {one.aborted for one in found}
    assert rebalances // 2 <= aborted <= rebalances // 2 + rebalances // 4
    moves = sum(one.moved_bytes for one in found) // (3 * HIDDEN * INNER * 4)
    assert moves > 8 * rebalances


def test_faults_leave_nothing_half_moved(pools: Callable[[int], LocalRanks]) -> None:
    check_disturbed(pools(RANKS).run(disturb, 4), 4)


@pytest.mark.slow
def test_a_thousand_moves_with_faults(pools: Callable[[int], LocalRanks]) -> None:
    check_disturbed(pools(RANKS).run(disturb, 128), 128)


def abandon_steps(
    group: RankGroup,
    rebalances: int,
    setting: Setting = Setting(step_bytes=200_000),
    fault_after: int = 39,
) -> Found:
    """Two of three steps are abandoned after the exchange, as a rollback does it: one rank, each
    time another one, has not advanced, the others have, and nothing is computed."""
    bench = Bench(group, setting)
    for number in count():
        own = [*bench.mover.report(0), bench.ended]
        packed = group.all_gather_bytes(msgspec.msgpack.encode(own), "agree on a step")
        *reports, ended = zip(*map(decode, packed), strict=True)
        if min(ended) == rebalances:
            return bench.found()
        bench.steps += 1
        if number % 3 == 0 or group.rank != number % RANKS:
            bench.mover.advance([RankReport(*row) for row in zip(*reports, strict=True)])
        if number % 3 == 0:
            busy = group.all_gather_bytes(bytes([bench.mover.is_busy]), "tell who is busy")
            assert len(set(busy)) == 1, "else some would sleep and others wait for them"
            bench.step(bench.steps, exchange=False)
        # In some phase; the first time the rank that fails also misses the next step.
        turn, left = divmod(number, fault_after)
        if left == 0 and bench.mover.is_busy and group.rank == turn % RANKS:
            bench.mover._failed, bench.mover._error = bench.mover._num_aborts + 1, "by the test"
    raise AssertionError


def test_a_rank_that_missed_a_step_follows(pools: Callable[[int], LocalRanks]) -> None:
    check_abandoned(pools(RANKS).run(abandon_steps, 6))


def check_abandoned(found: list[Found]) -> None:
    check([[one] for one in found], [Setting(rebalances=6)])
    assert all(0 < one.aborted < 6 for one in found)
