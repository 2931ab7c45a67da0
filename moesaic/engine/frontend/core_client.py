"""An engine whose ranks are other processes: what the caller's process keeps of it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, replace
from typing import Any

import msgspec

from moesaic.comm.arrange import mesh_of
from moesaic.comm.launch.service import Service, ServiceSpec, Timeouts, host_ranks
from moesaic.comm.mesh import Mesh
from moesaic.config import ServerArgs
from moesaic.config.devices import gpus_of
from moesaic.config.gpus import describe_shares, max_ranks_per_gpu
from moesaic.core.messages import (
    Abort,
    Fault,
    Finish,
    NewRequest,
    Query,
    QueryReply,
    RequestDelta,
    StepOutput,
    Submit,
)
from moesaic.core.request import ABORTED, FinishReason
from moesaic.engine.frontend.queries import PendingQuery, QueryTimeout
from moesaic.engine.frontend.request_state import RequestState
from moesaic.engine.setup.memory_plan import preview
from moesaic.engine.worker.planner import ModelFacts
from moesaic.engine.worker.rank_info import log_ranks, service_info
from moesaic.models.tiny import materialise
from moesaic.observe.spans import SpanKind, Spans

logger = logging.getLogger(__name__)

TARGET = "moesaic.engine.worker.worker:run"


class CoreClient:
    """Takes the place of EngineCore: requests go to the ranks, their tokens come back.

    Texts and stop strings are dealt with here: a request that such a string ends is aborted on its
    rank, and what the rank has sent beyond it is dropped. Between processes a request has a number
    for a name, so that its own may be used again at once.
    """

    def __init__(self, args: ServerArgs, service: Service) -> None:
        self.args, self.service = args, service
        self.facts = msgspec.convert(service.facts, ModelFacts)
        self.jobs: dict[str, RequestState] = {}
        self._by_number: dict[str, RequestState] = {}
        self.fault = ""
        self.rank_facts = msgspec.convert(service.facts["ranks"], list[dict[str, Any]])
        """What each rank holds."""
        self.front = Spans()
        """What this process does beside the ranks."""
        self._asked = 0
        self._questions: dict[int, PendingQuery] = {}

    @property
    def providers(self) -> dict[str, Any]:
        found: dict[str, Any] = self.rank_facts[0]["providers"]
        return found

    @property
    def has_work(self) -> bool:
        """As long as the service lives: the engine's thread waits for messages in `step`."""
        return not self.fault

    def wake(self) -> None:
        self.service.wake()

    @property
    def patience(self) -> float | None:
        """Of the engine's thread, which comes here only after a fault: then it waits for ever."""
        return None

    def rest(self) -> None:
        """Ranks rest by themselves."""

    def close(self) -> None:
        self.service.close()

    def add(self, job: RequestState) -> None:
        assert job.request.rid not in self.jobs, f"request id {job.request.rid!r} is in use"
        job.held = time.monotonic() - job.request.created
        if not self.fault:
            self.service.send(Submit([_new_request(job)]))
        self.jobs[job.request.rid] = self._by_number[_number(job)] = job
        if self.fault:
            self._finish(job, FinishReason("abort", message=self.fault, failed=True))

    def abort(self, rid: str, job: RequestState | None = None) -> None:
        """Whatever has that name, or with `job` only that one."""
        found = self.jobs.get(rid)
        if found is not None and job in (None, found):
            self._give_up(found, FinishReason("abort", message=ABORTED))

    def fail_all(self, message: str) -> None:
        end = self._finish if self.fault else self._give_up
        for job in list(self.jobs.values()):
            try:
                end(job, FinishReason("abort", message=message, failed=True))
            except Exception:
                logger.exception("request %s could not be ended in order", job.request.rid)
        for question in self._questions.values():
            question.answer.set_exception(RuntimeError(message))
        self._questions.clear()

    def ask(self, what: str, answer: Future[Any], options: Mapping[str, Any] | None = None) -> None:
        """Asks all serving groups, or every rank what it alone knows; the answer comes when the
        last of theirs does, or after a while without those that are missing."""
        if self.fault:
            answer.set_exception(RuntimeError(self.fault))
            return
        self._asked += 1
        mesh, every = self.service.spec.mesh, what not in OF_GROUPS
        waits_for = mesh.world if every else mesh.num_groups
        self._questions[self._asked] = PendingQuery(what, answer, every, waits_for)
        self.service.send(Query(self._asked, what, every, dict(options or {})))

    def step(self) -> None:
        """Waits for a message, or to be woken."""
        message = self.service.receive(self._patience())
        self._expire()
        if isinstance(message, StepOutput):
            begin = self.front.clock()
            for delta in message.deltas:
                self._take(delta)
            self.front.add(SpanKind.DETOKENISE, begin, tokens=len(message.deltas))
        elif isinstance(message, QueryReply):
            self._reply(message)
        elif isinstance(message, Fault):
            self.fault = message.message
            logger.error("%s", message.message)
            self.fail_all(message.message)

    def _take(self, delta: RequestDelta) -> None:
        job = self._by_number.get(delta.rid)
        if job is None:  # it has ended here already
            return
        try:
            self._advance(job, delta)
        except Exception as error:
            logger.exception("request %s failed", job.request.rid)
            message = f"its token could not be taken in: {error!r}"
            self._give_up(job, FinishReason("abort", message=message, failed=True))

    def _advance(self, job: RequestState, delta: RequestDelta) -> None:
        request = job.request
        request.cached_tokens, request.retractions = delta.cached_tokens, delta.retractions
        if delta.queue_seconds is not None:
            request.queue_seconds = job.held + delta.queue_seconds
        request.input_logprobs += delta.input_logprobs
        request.input_top_logprobs += delta.input_top_logprobs
        ended = None if delta.finish is None else _reason(delta.finish)
        for number, token in enumerate(delta.token_ids):
            logprob = delta.logprobs[number] if delta.logprobs else None
            top = delta.top_logprobs[number] if delta.top_logprobs else None
            reason = job.accept(token, logprob, top)
            if reason is not None:
                end = self._give_up if ended is None else self._finish
                end(job, reason)
                return
            job.notify_if_due()
        if ended is not None:
            self._finish(job, ended)

    def _reply(self, reply: QueryReply) -> None:
        question = self._questions.get(reply.number)
        if question is None:
            return
        question.take(reply)
        if question.is_answered:
            del self._questions[reply.number]
            self._conclude(question)

    def _conclude(self, question: PendingQuery) -> None:
        if question.every:
            question.answer.set_result(question.by_rank())
            return
        values = [question.replies[group].value for group in sorted(question.replies)]
        if question.what == "flush_cache":
            question.answer.set_result(sum(values))
            return
        info = service_info(asdict(self.args), values, question.overview, self.facts.num_experts)
        question.answer.set_result(info)

    def _patience(self) -> float | None:
        """Until the first question must be answered."""
        if not self._questions:
            return None
        first = min(question.deadline for question in self._questions.values())
        return max(0.0, first - time.monotonic())

    def _expire(self) -> None:
        now = time.monotonic()
        late = [n for n, question in self._questions.items() if question.deadline <= now]
        for question in map(self._questions.pop, late):
            if question.every and (question.replies or question.overview):
                self._conclude(question)
                continue
            missing = question.waits_for - len(question.replies)
            who = "ranks" if question.every else "serving groups"
            error = QueryTimeout(f"{missing} {who} did not answer {question.what!r} in time")
            question.answer.set_exception(error)

    def _give_up(self, job: RequestState, reason: FinishReason) -> None:
        """Ends a request that its rank would go on with."""
        self._finish(job, reason)
        self.service.send(Abort(_number(job)))

    def _finish(self, job: RequestState, reason: FinishReason) -> None:
        del self.jobs[job.request.rid]
        self._by_number.pop(_number(job), None)
        job.finish(reason)


def start_ranks(args: ServerArgs, mesh: Mesh) -> CoreClient:
    """Returns when all ranks of all nodes can serve."""
    preview(args)
    sizes = ("tp", "ep", "dp", "pp", "replicas", "nnodes")
    told = [f"{name} {getattr(mesh, name)}" for name in sizes if getattr(mesh, name) > 1]
    logger.info("starting %d ranks: %s", mesh.world, ", ".join(told) or "one of everything")
    if args.device == "cuda":
        logger.info("%s", describe_shares(gpus_of(args)))
    core = CoreClient(args, Service.start(service_spec(args, mesh)))
    log_ranks(core.rank_facts, mesh)
    return core


def serve_node(args: ServerArgs) -> int:
    """The ranks of a node other than the first, until that ends the service; an exit status."""
    args = replace(args, model_path=materialise(args.model_path))
    return host_ranks(Service(service_spec(args, mesh_of(args))))


def service_spec(args: ServerArgs, mesh: Mesh) -> ServiceSpec:
    assert args.dist_timeout is not None, "resolve fills it in"
    timeouts = Timeouts(collective=args.dist_timeout, hang=args.watchdog_timeout)
    return ServiceSpec(
        mesh=mesh,
        target=TARGET,
        config=asdict(args),
        node_rank=args.node_rank,
        dist_init_addr=args.dist_init_addr,
        load_balance=args.load_balance_method,
        timeouts=timeouts,
        threads=args.num_threads or max(1, len(os.sched_getaffinity(0)) // mesh.ranks_per_node),
        preload=("moesaic.engine.worker.worker",),
        log_level=args.log_level,
        gpu_sharers=max_ranks_per_gpu(gpus_of(args)) if args.device == "cuda" else 0,
    )


# What only the leaders of groups are asked; everything else every rank is.
OF_GROUPS = ("info", "flush_cache")


def _number(job: RequestState) -> str:
    return str(job.request.arrival)


def _new_request(job: RequestState) -> NewRequest:
    request = job.request
    return NewRequest(
        rid=_number(job),
        prompt_ids=request.prompt_ids,
        params=msgspec.to_builtins(request.params),
        seed=request.seed,
        max_new_tokens=request.max_new_tokens,
        arrival=request.arrival,
        eos_ids=sorted(request.eos_ids),
        return_logprob=request.return_logprob,
        logprob_start=request.logprob_start,
        top_logprobs_num=request.top_logprobs_num,
        group=request.group,
    )


def _reason(finish: Finish) -> FinishReason:
    return FinishReason(
        type=finish.type,
        matched=finish.matched,
        length=finish.length,
        message=finish.message,
        failed=finish.failed,
    )
