"""The life of a rank: it plans or is told steps, computes its part of them, and sleeps in between.

In the first stage the leader of each attention group plans. All ranks of the stage then settle in
one small all-gather what everybody must know of the step, its followers get the leader's plan, and
all compute, with nothing to do for those that have no tokens. In a pipeline the order goes on to
the next stage with the hidden states, and up to as many steps as there are stages are under way.
Ranks whose runners overlap steps begin one before they take in the results of the last. Every
decision of the loop follows from what was gathered, so all ranks take the same one.

A rank that raises in a step tells the supervisor, which calls all ranks of the replica back: each
abandons its step, forgets what is in flight, and when all have, they begin again in the next
generation. Leaders take back what was under way and look for the request that is to blame, one
group at a time (engine/schedule/quarantine.py).
"""

from __future__ import annotations

import gc
import logging
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import NoReturn

import torch

from moesaic.comm.collectives.collective import Collective, SingleRank, WindowCollective
from moesaic.comm.collectives.group import Peers
from moesaic.comm.collectives.pipeline import Pipe
from moesaic.comm.errors import PeerTimeout, WindowAborted
from moesaic.comm.launch.rank_link import RankLink, last_lines
from moesaic.comm.supervise.control_page import EpochChanged, StepRolledBack
from moesaic.config import ServerArgs
from moesaic.core import messages
from moesaic.core.rank_state import RankState
from moesaic.engine.runner.gpu_runner import make_runner
from moesaic.engine.runner.step_time import SlowStepDetector
from moesaic.engine.schedule import plan_codec as wires
from moesaic.engine.schedule.plan import (
    StageOrder,
    StepAgreement,
    StepHandle,
    StepPlan,
    decode_order,
    decode_result,
    encode,
)
from moesaic.engine.schedule.plan_codec import PlanReceiver, PlanSender
from moesaic.engine.setup.memory_plan import COLLECTIVE_BYTES, pipe_spec
from moesaic.engine.worker.leader import NOTHING, Leader
from moesaic.engine.worker.rank_context import RankContext
from moesaic.engine.worker.rank_info import holdings
from moesaic.engine.worker.rank_stats import RankStatsReporter
from moesaic.observe.spans import SpanKind

logger = logging.getLogger(__name__)

# What ends a step without being its fault, or cannot be helped by another try.
FINAL = (StepRolledBack, EpochChanged, WindowAborted, PeerTimeout)


def run(link: RankLink) -> None:
    """Until the supervisor ends it."""
    # What ranks have in common was logged before they were started.
    if not logging.getLogger().isEnabledFor(logging.DEBUG):
        quiet = "moesaic.engine.setup.moe_setup" if link.shows_progress else "moesaic"
        logging.getLogger(quiet).setLevel(logging.WARNING)
        # Batches are each leader's own.
        logging.getLogger("moesaic.engine.schedule.scheduler_metrics").setLevel(
            logging.getLogger().level
        )
    rank = Worker(link)
    # What was made until now stays: to look through it for garbage would hold up a step.
    gc.collect()
    gc.freeze()
    rank.serve()


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A step under way, since then; `has_items`: work of this rank's group."""

    when: int
    turn: StepAgreement
    has_items: bool


class Worker:
    def __init__(self, link: RankLink) -> None:
        self.link, self.mesh, self.place = link, link.mesh, link.place
        self.args = ServerArgs(**link.config)
        self.ranks = join(link)
        self.runner = make_runner(self.args, self.ranks)
        self.leader = Leader(link, self.args, self.runner) if self.place.is_leader else None
        self.spans = link.status.spans = self.runner.spans
        group = None if self.leader is None else self.leader.core.tally.stats
        self.observer = RankStatsReporter(self.runner, link.rank, group)
        self._pace = SlowStepDetector()
        self._woken: messages.Wake | None = None
        self.pipe = self._make_pipe()
        self.number = 0
        self._sender, self._receiver = PlanSender(), PlanReceiver()
        self._local: deque[StepHandle] = deque()
        self._under_way: deque[_UnderWay] = deque()
        self._finished = 0
        """The last step whose results have been taken in."""
        self._ended = 0
        """When that was."""
        self._suspects = [0] * self.mesh.dp
        """Sets of requests that each attention group has to try by themselves."""
        self._is_trial = False
        """Whether the step is for one such set."""
        self._failure = ""
        """The last one that was logged."""
        self._recall: messages.RollbackStep | None = None
        facts = {} if self.leader is None else asdict(self.leader.core.facts)
        link.ready(facts | holdings(self.runner))

    def serve(self) -> None:
        carry_out = self._lead if self.ranks.is_first else self._follow
        awake = False
        while True:
            try:
                if not awake:
                    self._sleep()
                awake = False
                carry_out()
            except StepRolledBack as recalled:
                self._begin_again(recalled.generation)
                awake = True

    def _sleep(self) -> None:
        """Until woken; what comes for the leader meanwhile is taken in."""
        while True:
            woken, self._woken = self._woken, None
            message = woken or self.link.receive(self._patience())
            if isinstance(message, messages.Wake):
                self.number = message.round
                return
            self._heed(message)

    def _patience(self) -> float | None:
        return None if self.leader is None else self.leader.core.tally.patience

    def _heed(self, message: messages.AnyMessage | None) -> None:
        if isinstance(message, messages.RollbackStep):
            self._recall = message
            if message.generation > self.link.status.generation:
                raise StepRolledBack(message.generation)
        elif isinstance(message, messages.Query) and message.every:
            value = self.observer.answer(message.what, message.options)
            group = self.mesh.group_of(self.place)
            self.link.send(messages.QueryReply(message.number, group, value, self.link.rank))
        elif self.leader is None:
            return
        elif message is None:
            self.leader.core.tally.flush()
        else:
            self.leader.heed(message)

    def _look(self) -> None:
        """Takes in what has come. To be woken again a rank may be told before it sleeps."""
        while (message := self.link.receive(0.0)) is not None:
            if isinstance(message, messages.Wake):
                self._woken = message
            else:
                self._heed(message)

    def _lead(self) -> None:
        """Steps until no rank of the stage has anything to do."""
        going_on = True
        while going_on:
            self._look()
            try:
                going_on = self._step()
            except FINAL:
                raise
            except Exception as error:
                self._report_failure(error)

    def _step(self) -> bool:
        """One step; whether there may be another."""
        start = time.monotonic_ns()
        self.spans.begin_step(self.number + 1)
        self._is_trial = any(self._suspects)
        turn, plan, wire = self._agree(self._plan())
        if turn.counts:
            self.spans.add(SpanKind.PLAN, start, tokens=plan.num_tokens)
            self._compute(turn, plan, wire)
            self._under_way.append(_UnderWay(start, turn, bool(plan.items)))
        if self._under_way and (not turn.counts or len(self._under_way) >= self._depth):
            self._finish_oldest()
        elif not turn.counts and not any(self._suspects):
            self._go_to_sleep(turn)
            return False
        if turn.counts:
            self._count_step(plan, start)
        return True

    @property
    def _depth(self) -> int:
        """Steps that may be under way at once."""
        if self._is_trial:
            return 1
        overlaps = self.runner.overlaps and not self.args.disable_overlap_schedule
        return 2 if overlaps else self.mesh.pp

    def _count_step(self, plan: StepPlan, start: int) -> None:
        self.observer.steps += 1
        self.spans.add(SpanKind.STEP, start, tokens=plan.num_tokens)

    def _judge(self, begun: _UnderWay) -> None:
        """One rank of a replica is enough to see that a step was slow."""
        now, turn = time.monotonic_ns(), begun.turn
        seconds = (now - max(begun.when, self._ended)) / 1e9
        self._ended = now
        if self.place.tp_rank > 0:
            return
        usual = self._pace.take(turn.prefill, sum(turn.counts), seconds)
        if usual is not None:
            self.link.send(messages.SlowStep(self.place.replica, turn.number, seconds, usual))

    def _plan(self) -> StepPlan:
        """While there are suspects only the first group that has any does something: so it is clear
        whose requests make a step fail."""
        turn = next((group for group, sets in enumerate(self._suspects) if sets), None)
        if self.leader is None or turn not in (None, self.place.dp_rank):
            return NOTHING
        return self.leader.plan(self.mesh.pp)

    def _report_failure(self, error: Exception) -> NoReturn:
        """Until the supervisor calls all ranks back from the step."""
        generation, text = self.link.status.generation, last_lines(error)
        # Once is enough: the steps that look for the request to blame fail in the same way.
        trace = None if text == self._failure else error
        logger.warning("step %d failed: %s", self.number, text, exc_info=trace)
        self._failure = text
        self.link.send(messages.StepFailed(self.link.rank, generation, self.number, text))
        while True:
            self._heed(self.link.receive(None, f"be called back from step {self.number}"))

    def _begin_again(self, generation: int) -> None:
        """In the next generation: abandon the step, wait until all ranks have, forget what was in
        flight. An error in here is final."""
        self.link.status.generation = generation
        while self._recall is None or self._recall.generation != generation:
            self._heed(self._wait_for_word())
        self.runner.abandon(f"step {self.number} is abandoned")
        suspects = 0 if self.leader is None else self._retreat(self.leader, self._recall)
        self.link.send(messages.StepAbandoned(self.link.rank, generation, self.number, suspects))
        resume = self._wait_for_word()
        while not isinstance(resume, messages.ResumeSteps):
            self._heed(resume)
            resume = self._wait_for_word()
        self.number, self._suspects = resume.round, resume.suspects
        self._under_way.clear()
        self._local.clear()
        self._sender, self._receiver = PlanSender(), PlanReceiver()
        self.link.restart(generation)

    def _wait_for_word(self) -> messages.AnyMessage | None:
        return self.link.receive(None, f"abandon step {self.number}")

    def _retreat(self, leader: Leader, recall: messages.RollbackStep) -> int:
        """How many sets of requests are to be tried by themselves. A step that this group has its
        results of has done it no harm."""
        if recall.step <= self._finished:
            return leader.retreat()
        return leader.retreat(recall.error, alone=self._is_trial or self.mesh.dp == 1)

    def _agree(self, plan: StepPlan) -> tuple[StepAgreement, StepPlan, bytes]:
        """The step that all ranks of this stage are about to do, and their leader's plan of it,
        also as others are told it."""
        self.number += 1
        self.link.status.begin_step(self.number)
        if self.mesh.world == 1:
            return self._settle(plan), plan, wires.NOTHING
        wire = self._encode(plan)
        data = wire if self.mesh.attention_tp > 1 and plan.items else b""
        logits = sum(1 for _ in plan.logit_rows())
        suspects = 0 if self.leader is None else self.leader.core.num_suspects
        own = torch.tensor([[plan.num_tokens, logits, int(plan.prefill), len(data), suspects]])
        operation = f"agree on step {self.number}"
        told = self.ranks.stage.gather_rows(own, [1] * self.mesh.tp, operation)
        table = told[:: self.mesh.attention_tp].tolist()
        counts, logit_rows, prefills, lengths, suspect_sets = zip(*table, strict=True)
        self._suspects = list(suspect_sets)
        length = lengths[self.place.dp_rank]
        if length:
            wire = self._share(data, length, operation)
            plan = plan if data else self._receiver.decode(wire)
        if not any(counts):
            return StepAgreement(self.number), plan, wire
        return StepAgreement(self.number, counts, logit_rows, any(prefills)), plan, wire

    def _settle(self, plan: StepPlan) -> StepAgreement:
        """As `_agree`, where there is nobody to agree with."""
        assert self.leader is not None
        self._suspects = [self.leader.core.num_suspects]
        if not plan.items:
            return StepAgreement(self.number)
        return StepAgreement(self.number, (plan.num_tokens,), prefill=plan.prefill)

    def _encode(self, plan: StepPlan) -> bytes:
        """For whoever else carries it out."""
        if self.leader is None or self.mesh.attention_tp * self.mesh.pp == 1:
            return wires.NOTHING
        return self._sender.encode(plan)

    def _share(self, data: bytes, length: int, operation: str) -> bytes:
        """The leader's plan to its followers."""
        sizes = [length] + [0] * (self.mesh.attention_tp - 1)
        raw = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
        told = self.ranks.attention.gather_rows(raw.to(torch.uint8).view(-1, 1), sizes, operation)
        return told.numpy().tobytes()

    def _compute(self, turn: StepAgreement, plan: StepPlan, wire: bytes) -> None:
        if self.pipe is None:
            self._local.append(self.runner.begin(plan, turn))
        else:
            self.pipe.send(encode(StageOrder(turn, wire)), self.runner.forward(plan, turn))

    def _finish_oldest(self) -> None:
        """Takes in the results of the step that has been under way for longest."""
        begun = self._under_way.popleft()
        result = self._local.popleft().wait() if self._local else None
        if self.leader is not None and begun.has_items:
            if result is None:
                assert self.pipe is not None
                result = decode_result(self.pipe.take_reply())
            self.leader.core.apply(result)
            self.leader.report()
            self._judge(begun)
        self._finished = begun.turn.number

    def _go_to_sleep(self, turn: StepAgreement) -> None:
        if self.pipe is not None:
            self.pipe.send(encode(StageOrder(turn, wires.NOTHING)), None)
        if self.place.tp_rank == 0:
            self.link.send(messages.Asleep(self.place.replica, turn.number))

    def _follow(self) -> None:
        """Carries out the orders of the stage before until it goes to sleep."""
        awake = True
        while awake:
            try:
                awake = self._carry_out_next()
            except FINAL:
                raise
            except Exception as error:
                self._report_failure(error)

    def _carry_out_next(self) -> bool:
        """One order; whether there may be another."""
        assert self.pipe is not None
        self.link.status.enter(RankState.COMPUTING)
        self._look()
        data, x_TH = self.pipe.receive()
        order = decode_order(data)
        start, self.number = time.monotonic_ns(), order.turn.number
        self.link.status.begin_step(self.number)
        self.spans.begin_step(self.number)
        asleep = not order.turn.counts
        plan = self._receiver.decode(order.plan)
        hidden_TH = None if asleep else self.runner.forward(plan, order.turn, x_TH)
        if not self.ranks.is_last:
            self.pipe.send(data, hidden_TH)
        elif hidden_TH is not None:
            result = self.runner.results(plan, order.turn, hidden_TH)
            if self.place.attention_rank == 0 and plan.items:
                self.pipe.reply(encode(result))
        if not asleep:
            self._count_step(plan, start)
        return not asleep

    def _make_pipe(self) -> Pipe | None:
        if self.mesh.pp == 1:
            return None
        peers = self.link.group(
            f"pipe {self.place.replica} {self.place.tp_rank}", self.mesh.pipe_ranks(self.place)
        )
        config = self.runner.model.config
        spec = pipe_spec(self.mesh, self.runner.limits, config.hidden_size, config.dtype)
        return Pipe(peers, spec, self.ranks.timeout)


def join(link: RankLink) -> RankContext:
    """Meets the ranks that this one computes with."""
    mesh, place = link.mesh, link.place
    stage_name = f"{place.replica} {place.stage}"
    stage_peers = link.group(f"stage {stage_name}", mesh.stage_ranks(place))
    timeout = link.timeout
    stage = attention = _collective(stage_peers, timeout)
    attention_peers = stage_peers
    if mesh.dp > 1:
        name = f"attention {stage_name} {place.dp_rank}"
        attention_peers = link.group(name, mesh.attention_ranks(place))
        attention = _collective(attention_peers, timeout)
    return RankContext(
        mesh=mesh,
        place=place,
        replica=link.group(f"replica {place.replica}", mesh.replica_ranks(place)),
        stage_peers=stage_peers,
        stage=stage,
        attention=attention,
        attention_peers=attention_peers,
        status=link.status,
        timeout=timeout,
    )


def _collective(peers: Peers, timeout: float) -> Collective:
    return SingleRank() if peers.size == 1 else WindowCollective(peers, COLLECTIVE_BYTES, timeout)
