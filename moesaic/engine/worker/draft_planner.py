"""Whether the next step of a serving group has drafts, how many, and whether it waits for them."""

from __future__ import annotations

import time
from typing import Final

from moesaic.config import ServerArgs
from moesaic.config.speculation import speculation_of
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.engine.schedule.acceptance import Acceptance
from moesaic.engine.schedule.inflight import InflightStep, PlannedItem
from moesaic.engine.schedule.plan import DraftGap, PlanItem
from moesaic.engine.schedule.scheduler import Scheduler
from moesaic.engine.speculate.controller import DraftController
from moesaic.engine.speculate.drafters import Drafter, make_drafter

# A step that ends so many times its own seconds after the last one was waited for by nobody.
IDLE_TIMES: Final = 2.0
# More drafts than any request gets.
ANY_NUMBER: Final = 1 << 20


class DraftPlanner:
    """Asks the drafter of this host, or plans for the draft model on the ranks. Where steps
    overlap, one with drafts waits for the tokens of those in flight, and others run ahead."""

    def __init__(
        self, args: ServerArgs, runner: ModelRunner, scheduler: Scheduler, drafter: Drafter | None
    ) -> None:
        self._scheduler, self._overlaps = scheduler, runner.overlaps
        self.drafter = drafter or make_drafter(args, runner)
        self.steps = 0 if runner.draft is None else runner.draft.num_steps
        """Tokens that the ranks' draft model proposes at the end of a step, at most."""
        self._fills_gaps = runner.draft is not None and runner.draft.fills_gaps
        self._most_tokens = runner.limits.tokens
        self.controller = _controller(args, runner.verifies_trees)
        """None: requests have all drafts that the drafter proposes."""
        self.agreed: int | None = None
        """What all groups plan next, as each with requests has wanted; None: this one decides."""
        self._planned = 0
        """The drafts that each request may have in the step that is being planned."""
        speculation = speculation_of(args)
        topk = 1 if speculation is None else speculation.topk
        self._tree_room = runner.limits.decode_tokens // topk
        """Trees whose branches fit into a pass."""
        self._most_trees = self._tree_room
        self._num_inflight = 0
        self._observed_at = 0.0
        self._was_drafting = False
        """Whether the last step that has run had drafts, or made some."""
        self._has_found: bool | None = None
        """Whether the drafter proposes anything; None: it has to be asked again."""

    @property
    def wanted(self) -> int:
        """The most drafts of a request that this group would plan; -1 without requests that may
        have some: another instance continues the others."""
        if all(request.kv_target is not None for request in self._scheduler.open_requests()):
            return -1
        if self.drafter is None and not self.steps:
            return 0
        return ANY_NUMBER if self.controller is None else self.controller.num_drafts

    @property
    def allowed(self) -> int:
        """The drafts that each request may have in the next step, if any are found."""
        return max(0, self.wanted if self.agreed is None else self.agreed)

    @property
    def awaits_tokens(self) -> bool:
        """Whether the next plan needs the tokens of all steps in flight."""
        return self.allowed > 0 and self._finds()

    def _finds(self) -> bool:
        """A model on the ranks has drafts in every step; a drafter is asked. Behind tokens in
        flight it would propose others: there it only tells that it is likely to find some."""
        if self.drafter is None:
            return True
        if self._has_found is None:
            able = (r for r in self._scheduler.running if r.is_decoding and r.may_draft)
            asked = [request for request in able if self._overlaps or not request.pending]
            self.drafter.propose(asked)
            self._has_found = any(request.drafts for request in asked)
            for request in asked:
                if request.pending:
                    request.drafts = []
        return self._has_found

    def propose(self) -> bool:
        """Sets the drafts of the next step; False if it is to have none."""
        most, self._planned, self._most_trees = self.allowed, 0, self._tree_room
        if self.drafter is None and not self.steps:
            return False
        if most and self._finds():
            self._planned = most
        for request in self._scheduler.running:  # some may be left from when more were allowed
            if len(request.drafts) > self._planned:
                request.drafts = request.drafts[: self._planned]
        return self._planned > 0

    def skip(self) -> None:
        """The next step has no drafts, as it looks for a request that breaks it."""
        self._planned = 0

    @property
    def steps_planned(self) -> int:
        """Tokens that the ranks' draft model proposes behind the step that is being planned."""
        return min(self.steps, self._planned)

    def complete_item(self, planned: PlannedItem, item: PlanItem) -> None:
        """Tells the ranks' draft model what it needs beside the item."""
        request = planned.request
        if item.sample is None:
            item.next_id = (*request.token_ids[planned.stop : planned.stop + 1], 0)[0]
            return
        if not self.steps_planned:
            return
        most = len(request.prompt_ids) + request.max_new_tokens
        config, pages = self._scheduler.config, len(request.pages)
        ahead, room = config.drafts_ahead, pages * self._scheduler.kv.page_size
        if config.most_positions:  # trees are stored there as a whole
            has_room = planned.stop + ahead <= room and self._most_trees > 0
            if planned.confirmed + 2 < most and has_room:
                item.draft_until, self._most_trees = min(room, most) - 1, self._most_trees - 1
            return
        room = min(room, most)
        # The step's token and a draft behind it must be allowed, and have pages.
        if planned.confirmed + 2 < most and (not ahead or planned.stop < room):
            item.draft_until = room - 1

    def fill_gaps(self, step: InflightStep) -> None:
        """Adds tokens to the plan that the ranks' draft model has not computed, as it did not run
        then. A request gets no drafts before it has computed all, which may take several steps."""
        plan = step.plan
        if not (plan.draft_steps and self._fills_gaps):
            return
        room = self._most_tokens - plan.num_tokens
        for planned, item in zip(step.items, plan.items, strict=True):
            request, stop = planned.request, planned.stop
            first = request.draft_computed
            if first < planned.first:
                stop = min(planned.first, first + room)
                if stop > first:
                    plan.gaps.append(DraftGap(item.row, first, request.token_ids[first:stop]))
                    room -= stop - first
                if stop < planned.first:
                    item.draft_until = 0
                else:
                    stop = planned.stop
            step.draft_stops[request] = stop

    def begin(self, step: InflightStep) -> None:
        """The step is planned."""
        step.is_overlapped = self._num_inflight > 0 or not self._overlaps
        # A step that has none after all has waited for the one before as one with drafts does.
        step.drafting = self._planned or (0 if step.is_overlapped else self.allowed)
        self._num_inflight += 1
        if step.plan.prefill:  # requests come to decode by it
            self._has_found = None

    def end(self) -> None:
        """The oldest step in flight is applied next: tokens that follow others are known."""
        self._num_inflight, self._has_found = self._num_inflight - 1, None

    def restart(self) -> None:
        """All steps in flight were undone."""
        self._num_inflight, self._has_found = 0, None

    def observe(self, step: InflightStep, seconds: float, seen: Acceptance) -> None:
        """A step that has run took so long on this rank."""
        controller, requests, now = self.controller, step.num_decoding, time.monotonic()
        if controller is None:
            return
        # From one step's end to the next one's: what the host does in between counts, too, unless
        # there was nothing to do.
        whole, self._observed_at = now - self._observed_at, now
        ms = 1000 * (whole if whole < IDLE_TIMES * seconds else seconds)
        if step.drafting:
            controller.observe_drafts(seen.accepted, requests, step.drafting)
        # The first step with a draft model has none to verify, and the first without drafts had to
        # wait for the one before it.
        is_usual = not self.steps or self._was_drafting if step.drafting else step.is_overlapped
        self._was_drafting = step.drafting > 0
        if step.agreement.fills_gaps and not step.plan.prefill:
            controller.observe_gap(requests, ms)
        elif is_usual and not step.plan.prefill:
            controller.observe_step(requests, ms, step.drafting)


def _controller(args: ServerArgs, trees: bool) -> DraftController | None:
    speculation = speculation_of(args)
    if speculation is None:
        return None
    adaptive = not args.disable_speculative_adaptive
    return DraftController(speculation.num_drafts, adaptive, trees)
