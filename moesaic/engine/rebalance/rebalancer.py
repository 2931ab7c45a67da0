"""Moves experts between ranks while they serve.

A rebalance is a list of phases: collect the loads, plan, adopt the plan; then for every chunk of
layers write and read until all its experts are staged, then flip slots, a few at a time. Each rank
tells in the exchange that begins every step how many phases it has ended. It works on the next one
when all have ended the last. So no data is read before it is there, and a flip comes between the
same two steps on all ranks: a layer has the same placement everywhere, with all experts.

A rank that has failed says so in the same exchange, and all drop what is staged. Slots that have
flipped keep their new experts, the others the old ones.

Layers that are alike have one plan; a draft model's may have other experts than the target's. What
is for all layers has as many columns as those with the most experts or slots.

W windows of time · S those to plan with · L layers · E experts · P slots.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, Final

import msgspec
import numpy as np
import torch
from torch import Tensor

from moesaic.balance.moves import SlotMove, moves_of_layer
from moesaic.balance.problem import Floats, Ints, fetched_slots
from moesaic.comm.errors import PeerTimeout, WindowAborted
from moesaic.comm.supervise.control_page import EpochChanged, StepRolledBack
from moesaic.comm.windows.factory import create_window
from moesaic.comm.windows.window import PlaneSpec, SharedWindow
from moesaic.config import ServerArgs
from moesaic.core.background import in_background
from moesaic.core.stats import MoveStats
from moesaic.engine.rebalance.copy_phases import (
    FlipPhase,
    LayerMove,
    ReadPhase,
    WritePhase,
    flips_of,
)
from moesaic.engine.rebalance.expert_copies import ChunkCopy, CopyBuffers, WrongExpert
from moesaic.engine.rebalance.layer_groups import LayerGroup, computed_tokens, groups_of
from moesaic.engine.rebalance.load_windows import MAX_WINDOWS, LoadWindows, planned_windows
from moesaic.engine.rebalance.orders import (
    Order,
    RankReport,
    RebalanceResult,
    Running,
    Trigger,
    log_end,
)
from moesaic.engine.rebalance.planner_child import PlannerProcess, PlanReply, PlanRequest
from moesaic.engine.setup.expert_buffers import buffer_sizes
from moesaic.engine.setup.rank_context import RankContext
from moesaic.engine.text.limited_child import ChildUnresponsive
from moesaic.moe.layer import FusedMoE
from moesaic.observe.spans import SpanKind, Spans

logger = logging.getLogger(__name__)

LOADS, PLAN = "loads", "plan"
LEADER: Final = 0
# A phase that waits for another rank is tried again this much later if there is nothing to compute.
IDLE_SECONDS: Final = 0.001
# For predictions of what a fetch costs: bytes copied in a second, until that has been measured, and
# how often an expert is copied: to the outbox, to staging, to its slot.
COPY_RATE: Final = {"cpu": 4e9, "cuda": 200e9}
COPIES: Final = 3
# The share of a step that its experts take, for the same predictions.
EXPERT_SHARE: Final = 0.5
# Results of the last rebalances, for operators who ask at the same time.
KEPT_RESULTS: Final = 16
# Errors that are not the rebalance's own: they end or abandon the whole step.
FINAL: Final = (StepRolledBack, EpochChanged, WindowAborted, PeerTimeout)

# Called with the phase's number, in every step until it returns that it has ended.
Phase = Callable[[int], bool]


class PlanFailed(RuntimeError):
    """There is no plan: the planner has failed or was killed."""


class Rebalancer:
    """This rank's part in moving experts of its stage. One thread uses it."""

    def __init__(
        self,
        args: ServerArgs,
        layers: Sequence[FusedMoE],
        ranks: RankContext,
        device: torch.device,
        num_groups: int = 1,
    ) -> None:
        """`num_groups`: of the first layer's experts, and of others that have as many."""
        self._args, self._layers, self._ranks = args, layers, ranks
        self._groups, self._num_groups = groups_of(layers), num_groups
        self._spans: Spans = layers[0].context.comm.spans
        sizes = buffer_sizes(args, layers, ranks.stage_peers)
        self._rate = COPY_RATE["cuda" if sizes.on_gpu and not sizes.through_host else "cpu"]
        self.window_bytes = sizes.window_bytes(ranks.mesh.tp, device)
        """The part of its buffers that torch's allocator does not count on a GPU."""
        shape = len(layers), max(group.num_experts for group in self._groups)
        slots = max(group.num_slots for group in self._groups)
        specs = [
            PlaneSpec(LOADS, (MAX_WINDOWS, *shape), torch.int64),
            PlaneSpec(PLAN, (len(layers), slots), torch.int32),
        ]
        with torch.device("cpu"):
            self._copies = CopyBuffers(ranks.stage_peers, sizes, ranks.timeout, device)
            self._control = create_window(ranks.stage_peers, specs, ranks.timeout, 1)
        self._trigger = Trigger(
            args.eplb_rebalance_num_iterations, args.eplb_rebalance_num_requests
        )
        self._planner = PlannerProcess()
        self._planner_start: Future[None] | None = None
        self._phases: deque[Phase] = deque()
        self._chunks: deque[list[int]] = deque()
        """Layers whose placement is to change, and below the expert of each slot afterwards."""
        self._new_LP: Ints = np.empty((0, 0), np.int64)
        self._running: Running | None = None
        self._windows = LoadWindows(*shape)
        self.is_held = False
        """Until `forget_load` experts move only when an operator asks."""
        self._is_partial = False
        """Some ranks are lost."""
        self._asked: Order | None = None
        """What an operator wants next."""
        self._begun = Order()
        self._num_ended = self._num_aborts = self._failed = 0
        self._all_finished = 0
        """Requests of all groups that have ended."""
        self._error = ""
        self._step_seconds = 0.0
        self.totals = MoveStats()
        self.last: RebalanceResult | None = None
        self._results: deque[RebalanceResult] = deque(maxlen=KEPT_RESULTS)

    def start_planner(self) -> None:
        """The planner's process starts beside the rest of the service: a start takes a processor
        for longer than a step."""
        if self.is_leader:
            self._planner_start = in_background(self._planner.start)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Copies an expert in every way and updates all placements to what they are; statistics are
        cleared afterwards. On a GPU new kernels, pinned memory and memory of another stream stop
        what it computes: later they would hold up a step."""
        for group in self._groups:
            own = group.layout.first_slot
            other = (own + group.layout.slots_per_rank) % group.num_slots
            moves, layers = [SlotMove(other, own), SlotMove(own, other)], group.layers[:1]
            sent = ChunkCopy(layers, [moves], self._copies)
            kept = ChunkCopy(layers, [[SlotMove(own, own)]], self._copies)
            self._copies.warm_up(sent.warm_up)
            self._copies.warm_up(kept.warm_up)
            kept.adopt(0, [own])
        for layer in self._layers:
            layer.update_placement(layer.placement)

    def wait_for_planner(self) -> None:
        """Waits for what `start_planner` began. If that failed, the first plan tries again."""
        if self._planner_start is not None:
            if (error := self._planner_start.exception()) is not None:
                logger.warning("eplb: the planner cannot be started: %s", error)
            self._planner_start = None

    @property
    def is_leader(self) -> bool:
        return self._ranks.place.tp_rank == LEADER

    @property
    def is_busy(self) -> bool:
        """Whether a rebalance runs. All ranks agree once they have advanced to the same step."""
        return bool(self._phases)

    @property
    def counters(self) -> tuple[int, int, int]:
        """What `follow` needs of each rank: ended phases, aborts and the last order. Phases of a
        rank's predecessor count, too, as their numbers are in the windows."""
        windows = [self._control, self._copies.window]
        shared = [window for window in windows if isinstance(window, SharedWindow)]
        phases = max(self._num_ended, *(window.posted(0) for window in shared))
        return phases, self._num_aborts, self._begun.encode()

    def follow(self, counters: Sequence[Sequence[int]], is_partial: bool) -> None:
        """Drops the rebalance in progress, and counts on where the rank that is furthest does:
        other ranks are live from now on, which tell these `counters`. Experts do not move while
        some ranks are lost (`is_partial`)."""
        self._phases.clear()
        self._chunks.clear()
        self._copies.abandon()
        self._failed, self._error, self._is_partial = 0, "", is_partial
        phases, aborts, begun = (max(column) for column in zip(*counters, strict=True))
        self._num_ended, self._num_aborts = phases + 1, aborts
        self.totals.aborted += self._running is not None
        self._begun = Order.decode(begun)
        self._end("aborted: other ranks are live now")

    def report(self, finished: int) -> RankReport:
        """`finished`: requests that have ended in this rank's group."""
        may_begin = self.is_leader and not self._phases and not self._is_partial
        wanted = self._next_order() if may_begin else None
        return RankReport(
            self._num_ended,
            self._num_aborts,
            self._failed,
            self._begun.encode(),
            0 if wanted is None else wanted.encode(),
            finished,
        )

    def _next_order(self) -> Order | None:
        number = self._begun.number + 1
        if self._asked is not None:
            return self._asked._replace(number=number)
        is_due = not self.is_held and self._trigger.is_due(self._all_finished)
        return Order(number) if is_due else None

    def ask(self, dry_run: bool) -> int:
        """An operator wants a rebalance; returns its number. One that runs is not disturbed, and of
        several operators one that wants experts to move prevails."""
        if self.is_leader and (self._asked is None or not dry_run):
            self._asked = Order(by_operator=True, dry_run=dry_run)
        return self._begun.number + 1

    def forget_load(self) -> None:
        """Tokens up to now are no load to plan from, as they are not those of clients."""
        self.is_held = False
        total_LE = self._tokens()
        self._windows.restart(total_LE)
        if self._running is not None and self._running.tokens_LE is not None:
            self._running.tokens_LE = total_LE  # where the windows begin when it has its plan
        self._trigger.restart(self._all_finished)

    @torch.inference_mode()
    def advance(self, reports: Sequence[RankReport]) -> None:
        """Works on the next phase if all ranks have ended the last, before the step is computed.
        `reports`: those of all ranks, which all ranks have."""
        if self._is_partial:  # the reports of lost ranks are zeros
            return
        begin = time.monotonic_ns()
        self._all_finished = sum(report.finished for report in reports)
        if self._drops(reports):
            return
        ended = [report.phases for report in reports]
        begun, wanted = max(report.begun for report in reports), reports[LEADER].wanted
        if begun > self._begun.encode():  # in a step that this rank has missed
            self._begin(Order.decode(begun))
        elif wanted > begun and min(ended) == max(ended):
            self._begin(Order.decode(wanted))
        if self._phases and min(ended) == self._num_ended:
            before = self._copies.received
            self._run_phase()
            self._spans.add(SpanKind.MOVE, begin, nbytes=self._copies.received - before)

    def _drops(self, reports: Sequence[RankReport]) -> bool:
        """Drops the rebalance if a rank has failed, or if others have dropped it in a step that
        this rank has missed."""
        known = max(report.aborts for report in reports)
        asked = max(report.failed for report in reports)
        if max(known, asked) == self._num_aborts:
            return False
        ranks = [rank for rank, report in enumerate(reports) if report.failed]
        reason = self._error or f"rank {'?' if not ranks else ranks[0]} of its stage has failed"
        self._phases.clear()
        self._chunks.clear()
        self._copies.forget()
        # All count alike from here on, also a rank for which the others have done this before.
        self._num_ended = max(report.phases for report in reports) + (asked > known)
        self._num_aborts, self._failed, self._error = max(known, asked), 0, ""
        self.totals.aborted = self._num_aborts
        self._begun = Order.decode(max(report.begun for report in reports))
        self._end(f"aborted: {reason}")
        return True

    def count_step(self, seconds: float) -> None:
        """A step with tokens has ended."""
        self._trigger.num_steps += 1
        if self._windows.count_step():
            self._windows.end_window(self._tokens())
        self._step_seconds += 0.1 * (seconds - self._step_seconds)

    def _run_phase(self) -> None:
        """An error drops the rebalance and fails no request. Only a flip must not be dropped, as
        other ranks have flipped: its error rolls the step back, and it is repeated."""
        phase = self._phases[0]
        try:
            has_ended = phase(self._num_ended + 1)
        except FINAL:
            raise
        except Exception as error:
            if isinstance(phase, FlipPhase):
                raise
            expected = isinstance(error, WrongExpert | PlanFailed)
            self._failed = self._num_aborts + 1
            self._error = str(error) if expected else repr(error)
            logger.warning(
                "eplb: this rank fails: %s", self._error, exc_info=None if expected else error
            )
            return
        if has_ended:
            self._phases.popleft()
            self._num_ended += 1

    def _begin(self, order: Order) -> None:
        self._begun = order
        self._asked = None if order.by_operator else self._asked
        if not order.dry_run:
            self._trigger.restart(self._all_finished)
        self._running = Running(RebalanceResult(order.number, order.dry_run), order.by_operator)
        self._phases.extend((self._collect, self._plan, self._adopt_plan))

    def _end(self, outcome: str) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        running.result.outcome = outcome
        running.result.seconds = time.monotonic() - running.began
        self.totals.seconds += 0.0 if running.result.dry_run else running.result.seconds
        self.last = running.result
        self._results.append(running.result)
        if self.is_leader:
            log_end(running.result)

    def _collect(self, number: int) -> bool:
        """Writes the loads since the last rebalance for the first rank."""
        assert self._running is not None
        total_LE = self._tokens()
        own_WLE = self._control.plane(LOADS)
        own_WLE.copy_(self._windows.loads(total_LE))
        self._running.tokens_LE = total_LE
        self._control.touch(own_WLE)
        self._control.signal(0, number, "tell loads")
        return True

    def _tokens(self) -> Tensor:
        """[L, E]: tokens of each expert that this rank has computed since its start."""
        return computed_tokens(self._layers, self._windows.num_experts)

    def _plan(self, number: int) -> bool:
        """The first rank plans in another process; the others have nothing to do."""
        running = self._running
        assert running is not None
        if not self.is_leader:
            return True
        if running.plans is None:
            self._control.wait(0, number - 1, "read loads")
            loads_WLE = self._control.stacked(LOADS).sum(0).to(torch.float32).numpy()
            running.planned = [one for one in self._groups if loads_WLE[:, one.rows].any()]
            requests = [self._request(group, loads_WLE) for group in running.planned]
            running.plans = in_background(lambda: [*map(self._planner.plan, requests)])
        if not running.plans.done():
            return False
        self._publish(running, running.plans, number)
        return True

    def _request(self, group: LayerGroup, loads_WLE: Floats) -> PlanRequest:
        loads_SLE = planned_windows(loads_WLE[:, group.rows, : group.num_experts])
        nodes, image = len(set(self._nodes)), group.expert_bytes
        grouped = group.num_experts == self._groups[0].num_experts
        grouped = grouped and self._num_groups % nodes == 0
        # A layer's part of a step is as large as its part of all experts' bytes.
        of_all = sum(one.expert_bytes * len(one.layers) for one in self._groups)
        per_layer = EXPERT_SHARE * self._step_seconds * image / of_all
        return PlanRequest(
            self._args.eplb_algorithm,
            loads_SLE.shape,
            group.num_slots,
            group.layout.ep_size,
            self._num_groups if grouped else 1,
            nodes if self._ranks.mesh.tp % nodes == 0 else 1,
            loads_SLE.tobytes(),
            group.current.astype(np.int32).tobytes(),
            COPIES * image / (self._copies.rate or self._rate),
            max(per_layer, 1e-6),
            self._trigger.horizon(self._all_finished),
        )

    @property
    def _nodes(self) -> tuple[int, ...]:
        """The node of each expert-parallel rank."""
        peers = self._ranks.stage_peers
        nodes = peers.nodes or (0,) * peers.size
        return nodes[:: self._groups[0].layout.moe_tp_size]

    def _publish(self, running: Running, plans: Future[list[PlanReply]], number: int) -> None:
        """Writes the plan for all ranks: the current placement if nothing is to move."""
        result = running.result
        try:
            replies = plans.result()
        except ChildUnresponsive as error:
            raise PlanFailed("the planner was killed, or its plan took too long") from error
        except Exception as error:
            raise PlanFailed(f"no plan: {error or type(error).__name__}") from error
        running.note(replies)
        result.outcome = self._why_not(running)
        own_LP = self._control.plane(PLAN)
        for group in self._groups:
            own_LP[group.rows, : group.num_slots] = torch.from_numpy(group.current)
        for group, reply in zip(running.planned, replies, strict=True):
            if not result.outcome:
                new_LP = np.frombuffer(reply.slots, np.int32).reshape(group.current.shape).copy()
                own_LP[group.rows, : group.num_slots] = torch.from_numpy(new_LP)
                result.fetched += reply.fetched
        self._control.touch(own_LP)
        self._control.signal(0, number, "tell the plan")

    def _why_not(self, running: Running) -> str:
        """Why a plan is not carried out; empty if it is."""
        threshold = self._args.eplb_min_rebalancing_utilization_threshold
        before = running.result.balancedness
        if before is None:
            return "nothing to plan from: no tokens since the last rebalance"
        if before > threshold and not running.by_operator:
            return f"skipped: balancedness is {before:.3f}, above {threshold:g}"
        return ""

    def _adopt_plan(self, number: int) -> bool:
        """Lists the chunks of layers that change."""
        running = self._running
        assert running is not None
        self._control.wait(0, number - 1, "read the plan", [LEADER])
        new_LP = self._control.plane(PLAN, LEADER).numpy().astype(np.int64)
        result, self._new_LP = running.result, new_LP
        if running.tokens_LE is not None and not result.dry_run:
            self._windows.restart(running.tokens_LE)
        size, chunks = self._args.eplb_rebalance_layers_per_chunk or 1, list[list[int]]()
        for group in self._groups:
            old, new, layout = group.current, new_LP[group.rows, : group.num_slots], group.layout
            changed = group.rows.start + np.flatnonzero((old != new).any(1))
            chunks += (changed[at : at + size].tolist() for at in range(0, len(changed), size))
            fetched = int(fetched_slots(old, new, layout.ep_size, group.num_experts).sum())
            result.fetched_bytes += fetched * group.expert_bytes * layout.moe_tp_size
        result.layers = sum(map(len, chunks))
        if result.dry_run or not chunks:
            self._end(result.outcome or ("dry run" if result.dry_run else "nothing to move"))
            return True
        self._chunks = deque(chunks)
        self._phases.append(self._open_chunk)
        return True

    def _open_chunk(self, number: int) -> bool:
        """Lists the phases of the next chunk; without one the rebalance has ended."""
        if not self._chunks:
            self.totals.rebalances += 1
            self._end("moved")
            return True
        chunk = [self._move_of(layer) for layer in self._chunks[0]]
        copy = ChunkCopy([one.layer for one in chunk], [one.moves for one in chunk], self._copies)
        for part in range(copy.rounds):
            self._phases.append(WritePhase(copy, self._copies, part))
            self._phases.append(ReadPhase(copy, self._copies, part))
        for flips in flips_of(chunk, self._copies.sizes.experts_per_step):
            self._phases.append(FlipPhase(copy, chunk, flips, self.totals))
        self._phases.append(self._open_chunk)
        self._chunks.popleft()
        return True

    def _move_of(self, number: int) -> LayerMove:
        layer = self._layers[number]
        old_P, new_P = np.array(layer.placement.slots), self._new_LP[number]
        new_P = new_P[: layer.layout.num_slots]
        moves = moves_of_layer(old_P, new_P, layer.layout.ep_size, self._nodes)
        return LayerMove(layer, moves, tuple(new_P.tolist()))

    def state(self) -> dict[str, Any]:
        """What operators want to know; the first rank of a stage knows all of it."""
        running = self._running
        return {
            "replica": self._ranks.place.replica,
            "stage": self._ranks.place.stage,
            "running": None if running is None else running.result.number,
            "layers_left": sum(map(len, self._chunks)),
            "last": None if self.last is None else asdict(self.last),
            "results": [asdict(result) for result in self._results],
            **msgspec.structs.asdict(self.totals),
        }
