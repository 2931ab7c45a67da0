"""How the ranks that compute a step agree on its schedule, and on two micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from moesaic.config import ServerArgs
from moesaic.core.overlap import Overlap
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.engine.schedule.plan import StepAgreement, StepPlan
from moesaic.overlap.policy import NoOverlap, OverlapPolicy, StepShape
from moesaic.overlap.split import cut_decodes, cut_prompts

WHOLE: Final = -1
"""What a group tells if it cannot split its batch."""


class StepSplitter:
    def __init__(
        self,
        policy: OverlapPolicy | None = None,
        threshold: float = 0.0,
        keeps_whole: Callable[[StepPlan], bool] = lambda plan: plan.is_routed,
    ) -> None:
        """`threshold`: as in `cut_prompts`. `keeps_whole`: whether a plan must not be split."""
        self._policy, self._threshold = policy or NoOverlap(), threshold
        self._keeps_whole = keeps_whole

    @classmethod
    def of(cls, args: ServerArgs, runner: ModelRunner) -> StepSplitter:
        """Steps that keep the slots of their tokens are not split."""
        return cls(
            runner.overlap_policy,
            args.tbo_token_distribution_threshold,
            lambda plan: plan.is_routed or runner.records_tokens,
        )

    def first_half(self, plan: StepPlan) -> int:
        """The tokens of the plan that the first micro-batch would have, or WHOLE."""
        if isinstance(self._policy, NoOverlap) or self._keeps_whole(plan):
            return WHOLE
        if plan.draft_steps or any(item.num_drafts for item in plan.items):
            return WHOLE  # a verify step is one batch
        if plan.prefill:
            return cut_prompts(plan.lengths, self._threshold).tokens
        return cut_decodes(plan.lengths).tokens

    def settle(self, agreement: StepAgreement, halves: Sequence[int]) -> StepAgreement:
        """`halves`: what the groups have told. The agreement with the schedule of the step."""
        first = () if WHOLE in halves else tuple(halves)
        shape = StepShape(agreement.counts, first, agreement.prefill)
        overlap = self._policy.choose(shape)
        if overlap != Overlap.TBO:
            first = ()
        return msgspec.structs.replace(agreement, overlap=overlap, first_half=first)
