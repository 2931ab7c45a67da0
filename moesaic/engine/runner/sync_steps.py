"""Steps whose results are known when `begin` returns.

T tokens of the step · R rows whose logits are needed · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from moesaic.core.step import Step
from moesaic.engine.runner.batches import EagerBatch, EagerOutput
from moesaic.engine.runner.pinned import PinnedRing
from moesaic.engine.runner.row_results import (
    LOGIT_ROWS,
    ScoreQueue,
    accept_drafts,
    item_results,
    sample_rows,
    sampled_rows,
)
from moesaic.engine.schedule.plan import (
    FinishedStep,
    ItemResult,
    StepAgreement,
    StepPlan,
    StepResult,
)
from moesaic.observe.spans import SpanKind

if TYPE_CHECKING:
    from moesaic.engine.runner.model_runner import ModelRunner


class SynchronousSteps:
    """The host samples, and all attention groups compute their logits together."""

    overlaps = False
    stuck = ""

    def __init__(self, runner: ModelRunner, timeout: float) -> None:
        self._runner = runner
        self._batch = EagerBatch(runner, PinnedRing(runner.device, 4 * LOGIT_ROWS, timeout))

    def begin(self, plan: StepPlan, agreement: StepAgreement, x_TH: Tensor | None) -> FinishedStep:
        runner = self._runner
        if runner.samples:
            runner.matchers.begin(plan)
        runner.attention.clear(plan.clear)
        step = Step(prefill=agreement.prefill, counts=runner.group_counts(agreement))
        output = self._batch.run(plan, step, x_TH)
        if not runner.ranks.is_last:
            return FinishedStep(StepResult([]), output.hidden_TH)
        return FinishedStep(self.results(plan, output, agreement.logits or (len(output.rows_R),)))

    def results(self, plan: StepPlan, output: EagerOutput, group_rows: Sequence[int]) -> StepResult:
        """Samples and scores on the first rank of an attention group; the others only compute
        their part of the logits. `group_rows`: how many logits each group needs; all groups compute
        as many pieces as the one with the most."""
        runner, spans, rows = self._runner, self._runner.spans, sampled_rows(plan)
        found = [ItemResult() for _ in rows]
        results = item_results(plan, rows, found)
        scores = ScoreQueue(plan, results)
        for begin in range(0, max(group_rows), LOGIT_ROWS):
            piece = slice(begin, begin + LOGIT_ROWS)
            logits_RV = self._logits(output, piece, group_rows)
            if not runner.samples or not len(output.rows_R[piece]):
                continue
            started, count = spans.clock(), len(rows[piece])
            sample_rows(rows[piece], logits_RV[:count], found[piece], runner.matchers.wait())
            scores.score_next(logits_RV[count:])
            spans.add(SpanKind.SAMPLE, started, tokens=count)
        accept_drafts(plan, found)
        return StepResult(results)

    def _logits(self, output: EagerOutput, piece: slice, group_rows: Sequence[int]) -> Tensor:
        spans, rows_R = self._runner.spans, output.rows_R[piece]
        counts = [min(max(0, rows - piece.start), LOGIT_ROWS) for rows in group_rows]
        started = spans.clock()
        logits_RV = self._runner.model.logits(output.hidden_TH[rows_R], counts)
        spans.add(SpanKind.LOGITS, started, tokens=len(rows_R))
        return logits_RV

    def drop(self) -> None:
        """No step is in flight."""

    def device_info(self) -> dict[str, Any]:
        return {}
