"""Chooses the tokens of the next step.

Every step has one token of each decoding request and is filled up with chunks of prompts, so that
both share one pass over the weights; step_budget.py says how far. Older requests have priority:
when pages run out, the youngest running request is retracted (its tokens kept, its pages freed) and
resumed later, so that every request ends.
"""

from __future__ import annotations

import sys
import time
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Final, NamedTuple

from moesaic.core.request import Request, RequestPhase
from moesaic.engine.schedule.decode_table import DecodeTable
from moesaic.engine.schedule.inflight import PlannedItem, work_of
from moesaic.engine.schedule.kv_cache import PrefixNode
from moesaic.engine.schedule.kv_manager import KVManager
from moesaic.engine.schedule.plan import NO_DECODES, Ints
from moesaic.engine.schedule.prefill_delay import PrefillDelayer
from moesaic.engine.schedule.step_budget import (
    CHUNK_MULTIPLE,
    PromptBudget,
    StepBudget,
    StepWork,
    heaviest,
)
from moesaic.engine.schedule.waiting_queue import WaitingQueue

# The share of a running request's remaining tokens for which pages stay free when another is
# admitted; it falls with time and rises with each retraction.
RESERVE_START, RESERVE_MIN, RESERVE_DECAY, RESERVE_STEP = 0.5, 0.1, 0.002, 0.2
# Remaining tokens count up to this number.
RESERVE_TOKENS = 4096
# Waiting requests that a plan passes because another one computes their next page.
MOST_AWAITING = 64
_request_no = attrgetter("request_no")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_running: int
    chunk_tokens: int
    conservativeness: float = 1.0
    max_prompts: int = sys.maxsize
    """Most requests whose prompts share a step."""
    mixed: bool = True
    """Prompts and decodes share steps; if not, decodes wait while there are prompts."""
    max_step_ms: float | None = 0.0
    """The bound of StepBudget."""
    wave: int = CHUNK_MULTIPLE
    """As in StepBudget."""
    delayer: PrefillDelayer | None = None
    max_drafts: int = sys.maxsize
    """Most drafts of a step."""
    has_draft_model: bool = False
    """Requests that only decode are columns; a draft model needs an item of each."""
    reuses_arrived: bool = False
    """Prompts that other instances compute are looked up in the prefix cache, too."""
    drafts_ahead: int = 0
    """Positions behind a step's last one that a draft model fills on the ranks."""
    most_positions: int = 0
    """Of a request, if a draft model needs all of these, also behind its longest answer."""


Plan = dict[Request, PlannedItem]


class Schedule(NamedTuple):
    """The work of a step: items, and rows of the decode table."""

    items: list[PlannedItem]
    rows: Ints

    @property
    def is_empty(self) -> bool:
        return not self.items and not len(self.rows)


NOTHING: Final = Schedule([], NO_DECODES.rows)


class Scheduler:
    def __init__(self, config: SchedulerConfig, kv: KVManager) -> None:
        self.config, self.kv = config, kv
        self.step_budget = StepBudget(config.max_step_ms, wave=config.wave)
        self.delayer = config.delayer
        self.waiting = WaitingQueue()
        self.arriving = WaitingQueue()
        """Requests whose prompts other instances compute, while they wait for pages here."""
        self.running: list[Request] = []
        """Oldest first."""
        self.decode_table = DecodeTable(config.max_running, kv.page_size)
        self._others: list[Request] = []
        """Running requests that are not in the table, oldest first."""
        self._prompting: dict[Request, None] = {}
        """Running requests whose prompts may not be in the prefix tree yet."""
        self._free_rows = list(range(config.max_running))[::-1]
        self.num_retractions = self.num_admitted = self.num_cached_tokens = 0
        self._least_reserve = min(1.0, RESERVE_MIN * config.conservativeness)
        self._reserve = min(1.0, RESERVE_START * config.conservativeness)
        self._awaiting = StepWork()
        """Requests that decode, but not in this step: they need their token in flight on the host,
        and wait for this step all the same."""
        self._promised: int | None = None
        """Pages that the running requests are likely to take, once it is needed in a step."""

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.arriving)

    def open_requests(self) -> Iterator[Request]:
        return chain(self.running, self.waiting, self.arriving)

    def add(self, request: Request) -> None:
        request.phase = RequestPhase.WAITING
        self._queue(request).append(request)

    def _queue(self, request: Request) -> WaitingQueue:
        return self.waiting if request.arriving is None else self.arriving

    def reserve(self, room: int) -> list[Request]:
        """Gives pages to requests whose prompts arrive from other instances, in order, as far as
        there are some and no older request waits for them; returns those that have begun. `room`:
        the tokens that may still be on their way; what has a ticket was counted already, also
        if it was retracted since."""
        begun: list[Request] = []
        self._promised = None
        while self.arriving.oldest < self.waiting.oldest and self._free_rows:
            request = next(iter(self.arriving))
            if request.pending:  # retracted while its next token is in flight
                break
            assert request.arriving is not None
            num_tokens = len(request.token_ids)
            coming = num_tokens if request.arriving.ticket is None else 0
            node, pages = self.kv.lookup(request) if self.config.reuses_arrived else self.kv.nothing
            if coming > room or not self._fits(request, node, len(pages)):
                break
            self._begin(request, node, pages)
            has_pages = self.kv.grow(request, num_tokens)
            assert has_pages, "it fits"
            room -= coming
            self._promised = None
            begun.append(request)
        return begun

    def compute_here(self, request: Request) -> None:
        """The prompt of a request does not arrive."""
        is_queued = request.phase is RequestPhase.WAITING
        if is_queued:
            self.arriving.remove(request)
        request.arriving = None
        if is_queued:
            self.waiting.insert(request)

    def schedule(
        self,
        parts: int = 1,
        only: frozenset[Request] | None = None,
        ahead: bool = False,
        drafts: bool = False,
    ) -> Schedule:
        """The next step's work. `parts`: in-flight steps that share the decoding requests. `only`:
        the requests that may take part (None: all). `ahead`: includes requests whose next token is
        in flight, if they do not need it on the host. `drafts`: some requests have drafts."""
        planned: Plan = {}
        self._fill_table(uses_table=only is None and not (drafts and self.config.has_draft_model))
        if drafts:
            self._take_drafted()
        rows, waiting = self.decode_table.choose(ahead)
        self._awaiting = work_of((), self.decode_table.first(waiting))
        decoding, filling = self._choose(only, ahead)
        if not self.config.mixed:
            self._plan_prompts(filling, planned, rows[:0], only)
        if planned:
            rows = rows[:0]
        else:
            most = -(-len(self.running) // parts)
            self._plan_decodes(decoding[:most], planned)
            rows = self._make_rows_fit(rows[: max(0, most - len(decoding))], planned)
        if self.config.mixed:
            self._plan_prompts(filling, planned, rows, only)
        self._reserve = max(self._least_reserve, self._reserve - RESERVE_DECAY)
        for item in planned.values() if self.config.drafts_ahead and drafts else ():
            if item.samples:
                self._make_room_ahead(item)
        return Schedule(list(planned.values()), self.decode_table.still_in(rows))

    def requests_of(self, schedule: Schedule) -> list[Request]:
        items = [planned.request for planned in schedule.items]
        return self.decode_table.requests(schedule.rows) + items

    def _fill_table(self, uses_table: bool) -> None:
        """Puts requests into the table that have come to decode, or all others out of it."""
        if not uses_table:
            self.decode_table.clear()
            self._others = list(self.running)
            return
        others, self._others = self._others, []
        for request in others:
            is_known = request.is_plain and request.sampling_sent and not request.drafts
            if is_known and request.is_decoding:
                self.decode_table.enter(request)
            else:
                self._others.append(request)

    def _take_drafted(self) -> None:
        """Requests with drafts are items of their own."""
        for request in self.running:
            if request.drafts and request in self.decode_table:
                self.decode_table.leave(request)
                insort(self._others, request, key=_request_no)

    def _choose(
        self, only: frozenset[Request] | None, ahead: bool
    ) -> tuple[list[Request], list[Request]]:
        """Those outside of the table that decode, and those that compute a prompt."""
        decoding: list[Request] = []
        filling: list[Request] = []
        for request in self._others:
            if request.awaits_prompt:
                continue
            if request.pending and not (ahead and request.can_run_ahead):
                self._awaiting = self._awaiting.with_decode(request.num_tokens)
            elif only is None or request in only:
                (decoding if request.is_decoding else filling).append(request)
        return decoding, filling

    def _make_rows_fit(self, rows: Ints, planned: Plan) -> Ints:
        """The rows of the table that have room for another token."""
        for request in self.decode_table.full(rows):
            # A request that was just retracted has left the table.
            if request in self.decode_table and self._make_room(
                request, request.num_computed + 1, planned
            ):
                self.decode_table.update(request)
        return self.decode_table.still_in(rows)

    def _plan_decodes(self, decoding: list[Request], planned: Plan) -> None:
        page_size, room = self.kv.page_size, self.config.max_drafts
        for request in decoding:
            # Mostly the last page has room; a request that was just retracted has no pages.
            first = request.num_computed
            if first < len(request.pages) * page_size or self._plan(request, 1, planned):
                drafts = self._drafts_that_fit(request, room) if request.drafts else 0
                room -= drafts
                planned[request] = PlannedItem.decoding(request, first, drafts)

    def _plan_prompts(
        self,
        filling: list[Request],
        planned: Plan,
        rows: Ints,
        only: frozenset[Request] | None,
    ) -> None:
        """`rows`: of the table, which decode in the same step."""
        if not filling and not self.waiting:
            return
        filled = ((request.num_computed, _uncomputed(request)) for request in filling)
        new = ((0, len(request.token_ids)) for request in self.waiting)
        work = work_of(planned.values(), self.decode_table.first(rows))
        decodes, prompts = heaviest([work, self._awaiting]), chain(filled, new)
        count = len(filling) + min(len(self.waiting), len(self._free_rows))
        budget = self.step_budget.prompt_tokens(self.config.chunk_tokens, decodes, prompts, count)
        for request in filling[: self.config.max_prompts]:
            remaining, computed = _uncomputed(request), request.num_computed
            length = budget.length(remaining, computed, begun=True)
            budget.spend(self._plan(request, length, planned), computed, begun=True)
        computes = bool(planned) or len(rows) > 0 or decodes.decode_tokens > 0
        if self.waiting and not (only is None and self._hold_back(computes)):
            self._admit(budget, self.config.max_prompts - len(filling), planned, only)

    def _hold_back(self, computes: bool) -> bool:
        """Whether waiting requests stay for other groups. `computes`: others wait for the step."""
        if self.delayer is None:
            return False
        busy = computes or self.step_budget.others.decode_tokens > 0
        usage = self.kv.num_used / self.kv.allocator.num_pages
        return self.delayer.hold_back(busy and len(self.running) < self.config.max_running, usage)

    def _drafts_that_fit(self, request: Request, room: int = sys.maxsize) -> int:
        """Drafts retract no request, and none is verified beyond the last token that is allowed.
        The runner needs the newest token on the host."""
        if request.pending:
            return 0
        count = min(len(request.drafts), request.remaining_tokens - 1, room)
        has_room = count > 0 and self.kv.grow(request, request.num_computed + 1 + count)
        return count if has_room else 0

    def _make_room_ahead(self, item: PlannedItem) -> None:
        """Gives a request the pages that a draft model fills, as far as this retracts no other."""
        request = item.request
        last = self.config.most_positions or len(request.prompt_ids) + request.max_new_tokens
        self.kv.grow(request, min(item.stop + self.config.drafts_ahead, last))

    def finish(self, request: Request) -> None:
        """Removes a running or waiting request."""
        if request.phase is RequestPhase.RUNNING:
            self._leave(request, RequestPhase.FINISHED)
        elif request.phase is RequestPhase.WAITING:
            request.phase = RequestPhase.FINISHED
            self._queue(request).remove(request)

    def _plan(self, request: Request, length: int, planned: Plan) -> int:
        """Plans `length` tokens, retracting the youngest while pages are missing; returns how many
        were planned, 0 if the request itself was retracted."""
        if length == 0 or request.phase is not RequestPhase.RUNNING:
            return 0
        if not self._make_room(request, request.num_computed + length, planned):
            return 0
        planned[request] = PlannedItem.of(request, length)
        return length

    def _make_room(self, request: Request, num_tokens: int, planned: Plan) -> bool:
        """Allocates pages for the first `num_tokens` tokens, which may retract the youngest
        requests; False if that is the request itself."""
        while not self.kv.grow(request, num_tokens):
            youngest = self.running[-1]
            planned.pop(youngest, None)
            self._retract(youngest)
            if youngest is request:
                return False
        return True

    def _retract(self, request: Request) -> None:
        assert len(self.running) > 1, "a request that was admitted alone must fit"
        # Before pages are released, which may fail.
        self._queue(request).append_first(request)
        self._leave(request, RequestPhase.WAITING)
        request.retractions += 1
        self.num_retractions += 1
        self._reserve = min(1.0, self._reserve + RESERVE_STEP)

    def _leave(self, request: Request, phase: RequestPhase) -> None:
        request.phase = phase
        _remove(self.running, request)
        if request in self.decode_table:
            self.decode_table.leave(request)
        else:
            _remove(self._others, request)
        self._prompting.pop(request, None)
        self._free_rows.append(request.row)
        request.row, request.sampling_sent = -1, False
        self.kv.release(request)

    def restart(self) -> None:
        """In-flight steps were undone: ranks may have lost their page tables, and requests some of
        the pages that were computed."""
        self._prompting.update(dict.fromkeys(self.running))
        self.decode_table.clear()
        self._others = list(self.running)
        for request in self.running:
            request.pages_sent, request.sampling_sent = 0, False

    def _admit(
        self, budget: PromptBudget, room: int, planned: Plan, only: frozenset[Request] | None
    ) -> None:
        """Admits up to `room` waiting requests in order, except those whose next page another one
        computes, until pages run out."""
        # A prompt's last pages are shared once its first token has been sampled.
        for request in [r for r in self._prompting if r.num_output and r.is_decoding]:
            del self._prompting[request]
        computing = {self.kv.frontier(request) for request in self._prompting}
        self._promised, retractions, awaiting = None, self.num_retractions, 0
        with closing(self.waiting.scan()) as candidates:
            for request in candidates:
                if room <= 0 or budget.is_spent or not self._free_rows:
                    break
                if only is not None and request not in only:
                    continue
                if request.request_no > self.arriving.oldest:  # that one waits for these pages
                    break
                if request.pending:  # retracted while its next token is in flight
                    break
                node, pages = self.kv.lookup(request)
                key = self.kv.awaited(request, len(pages))
                if key is not None and (node, key) in computing:
                    awaiting += 1
                    if awaiting == MOST_AWAITING:
                        break
                    continue
                cached = len(pages) * self.kv.page_size
                length = budget.length(request.num_tokens - cached, cached, begun=False)
                if not length or not self._fits(request, node, len(pages)):
                    break
                self._begin(request, node, pages)
                room -= 1
                computing.add(self.kv.frontier(request))
                budget.spend(self._plan(request, length, planned), cached, begun=False)
                if self.num_retractions != retractions:
                    break
                if self._promised is not None:
                    self._promised += self._expected_pages([request])

    def _begin(self, request: Request, node: PrefixNode, pages: list[int]) -> None:
        self.kv.admit(request, node, pages)
        self._queue(request).remove(request)
        assert request.phase is RequestPhase.WAITING, request.phase
        request.phase = RequestPhase.RUNNING
        insort(self.running, request, key=_request_no)
        insort(self._others, request, key=_request_no)
        if request.arriving is None:
            self._prompting[request] = None
        request.row = self._free_rows.pop()
        if request.num_output == 0 and request.retractions == 0:
            request.cached_tokens = request.num_computed
            request.queue_seconds = time.monotonic() - request.created
        self.num_admitted += 1
        self.num_cached_tokens += request.num_computed

    def _fits(self, request: Request, node: PrefixNode, num_cached: int) -> bool:
        """Whether the sequence has room beside what the running requests are likely to need."""
        needed = self.kv.pages_for(len(request.token_ids) + 1) - num_cached
        available = self.kv.num_available - self.kv.tree.num_idle(node)
        if not self.running:
            return needed <= available
        if self._promised is None:
            self._promised = self._expected_pages(self.running)
        return needed + self._promised <= available

    def _expected_pages(self, requests: Iterable[Request]) -> int:
        """Pages that running requests are likely to take from now on."""
        reserve, page_size, total = self._reserve, self.kv.page_size, 0
        for request in requests:
            length = len(request.token_ids)
            remaining = request.max_new_tokens + len(request.prompt_ids) - length
            growth = int(reserve * min(remaining, RESERVE_TOKENS))
            tokens = max(length + growth, request.num_computed)
            total += -(-tokens // page_size) - len(request.pages)
        return total


def _remove(requests: list[Request], request: Request) -> None:
    """`requests`: in the order of their numbers."""
    place = bisect_left(requests, request.request_no, key=_request_no)
    assert requests[place] is request, f"request {request.request_no} does not run"
    del requests[place]


def _uncomputed(request: Request) -> int:
    return request.num_tokens - request.num_computed
