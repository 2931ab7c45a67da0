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
from moesaic.engine.asking import RankAnswers, Told
from moesaic.engine.gpu_runner import make_runner
from moesaic.engine.holdings import holdings, providers, service_info
from moesaic.engine.jobs import Job
from moesaic.engine.kv_manager import KVManager
from moesaic.engine.model_runner import ModelRunner
from moesaic.engine.observer import Observer
from moesaic.engine.pace import Pace
from moesaic.engine.plan import ItemResult, PlanItem, Score, StepPlan, StepResult
from moesaic.engine.quarantine import Planned, Quarantine, UnderWay
from moesaic.engine.sampler import SampleRow
from moesaic.engine.scheduler import Scheduled, Scheduler, SchedulerConfig
from moesaic.engine.tally import Tally
from moesaic.observe.spans import Kind, Spans

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What callers must know of the model that is served; limits are those of one serving group."""

    vocab_size: int
    context_length: int
    cache_tokens: int
    max_running: int
    eos_ids: tuple[int, ...]
    num_experts: int = 0


class EngineCore:
    """The requests of one serving group. Not thread-safe: one thread calls it."""

    fault: str = ""

    def __init__(self, args: ServerArgs, runner: ModelRunner | None = None, group: int = 0) -> None:
        self.args = args
        self.runner = runner or make_runner(args)
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
        self.tally = Tally(self.scheduler, args.decode_log_interval, group)
        self.observer = Observer(self.runner, group=self.tally.stats)
        self.front = Spans()
        """What callers' threads do beside the engine's."""
        self._pace = Pace()
        self.jobs: dict[str, Job] = {}
        self.num_steps = 0
        self._under_way: deque[UnderWay] = deque()
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
        return self.scheduler.has_work

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

    def add(self, job: Job) -> None:
        self.jobs[job.request.rid] = job
        self.scheduler.add(job.request)

    def abort(self, rid: str, job: Job | None = None) -> None:
        """Whatever has that name, or with `job` only that one."""
        found = self.jobs.get(rid)
        if found is not None and job in (None, found):
            self._finish(found, FinishReason("abort", message=ABORTED))

    def fail_all(self, message: str) -> None:
        self._under_way.clear()
        self._quarantine.clear()
        self.tally.forget()
        for job in list(self.jobs.values()):
            self._finish(job, FinishReason("abort", message=message, failed=True))

    def ask(self, what: str, answer: Future[Any], options: Mapping[str, Any] | None = None) -> None:
        """Answers at once; `what`: info, flush_cache, or what a rank's Observer knows."""
        if self.observer.knows(what):
            now = time.monotonic_ns()
            value = self.observer.answer(what, dict(options or {}))
            answer.set_result(RankAnswers({0: Told(value, now, time.monotonic_ns())}))
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
        """One pass of the model; a request that makes it fail is found and ended, no others."""
        spans, start = self.runner.spans, time.monotonic_ns()
        spans.begin_step(self.num_steps + 1)
        plan = self.plan()
        spans.add(Kind.PLAN, start, tokens=plan.num_tokens)
        try:
            result = self.runner.step(plan)
        except Exception as error:
            if not self._under_way:
                raise
            known = self.num_suspects > 0
            logger.log(logging.INFO if known else logging.ERROR, "a step failed", exc_info=True)
            self.accuse(self.retreat(), repr(error), alone=True)
            return
        begin = spans.clock()
        self.apply(result)
        spans.add(Kind.DETOKENISE, begin, tokens=len(result.items))
        spans.add(Kind.STEP, start, tokens=plan.num_tokens)
        self._count_step(plan, (time.monotonic_ns() - start) / 1e9)

    def _count_step(self, plan: StepPlan, seconds: float) -> None:
        self.observer.steps += 1
        self.observer.busy += seconds
        usual = self._pace.take(plan.prefill, plan.num_tokens, seconds)
        if usual is not None:
            logger.warning("step %d took %.1f s, usually %.2f s", self.num_steps, seconds, usual)

    def plan(self, parts: int = 1) -> StepPlan:
        """The next step, which is then under way; `parts`: how many may be so at once. A step of
        nothing is not under way."""
        work = self._try_suspects() or self.scheduler.schedule(parts)
        prefill = any(not item.request.is_decoding for item in work)
        items = [_plan_item(item) for item in work]
        if not work:
            return StepPlan([], [])
        plan = StepPlan(items, list(self._taken), prefill, self._ended)
        self._taken.clear()
        self._ended = []
        self.num_steps += 1
        self.tally.begin(work)
        self._under_way.append(UnderWay([Planned.begin(item) for item in work], plan.clear))
        return plan

    def _try_suspects(self) -> list[Scheduled]:
        """A step for the next set of suspects; those that cannot be computed now are dropped."""
        while self._quarantine:
            suspects = [request for request in self._quarantine.take() if self._is_open(request)]
            work = self.scheduler.schedule(only=frozenset(suspects)) if suspects else []
            if work:
                tried = {item.request for item in work}
                self._quarantine.put_back([r for r in suspects if r not in tried])
                return work
        return []

    def retreat(self) -> list[Request]:
        """Takes back all steps that are under way; the requests that took part. Pages are zeroed
        again: who was to do it may not have come to it."""
        suspects: dict[Request, None] = {}
        self.tally.forget()
        while self._under_way:
            step = self._under_way.pop()
            self._taken += step.clear
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
        work, found_items = self._under_way[0].items, result.items
        if len(work) != len(found_items):
            raise ValueError(f"{len(found_items)} results of a step with {len(work)} requests")
        self._under_way.popleft()
        self.tally.end(result)
        for item, found in zip(work, found_items, strict=True):
            try:
                self._advance(item, found)
            except Exception as error:
                logger.exception("request %s failed", item.request.rid)
                self._fail(item.request, f"its token could not be taken in: {error!r}")

    def _advance(self, item: Planned, found: ItemResult) -> None:
        request = item.request
        if not self._is_open(request):  # it ended while the step was under way
            return
        job = self.jobs[request.rid]
        if found.broken:
            self._fail(request, found.broken)
            return
        request.input_logprobs += found.input_logprobs
        request.input_top_logprobs += found.input_top_logprobs
        if request in self.scheduler.running:
            self.kv.share(request, min(item.stop, request.num_computed))
        if not item.samples:
            return
        request.pending = False
        if found.ended:
            reason: FinishReason | None = FinishReason("stop")
        elif found.token_id is None:
            reason = FinishReason("length", length=0)
        else:
            reason = job.accept(found.token_id, found.logprob, found.top_logprobs)
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

    def _finish(self, job: Job, reason: FinishReason) -> None:
        del self.jobs[job.request.rid]
        self.scheduler.finish(job.request)
        self._ended.append(job.request.arrival)
        job.finish(reason)


def _plan_item(item: Scheduled) -> PlanItem:
    request = item.request
    first, stop = request.num_computed, item.stop
    sample = None
    if item.samples and request.remaining_tokens > 0:
        sample = _sample_row(request)
    pages, score = list(request.pages), _score(request, stop)
    return PlanItem(request.arrival, request.token_ids[first:stop], first, pages, score, sample)


def _score(request: Request, stop: int) -> Score | None:
    """The prompt tokens whose logprobs this chunk's rows give."""
    begin = request.logprob_start + request.num_scored
    end = min(stop, request.prompt_len - 1)
    if not request.return_logprob or begin >= end:
        return None
    assert begin >= request.num_computed, "a prefix was reused whose logprobs are wanted"
    row = begin - request.num_computed
    return Score(row, request.prompt_ids[begin + 1 : end + 1], request.top_logprobs_num)


def _sample_row(request: Request) -> SampleRow:
    params = request.params
    looks_back = params.penalised or params.min_new_tokens > 0 or params.grammar is not None
    return SampleRow(
        params=params,
        seed=request.seed,
        position=len(request.token_ids),
        prompt_ids=request.prompt_ids if params.penalised else (),
        output_ids=request.output_ids if looks_back else (),
        eos_ids=request.eos_ids,
        return_logprob=request.return_logprob,
        top_logprobs_num=request.top_logprobs_num,
    )
