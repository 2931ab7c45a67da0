"""Whether the next step of a serving group has drafts, which, and whether it waits for them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from moesaic.config import ServerArgs
from moesaic.config.speculation import speculation_of
from moesaic.core.draft_shape import ANY_DRAFTS, NO_DRAFTS, DraftShape, draft_shapes
from moesaic.core.request import Request
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.engine.schedule.acceptance import Acceptance
from moesaic.engine.schedule.inflight import InflightStep, PlannedItem
from moesaic.engine.schedule.plan import DraftGap, PlanItem, StepResult
from moesaic.engine.schedule.scheduler import Scheduler
from moesaic.engine.speculate.controller import DraftController, DraftWork
from moesaic.engine.speculate.draft_shares import VerifiedDraft
from moesaic.engine.speculate.drafters import Drafter, make_drafter

# A step that ends so many times its own seconds after the last one was waited for by nobody.
IDLE_TIMES = 2.0


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
        self.controller = _controller(args, runner)
        """None: requests have all drafts that the drafter proposes."""
        self.agreed: int | None = None
        """What all groups plan next, as each with requests has wanted; None: this one decides."""
        self.rests = False
        """Whether ranks that hold experts of the draft model are away."""
        self._planned = NO_DRAFTS
        """What each request may have in the step that is being planned."""
        self._pass_rows = runner.limits.decode_tokens
        self._most_trees = 0
        """Trees whose branches still fit into a pass of that step's draft model."""
        self._num_inflight = 0
        self._observed_at = 0.0
        self._made = NO_DRAFTS
        """The drafts of the last step that has run, and the largest that it made for the next."""
        self._undone = set[Request]()
        self._has_found: bool | None = None
        """Whether the drafter proposes anything; None: it has to be asked again."""

    @property
    def wanted(self) -> int:
        """The place of the shape that this group would plan; -1 without requests that may
        have drafts: another instance continues the others."""
        if all(request.kv_target is not None for request in self._scheduler.open_requests()):
            return -1
        if self.rests or (self.drafter is None and not self.steps):
            return 0
        return 1 if self.controller is None else self.controller.chosen

    @property
    def allowed(self) -> DraftShape:
        """What each request may have in the next step, if drafts are found. Groups have agreed on
        it before ranks went away."""
        shapes = self._shapes
        if self.rests:
            return NO_DRAFTS
        return shapes[max(0, self.wanted if self.agreed is None else self.agreed)]

    @property
    def _shapes(self) -> Sequence[DraftShape]:
        return (NO_DRAFTS, ANY_DRAFTS) if self.controller is None else self.controller.shapes

    @property
    def awaits_tokens(self) -> bool:
        """Whether the next plan needs the tokens of all steps in flight."""
        return self.allowed.drafts > 0 and self._finds()

    def _finds(self) -> bool:
        """A model on the ranks has drafts in every step; a drafter is asked. Behind tokens in
        flight it would propose others: there it only tells that it is likely to find some."""
        if self.drafter is None:
            return True
        if self._has_found is None:
            able = (r for r in self._scheduler.running if r.is_decoding and r.may_draft)
            asked = [request for request in able if self._overlaps or not request.pending]
            self.drafter.propose(asked, self.allowed)
            self._has_found = any(request.drafts for request in asked)
            for request in asked:
                if request.pending:
                    request.drafts = []
        return self._has_found

    def propose(self) -> bool:
        """Sets the drafts of the next step; False if it is to have none."""
        shape, self._planned = self.allowed, NO_DRAFTS
        if self.drafter is None and not self.steps:
            return False
        if shape.drafts and self._finds():
            self._planned = shape
        self._most_trees = self._pass_rows // max(1, self._planned.branches)
        for request in self._scheduler.running:  # some may be left from when others were allowed
            if request.drafts:
                cut = self._planned.cut(request.drafts, request.draft_parents)
                request.drafts, request.draft_parents = cut
        return self._planned.drafts > 0

    def skip(self, suspects: Iterable[Request] = ()) -> None:
        """The next step has no drafts, as it looks for a request that breaks it: these may have
        some from before."""
        self._planned = NO_DRAFTS
        for request in suspects:
            request.drafts, request.draft_parents = [], []

    @property
    def steps_planned(self) -> int:
        """Passes of the ranks' draft model behind the step that is being planned."""
        return min(self.steps, self._planned.steps)

    @property
    def branches_planned(self) -> int:
        """Branches that each of them continues."""
        return self._planned.branches if self.steps_planned else 0

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
        step.drafting = self._planned
        if not self._planned.drafts and not step.is_overlapped:
            step.drafting = self.allowed
        self._num_inflight += 1
        if step.plan.prefill:  # requests come to decode by it
            self._has_found = None

    def end(self) -> None:
        """The oldest step in flight is applied next: tokens that follow others are known."""
        self._num_inflight, self._has_found = self._num_inflight - 1, None

    def have_broken(self, request: Request) -> bool:
        """Whether the steps that were undone last had drafts of it, which may have broken them."""
        was_drafted = request in self._undone
        self._undone.discard(request)
        return was_drafted

    def restart(self, steps: Sequence[InflightStep], failed: bool) -> None:
        """These, all that were in flight, are undone, as one of them has `failed`, or for a reason
        that is not in them."""
        drafted = {item.request for step in steps for item in step.items if item.drafts}
        self._undone = drafted if failed else set()
        self._num_inflight, self._has_found = 0, None

    def observe(
        self, step: InflightStep, result: StepResult, seconds: float, seen: Acceptance
    ) -> None:
        """A step that has run took so long on this rank."""
        controller, requests, now = self.controller, step.num_decoding, time.monotonic()
        if controller is None:
            return
        # From one step's end to the next one's: what the host does in between counts, too, unless
        # there was nothing to do.
        whole, self._observed_at = now - self._observed_at, now
        ms = 1000 * (whole if whole < IDLE_TIMES * seconds else seconds)
        shape, made = step.drafting, self._made
        self._made = shape
        # A draft model's step verifies what the one before has made, which may be less, and the
        # first step without drafts had to wait for the one before it.
        is_usual = not self.steps or shape.is_within(made) if shape.drafts else step.is_overlapped
        if shape.is_tree and is_usual:
            controller.observe_trees(_verified(step, result), requests, shape)
        elif shape.drafts and is_usual:
            controller.observe_chains(seen.accepted, requests, shape)
        if step.agreement.fills_gaps and not step.plan.prefill:
            controller.observe_gap(requests, ms)
        elif is_usual and not step.plan.prefill:
            controller.observe_step(requests, ms, shape)


def _verified(step: InflightStep, result: StepResult) -> list[VerifiedDraft]:
    return [
        VerifiedDraft(item.parents or range(len(item.drafts)), item.accepted_rows(found.token_ids))
        for item, found in zip(step.items, result.items, strict=True)
        if item.drafts
    ]


def _controller(args: ServerArgs, runner: ModelRunner) -> DraftController | None:
    speculation = speculation_of(args)
    if speculation is None:
        return None
    work = DraftWork(speculation.makes.on_ranks, runner.num_experts, runner.top_k)
    shapes = draft_shapes(speculation, runner.verifies_trees)
    return DraftController(shapes, not args.disable_speculative_adaptive, work)
