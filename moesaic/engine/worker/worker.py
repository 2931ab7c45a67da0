"""The process of a rank: it runs the step loop while there is work, and sleeps in between.

A rank that raises in a step tells the supervisor, which rolls the step back on all ranks of the
replica: each abandons its step and drops what is in flight, and when all have, they go on in the
next generation. Leaders undo their in-flight steps and look for the request that breaks them, one
group at a time (engine/schedule/quarantine.py).
"""

from __future__ import annotations

import gc
import logging
from collections import deque
from dataclasses import asdict
from typing import NoReturn

from moesaic.comm.collectives.collective import Collective, SingleRank, WindowCollective
from moesaic.comm.collectives.group import Peers
from moesaic.comm.collectives.pipeline import Pipe
from moesaic.comm.errors import ConnectionLost, PeerTimeout, WindowAborted
from moesaic.comm.launch.rank_link import RankLink, last_lines
from moesaic.comm.supervise.control_page import EpochChanged, StepRolledBack
from moesaic.comm.windows.lasting_memory import LastingMemory
from moesaic.config import ServerArgs
from moesaic.core import messages
from moesaic.engine.elastic.members import RankMembers
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.engine.schedule.inflight import InflightStep
from moesaic.engine.setup.memory_plan import COLLECTIVE_BYTES, pipe_spec
from moesaic.engine.setup.rank_context import RankContext
from moesaic.engine.worker.arrivals import Arrivals
from moesaic.engine.worker.leader import Leader
from moesaic.engine.worker.planner import Planner
from moesaic.engine.worker.rank_info import rank_info
from moesaic.engine.worker.rank_stats import RankStatsReporter
from moesaic.engine.worker.stage import FirstStage, LaterStage, SingleStage, Stage
from moesaic.engine.worker.step_loop import StepLoop
from moesaic.engine.worker.step_splitter import StepSplitter
from moesaic.engine.worker.transfers import make_transfers

logger = logging.getLogger(__name__)

# Errors that the step does not cause, or that another try does not cure.
FINAL = (StepRolledBack, EpochChanged, WindowAborted, PeerTimeout)


def run(link: RankLink) -> None:
    """Serves until the supervisor ends the process."""
    # What ranks have in common was logged before they started.
    if not logging.getLogger().isEnabledFor(logging.DEBUG):
        quiet = "moesaic.engine.setup.moe_setup" if link.rank == 0 else "moesaic"
        logging.getLogger(quiet).setLevel(logging.WARNING)
        # Each leader logs its own batches, and the first rank of a stage what experts it moves.
        for own in ("schedule.scheduler_metrics", "rebalance.rebalancer"):
            logging.getLogger(f"moesaic.engine.{own}").setLevel(logging.getLogger().level)
    worker = Worker(link)
    # The objects of the start stay: a garbage collection that visits them would delay a step.
    gc.collect()
    gc.freeze()
    if worker.args.gc_threshold is not None:
        gc.set_threshold(*worker.args.gc_threshold)
    worker.serve()


class Worker:
    def __init__(self, link: RankLink) -> None:
        self.link, self.mesh, self.place = link, link.mesh, link.place
        self.args = ServerArgs(**link.config)
        self.ranks = join(link, lasting=self.args.weight_cache_mode != "off")
        self.runner = ModelRunner(self.args, self.ranks)
        link.status.spans = self.runner.spans
        self.transfers = self.runner.transfers = make_transfers(self.args, self.runner, link)
        self.leader = self._make_leader()
        self.planner = None if self.leader is None else self.leader.planner
        group = None if self.planner is None else self.planner.metrics.stats
        self.stats = RankStatsReporter(self.runner, link.rank, group)
        self.pipe = self._make_pipe()
        self.stage = self._make_stage()
        self.loop = StepLoop(self.runner, self.stage, self.leader, self.stats)
        if self.place.tp_rank == 0:  # one rank of a replica is enough to see a slow step
            self.loop.on_slow = self._report_slow
        self._wakes: deque[messages.Wake] = deque()
        """Those that came before it slept: a later stage may be several of them behind."""
        self._rollback: messages.RollbackStep | None = None
        self._last_error = ""
        self.members = RankMembers(self.runner, self.link.status)

    def _make_leader(self) -> Leader | None:
        if not self.place.is_leader:
            return None
        group = self.mesh.group_of(self.place)
        planner = Planner(self.args, self.runner, group)
        arrivals, rooms = None, self.transfers.rooms
        if rooms is not None:
            self.link.watch(rooms.wakeup_fd)
            arrivals = Arrivals(planner, rooms, self.link.send)
        return Leader(self.link, planner, arrivals, self.transfers.sender)

    def _make_pipe(self) -> Pipe | None:
        if self.mesh.pp == 1:
            return None
        peers = self.link.group(
            f"pipe {self.place.replica} {self.place.tp_rank}", self.mesh.pipe_ranks(self.place)
        )
        config = self.runner.model.config
        spec = pipe_spec(self.mesh, self.runner.limits, config.hidden_size, config.dtype)
        return Pipe(peers, spec, self.ranks.timeout)

    def _make_stage(self) -> Stage:
        status = self.link.status
        if self.mesh.world == 1:
            assert self.planner is not None
            return SingleStage(self.planner, status)
        rebalancer = self.runner.rebalancer
        if self.ranks.is_first:
            moves = rebalancer is not None or (self.args.enable_eplb and self.mesh.pp > 1)
            splitter = StepSplitter.of(self.args, self.runner)
            shared = (self.ranks, status, self.planner, self.pipe)
            return FirstStage(*shared, moves, rebalancer, splitter)
        assert self.pipe is not None
        return LaterStage(self.ranks, status, self.pipe, rebalancer)

    def serve(self) -> None:
        facts = {} if self.planner is None else asdict(self.planner.facts)
        self.link.ready(facts | rank_info(self.runner))
        awake = False
        while True:
            try:
                if not awake:
                    self._sleep()
                awake = False
                self._run_steps()
            except StepRolledBack as error:
                self._recover(error.generation)
                awake = True

    def _sleep(self) -> None:
        """Handles messages until one wakes the rank."""
        while True:
            wake = self._wakes.popleft() if self._wakes else None
            timeout = None if self.planner is None else self.planner.metrics.idle_timeout
            message = wake or self.link.receive(timeout)
            if isinstance(message, messages.Wake):
                self.stage.number = message.round
                return
            self._handle(message)

    def _handle(self, message: messages.AnyMessage | None) -> None:
        if isinstance(message, messages.RollbackStep):
            self._rollback = message
            if message.generation > self.link.status.generation:
                raise StepRolledBack(message.generation)
        elif isinstance(message, messages.Query) and message.every:
            self.link.send(self._answer(message))
        elif self.leader is None:
            return
        elif message is None:
            self.leader.advance()
            self.leader.planner.metrics.flush_log()
        else:
            self.leader.handle(message)

    def _answer(self, query: messages.Query) -> messages.QueryReply:
        """A question that cannot be answered ends no rank: it may be about a predecessor."""
        group, value, lost = self.mesh.group_of(self.place), None, False
        try:
            value = self.stats.answer(query.what, query.options)
        except Exception:
            lost = True
            logger.exception("%r cannot be answered", query.what)
        return messages.QueryReply(query.number, group, value, self.link.rank, lost)

    def _handle_received(self) -> None:
        """Handles the messages that are here, or come before it is time to plan the next step."""
        while True:
            if self.leader is not None:
                self.leader.advance()
            slack = self.loop.slack
            if not self.link.poll(slack):
                if slack:
                    continue
                return
            message = self.link.receive(0.0)
            if isinstance(message, messages.Wake):
                self._wakes.append(message)
            else:
                self._handle(message)

    def _run_steps(self) -> None:
        """Steps until no rank has work."""
        has_work = True
        while has_work:
            self._handle_received()
            try:
                has_work = self.loop.step()
                if not has_work:
                    self._stop()
            except FINAL:
                raise
            except Exception as error:
                if not self.loop.is_settled:
                    raise
                self._report_failure(error)

    def _stop(self) -> None:
        self.stage.stop()
        first = self.mesh.stage_ranks(self.place)[0]
        active = [rank for rank in self.link.lifecycle.membership.active if rank >= first]
        if self.ranks.is_first and active[0] == self.link.rank:
            self.link.send(messages.Asleep(self.place.replica, self.stage.number))

    def _report_slow(self, step: InflightStep, seconds: float, usual: float) -> None:
        self.link.send(messages.SlowStep(self.place.replica, step.number, seconds, usual))

    def _report_failure(self, error: Exception) -> NoReturn:
        """Waits until the supervisor rolls the step back on all ranks."""
        generation, text, number = self.link.status.generation, last_lines(error), self.stage.number
        # Steps that look for the culprit fail in the same way: one traceback is enough.
        trace = None if text == self._last_error else error
        logger.warning("step %d failed: %s", number, text, exc_info=trace)
        self._last_error = text
        lost_link = isinstance(error, ConnectionLost)
        self.link.send(messages.StepFailed(self.link.rank, generation, number, text, lost_link))
        while True:
            self._handle(self.link.receive(None, f"be called back from step {number}"))

    def _recover(self, generation: int) -> None:
        """Returns in a generation that all live ranks have entered: others may be lost meanwhile,
        with which another one begins."""
        while True:
            try:
                self._restart(generation)
                return
            except StepRolledBack as error:
                generation = error.generation

    def _restart(self, generation: int) -> None:
        """Abandons the step and resumes with all ranks in the next generation; errors are final."""
        self.link.status.generation = generation
        while self._rollback is None or self._rollback.generation != generation:
            self._handle(self._receive_order())
        self._wakes.clear()  # of the generation that ends: all ranks are awake from here on
        self.runner.abandon(f"step {self.stage.number} is abandoned")
        if self.runner.steps.stuck:
            raise RuntimeError(f"the GPU is unusable in this process: {self.runner.steps.stuck}")
        suspects = 0 if self.leader is None else self._undo_steps(self.leader, self._rollback)
        self.loop.inflight.clear()
        if self._rollback.ends_links:
            self.link.end_links(generation)
        self.link.send(
            messages.StepAbandoned(self.link.rank, generation, self.stage.number, suspects)
        )
        resume = self._receive_order()
        while not (isinstance(resume, messages.ResumeSteps) and resume.generation == generation):
            self._handle(resume)
            resume = self._receive_order()
        self.stage.restart(resume.round, resume.suspects)
        self.link.restart(generation, resume.active)
        if resume.epoch != self.members.epoch:
            self._adopt_members(resume)

    def _adopt_members(self, resume: messages.ResumeSteps) -> None:
        if self.leader is not None and self.leader.group in resume.reset:
            self.leader.planner.drop_all()
        live = set(resume.active)
        self.stage.is_whole = live.issuperset(self.mesh.attention_ranks(self.place))
        if self.planner is not None and self.runner.draft is not None:
            self.planner.drafts.rests = not live.issuperset(self.mesh.stage_ranks(self.place))
        self.link.send(self.members.adopt(resume.epoch, resume.active))

    def _receive_order(self) -> messages.AnyMessage | None:
        return self.link.receive(None, f"abandon step {self.stage.number}")

    def _undo_steps(self, leader: Leader, order: messages.RollbackStep) -> int:
        """Requests of this group cannot have broken a step whose results it already has."""
        error = order.error if order.step > self.loop.last_completed else ""
        alone = self.loop.in_trial or self.mesh.dp == 1
        return leader.rollback(self.loop.inflight, error, alone)


def join(link: RankLink, lasting: bool = False) -> RankContext:
    """Connects to the ranks that this one computes with. `lasting`: weights outlive the rank."""
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
        replica=link.group(f"replica {place.replica}", mesh.ranks_of_replica(place.replica)),
        stage_peers=stage_peers,
        stage=stage,
        attention=attention,
        attention_peers=attention_peers,
        status=link.status,
        timeout=timeout,
        memory=LastingMemory(link.node_store, link.rank) if lasting else None,
        returns=link.returns,
    )


def _collective(peers: Peers, timeout: float) -> Collective:
    return SingleRank() if peers.size == 1 else WindowCollective(peers, COLLECTIVE_BYTES, timeout)
