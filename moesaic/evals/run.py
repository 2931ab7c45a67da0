"""Asks all problems, grades the replies and counts them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import msgspec
from tqdm import tqdm

import moesaic
from moesaic.evals.ask import Asker, EngineAsker, ModelReply, Options
from moesaic.evals.figures import Latency
from moesaic.evals.result import GradedReply, Result, by_task, digest, score
from moesaic.evals.tasks.problem import Problem, grade

if TYPE_CHECKING:
    from moesaic.engine.engine import Engine

logger = logging.getLogger(__name__)


def evaluate(
    target: Engine | Asker, problems: Sequence[Problem], options: Options | None = None
) -> Result:
    """Ask an engine, or any Asker. Ctrl-C returns the replies so far, with `complete` false. Must
    not be called on an event loop."""
    if not problems:
        raise ValueError("there are no problems: give at least one")
    asker = target if isinstance(target, Asker) else EngineAsker(target)
    run = _Run(asker, problems, options or Options())
    asyncio.run(run.all())
    return run.result()


class _Run:
    def __init__(self, asker: Asker, problems: Sequence[Problem], options: Options) -> None:
        self._asker, self._problems, self._options = asker, problems, options
        self._data = digest(problems)  # first: an error here must not waste a finished run
        self._found: dict[int, GradedReply] = {}
        self._right = 0
        self._slots: AbstractAsyncContextManager[object] = nullcontext()
        if (limit := options.concurrency or asker.limit) is not None:
            self._slots = asyncio.Semaphore(limit)
        self._started = self._seconds = 0.0

    async def all(self) -> None:
        total, hidden = len(self._problems), not self._options.progress
        async with self._asker.opened():
            self._started = time.perf_counter()
            with tqdm(total=total, disable=hidden, unit="problem") as bar:
                tasks = [asyncio.create_task(self._one(number, bar)) for number in range(total)]
                try:
                    await asyncio.gather(*tasks)
                except asyncio.CancelledError:  # Ctrl-C
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
            self._seconds = time.perf_counter() - self._started

    async def _one(self, number: int, bar: tqdm[Any]) -> None:
        problem = self._problems[number]
        async with self._slots:
            reply = await self._reply(problem)
        output = graded(problem, reply, number)
        self._found[number] = output
        self._right += output.right
        bar.set_postfix_str(f"accuracy {self._right / len(self._found):.3f}", refresh=False)
        bar.update()

    async def _reply(self, problem: Problem) -> ModelReply:
        """Turn an exception of one problem into an error; the others go on."""
        try:
            return await self._asker.ask(problem, self._options)
        except Exception as error:
            logger.debug("a problem of task %r failed", problem.task, exc_info=True)
            text = f"{type(error).__name__}: {error}"
            return ModelReply(error=text.encode(errors="replace").decode())

    def result(self) -> Result:
        options = self._options
        outputs = [self._found[number] for number in sorted(self._found)]
        answered = [output for output in outputs if not output.failed]
        seconds = max(self._seconds, 1e-9)
        return Result(
            tasks={task: score(some) for task, some in by_task(outputs).items()},
            accuracy=score(outputs).accuracy,
            seed=options.seed,
            num=options.num,
            temperature=options.temperature,
            top_p=options.top_p,
            system=options.system,
            max_new_tokens=options.max_new_tokens,
            target=self._asker.target,
            arguments=options.arguments or {},
            seconds=seconds,
            output_throughput=sum(one.completion_tokens or 0 for one in answered) / seconds,
            requests_per_second=len(answered) / seconds,
            latency=Latency.of([output.latency_s for output in answered]),
            version=moesaic.__version__,
            data=self._data,
            complete=len(outputs) == len(self._problems),
            outputs=outputs,
        )


def graded(problem: Problem, reply: ModelReply, number: int) -> GradedReply:
    """Grade a reply; a failed request has no answer."""
    found = None if reply.error else grade(problem, reply.text)
    return GradedReply(
        task=problem.task,
        id=problem.id or str(number),
        answer=problem.answer,
        reply=reply.text,
        found=None if found is None else found.found,
        right=found is not None and found.right,
        finish_reason=reply.finish_reason,
        prompt_tokens=reply.prompt_tokens,
        completion_tokens=reply.completion_tokens,
        latency_s=reply.latency_s,
        prompt=msgspec.UNSET if problem.messages else problem.prompt,
        messages=problem.messages or msgspec.UNSET,
        error=reply.error or msgspec.UNSET,
    )
