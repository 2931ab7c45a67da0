"""Plans the steps of one serving group and applies their results to its requests."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from moesaic.comm.errors import StateLost
from moesaic.config import ServerArgs
from moesaic.config.speculation import speculation_of
from moesaic.core.redact import shown_id
from moesaic.core.request import ABORTED, FinishReason, NewRequest, Request, failure
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.engine.sampling.token_history import TokenHistory
from moesaic.engine.schedule.inflight import (
    InflightStep,
    MovedTokens,
    PlannedDecodes,
    PlannedItem,
)
from moesaic.engine.schedule.kv_manager import KVManager
from moesaic.engine.schedule.plan import (
    NO_DECODES,
    NOT_FINITE,
    DecodeRows,
    ItemResult,
    PlanItem,
    StepPlan,
    StepResult,
)
from moesaic.engine.schedule.prefill_delay import PrefillDelayer
from moesaic.engine.schedule.quarantine import Quarantine
from moesaic.engine.schedule.request_state import RequestState
from moesaic.engine.schedule.scheduler import NOTHING, Schedule, Scheduler, SchedulerConfig
from moesaic.engine.schedule.scheduler_metrics import SchedulerMetrics
from moesaic.engine.speculate.drafters import Drafter
from moesaic.engine.worker.draft_planner import DraftPlanner
from moesaic.engine.worker.plan_items import history_of, plan_item

logger = logging.getLogger(__name__)


class PlannedWork(NamedTuple):
    """The requests of a step with their ranges of tokens, and its plan items in the same order;
    those that only decode, and their part of the plan."""

    work: list[PlannedItem]
    items: list[PlanItem]
    decoding: PlannedDecodes
    decodes: DecodeRows

    @property
    def requests(self) -> list[Request]:
        return [*self.decoding.requests, *(planned.request for planned in self.work)]


NO_WORK: Final = PlannedWork([], [], PlannedDecodes(), NO_DECODES)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of the served model that callers need; limits are those of one serving group."""

    vocab_size: int
    context_length: int
    cache_tokens: int
    max_running: int
    eos_ids: tuple[int, ...]
    num_experts: int = 0
    num_layers: int = 0
    top_k: int = 0


class Planner:
    """The requests of one serving group. Not thread-safe: one thread calls it. Where steps overlap,
    `plan` makes the next one before the results of the last are known: requests take part with a
    FUTURE_TOKEN that only the device knows, unless they need their last token on the host, as all
    of them do for a drafter."""

    def __init__(
        self,
        args: ServerArgs,
        runner: ModelRunner,
        group: int = 0,
        drafter: Drafter | None = None,
    ) -> None:
        self.runner = runner
        self._is_replaceable = args.elastic_ep_backend is not None
        """Whether others continue its requests if its process ends."""
        self._new_pages: list[int] = []
        """Allocated since the last plan; the next step clears them."""
        self.kv = KVManager(
            runner.num_pages,
            args.page_size,
            prefix_cache=not args.disable_radix_cache,
            on_take=self._new_pages.extend,
        )
        self.scheduler = Scheduler(_scheduler_config(args, runner), self.kv)
        self.drafts = DraftPlanner(args, runner, self.scheduler, drafter)
        speculation = speculation_of(args)
        most_drafts = 0 if speculation is None else speculation.num_drafts
        self.metrics = SchedulerMetrics(
            self.scheduler, args.decode_log_interval, group, most_drafts
        )
        self.facts = ModelFacts(
            vocab_size=runner.vocab_size,
            context_length=runner.context_length,
            cache_tokens=runner.num_pages * args.page_size,
            max_running=runner.max_running,
            eos_ids=tuple(sorted(runner.eos_ids)),
            num_experts=runner.num_experts,
            num_layers=runner.num_layers,
            top_k=runner.top_k,
        )
        self.states: dict[int, RequestState] = {}
        """The open requests, by number."""
        self._histories: dict[int, TokenHistory] = {}
        """Of those whose sampling keeps state."""
        self._routed: set[int] = set()
        """Those that ask for routed experts."""
        self.num_steps = 0
        self._quarantine = Quarantine()
        self._moves: dict[int, MovedTokens] = {}
        """Tokens whose cache entries the next step of their request moves, by its number."""
        self._ended: list[int] = []
        """Numbers of requests that ended since the last plan; the next one names them."""
        self.num_finished = 0
        """Requests that have ended, for whatever reason."""

    @property
    def num_suspects(self) -> int:
        """Sets of requests that are still to be retried by themselves."""
        return len(self._quarantine)

    def info(self) -> dict[str, Any]:
        """The state of scheduler and cache, for /server_info."""
        return {
            "max_total_num_tokens": self.facts.cache_tokens,
            "max_running_requests": self.facts.max_running,
            "context_length": self.facts.context_length,
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting) + len(self.scheduler.arriving),
            "pages_used": self.kv.num_used,
            "pages_cached": self.kv.tree.num_nodes,
            "pages_free": self.kv.allocator.num_free,
            "retractions": self.scheduler.num_retractions,
            "steps": self.num_steps,
            "failed_steps": self.metrics.counts.failed_steps,
            "placement_version": self.runner.placement_version,
        }

    def add(self, state: RequestState) -> None:
        number = state.request.request_no
        assert number not in self.states, f"request number {number} is in use"
        self.scheduler.add(state.request)
        self.states[number] = state
        if state.request.params.has_history:
            self._histories[number] = history_of(state.request)
        if state.request.routed_start is not None:
            self._routed.add(number)

    def begin_answer(
        self, state: RequestState, found: ItemResult, finish: FinishReason | None
    ) -> None:
        """The first token of a prompt that has arrived; without one, `finish` says why."""
        reason = state.accept_all(found) or finish
        if reason is not None:
            self._finish(state, reason)

    def abort(self, request_no: int) -> None:
        if (state := self.states.get(request_no)) is not None:
            self._finish(state, FinishReason("abort", message=ABORTED))

    def drop_all(self) -> None:
        """Forgets all requests, which another group or this one gets anew, and all that is cached:
        a rank of the group has lost its part. No step is in flight."""
        self._quarantine.clear()
        for number, state in self.states.items():
            self.scheduler.finish(state.request)
            self._ended.append(number)
        self.states.clear()
        self._histories.clear()
        self._routed.clear()
        self._moves.clear()
        self.kv.flush()

    def fail_all(self, message: str) -> None:
        """Ends every request; results of in-flight steps are ignored."""
        self._quarantine.clear()
        for state in list(self.states.values()):
            try:
                self._finish(state, failure(message))
            except Exception:
                logger.exception(
                    "request %s could not be ended cleanly", shown_id(state.request.rid)
                )

    def give_up(self, error: Exception, request: NewRequest | None = None) -> None:
        """Raises StateLost where others can continue: half of a change may be done, and the error
        may be no request's. A request that was moved for this before is the cause."""
        if self._is_replaceable and not (request is not None and request.is_suspect):
            request_no = -1 if request is None else request.request_no
            raise StateLost(f"the state of requests is lost: {error!r}", request_no) from error

    def plan(self, parts: int = 1) -> InflightStep:
        """The next step, empty if there is nothing to compute. `parts`: how many steps share the
        decoding requests. A request that breaks the plan is found and ended as one that breaks a
        step; an error that no request causes ends all of them."""
        self.drafts.skip()
        try:
            chosen = self._try_suspects()
            if chosen is NO_WORK and self.scheduler.has_work:
                chosen = self._choose(parts)
        except Exception as error:
            self.give_up(error)
            logger.exception("no step can be planned; all %d requests end", len(self.states))
            self.fail_all(f"the engine failed: {error!r}")
            chosen = NO_WORK
        if chosen is NO_WORK:
            return InflightStep()
        work, items, decoding, decodes = chosen
        prefill = not all(planned.decodes for planned in work)
        for planned in work:
            planned.begin()
        self.scheduler.decode_table.begin(decoding, decodes)
        pages, self._new_pages[:] = list(self._new_pages), []
        ended, self._ended = self._ended, []
        self.num_steps += 1
        is_routed = bool(self._routed) and any(item.num_routed for item in items)
        facts = (ended, is_routed, decodes, self.drafts.steps_planned)
        plan = StepPlan(items, pages, prefill, *facts, self.drafts.branches_planned)
        step = InflightStep(plan, work, decoding)
        if self._moves:
            self._move_tokens(step, chosen.requests)
        self.drafts.fill_gaps(step)
        self.drafts.begin(step)
        return step

    def _move_tokens(self, step: InflightStep, requests: Iterable[Request]) -> None:
        """Adds what the accepted drafts of these requests need to the plan."""
        found = (self._moves.pop(request.request_no, None) for request in requests)
        step.moved = [moved for moved in found if moved is not None and moved.is_current]
        for moved in step.moved:
            step.plan.moves += moved.slots(self.kv.page_size)

    def _choose(self, parts: int) -> PlannedWork:
        """The work of the next step. Nothing counts as done before all of it is known, so that an
        error leaves all requests as they were; the error is raised if no request causes it."""
        num_open, schedule = len(self.states), NOTHING
        try:
            drafts = self.drafts.propose()
            ahead = self.runner.overlaps and not drafts
            schedule = self._schedule(parts=parts, ahead=ahead, drafts=drafts)
            return self._plan_work(schedule)
        except Exception as error:
            logger.exception("a step could not be planned")
            suspects = self.scheduler.requests_of(schedule)
            all_open = [state.request for state in self.states.values()]
            self.report_failure(suspects or all_open, repr(error), alone=True)
            chosen = self._try_suspects()
            if chosen is NO_WORK and len(self.states) == num_open:
                raise
            return chosen

    def _try_suspects(self) -> PlannedWork:
        """A step for the next set of suspects; those that cannot be computed now are dropped."""
        while self._quarantine:
            next_suspects = self._quarantine.next_suspects()
            suspects = [r for r in next_suspects if r.request_no in self.states]
            if not suspects:
                continue
            self.drafts.skip(suspects)
            try:
                chosen = self._plan_work(self._schedule(only=frozenset(suspects)))
            except Exception as error:
                logger.info("a step could not be planned", exc_info=True)
                self.report_failure(suspects, repr(error), alone=True)
                continue
            if chosen is not NO_WORK:
                tried = set(chosen.requests)
                self._quarantine.put_back([r for r in suspects if r not in tried])
                return chosen
        return NO_WORK

    def _schedule(self, **options: Any) -> Schedule:
        """An error may leave pages and queues half changed."""
        try:
            return self.scheduler.schedule(**options)
        except Exception as error:
            self.give_up(error)
            raise

    def _plan_work(self, schedule: Schedule) -> PlannedWork:
        if schedule.is_empty:
            return NO_WORK
        history, work = self._histories.get, schedule.items
        items = [plan_item(planned, history(planned.request.request_no)) for planned in work]
        if self.drafts.steps:
            for planned, item in zip(work, items, strict=True):
                self.drafts.complete_item(planned, item)
        return PlannedWork(work, items, *self.scheduler.decode_table.plan(schedule.rows))

    def rollback(self, steps: Iterable[InflightStep], failed: bool = True) -> list[Request]:
        """Undoes all in-flight steps and returns their requests; their pages are cleared again, and
        all pages are sent again. `failed`: one of the steps may be the cause."""
        suspects: dict[Request, None] = {}
        undone = [*steps]
        self.drafts.restart(undone, failed)
        for step in reversed(undone):
            self._new_pages += step.plan.clear if step.has_requests else []
            self._ended += step.plan.ended if step.has_requests else []
            for request in step.undo(self.kv, failed):
                if request.request_no in self.states:
                    suspects[request] = None
        self.scheduler.restart()
        return list(suspects)

    def report_failure(self, suspects: Sequence[Request], error: str, *, alone: bool) -> None:
        """A step with these requests failed. `alone`: no other serving group was in it."""
        self.metrics.counts.failed_steps += bool(suspects)
        culprit = self._quarantine.report_failure(suspects, alone=alone)
        if culprit is not None and self.drafts.have_broken(culprit):
            self._quarantine.put_back([culprit])
        elif culprit is not None and self._is_replaceable and not culprit.is_suspect:
            culprit.is_suspect = True
            self._quarantine.put_back([culprit])  # what does not come again is not its fault
        elif culprit is not None:
            logger.error("request %s made a step fail: %s", shown_id(culprit.rid), error)
            self._fail(culprit, f"the step failed: {error}")

    def observe(self, step: InflightStep, result: StepResult, seconds: float) -> None:
        """Counts a step that has run, before it is applied."""
        self.metrics.observe(step, result, seconds)
        self.drafts.observe(step, result, seconds, self.metrics.acceptance)
        self.metrics.counts.num_drafts = self.drafts.allowed.drafts

    def apply(self, step: InflightStep, result: StepResult) -> None:
        """Steps are applied in the order in which they were planned."""
        self.drafts.end()
        if step.decoding.requests:
            self._apply_decodes(step, result)
        routed_of = result.routed_of(step.plan.items)
        for item, found, routed in zip(step.items, result.items, routed_of, strict=True):
            try:
                self._count_drafted(item, found, step.draft_stops.get(item.request))
                self._apply_item(item, found, routed)
            except Exception as error:
                self._fail_token(item.request, error)

    def _apply_decodes(self, step: InflightStep, result: StepResult) -> None:
        states, now = self.states, time.monotonic()
        self.scheduler.decode_table.end(step.decoding, step.plan.decodes)
        broken = frozenset(result.broken)
        self._share_full_pages(step, broken)
        planned = zip(step.decoding.requests, result.token_ids, strict=True)
        for place, (request, token_id) in enumerate(planned):
            state = states.get(request.request_no)
            if state is None:  # it ended while the step was in flight
                continue
            try:
                if place in broken:
                    self._finish(state, failure(NOT_FINITE))
                elif (reason := state.accept_one(token_id, now)) is not None:
                    self._finish(state, reason)
            except Exception as error:
                self._fail_token(request, error)

    def _share_full_pages(self, step: InflightStep, broken: frozenset[int]) -> None:
        """Shares the pages of requests whose decoded token is the last one of a page."""
        if not self.kv.tree.enabled:
            return
        computed, planned = step.plan.decodes.first + 1, step.decoding
        for place in np.flatnonzero(computed % self.kv.page_size == 0).tolist():
            request = planned.requests[place]
            is_open = request.request_no in self.states and place not in broken
            if is_open and request.retractions == planned.retractions[place]:
                try:
                    self._share(request, int(computed[place]))
                except Exception as error:
                    self._fail_token(request, error)

    def _share(self, request: Request, num_tokens: int) -> None:
        self.kv.share(request, num_tokens)
        self.scheduler.decode_table.update(request)

    def _fail_token(self, request: Request, error: Exception) -> None:
        self.give_up(error, request)
        logger.error("request %s failed", shown_id(request.rid), exc_info=error)
        self._fail(request, f"its token could not be applied: {error!r}")

    def _count_drafted(self, item: PlannedItem, found: ItemResult, stop: int | None) -> None:
        """`stop`: that of InflightStep.draft_stops, if the draft model has run."""
        request = item.request
        is_there = request.request_no in self.states and request.retractions == item.retractions
        if stop is not None and is_there and not found.broken:
            accepted = item.confirmed + item.accepted(len(found.token_ids))
            self.kv.draft_until(request, min(stop, accepted - found.unready))

    def _apply_item(self, item: PlannedItem, found: ItemResult, routed: bytes) -> None:
        request = item.request
        state = self.states.get(request.request_no)
        if state is None:  # it ended while the step was in flight
            return
        if found.broken:
            self._fail(request, found.broken)
            return
        if found.input_logprobs:
            request.input_logprobs += found.input_logprobs
            request.input_top_logprobs += found.input_top_logprobs
        if routed:
            size, rows = request.routed_row, item.accepted_rows(found.token_ids)
            first = item.stop - len(routed) // size
            known = (item.confirmed - first) * size
            places = (known + (row - 1) * size for row in rows)
            routed = routed[:known] + b"".join(routed[at : at + size] for at in places)
            request.add_routed(first, routed)
        if request.retractions == item.retractions:
            request.arriving = None  # its prompt is in its pages
            self._share(request, item.confirmed)
        if not item.samples:
            return
        if found.unready:
            item.repeat_last()
            return
        item.end(len(found.token_ids))
        if item.drafts:
            verified, drafted, accepted = request.draft_counts
            accepted += item.accepted(len(found.token_ids))
            request.draft_counts = verified + 1, drafted + len(item.drafts), accepted
            moved = MovedTokens.of(item, item.accepted_rows(found.token_ids))
            if moved is not None:
                self._moves[request.request_no] = moved
        self.scheduler.decode_table.update(request)
        reason = state.accept_all(found)
        if found.ended:
            reason = FinishReason("stop")
        elif not found.token_ids:
            reason = FinishReason("length", length=0)
        if reason is not None:
            self._finish(state, reason)
        elif request.retractions == item.retractions:
            request.drafts, request.draft_parents = [*found.drafts], [*found.parents]

    def _fail(self, request: Request, message: str) -> None:
        if (state := self.states.get(request.request_no)) is not None:
            self._finish(state, failure(message))

    def _finish(self, state: RequestState, reason: FinishReason) -> None:
        del self.states[state.request.request_no]
        self.num_finished += 1
        self._histories.pop(state.request.request_no, None)
        self._routed.discard(state.request.request_no)
        self._moves.pop(state.request.request_no, None)
        try:
            self.scheduler.finish(state.request)
        finally:
            self._ended.append(state.request.request_no)
            state.finish(reason)


def _scheduler_config(args: ServerArgs, runner: ModelRunner) -> SchedulerConfig:
    return SchedulerConfig(
        max_running=runner.max_running,
        chunk_tokens=runner.limits.chunk_tokens,
        conservativeness=args.schedule_conservativeness,
        max_prompts=args.prefill_max_requests or sys.maxsize,
        mixed=not args.disable_mixed_chunk,
        max_step_ms=args.max_step_ms,
        wave=runner.prefill_wave,
        delayer=_delayer(args),
        max_drafts=runner.limits.drafts or sys.maxsize,
        reuses_arrived=args.disaggregation_decode_enable_radix_cache,
        drafts_ahead=0 if runner.draft is None else runner.draft.positions_ahead,
        most_positions=_most_positions(args, runner),
        has_draft_model=runner.draft is not None,
    )


def _most_positions(args: ServerArgs, runner: ModelRunner) -> int:
    """Those of a row of the page table, if branches of drafts are stored there, too."""
    has_branches = runner.draft is not None and runner.verifies_trees
    return runner.page_table.max_pages * args.page_size if has_branches else 0


def _delayer(args: ServerArgs) -> PrefillDelayer | None:
    """Only groups whose steps are one can wait for each other."""
    if not (args.enable_prefill_delayer and args.enable_dp_attention and args.dp_size > 1):
        return None
    return PrefillDelayer(
        args.prefill_delayer_max_delay_passes,
        args.prefill_delayer_max_delay_ms,
        args.prefill_delayer_token_usage_low_watermark,
    )
