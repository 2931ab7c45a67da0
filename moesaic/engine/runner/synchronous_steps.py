"""Steps whose results are there when they have begun: the host computes or samples them.

R rows with logits · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from moesaic.core.step import Step
from moesaic.engine.runner.batches import EagerBatch, EagerOutput
from moesaic.engine.runner.pinned import PinnedRing
from moesaic.engine.runner.routed_experts import RoutedExperts
from moesaic.engine.runner.row_results import (
    LOGIT_ROWS,
    KnownRows,
    ScoreQueue,
    accept_drafts,
    decoded_tokens,
    item_results,
    sample_rows,
    sampled_rows,
)
from moesaic.engine.runner.split_step import SplitStep
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
    waited_ns = 0
    stuck = ""

    def __init__(self, runner: ModelRunner, timeout: float) -> None:
        self._runner = runner
        uploads = PinnedRing(runner.device, 4 * LOGIT_ROWS, timeout)
        self._batch = EagerBatch(runner, uploads)
        self._routed_experts = RoutedExperts(runner, uploads)
        self._known_rows = KnownRows(runner.max_running)

    def begin(self, plan: StepPlan, agreement: StepAgreement, x_TH: Tensor | None) -> FinishedStep:
        runner = self._runner
        if runner.samples:
            runner.matchers.begin(plan)
        self._known_rows.learn(plan.items)
        runner.move(plan.moves)
        runner.clear(plan.clear)
        runner.transfers.receive(plan, runner.sent_caches, runner.page_table)
        keeps_slots = plan.is_routed or runner.keeps_slots(agreement)
        slots: list[Tensor] | None = [] if keeps_slots else None
        counts = runner.group_counts(agreement.counts)
        prefill, overlap = agreement.prefill, agreement.overlap
        step = Step(prefill=prefill, counts=counts, routed=slots, overlap=overlap)
        split = SplitStep.of(runner, agreement, step)
        output, routed = self._batch.run(plan, step, x_TH, split=split), b""
        runner.record_pass(plan, agreement, output.tokens)
        outgoing = runner.transfers.outgoing(plan, runner.cache, runner.page_table)
        runner.transfers.send(outgoing, runner.cache)
        if slots is not None and plan.is_routed:
            routed = self._routed_experts.read(plan, slots, plan.num_tokens).experts()
        if not runner.ranks.is_last:
            return FinishedStep(StepResult([], routed), output.hidden_TH)
        result = self.results(plan, output, agreement.logits or (len(output.rows_R),))
        result.routed = routed
        if runner.draft is not None and agreement.draft_steps:
            runner.draft.run(plan, agreement, output.hidden_TH, result.items)
        elif runner.draft is not None:
            runner.draft.store(plan, output.hidden_TH, result)
        runner.send_drafts(outgoing)
        return FinishedStep(result)

    def results(self, plan: StepPlan, output: EagerOutput, group_rows: Sequence[int]) -> StepResult:
        """Samples and scores on the first rank of an attention group; the others only compute
        their part of the logits. `group_rows`: how many logits each group needs; all groups compute
        as many pieces as the one with the most."""
        runner, spans, begin = self._runner, self._runner.spans, len(plan.decodes)
        thresholds = runner.accept_thresholds
        rows = self._known_rows.sampled(plan.decodes)
        rows += sampled_rows(plan, thresholds is not None)
        found = [ItemResult() for _ in rows]
        results = item_results(plan, found[begin:])
        scores = ScoreQueue(plan, results)
        for start in range(0, max(group_rows), LOGIT_ROWS):
            piece = slice(start, start + LOGIT_ROWS)
            logits_RV = self._logits(output, piece, group_rows)
            if not runner.samples or not len(output.rows_R[piece]):
                continue
            started, count = spans.clock(), len(rows[piece])
            masks = runner.matchers.wait()
            sample_rows(rows[piece], logits_RV[:count], found[piece], masks, thresholds)
            scores.score_next(logits_RV[count:])
            spans.add(SpanKind.SAMPLE, started, tokens=count)
        accept_drafts(plan, found[begin:])
        return StepResult(results, b"", *decoded_tokens(found[:begin]))

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
