"""How the ranks that compute a step agree on it, and pass it from stage to stage.

One small all-gather gives all ranks of the first stage what each must know of a step; followers
also get their leader's plan. A pipeline passes both to the next stage with the hidden states. All
decisions follow from the gathered values, so that all ranks decide alike.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from msgspec.structs import astuple
from torch import Tensor

from moesaic.comm.collectives.pipeline import Pipe
from moesaic.comm.supervise.control_page import RankStatus
from moesaic.core.rank_state import RankState
from moesaic.engine.rebalance.orders import RankReport
from moesaic.engine.rebalance.rebalancer import Rebalancer
from moesaic.engine.runner.routed_experts import join_layers
from moesaic.engine.schedule import plan_codec
from moesaic.engine.schedule.inflight import InflightStep
from moesaic.engine.schedule.plan import (
    FinishedStep,
    StageOrder,
    StepAgreement,
    StepHandle,
    StepResult,
    decode_order,
    decode_result,
    encode,
)
from moesaic.engine.schedule.plan_codec import PlanReceiver, PlanSender
from moesaic.engine.schedule.step_budget import StepWork, heaviest
from moesaic.engine.setup.rank_context import RankContext
from moesaic.engine.worker.planner import Planner
from moesaic.engine.worker.step_splitter import StepSplitter


@dataclass(frozen=True, slots=True)
class PipelineReply:
    """The results of a step come back from the last stage."""

    pipe: Pipe
    hidden_TH: None = None
    is_done: bool = False

    def wait(self) -> StepResult:
        return decode_result(self.pipe.take_reply())


class Stage:
    """The ranks that compute a step together with this one."""

    number = 0
    """The step that was agreed on last."""
    pipeline_depth = 1
    """Steps that a pipeline has in flight at once."""
    holds_prompts = False
    """A group has held prompts back from the last step, so that there is more to do."""
    reports: Sequence[RankReport] = ()
    """What the ranks of the stage have told of moving experts, if these move."""
    is_whole = True
    """No rank of this rank's attention group is lost."""

    @property
    def is_trial(self) -> bool:
        """The next step looks for a request that breaks it: one step, and one group, at a time."""
        return False

    @property
    def awaits_tokens(self) -> bool:
        """The group that this rank plans for needs the tokens of all steps in flight."""
        return False

    def may_plan(self) -> bool:
        return True

    def agree(self, step: InflightStep) -> Tensor | None:
        """Sets the step's agreement and, on followers, its plan; the previous stage's output."""
        raise NotImplementedError

    def hand_on(self, step: InflightStep, handle: StepHandle) -> StepHandle:
        """Gives the hidden states to the next stage; returns the handle of the step's results."""
        return handle

    def pass_on(self, goes_on: bool) -> bool:
        """Called in a step without work, with nothing in flight: whether another one follows.
        `goes_on`: whether this rank has more to do."""
        return goes_on

    def stop(self) -> None:
        """Lets the next stage sleep until ranks are woken."""

    def restart(self, number: int, suspects: list[int]) -> None:
        """`suspects`: sets of requests that each serving group has to run by themselves."""
        self.number = number


class SingleStage(Stage):
    """A single rank, without peers."""

    def __init__(self, planner: Planner, status: RankStatus | None = None) -> None:
        self._planner, self._status = planner, status

    @property
    def is_trial(self) -> bool:
        return self._planner.num_suspects > 0

    @property
    def awaits_tokens(self) -> bool:
        return self._planner.drafts.awaits_tokens

    def agree(self, step: InflightStep) -> None:
        self.number += 1
        if self._status is not None:
            self._status.begin_step(self.number)
        plan, work = step.plan, step.work
        counts = (plan.num_tokens,) if plan.has_work else ()
        step.agreement = StepAgreement(
            self.number,
            counts,
            prefill=plan.prefill,
            work=work,
            draft_steps=plan.draft_steps,
            draft_branches=plan.draft_branches,
            drafting=(plan.num_drafting,),
            extending=(plan.extending,),
        )


class FirstStage(Stage):
    """The first or only stage of a pipeline. `planner`: the serving group's, on its leader.
    `moves`: whether stages move experts, each among its ranks; this one may have none."""

    def __init__(
        self,
        ranks: RankContext,
        status: RankStatus,
        planner: Planner | None,
        pipe: Pipe | None,
        moves: bool = False,
        rebalancer: Rebalancer | None = None,
        splitter: StepSplitter | None = None,
    ) -> None:
        self._ranks, self._status, self._planner, self._pipe = ranks, status, planner, pipe
        self._moves, self._rebalancer = moves, rebalancer
        self._splitter = splitter or StepSplitter()
        self._mesh, self._place = ranks.mesh, ranks.place
        self.pipeline_depth = self._mesh.pp
        self.restart(0, [0] * self._mesh.dp)

    def restart(self, number: int, suspects: list[int]) -> None:
        self.number, self._suspects = number, suspects
        self._sender, self._receiver = PlanSender(), PlanReceiver()
        self._encoded = plan_codec.NOTHING

    @property
    def is_trial(self) -> bool:
        return any(self._suspects)

    @property
    def awaits_tokens(self) -> bool:
        return self._planner is not None and self._planner.drafts.awaits_tokens

    def may_plan(self) -> bool:
        """Only the first group with suspects computes, so that its requests break the step."""
        first = next((group for group, sets in enumerate(self._suspects) if sets), None)
        return self.is_whole and first in (None, self._place.dp_rank)

    def agree(self, step: InflightStep) -> None:
        self.number += 1
        self._status.begin_step(self.number)
        plan, mesh, operation = step.plan, self._mesh, f"agree on step {self.number}"
        self._encoded = self._encode(step)
        data = self._encoded if mesh.attention_tp > 1 and plan.has_work else b""
        logits = len(plan.logit_rows())
        suspects = 0 if self._planner is None else self._planner.num_suspects
        delayer = None if self._planner is None else self._planner.scheduler.delayer
        told = 0 if delayer is None else delayer.told
        half = self._splitter.first_half(plan)
        drafts = [plan.draft_steps, plan.draft_branches, plan.num_drafting, plan.extending]
        drafts.append(self._wanted_drafts)
        facts = [plan.num_tokens, logits, int(plan.prefill), len(data), suspects, told, half]
        facts += drafts
        report = self._report()
        own = torch.tensor([[*report, *facts, *astuple(step.work)]])
        rows = self._ranks.stage.gather_rows(own, [1] * mesh.tp, operation)
        if self._moves:
            self.reports = [RankReport(*row) for row in rows[:, : len(report)].tolist()]
        table = rows[:: mesh.attention_tp, len(report) :].tolist()
        columns = zip(*table, strict=True)
        counts, logit_rows, prefills, lengths, suspect_sets, told_by, halves, *more = columns
        steps, branches, drafting, extending, wanted, *_ = more
        self._settle_drafts(wanted)
        works = [StepWork(*row[len(facts) :]) for row in table]
        self._settle_prompts(works, told_by)
        self._suspects = list(suspect_sets)
        if length := lengths[self._place.dp_rank]:
            self._encoded = self._share(data, length, operation)
            step.plan = plan if data else self._receiver.decode(self._encoded)
        step.agreement = StepAgreement(self.number)
        if any(counts):
            whole = StepAgreement(self.number, counts, logit_rows, any(prefills), heaviest(works))
            whole.draft_steps, whole.draft_branches = max(steps), max(branches)
            whole.drafting, whole.extending = drafting, extending
            step.agreement = self._splitter.settle(whole, halves)

    @property
    def _wanted_drafts(self) -> int:
        return -1 if self._planner is None else self._planner.drafts.wanted

    def _settle_drafts(self, wanted: Sequence[int]) -> None:
        """All groups plan the largest drafts that any wants: a step with drafts of one is no faster
        than with those of all, and draft models run on all ranks."""
        most = max(wanted)
        if most >= 0 and self._planner is not None:  # else no group has requests
            self._planner.drafts.agreed = most

    def _report(self) -> RankReport | tuple[()]:
        if not self._moves:
            return ()
        finished = 0 if self._planner is None else self._planner.num_finished
        if self._rebalancer is None:
            return RankReport(finished=finished)
        return self._rebalancer.report(finished)

    @property
    def _finished(self) -> int:
        return sum(report.finished for report in self.reports)

    def _settle_prompts(self, works: list[StepWork], told: Sequence[int]) -> None:
        """Tells the scheduler what the other groups do, which wait for its prompts."""
        self.holds_prompts = any(told)
        if self._planner is None:
            return
        scheduler = self._planner.scheduler
        others = [work for group, work in enumerate(works) if group != self._place.dp_rank]
        scheduler.step_budget.others = heaviest([StepWork(), *others])
        if scheduler.delayer is not None:
            scheduler.delayer.settle(told, works)

    def _encode(self, step: InflightStep) -> bytes:
        """The plan for the ranks that follow this one."""
        if self._planner is None or self._mesh.attention_tp * self._mesh.pp == 1:
            return plan_codec.NOTHING
        return self._sender.encode(step.plan)

    def _share(self, data: bytes, length: int, operation: str) -> bytes:
        """Sends the leader's plan to its followers."""
        sizes = [length] + [0] * (self._mesh.attention_tp - 1)
        raw = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
        column = raw.to(torch.uint8).view(-1, 1)
        return self._ranks.attention.gather_rows(column, sizes, operation).numpy().tobytes()

    def hand_on(self, step: InflightStep, handle: StepHandle) -> StepHandle:
        if self._pipe is None:
            return handle
        routed = [handle.wait().routed] if step.plan.is_routed else []
        order = StageOrder(step.agreement, self._encoded, routed, self._finished)
        self._pipe.send(encode(order), handle.hidden_TH)
        if self._planner is not None and step.has_requests:
            return PipelineReply(self._pipe)
        return FinishedStep(StepResult([]))

    def pass_on(self, goes_on: bool) -> bool:
        """Other stages may move experts when this one has nothing to do."""
        if self._pipe is None or not self._moves:
            return goes_on
        agreement = StepAgreement(self.number)
        order = StageOrder(agreement, plan_codec.NOTHING, finished=self._finished, moves=goes_on)
        self._pipe.send(encode(order), None)
        moves = decode_order(self._pipe.take_reply()).moves
        assert moves is not None
        return moves

    def stop(self) -> None:
        if self._pipe is not None:
            order = StageOrder(StepAgreement(self.number), plan_codec.NOTHING)
            self._pipe.send(encode(order), None)


class LaterStage(Stage):
    """A later stage of a pipeline: it carries out the orders of the previous one."""

    def __init__(
        self,
        ranks: RankContext,
        status: RankStatus,
        pipe: Pipe,
        rebalancer: Rebalancer | None = None,
    ) -> None:
        self._ranks, self._status, self._pipe = ranks, status, pipe
        self._rebalancer = rebalancer
        self.restart(0, [])

    def restart(self, number: int, suspects: list[int]) -> None:
        self.number = number
        self._receiver = PlanReceiver()
        self._order = b""
        self._routed: list[bytes] = []
        self._idle: StageOrder | None = None

    def may_plan(self) -> bool:
        return False

    def agree(self, step: InflightStep) -> Tensor | None:
        self._status.enter(RankState.COMPUTING)
        self._order, x_TH = self._pipe.receive()
        order = decode_order(self._order)
        step.started_at, self.number = time.monotonic_ns(), order.agreement.number
        self._status.begin_step(self.number)
        step.plan, step.agreement = self._receiver.decode(order.plan), order.agreement
        self._routed = order.routed
        self._idle = None if order.moves is None else order
        self._exchange_reports(order)
        return x_TH

    def _exchange_reports(self, order: StageOrder) -> None:
        """Not before ranks sleep: experts would stay on their way until a request comes."""
        self.reports = ()
        if self._rebalancer is None or not (order.agreement.counts or self._idle):
            return
        finished = order.finished if self._ranks.place.tp_rank == 0 else 0
        own = torch.tensor([self._rebalancer.report(finished)])
        operation = f"move experts in step {self.number}"
        rows = self._ranks.stage.gather_rows(own, [1] * self._ranks.mesh.tp, operation)
        self.reports = [RankReport(*row) for row in rows.tolist()]

    def pass_on(self, goes_on: bool) -> bool:
        """Without an order for such a step ranks sleep, as no stage has anything to do."""
        if self._idle is None:
            return False
        self._idle.moves = bool(self._idle.moves) or goes_on
        if self._ranks.is_last:
            self._pipe.reply(encode(self._idle))
        else:
            self._pipe.send(encode(self._idle), None)
        return True

    def hand_on(self, step: InflightStep, handle: StepHandle) -> StepHandle:
        if not self._ranks.is_last:
            if self._routed:
                self._order = self._with_routed(handle.wait())
            self._pipe.send(self._order, handle.hidden_TH)
            return FinishedStep(StepResult([]))
        result = handle.wait()
        if self._routed:
            rows = len(step.plan.routed_rows())
            result.routed = join_layers([*self._routed, result.routed], rows)
        if self._ranks.place.attention_rank == 0 and step.plan.has_work:
            self._pipe.reply(encode(result))
        return FinishedStep(result)

    def _with_routed(self, result: StepResult) -> bytes:
        """The order for the next stage, with the routed experts of this one."""
        order = decode_order(self._order)
        order.routed.append(result.routed)
        return encode(order)

    def stop(self) -> None:
        if not self._ranks.is_last:
            self._pipe.send(self._order, None)
