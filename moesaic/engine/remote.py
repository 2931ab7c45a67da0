"""An engine whose ranks are other processes: what the caller's process keeps of it."""

from __future__ import annotations

import logging
import os
from concurrent.futures import Future
from dataclasses import asdict, replace
from typing import Any

import msgspec

from moesaic.comm.arrange import mesh_of
from moesaic.comm.launch import Service, ServiceSpec, Timeouts, host_ranks
from moesaic.comm.mesh import Mesh
from moesaic.config import ServerArgs
from moesaic.core.messages import (
    Abort,
    Ask,
    Delta,
    Fault,
    Finish,
    NewRequest,
    Output,
    Reply,
    Submit,
)
from moesaic.core.request import FinishReason
from moesaic.engine.core import ModelFacts
from moesaic.engine.jobs import Job
from moesaic.engine.layout import preview
from moesaic.models.tiny import materialise
from moesaic.moe.registry import Problem

logger = logging.getLogger(__name__)

TARGET = "moesaic.engine.rank:run"


class RemoteCore:
    """Takes the place of EngineCore: requests go to the ranks, their tokens come back.

    Texts and stop strings are dealt with here: a request that such a string ends is aborted on its
    rank, and what the rank has sent beyond it is dropped. Between processes a request has a number
    for a name, so that its own may be used again at once.
    """

    def __init__(self, args: ServerArgs, service: Service, moe: Problem) -> None:
        self.args, self.service, self.moe = args, service, moe
        self.facts = msgspec.convert(service.facts, ModelFacts)
        self.jobs: dict[str, Job] = {}
        self._by_number: dict[str, Job] = {}
        self.fault = ""
        self._asked = 0
        self._questions: dict[int, tuple[str, Future[Any], dict[int, Any]]] = {}

    @property
    def has_work(self) -> bool:
        """As long as the service lives: the engine's thread waits for messages in `step`."""
        return not self.fault

    def wake(self) -> None:
        self.service.wake()

    def close(self) -> None:
        self.service.close()

    def add(self, job: Job) -> None:
        if not self.fault:
            self.service.send(Submit([_new_request(job)]))
        self.jobs[job.request.rid] = self._by_number[_number(job)] = job
        if self.fault:
            self._finish(job, FinishReason("abort", message=self.fault, failed=True))

    def abort(self, rid: str) -> None:
        if (job := self.jobs.get(rid)) is not None:
            self._give_up(job, FinishReason("abort", message="aborted by the caller"))

    def fail_all(self, message: str) -> None:
        end = self._finish if self.fault else self._give_up
        for job in list(self.jobs.values()):
            end(job, FinishReason("abort", message=message, failed=True))
        for _, answer, _ in self._questions.values():
            answer.set_exception(RuntimeError(message))
        self._questions.clear()

    def ask(self, what: str, answer: Future[Any]) -> None:
        """Asks all serving groups; the answer comes when the last of theirs does."""
        if self.fault:
            answer.set_exception(RuntimeError(self.fault))
            return
        self._asked += 1
        self._questions[self._asked] = (what, answer, {})
        self.service.send(Ask(self._asked, what))

    def step(self) -> None:
        """Waits for a message, or to be woken."""
        message = self.service.receive(None)
        if isinstance(message, Output):
            for delta in message.deltas:
                self._take(delta)
        elif isinstance(message, Reply):
            self._reply(message)
        elif isinstance(message, Fault):
            self.fault = message.message
            logger.error("%s", message.message)
            self.fail_all(message.message)

    def _take(self, delta: Delta) -> None:
        job = self._by_number.get(delta.rid)
        if job is None:  # it has ended here already
            return
        try:
            self._advance(job, delta)
        except Exception as error:
            logger.exception("request %s failed", job.request.rid)
            message = f"its token could not be taken in: {error!r}"
            self._give_up(job, FinishReason("abort", message=message, failed=True))

    def _advance(self, job: Job, delta: Delta) -> None:
        request = job.request
        request.cached_tokens, request.retractions = delta.cached_tokens, delta.retractions
        request.queue_seconds = delta.queue_seconds
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

    def _reply(self, reply: Reply) -> None:
        if reply.number not in self._questions:
            return
        what, answer, replies = self._questions[reply.number]
        replies[reply.group] = reply.value
        groups = range(self.service.spec.mesh.num_groups)
        if len(replies) < len(groups) + (what == "info"):
            return
        del self._questions[reply.number]
        values = [replies[group] for group in groups]
        if what == "flush_cache":
            answer.set_result(sum(values))
            return
        summed = {key: sum(value[key] for value in values) for key in SUMMED}
        told = {"groups": values, "ranks": replies[-1]}
        answer.set_result({**asdict(self.args), **values[0], **summed, **told})

    def _give_up(self, job: Job, reason: FinishReason) -> None:
        """Ends a request that its rank would go on with."""
        self._finish(job, reason)
        self.service.send(Abort(_number(job)))

    def _finish(self, job: Job, reason: FinishReason) -> None:
        del self.jobs[job.request.rid]
        self._by_number.pop(_number(job), None)
        job.finish(reason)


def start_ranks(args: ServerArgs, mesh: Mesh) -> RemoteCore:
    """Returns when all ranks of all nodes can serve."""
    moe = preview(args)
    sizes = ("tp", "ep", "dp", "pp", "replicas", "nnodes")
    told = [f"{name} {getattr(mesh, name)}" for name in sizes if getattr(mesh, name) > 1]
    logger.info("starting %d ranks: %s", mesh.world, ", ".join(told))
    return RemoteCore(args, Service.start(service_spec(args, mesh)), moe)


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
        preload=("moesaic.engine.rank",),
        log_level=args.log_level,
    )


# Figures of the serving groups that add up to those of the service.
SUMMED = ("running", "waiting", "pages_used", "pages_cached", "pages_free", "retractions", "steps")


def _number(job: Job) -> str:
    return str(job.request.arrival)


def _new_request(job: Job) -> NewRequest:
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
    )


def _reason(finish: Finish) -> FinishReason:
    return FinishReason(
        type=finish.type,
        matched=finish.matched,
        length=finish.length,
        message=finish.message,
        failed=finish.failed,
    )
