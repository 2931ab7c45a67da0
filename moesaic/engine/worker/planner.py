"""The engine without its surroundings: requests in, steps planned, their results out."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

from moesaic.config import ServerArgs
from moesaic.core.request import ABORTED, FinishReason, Request
from moesaic.engine.frontend.queries import RankAnswers, RankReply
from moesaic.engine.frontend.request_state import RequestState
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.engine.runner.step_time import SlowStepDetector
from moesaic.engine.sampling.sampler import SampleRow
from moesaic.engine.schedule.kv_manager import KVManager
from moesaic.engine.schedule.plan import (
    FUTURE_TOKEN,
    ItemResult,
    PlanItem,
    PromptScore,
    StepHandle,
    StepPlan,
    StepResult,
)
from moesaic.engine.schedule.quarantine import InflightPlan, Planned, Quarantine
from moesaic.engine.schedule.scheduler import Scheduled, Scheduler, SchedulerConfig
from moesaic.engine.schedule.scheduler_metrics import SchedulerMetrics
from moesaic.engine.worker.rank_info import holdings, providers, service_info
from moesaic.engine.worker.rank_stats import RankStatsReporter
from moesaic.observe.spans import SpanKind, Spans

logger = logging.getLogger(__name__)


Chosen = list[tuple[Scheduled, PlanItem]]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What callers must know of the model that is served; limits are those of one serving group."""

    vocab_size: int
    context_length: int
    cache_tokens: int
    max_running: int
    eos_ids: tuple[int, ...]
    num_experts: int = 0


@dataclass(frozen=True, slots=True)
class _Running:
    """A step that the runner was given, and when it was planned."""

    number: int
    when: int
    tokens: int
    prefill: bool
    begun: StepHandle


class EngineCore:
    """The requests of one serving group. Not thread-safe: one thread calls it.

    Where the runner overlaps steps with the host's work, the next step begins before the results
    of the last are known: two are under way at once, and requests take part in the second with a
    token that only the device knows. Requests for which that cannot be wait for their token.
    """

    fault: str = ""

    def __init__(self, args: ServerArgs, runner: ModelRunner | None = None, group: int = 0) -> None:
        self.args = args
        self.runner = runner or ModelRunner(args)
        self.overlaps = self.runner.overlaps and not args.disable_overlap_schedule
        self._taken: list[int] = []
        self.kv = KVManager(
            self.runner.num_pages,
            args.page_size,
            prefix_cache=not args.disable_radix_cache,
            on_take=self._taken.extend,
        )
        config = SchedulerConfig(
            max_running=self.runner.max_running,
            chunk_tokens=self.runner.chunk_tokens,
            conservativeness=args.schedule_conservativeness,
        )
        self.scheduler = Scheduler(config, self.kv)
        self.tally = SchedulerMetrics(self.scheduler, args.decode_log_interval, group)
        self.observer = RankStatsReporter(self.runner, group=self.tally.stats)
        self.front = Spans()
        """What callers' threads do beside the engine's."""
        self._pace = SlowStepDetector()
        self.jobs: dict[str, RequestState] = {}
        self.num_steps = 0
        self._under_way: deque[InflightPlan] = deque()
        self._running: deque[_Running] = deque()
        self._stepped = 0
        """When the last step's results had been taken in."""
        self._quarantine = Quarantine()
        self._ended: list[int] = []
        """Numbers of requests that are over, for the next plan to say."""

    @property
    def providers(self) -> dict[str, Any]:
        return providers(self.runner)

    @property
    def facts(self) -> ModelFacts:
        runner = self.runner
        return ModelFacts(
            vocab_size=runner.vocab_size,
            context_length=runner.context_length,
            cache_tokens=runner.num_pages * self.args.page_size,
            max_running=runner.max_running,
            eos_ids=tuple(sorted(runner.eos_ids)),
            num_experts=runner.num_experts,
        )

    @property
    def has_work(self) -> bool:
        """Requests, or steps under way whose requests have ended."""
        return self.scheduler.has_work or bool(self._under_way)

    @property
    def depth(self) -> int:
        """Steps that may be under way at once on one rank; those for suspects go alone."""
        return 2 if self.overlaps and not self._quarantine else 1

    def wake(self) -> None:
        """Called when the engine's thread has something to do besides its steps: it will look."""

    @property
    def patience(self) -> float | None:
        """How long nothing may happen before `rest` is due; None: for ever."""
        return self.tally.patience

    def rest(self) -> None:
        """There was nothing to do for a while."""
        self.tally.flush()

    def close(self) -> None:
        """Nothing to give back but memory."""

    def add(self, job: RequestState) -> None:
        assert job.request.rid not in self.jobs, f"request id {job.request.rid!r} is in use"
        self.jobs[job.request.rid] = job
        self.scheduler.add(job.request)

    def abort(self, rid: str, job: RequestState | None = None) -> None:
        """Whatever has that name, or with `job` only that one."""
        found = self.jobs.get(rid)
        if found is not None and job in (None, found):
            self._finish(found, FinishReason("abort", message=ABORTED))

    def fail_all(self, message: str) -> None:
        """Results of steps in flight are dropped when they come. Each caller learns the end of its
        request, whatever state the scheduler is in."""
        self._quarantine.clear()
        for job in list(self.jobs.values()):
            try:
                self._finish(job, FinishReason("abort", message=message, failed=True))
            except Exception:
                logger.exception("request %s could not be ended in order", job.request.rid)

    def ask(self, what: str, answer: Future[Any], options: Mapping[str, Any] | None = None) -> None:
        """Answers at once; `what`: info, flush_cache, or what a rank's Observer knows."""
        if self.observer.knows(what):
            now = time.monotonic_ns()
            value = self.observer.answer(what, dict(options or {}))
            answer.set_result(RankAnswers({0: RankReply(value, now, time.monotonic_ns())}))
            return
        answer.set_result({"info": self.info, "flush_cache": self.kv.flush}[what]())

    def info(self) -> dict[str, Any]:
        """In the shape that many ranks have, too."""
        rank = {"rank": 0, "place": "rank 0", **holdings(self.runner)} | {
            "state": "computing" if self.has_work else "idle",
            "step": self.num_steps,
            "computed": self.observer.busy,
            "waited": 0.0,
        }
        return service_info(asdict(self.args), [self.figures()], [rank], self.facts.num_experts)

    def figures(self) -> dict[str, Any]:
        return {
            "max_total_num_tokens": self.runner.num_pages * self.kv.page_size,
            "max_running_requests": self.runner.max_running,
            "context_length": self.runner.context_length,
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "pages_used": self.kv.num_used,
            "pages_cached": self.kv.tree.num_nodes,
            "pages_free": self.kv.allocator.num_free,
            "retractions": self.scheduler.num_retractions,
            "steps": self.num_steps,
            "failed_steps": self.tally.counts.failed_steps,
        }

    @property
    def num_suspects(self) -> int:
        """Sets of requests that are still to be tried by themselves, after a step that failed."""
        return len(self._quarantine)

    def step(self) -> None:
        """Begins a pass of the model if there is anything to compute, and takes in the results of
        the oldest if enough are under way; a request that makes one fail is found and ended, no
        others."""
        spans, start, depth = self.runner.spans, time.monotonic_ns(), self.depth
        spans.begin_step(self.num_steps + 1)
        plan = self.plan()
        result = None
        try:
            if plan.items:
                tokens = plan.num_tokens
                spans.add(SpanKind.PLAN, start, tokens=tokens)
                begun = self.runner.begin(plan)
                self._running.append(_Running(self.num_steps, start, tokens, plan.prefill, begun))
            if self._running and not (plan.items and len(self._running) < depth):
                result = self._running[0].begun.wait()
        except Exception as error:
            known = self.num_suspects > 0
            logger.log(logging.INFO if known else logging.ERROR, "a step failed", exc_info=True)
            if len(self._running) < len(self._under_way):  # it has not even begun
                self._drain()
            self.accuse(self.retreat(), repr(error), alone=True)
            return
        if result is not None:
            self._take_in(self._running.popleft(), result)

    def _drain(self) -> None:
        """Takes in what began before a step that could not: it is as good as ever."""
        while self._running:
            try:
                result = self._running[0].begun.wait()
            except Exception:
                logger.info("the step before it failed, too", exc_info=True)
                return
            self._take_in(self._running.popleft(), result)

    def _take_in(self, step: _Running, result: StepResult) -> None:
        """Steps under way at once share the time."""
        spans = self.runner.spans
        spans.begin_step(step.number)
        begin = spans.clock()
        self.apply(result)
        spans.add(SpanKind.DETOKENISE, begin, tokens=len(result.items))
        start, self._stepped = max(step.when, self._stepped), time.monotonic_ns()
        spans.add(SpanKind.STEP, start, tokens=step.tokens, end=self._stepped)
        spans.begin_step(self.num_steps)
        seconds = (self._stepped - start) / 1e9
        self.observer.steps += 1
        self.observer.busy += seconds
        usual = self._pace.take(step.prefill, step.tokens, seconds)
        if usual is not None:
            logger.warning("step %d took %.1f s, usually %.2f s", step.number, seconds, usual)

    def plan(self, parts: int = 1) -> StepPlan:
        """The next step, which is then in flight; `parts`: how many may be so at once. A step of
        nothing is not in flight. A request that makes the plan fail is found and ended as one that
        makes a step fail."""
        chosen = self._try_suspects()
        if not chosen and self.scheduler.has_work:
            chosen = self._choose(parts)
        if not chosen:
            return StepPlan([], [])
        work = [scheduled for scheduled, _ in chosen]
        prompt_tokens = sum(item.length for item in work if not item.decodes)
        plan = StepPlan(
            [item for _, item in chosen], list(self._taken), prompt_tokens > 0, self._ended
        )
        self._taken.clear()
        self._ended = []
        self.num_steps += 1
        self.tally.begin(prompt_tokens)
        planned = [Planned.begin(request, length) for request, length, _ in work]
        self._under_way.append(InflightPlan(planned, plan.clear, plan.ended))
        return plan

    def _choose(self, parts: int) -> Chosen:
        """The work of the next step. Until it is known nothing is counted as done, so that an error
        leaves all requests as they were; it is raised if it follows no request."""
        suspects, num_open = [job.request for job in self.jobs.values()], len(self.jobs)
        try:
            work = self.scheduler.schedule(parts, ahead=self.overlaps)
            suspects = [item.request for item in work]
            return _with_items(work)
        except Exception as error:
            logger.exception("a step could not be planned")
            self.accuse(suspects, repr(error), alone=True)
            chosen = self._try_suspects()
            if not chosen and len(self.jobs) == num_open:
                raise
            return chosen

    def _try_suspects(self) -> Chosen:
        """A step for the next set of suspects; those that cannot be computed now are dropped."""
        while self._quarantine:
            suspects = [request for request in self._quarantine.take() if self._is_open(request)]
            try:
                work = self.scheduler.schedule(only=frozenset(suspects)) if suspects else []
                chosen = _with_items(work)
            except Exception as error:
                logger.info("a step could not be planned", exc_info=True)
                self.accuse(suspects, repr(error), alone=True)
                continue
            if chosen:
                tried = {item.request for item in work}
                self._quarantine.put_back([r for r in suspects if r not in tried])
                return chosen
        return []

    def retreat(self) -> list[Request]:
        """Takes back all steps that are under way; the requests that took part. Pages are zeroed
        again: who was to do it may not have come to it."""
        suspects: dict[Request, None] = {}
        self.tally.forget()
        self._running.clear()
        while self._under_way:
            step = self._under_way.pop()
            self._taken += step.clear
            self._ended += step.ended
            for item in step.items:
                item.undo()
                if self._is_open(item.request):
                    suspects[item.request] = None
        return list(suspects)

    def accuse(self, suspects: Sequence[Request], error: str, *, alone: bool) -> None:
        """These took part in a step that failed. `alone`: nobody of another group did."""
        self.tally.counts.failed_steps += bool(suspects)
        guilty = self._quarantine.accuse(suspects, alone=alone)
        if guilty is not None:
            logger.error("request %s made a step fail: %s", guilty.rid, error)
            self._fail(guilty, f"the step failed: {error}")

    def apply(self, result: StepResult) -> None:
        """The results of the oldest step under way."""
        work, found_items = self._under_way.popleft().items, result.items
        self.tally.end(result)
        if len(work) != len(found_items):
            raise ValueError(f"{len(found_items)} results of a step with {len(work)} requests")
        for item, found in zip(work, found_items, strict=True):
            try:
                self._advance(item, found)
            except Exception as error:
                logger.exception("request %s failed", item.request.rid)
                self._fail(item.request, f"its token could not be taken in: {error!r}")

    def _advance(self, item: Planned, found: ItemResult) -> None:
        request = item.request
        job = self.jobs.get(request.rid)
        if job is None or job.request is not request:  # it ended while the step was under way
            return
        if found.broken:
            self._fail(request, found.broken)
            return
        if found.input_logprobs:
            request.input_logprobs += found.input_logprobs
            request.input_top_logprobs += found.input_top_logprobs
        if request.retractions == item.retractions:
            self.kv.share(request, item.stop)
        if not item.samples:
            return
        request.pending -= 1
        if found.ended:
            reason: FinishReason | None = FinishReason("stop")
        elif not found.token_ids:
            reason = FinishReason("length", length=0)
        else:
            logprob = found.logprobs[0] if found.logprobs else None
            top = found.top_logprobs[0] if found.logprobs else None
            reason = job.accept(found.token_ids[0], logprob, top)
        if reason is not None:
            self._finish(job, reason)
        else:
            job.notify_if_due()

    def _fail(self, request: Request, message: str) -> None:
        if self._is_open(request):
            job = self.jobs[request.rid]
            self._finish(job, FinishReason("abort", message=message, failed=True))

    def _is_open(self, request: Request) -> bool:
        """Its name may have been used again since it ended."""
        job = self.jobs.get(request.rid)
        return job is not None and job.request is request

    def _finish(self, job: RequestState, reason: FinishReason) -> None:
        del self.jobs[job.request.rid]
        try:
            self.scheduler.finish(job.request)
        finally:
            self._ended.append(job.request.arrival)
            job.finish(reason)


def _with_items(work: Sequence[Scheduled]) -> Chosen:
    return [(item, _plan_item(item.request, item.length)) for item in work]


def _plan_item(request: Request, length: int) -> PlanItem:
    first, tokens = request.num_computed, request.token_ids
    stop, position = first + length, len(tokens) + request.pending
    ids = tokens[first:stop] if first < len(tokens) else [FUTURE_TOKEN]
    sample = None
    if stop == position and position < request.prompt_len + request.max_new_tokens:
        sample = _sample_row(request, position)
    score = _score(request, stop) if request.return_logprob else None
    return PlanItem(request.arrival, ids, first, list(request.pages), score, sample)


def _score(request: Request, stop: int) -> PromptScore | None:
    """The prompt tokens whose logprobs this chunk's rows give."""
    begin = request.logprob_start + request.num_scored
    end = min(stop, request.prompt_len - 1)
    if begin >= end:
        return None
    assert begin >= request.num_computed, "a prefix was reused whose logprobs are wanted"
    row = begin - request.num_computed
    return PromptScore(row, request.prompt_ids[begin + 1 : end + 1], request.top_logprobs_num)


def _sample_row(request: Request, position: int) -> SampleRow:
    """`position`: that of the token which is sampled."""
    params = request.params
    return SampleRow(
        params,
        request.seed,
        position,
        request.prompt_ids if request.looks_back and params.penalised else (),
        request.output_ids if request.looks_back else (),
        request.eos_ids,
        request.return_logprob,
        request.top_logprobs_num,
    )
