"""A runner that overlaps steps as one on a GPU does, on the CPU; and ranks that have it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from msgspec import structs

from moesaic.comm.launch.rank_link import RankLink
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.engine.schedule.plan import (
    FUTURE_TOKEN,
    DecodeRows,
    PlanItem,
    StepAgreement,
    StepHandle,
    StepPlan,
    StepResult,
)
from moesaic.engine.worker import worker as ranks
from tests.e2e.poison_rank import Poison

TARGET = "tests.ahead:run"
MODES = ("begin", "wait", "late")
"""When a step is computed, and when its errors are raised: both at the beginning, both when it is
waited for, or as on a device: computed when it begins, its errors seen when it is waited for."""


@dataclass
class Late:
    runner: AheadRunner
    plan: StepPlan
    done: StepResult | Exception | None = None
    hidden_TH: None = None
    is_done: bool = True
    """So that the loop plans the next step at once."""

    def compute(self) -> None:
        if self.done is None:
            try:
                self.done = self.runner.compute(self.plan)
            except Exception as error:
                self.done = error

    def wait(self) -> StepResult:
        self.compute()
        if isinstance(self.done, Exception):
            raise self.done
        assert self.done is not None
        return self.done


class AheadRunner(ModelRunner):
    """Knows the last token of each request; `poison`: tokens that break a step."""

    def __init__(
        self, *args: Any, mode: str = "late", poison: Sequence[int] = (), **named: Any
    ) -> None:
        super().__init__(*args, **named)
        self.overlaps = not args[0].disable_overlap_schedule
        self.mode, self.poison = mode, frozenset(poison)
        self.last: dict[int, int] = {}
        self.futures = 0

    def begin(
        self, plan: StepPlan, agreement: StepAgreement | None = None, x_TH: Any = None
    ) -> StepHandle:
        step = Late(self, plan)
        if self.mode != "wait":
            step.compute()
        if self.mode == "begin":
            step.wait()
        return step

    def compute(self, plan: StepPlan) -> StepResult:
        for key in plan.ended:
            self.last.pop(key, None)
        items = []
        for item in plan.items:
            if FUTURE_TOKEN in item.token_ids:
                assert len(item.token_ids) == 1 and item.score is None
                self.futures += 1
                item = self._resolved(item, self.last.get(item.request_no, 0))
            if item.sample is not None:
                assert item.sample.position == item.first + len(item.token_ids) - item.num_drafts
            items.append(item)
        plan = structs.replace(plan, items=items, decodes=self._decodes(plan.decodes))
        if self.poison.intersection(plan.token_ids.tolist()):
            # A device has the pages when it computes, and the next step is launched behind it.
            self.page_table.write(plan.page_updates())
            raise ZeroDivisionError("poison")
        result = super().begin(plan).wait()
        numbers = plan.decodes.request_nos.tolist()
        self.last.update(zip(numbers, result.token_ids, strict=True))
        for item, found in zip(items, result.items, strict=True):
            if found.token_ids:
                self.last[item.request_no] = found.token_ids[-1]
        return result

    def _decodes(self, decodes: DecodeRows) -> DecodeRows:
        is_future = decodes.token_ids == FUTURE_TOKEN
        self.futures += int(is_future.sum())
        last = np.array([self.last.get(number, 0) for number in decodes.request_nos.tolist()], int)
        return replace(decodes, token_ids=np.where(is_future, last, decodes.token_ids))

    @staticmethod
    def _resolved(item: PlanItem, token: int) -> PlanItem:
        sample = item.sample
        if sample is not None and sample.params.adjusts:
            sample = structs.replace(sample, output_ids=[*sample.output_ids, token])
        return structs.replace(item, token_ids=[token], sample=sample)


def run(link: RankLink) -> None:
    """A rank as the engine's own."""
    ranks.ModelRunner = AheadRunner  # type: ignore[assignment]
    rank = ranks.Worker(link)
    Poison(rank.runner)
    rank.serve()
