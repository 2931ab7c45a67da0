"""The engine core in the caller's process: one rank, without a supervisor."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

from moesaic.config import ServerArgs
from moesaic.engine.frontend.queries import GROUP_QUERIES, RankAnswers, RankReply
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.engine.schedule.inflight import InflightStep
from moesaic.engine.schedule.plan import StepResult
from moesaic.engine.schedule.request_state import RequestState
from moesaic.engine.schedule.step_budget import StepCost
from moesaic.engine.setup.moe_setup import describe_backends
from moesaic.engine.speculate.drafters import Drafter
from moesaic.engine.worker.planner import Planner
from moesaic.engine.worker.rank_info import rank_info, service_info
from moesaic.engine.worker.rank_stats import RankStatsReporter
from moesaic.engine.worker.stage import SingleStage
from moesaic.engine.worker.step_loop import StepLoop
from moesaic.observe.spans import SpanKind, Spans

logger = logging.getLogger(__name__)


class LocalCore:
    """Runs the step loop in the engine's thread. Not thread-safe: one thread calls it."""

    fault: str = ""
    lobby: None = None
    losses: None = None
    found_requests = first_request = 0
    on_failure: Callable[[str], None] | None = None

    def __init__(
        self,
        args: ServerArgs,
        runner: ModelRunner | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.args = args
        self.runner = runner or ModelRunner(args)
        self.planner = Planner(args, self.runner, drafter=drafter)
        self.states, self.facts = self.planner.states, self.planner.facts
        self.rank_facts = [rank_info(self.runner)]
        self.providers = describe_backends(self.runner.moe)
        self.stats = RankStatsReporter(self.runner, group=self.planner.metrics.stats)
        self.loop = StepLoop(self.runner, SingleStage(self.planner), self, self.stats)
        self.loop.on_slow = _log_slow
        self.front = Spans()
        """Spans of the caller's threads."""

    @property
    def has_work(self) -> bool:
        """There are open requests, or in-flight steps whose requests have ended."""
        return self.planner.scheduler.has_work or bool(self.loop.inflight)

    @property
    def slack(self) -> float:
        return self.loop.slack

    def wake(self) -> None:
        """The engine's thread polls its commands between steps."""

    @property
    def state(self) -> str:
        return "computing" if self.has_work else "idle"

    @property
    def idle_timeout(self) -> float | None:
        """Seconds of idleness after which `idle` is due; None: never."""
        return self.planner.metrics.idle_timeout

    def idle(self) -> None:
        self.planner.metrics.flush_log()

    def close(self) -> None:
        """There is nothing to release but memory."""

    def add(self, state: RequestState) -> None:
        self.planner.add(state)

    def abort(self, request_no: int) -> None:
        self.planner.abort(request_no)

    def fail_all(self, message: str) -> None:
        self.planner.fail_all(message)

    def ask(self, what: str, answer: Future[Any], options: Mapping[str, Any] | None = None) -> None:
        if what in GROUP_QUERIES:
            answers = {"info": self.info, "flush_cache": self.planner.kv.flush, "rooms": list}
            answer.set_result(answers[what]())
            return
        now = time.monotonic_ns()
        value = self.stats.answer(what, dict(options or {}))
        reply = RankReply(value, now, time.monotonic_ns())
        overview = {"rank": 0, "state": self.state, "state_age": 0.0, "pid": os.getpid()}
        answer.set_result(RankAnswers({0: reply}, [overview]))

    def info(self) -> dict[str, Any]:
        """In the shape that a service of many ranks has."""
        rank = {"rank": 0, "place": "rank 0", **rank_info(self.runner)} | {
            "state": self.state,
            "step": self.planner.num_steps,
            "computed": self.stats.busy,
            "waited": 0.0,
        }
        groups = [self.planner.info()]
        return service_info(asdict(self.args), groups, [rank], self.facts.num_experts)

    def step(self) -> None:
        """Runs the loop once. A request that makes a step fail is found and ended alone."""
        try:
            self.loop.step()
        except Exception as error:
            known = self.planner.num_suspects > 0
            logger.log(logging.INFO if known else logging.ERROR, "a step failed", exc_info=True)
            settled, self.loop.is_settled = self.loop.is_settled, True
            self._undo_steps(repr(error))
            if not settled:
                self.fail_all(f"the engine failed: {error!r}")

    @property
    def step_cost(self) -> StepCost:
        return self.planner.scheduler.step_budget.cost

    def plan(self, parts: int) -> InflightStep:
        return self.planner.plan(parts)

    def apply(self, step: InflightStep, result: StepResult, seconds: float) -> None:
        """An error that no single request causes ends all requests, but not the engine."""
        begin = self.runner.spans.clock()
        self.planner.observe(step, result, seconds)
        try:
            self.planner.apply(step, result)
        except Exception as error:
            logger.exception("the engine failed; all %d requests end", len(self.states))
            self.fail_all(f"the engine failed: {error!r}")
        tokens = len(result.token_ids) + len(result.items)
        self.runner.spans.add(SpanKind.DETOKENISE, begin, tokens=tokens)

    def _undo_steps(self, error: str) -> None:
        """Earlier steps are valid if the failed one has not started."""
        inflight = self.loop.inflight
        started = not inflight or inflight[-1].handle is not None
        try:
            while not started and inflight[0].handle is not None:
                self.loop.complete_oldest()
        except Exception:
            logger.info("the step before it failed, too", exc_info=True)
        suspects = self.planner.rollback(inflight)
        alone = not any(step.has_ended_requests for step in inflight)
        inflight.clear()
        self.planner.report_failure(suspects, error, alone=alone)


def _log_slow(step: InflightStep, seconds: float, usual: float) -> None:
    logger.warning("step %d took %.1f s, usually %.2f s", step.number, seconds, usual)
