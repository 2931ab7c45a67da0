"""The engine without its surroundings: requests in, one step at a time, progress out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from moesaic.config import ServerArgs
from moesaic.core.request import FinishReason, Request
from moesaic.engine.detokenizer import IncrementalDetokenizer
from moesaic.engine.kv_manager import KVManager
from moesaic.engine.model_runner import ModelRunner, StepOutput, Token
from moesaic.engine.scheduler import Scheduled, Scheduler, SchedulerConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a request is: what a reader in another thread may show."""

    rid: str
    num_output: int
    text: str
    finished: bool


@dataclass(slots=True, eq=False)
class Job:
    """A request with its text and whoever waits for it; `listener` is called from the engine's
    thread, at the first token and every `stream_interval` ones if that is set, and at the end."""

    request: Request
    detokenizer: IncrementalDetokenizer | None
    listener: Callable[[Progress], None]
    stream_interval: int | None = None

    def notify(self) -> None:
        text = "" if self.detokenizer is None else self.detokenizer.text
        finished = self.request.finish_reason is not None
        try:
            request = self.request
            self.listener(Progress(request.rid, request.num_output, text, finished))
        except Exception:
            logger.exception("the listener of request %s failed", self.request.rid)


class EngineCore:
    """Not thread-safe: one thread calls it."""

    def __init__(self, args: ServerArgs) -> None:
        self.args = args
        self.runner = ModelRunner(args)
        self.kv = KVManager(
            self.runner.num_pages,
            args.page_size,
            prefix_cache=not args.disable_radix_cache,
            on_take=self.runner.cache.clear,
        )
        chunk = args.chunked_prefill_size
        config = SchedulerConfig(
            max_running=self.runner.max_running,
            chunk_tokens=chunk if chunk > 0 else self.runner.context_length,
            conservativeness=args.schedule_conservativeness,
        )
        self.scheduler = Scheduler(config, self.kv)
        self.jobs: dict[str, Job] = {}
        self.num_steps = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, job: Job) -> None:
        self.jobs[job.request.rid] = job
        self.scheduler.add(job.request)

    def abort(self, rid: str) -> None:
        if (job := self.jobs.get(rid)) is not None:
            self._finish(job, FinishReason("abort", message="aborted by the caller"))

    def fail_all(self, message: str) -> None:
        for job in list(self.jobs.values()):
            self._finish(job, FinishReason("abort", message=message, failed=True))

    def info(self) -> dict[str, Any]:
        return {
            **asdict(self.args),
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
        }

    def step(self) -> None:
        """One pass of the model; an error in it ends the requests that took part, no others."""
        work = self.scheduler.schedule()
        self.num_steps += 1
        try:
            output = self.runner.step(work)
        except Exception as error:
            logger.exception("a step failed; its %d requests are ended", len(work))
            for item in work:
                self._fail(item.request, f"the step failed: {error!r}")
            return
        for item in work:
            try:
                self._advance(item, output)
            except Exception as error:
                logger.exception("request %s failed", item.request.rid)
                self._fail(item.request, f"its token could not be taken in: {error!r}")

    def _advance(self, item: Scheduled, output: StepOutput) -> None:
        request = item.request
        if request in output.broken:
            self._fail(request, "the model gave numbers that are not finite for this request")
            return
        done = item.samples
        request.num_computed = item.stop
        self.kv.share(request)
        if not done:
            return
        job = self.jobs[request.rid]
        token = output.tokens.get(request)
        reason = FinishReason("length", length=0) if token is None else self._accept(job, token)
        if reason is not None:
            self._finish(job, reason)
        elif job.stream_interval and (request.num_output - 1) % job.stream_interval == 0:
            job.notify()

    def _accept(self, job: Job, token: Token) -> FinishReason | None:
        """Appends a token; the reason to stop, if that was the last."""
        request, params, token_id = job.request, job.request.params, token.token_id
        request.first_token = request.first_token or time.monotonic()
        request.token_ids.append(token_id)
        if token.logprob is not None:
            request.output_logprobs.append(token.logprob)
            request.output_top_logprobs.append(token.top_logprobs or [])
        ends = token_id in params.stop_token_ids
        ends = ends or (token_id in request.eos_ids and not params.ignore_eos)
        if job.detokenizer is not None and (not ends or params.no_stop_trim):
            matched = job.detokenizer.push([token_id])
            if matched is not None:
                return FinishReason("stop", matched=matched)
        if ends:
            return FinishReason("stop", matched=token_id)
        if request.remaining_tokens <= 0:
            return FinishReason("length", length=request.num_output)
        return None

    def _fail(self, request: Request, message: str) -> None:
        if (job := self.jobs.get(request.rid)) is not None:
            self._finish(job, FinishReason("abort", message=message, failed=True))

    def _finish(self, job: Job, reason: FinishReason) -> None:
        del self.jobs[job.request.rid]
        self.scheduler.finish(job.request)
        job.request.finish_reason = reason
        job.request.finished = time.monotonic()
        try:
            if job.detokenizer is not None:
                job.detokenizer.finish()
        finally:
            job.notify()
