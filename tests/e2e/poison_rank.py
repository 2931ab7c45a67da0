"""The engine's own ranks, except that some tokens make them raise in the middle of a step.

Where depends on the token: before the last attention on one rank of the group, in the router on all
of them, on the way to the experts, on whatever rank gets the token's rows, on the way back, in the
sampler, or on a follower whose leader has its results already.
"""

from __future__ import annotations

import sys
from typing import Any, Final, NoReturn

import torch

from moesaic.cli.main import main as command
from moesaic.comm.launch.rank_link import RankLink
from moesaic.engine.frontend import core_client as remote
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.engine.runner.synchronous_steps import SynchronousSteps
from moesaic.engine.sampling.token_history import TokenHistory
from moesaic.engine.schedule.inflight import PlannedItem
from moesaic.engine.schedule.plan import PlanItem, StepPlan
from moesaic.engine.worker import planner
from moesaic.engine.worker.worker import Worker
from moesaic.moe.dispatch.base import BaseDispatcher
from moesaic.moe.formats import FusedDispatchOutput, LowLatencyDispatchOutput

TARGET: Final = "tests.e2e.poison_rank:run"
POISONS: Final = {
    "attention": 200,
    "router": 201,
    "dispatch": 202,
    "experts": 203,
    "combine": 204,
    "sampling": 205,
}
LATE: Final = 206
"""Harms nobody: the step is done when the follower raises."""
PLAN: Final = 207
"""The leader cannot plan a step with it."""
MARK: Final = 777.0


class Poison:
    """Hooks in a rank's model; `tokens`: those of the step that its group is in."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner, self.tokens = runner, set[int]()
        place, mesh = runner.ranks.place, runner.ranks.mesh
        self.leads = place.attention_rank == 0
        self.is_last = place.attention_rank == mesh.attention_tp - 1
        steps = runner.steps
        self._begin = steps.begin
        steps.begin = self.begin  # type: ignore[assignment, method-assign]
        if isinstance(steps, SynchronousSteps):
            self._results = steps.results
            steps.results = self.results  # type: ignore[method-assign]
        block = runner.model.model.layers[-1]
        if self.is_last and runner.ranks.is_last:
            block.self_attn.register_forward_pre_hook(lambda *_: self.check("attention"))
        block.mlp.gate.register_forward_pre_hook(lambda *_: self.check("router"))
        dispatcher = runner.moe_layers[-1].dispatcher
        dispatcher.register_hook("pre_dispatch", self.before_dispatch)
        dispatcher.register_hook("post_dispatch", self.after_dispatch)
        if self.leads:
            dispatcher.register_hook("pre_combine", lambda *_: self.check("combine"))

    def begin(self, plan: StepPlan, *args: Any) -> Any:
        self.tokens = set(plan.token_ids.tolist())
        return self._begin(plan, *args)

    def results(self, *args: Any) -> Any:
        if self.leads:
            self.check("sampling")
        found = self._results(*args)
        if not self.leads and LATE in self.tokens:
            fail("late")
        return found

    def check(self, name: str) -> None:
        if POISONS[name] in self.tokens:
            fail(name)

    def before_dispatch(self, _: BaseDispatcher, value: Any) -> Any:
        if self.leads:
            self.check("dispatch")
        if POISONS["experts"] not in self.tokens:
            return None
        return torch.full_like(value[0], MARK), value[1]

    def after_dispatch(self, _: BaseDispatcher, output: Any) -> None:
        """On any rank that got a marked row, of whatever group."""
        if isinstance(output, FusedDispatchOutput):
            rows = output.x_TH
        elif isinstance(output, LowLatencyDispatchOutput):
            filled = zip(output.x.values, output.masked_m, strict=True)
            rows = torch.cat([block[:count] for block, count in filled])
        else:
            rows = output.x.values[(output.ids_RK >= 0).any(1)]
        if bool((rows == MARK).any()):
            fail("experts")


def fail(name: str) -> NoReturn:
    raise ZeroDivisionError(f"poison in {name}")


def poison_plans() -> None:
    plan_item = planner.plan_item

    def fail_or_plan(work: PlannedItem, history: TokenHistory | None) -> PlanItem:
        if PLAN in work.request.token_ids:
            fail("the plan")
        return plan_item(work, history)

    planner.plan_item = fail_or_plan


def run(link: RankLink) -> None:
    poison_plans()
    rank = Worker(link)
    Poison(rank.runner)
    rank.serve()


def main() -> int:
    """The `moesaic` command with such ranks."""
    remote.TARGET = TARGET
    return command()


if __name__ == "__main__":
    sys.exit(main())
