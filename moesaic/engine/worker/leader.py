"""The requests of a serving group, on the rank that plans for it."""

from __future__ import annotations

import logging

from moesaic.comm.launch.rank_link import RankLink
from moesaic.config import ServerArgs
from moesaic.core import messages
from moesaic.core.request import FinishReason, Request
from moesaic.core.sampling import SamplingParams
from moesaic.engine.frontend.request_state import RequestState
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.engine.schedule.plan import StepPlan
from moesaic.engine.worker.planner import EngineCore

logger = logging.getLogger(__name__)

NOTHING = StepPlan([], [])


class Leader:
    """The requests of a serving group, and what is told of them."""

    def __init__(self, link: RankLink, args: ServerArgs, runner: ModelRunner) -> None:
        self.link = link
        self.group = link.mesh.group_of(link.place)
        self.core = EngineCore(args, runner, self.group)
        self._news: list[messages.RequestDelta] = []

    def heed(self, message: messages.AnyMessage) -> None:
        if isinstance(message, messages.Submit):
            for new in message.requests:
                self._take(new)
            self.report()
        elif isinstance(message, messages.Abort):
            self.core.abort(message.rid)
            self.report()
        elif isinstance(message, messages.Query):
            value = self.core.kv.flush() if message.what == "flush_cache" else self.core.figures()
            self.link.send(messages.QueryReply(message.number, self.group, value))

    def plan(self, parts: int) -> StepPlan:
        """An error that no request is to blame for ends those of this group, and nothing else."""
        try:
            return self.core.plan(parts)
        except Exception as error:
            logger.exception("no step can be planned; all %d requests end", len(self.core.jobs))
            self.core.fail_all(f"the engine failed: {error!r}")
            return NOTHING
        finally:
            self.report()  # of requests that ended because their part could not be planned

    def retreat(self, error: str = "", alone: bool = False) -> int:
        """From all steps under way, with an `error` because one of them failed: how many sets of
        requests are to be tried by themselves."""
        suspects = self.core.retreat()
        if error:
            self.core.accuse(suspects, error, alone=alone)
        self.report()
        return self.core.num_suspects

    def report(self) -> None:
        """What was learned in this step, to the supervisor."""
        if self._news:
            self.link.send(messages.StepOutput(self._news))
            self._news = []

    def _take(self, new: messages.NewRequest) -> None:
        """A request that cannot be taken in harms nobody else."""
        try:
            self._add(new)
        except Exception as error:
            logger.exception("a request was refused")
            finish = messages.Finish("abort", message=f"refused: {error!r}", failed=True)
            self._news.append(messages.RequestDelta(new.rid, [], finish=finish))

    def _add(self, new: messages.NewRequest) -> None:
        request = Request(
            rid=new.rid,
            prompt_ids=new.prompt_ids,
            params=SamplingParams.from_dict(new.params),
            seed=new.seed,
            max_new_tokens=new.max_new_tokens,
            arrival=new.arrival,
            eos_ids=frozenset(new.eos_ids),
            return_logprob=new.return_logprob,
            # Logprobs of the prompt were told with the first token.
            logprob_start=len(new.prompt_ids) - 1 if new.emitted else new.logprob_start,
            top_logprobs_num=new.top_logprobs_num,
            token_ids=[*new.prompt_ids, *new.emitted],
        )
        told = _Told(request)
        self.core.add(RequestState(request, None, lambda _: self._news.append(told.delta()), 1))


class _Told:
    """How much of a request the supervisor knows: its prompt and what it had emitted before this
    rank got it, of which this rank has the tokens and no logprobs."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._num_tokens = len(request.token_ids)
        self._num_logprobs = self._num_scored = 0

    def delta(self) -> messages.RequestDelta:
        request, tokens = self._request, self._num_tokens
        seen, scored = self._num_logprobs, self._num_scored
        reason = request.finish_reason
        self._num_tokens = len(request.token_ids)
        self._num_logprobs = len(request.output_logprobs)
        self._num_scored = len(request.input_logprobs)
        return messages.RequestDelta(
            rid=request.rid,
            token_ids=request.token_ids[tokens:],
            logprobs=request.output_logprobs[seen:],
            top_logprobs=request.output_top_logprobs[seen:],
            input_logprobs=request.input_logprobs[scored:],
            input_top_logprobs=request.input_top_logprobs[scored:],
            cached_tokens=request.cached_tokens,
            retractions=request.retractions,
            finish=None if reason is None else _finish(reason),
            queue_seconds=request.queue_seconds,
        )


def _finish(reason: FinishReason) -> messages.Finish:
    return messages.Finish(
        reason.type, reason.matched, reason.length, reason.message, reason.failed
    )
