"""The requests of a serving group, on the rank that plans for it."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from msgspec.structs import astuple

from moesaic.comm.launch.rank_link import RankLink
from moesaic.core import messages
from moesaic.core.request import FinishReason, NewRequest, Request
from moesaic.engine.schedule.inflight import InflightStep
from moesaic.engine.schedule.plan import StepResult
from moesaic.engine.schedule.request_state import RequestState
from moesaic.engine.worker.planner import Planner

logger = logging.getLogger(__name__)


class Leader:
    """The requests of a serving group, on the rank that plans for it: it takes them from the
    supervisor and reports their tokens."""

    def __init__(self, link: RankLink, planner: Planner) -> None:
        self.link, self.planner = link, planner
        self.group = link.mesh.group_of(link.place)
        self._deltas: list[messages.RequestDelta] = []

    def handle(self, message: messages.AnyMessage) -> None:
        if isinstance(message, messages.Submit):
            for new in message.requests:
                self._submit(new)
            self.report()
        elif isinstance(message, messages.Abort):
            self.planner.abort(message.request_no)
            self.report()
        elif isinstance(message, messages.Query):
            flush = message.what == "flush_cache"
            value = self.planner.kv.flush() if flush else self.planner.info()
            self.link.send(messages.QueryReply(message.number, self.group, value))

    def plan(self, parts: int) -> InflightStep:
        step = self.planner.plan(parts)
        self.report()  # requests that ended because they could not be planned
        return step

    def apply(self, step: InflightStep, result: StepResult, seconds: float) -> None:
        self.planner.metrics.observe(step, result, seconds)
        self.planner.apply(step, result)
        self.report()

    def rollback(self, steps: Iterable[InflightStep], error: str, alone: bool) -> int:
        """Undoes all in-flight steps, with an `error` because one of them failed; returns how many
        sets of requests are to run by themselves."""
        suspects = self.planner.rollback(steps)
        if error:
            self.planner.report_failure(suspects, error, alone=alone)
        self.report()
        return self.planner.num_suspects

    def report(self) -> None:
        """Sends what requests got since the last report to the supervisor."""
        if self._deltas:
            self.link.send(messages.StepOutput(self._deltas))
            self._deltas = []

    def _submit(self, new: NewRequest) -> None:
        """A request that cannot be accepted affects no other."""
        try:
            self._add(new)
        except Exception as error:
            logger.exception("a request was refused")
            finish = FinishReason("abort", message=f"refused: {error!r}", failed=True)
            self._deltas.append(messages.RequestDelta(new.request_no, [], finish=finish))

    def _add(self, new: NewRequest) -> None:
        request = Request(*astuple(new))
        if new.emitted:  # logprobs of the prompt were reported with the first token
            request.logprob_start = request.prompt_len - 1
        reported = _Reported(request)
        state = RequestState(request, None, lambda _: self._deltas.append(reported.delta()), 1)
        self.planner.add(state)


class _Reported:
    """How much of a request the supervisor knows: the prompt, and the tokens that were emitted
    before this rank got it, of which this rank has no logprobs."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._num_tokens = len(request.token_ids)
        self._num_logprobs = self._num_scored = 0

    def delta(self) -> messages.RequestDelta:
        request, tokens = self._request, self._num_tokens
        seen, scored = self._num_logprobs, self._num_scored
        self._num_tokens = len(request.token_ids)
        self._num_logprobs = len(request.output_logprobs)
        self._num_scored = len(request.input_logprobs)
        return messages.RequestDelta(
            request_no=request.request_no,
            token_ids=request.token_ids[tokens:],
            logprobs=request.output_logprobs[seen:],
            top_logprobs=request.output_top_logprobs[seen:],
            input_logprobs=request.input_logprobs[scored:],
            input_top_logprobs=request.input_top_logprobs[scored:],
            cached_tokens=request.cached_tokens,
            retractions=request.retractions,
            finish=request.finish_reason,
            queue_seconds=request.queue_seconds,
        )
