"""The requests of a serving group, on the rank that plans for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from msgspec.structs import astuple

from moesaic.comm.launch.rank_link import RankLink
from moesaic.core import messages
from moesaic.core.request import FinishReason, NewRequest, Request, failure
from moesaic.disagg.messages import PromptResult
from moesaic.disagg.sender import KVSender
from moesaic.engine.schedule.inflight import InflightStep
from moesaic.engine.schedule.plan import ItemResult, StepResult
from moesaic.engine.schedule.request_state import Progress, RequestState
from moesaic.engine.schedule.step_budget import StepCost
from moesaic.engine.worker.arrivals import Arrivals
from moesaic.engine.worker.planner import Planner

logger = logging.getLogger(__name__)


class Leader:
    """Takes requests from the supervisor and reports their tokens to it."""

    def __init__(
        self,
        link: RankLink,
        planner: Planner,
        arrivals: Arrivals | None = None,
        sender: KVSender | None = None,
    ) -> None:
        self.link, self.planner = link, planner
        self.arrivals, self._sender = arrivals, sender
        self.group = link.mesh.group_of(link.place)
        self._output = messages.StepOutput([])

    def handle(self, message: messages.AnyMessage) -> None:
        if isinstance(message, messages.Submit):
            for new in message.requests:
                self._submit(new)
            self.report()
        elif isinstance(message, messages.Abort):
            self.planner.abort(message.request_no)
            self.report()
        elif isinstance(message, messages.Query):
            value = self._answer(message.what)
            self.link.send(messages.QueryReply(message.number, self.group, value))
        self.advance()

    def advance(self) -> None:
        """Takes what other instances have sent, and makes room for more."""
        if self.arrivals is not None and self.arrivals.advance():
            self.report()

    def _answer(self, what: str) -> Any:
        if what == "flush_cache":
            return self.planner.kv.flush()
        rooms = [] if self.arrivals is None else self.arrivals.state()
        if what == "rooms":
            return rooms
        transports = {} if self._sender is None else self._sender.transports
        return self.planner.info() | {"rooms": rooms, "kv_transports": transports}

    @property
    def step_cost(self) -> StepCost:
        return self.planner.scheduler.step_budget.cost

    def plan(self, parts: int) -> InflightStep:
        step = self.planner.plan(parts)
        self.report()  # requests that ended because they could not be planned
        return step

    def apply(self, step: InflightStep, result: StepResult, seconds: float) -> None:
        self.planner.observe(step, result, seconds)
        self.planner.apply(step, result)
        self.report()
        self.advance()

    def rollback(self, steps: Sequence[InflightStep], error: str, alone: bool) -> int:
        """Undoes all in-flight steps, with an `error` because one of them failed; returns how many
        sets of requests are to run by themselves."""
        suspects = self.planner.rollback(steps, failed=bool(error))
        if error:
            alone = alone and not any(step.has_ended_requests for step in steps)
            self.planner.report_failure(suspects, error, alone=alone)
        self.report()
        return self.planner.num_suspects

    def report(self) -> None:
        """Sends what requests got since the last report to the supervisor."""
        output = self._output
        if output.numbers or output.deltas:
            self.link.send(output)
            for sent in (output.numbers, output.tokens, output.deltas):
                sent.clear()

    def _submit(self, new: NewRequest) -> None:
        """A request that cannot be accepted affects no other."""
        try:
            self._add(new)
        except Exception as error:
            self.planner.give_up(error, new)
            logger.exception("a request was refused")
            finish = failure(f"refused: {error!r}")
            self._output.deltas.append(messages.RequestDelta(new.request_no, [], finish=finish))

    def _add(self, new: NewRequest) -> None:
        request = Request(*astuple(new))
        if new.emitted:  # logprobs of the prompt were reported with the first token
            request.logprob_start = request.prompt_len - 1
        if self.arrivals is not None and request.room is not None:
            self.arrivals.expect(request)
        self.planner.add(self._state(request))

    def _state(self, request: Request) -> ReportedRequest:
        if self._sender is None or request.kv_target is None:
            return ReportedRequest(request, self._output)
        return SentRequest(request, self._output, self._sender)


class ReportedRequest(RequestState):
    """Adds its progress to `output`. The supervisor knows the prompt, and the tokens that were
    emitted before this rank got it, whose logprobs this rank does not have."""

    __slots__ = (
        "_num_logprobs",
        "_num_scored",
        "_num_tokens",
        "_output",
        "_plain_after",
        "_routed_bytes",
    )

    def __init__(self, request: Request, output: messages.StepOutput) -> None:
        super().__init__(request, None, _nobody_listens)
        self._output = output
        self._plain_after = -1
        """The retractions that the supervisor knows, if a token needs no delta then; else -1."""
        self._num_tokens = len(request.token_ids)
        self._num_logprobs = self._num_scored = self._routed_bytes = 0

    def accept_all(self, found: ItemResult | messages.RequestDelta) -> FinishReason | None:
        if len(found.token_ids) == 1 and self.request.retractions == self._plain_after:
            return self.accept_one(found.token_ids[0], time.monotonic())
        reason = super().accept_all(found)
        if reason is None and found.token_ids:  # else `finish` follows
            self.notify()
        return reason

    def accept_one(self, token_id: int, now: float) -> FinishReason | None:
        """Most tokens end nothing and come with nothing else: they need no delta."""
        request = self.request
        if request.retractions == self._plain_after and token_id not in self.stop_ids:
            token_ids = request.token_ids
            if len(token_ids) + 1 < self.most_tokens:
                token_ids.append(token_id)
                self._num_tokens += 1
                self._output.numbers.append(request.request_no)
                self._output.tokens.append(token_id)
                return None
        if (reason := self.accept(token_id, now)) is None:
            self.notify()
        return reason

    def notify(self) -> None:
        """Adds a delta with all that is new."""
        request = self.request
        delta = messages.RequestDelta(
            request.request_no,
            request.token_ids[self._num_tokens :],
            cached_tokens=request.cached_tokens,
            retractions=request.retractions,
            finish=request.finish_reason,
            queue_seconds=request.queue_seconds,
            drafts=request.draft_counts,
        )
        self._num_tokens = len(request.token_ids)
        if request.return_logprob:
            self._add_logprobs(delta)
        if request.routed_start is not None:
            delta.routed = bytes(request.routed[self._routed_bytes :])
            delta.routed_first = request.routed_start + self._routed_bytes // request.routed_row
            self._routed_bytes = len(request.routed)
        if not request.return_logprob and request.routed_start is None:
            self._plain_after = request.retractions
        self._output.deltas.append(delta)

    def _add_logprobs(self, delta: messages.RequestDelta) -> None:
        request, seen, scored = self.request, self._num_logprobs, self._num_scored
        delta.logprobs = request.output_logprobs[seen:]
        delta.top_logprobs = request.output_top_logprobs[seen:]
        delta.input_logprobs = request.input_logprobs[scored:]
        delta.input_top_logprobs = request.input_top_logprobs[scored:]
        self._num_logprobs = len(request.output_logprobs)
        self._num_scored = len(request.input_logprobs)


class SentRequest(ReportedRequest):
    """A request that another instance continues: it gets what there is once the prompt is computed.
    If that fails, the client's process tells it."""

    __slots__ = ("_sender",)

    def __init__(self, request: Request, output: messages.StepOutput, sender: KVSender) -> None:
        super().__init__(request, output)
        self._sender = sender

    def finish(self, reason: FinishReason) -> None:
        super().finish(reason)
        request = self.request
        assert request.kv_target is not None
        if reason.type == "abort":
            return
        result = PromptResult(
            request.kv_target.ticket,
            request.token_ids[request.kv_target.stop :],
            request.output_logprobs,
            request.output_top_logprobs,
            request.input_logprobs,
            request.input_top_logprobs,
            bytes(request.routed),
            request.cached_tokens,
            None if len(request.token_ids) > request.kv_target.stop else reason,
        )
        self._output.deltas[-1].unsent = self._sender.finish(request.kv_target, result)


def _nobody_listens(_: Progress) -> None:
    """The listener of a request that is reported instead."""
