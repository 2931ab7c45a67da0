"""The requests of a decode instance whose prompts other instances compute, on the leader of their
group."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from moesaic.core.messages import Message, Runnable
from moesaic.core.redact import shown_id
from moesaic.core.request import ArrivingPrompt, Request, RequestPhase
from moesaic.disagg.likeness import prompt_digest
from moesaic.disagg.messages import PromptResult
from moesaic.disagg.rooms import DecodeRooms, RoomEvent
from moesaic.engine.schedule.plan import ItemResult
from moesaic.engine.worker.planner import Planner

logger = logging.getLogger(__name__)


class Arrivals:
    """Pages are reserved before a prompt is computed. What does not come is computed here, so that
    no request is lost with another instance."""

    def __init__(
        self, planner: Planner, rooms: DecodeRooms, send: Callable[[Message], None]
    ) -> None:
        self._planner, self._rooms, self._send = planner, rooms, send
        self._open: dict[int, Request] = {}
        """The requests that `rooms` knows."""
        self._recomputed: dict[Request, float] = {}
        """Those without a token whose prompts do not come, and since when that is known."""

    def state(self) -> list[dict[str, Any]]:
        return [*self._rooms.state(), *self._recomputed_rooms()]

    def _recomputed_rooms(self) -> Iterator[dict[str, Any]]:
        now = time.monotonic()
        for request, since in self._recomputed.items():
            if request.room is not None and request.request_no not in self._open:
                yield {
                    "room": request.room.number,
                    "phase": "is computed here",
                    "peer": request.room.address,
                    "seconds": round(now - since, 3),
                }

    def expect(self, request: Request) -> None:
        """A new request, before the planner gets it."""
        assert request.room is not None
        request.arriving = ArrivingPrompt()
        self._open[request.request_no] = request
        prompt = prompt_digest(request.token_ids, request.cache_namespace)
        self._rooms.announce(request.request_no, request.room, prompt)

    def advance(self) -> bool:
        """Takes what has come, releases what is over, and gives pages to those that wait; returns
        whether there was any request to do this for. What came for others is taken, too."""
        for event in self._rooms.take():
            self._apply(event)
        for request in list(self._recomputed):
            if request.num_output or request.phase is RequestPhase.FINISHED:
                del self._recomputed[request]
        if not self._open:
            return False
        for request in list(self._open.values()):
            if request.arriving is None or request.phase is RequestPhase.FINISHED:
                del self._open[request.request_no]
                self._rooms.release(request.request_no)
        for request in self._planner.scheduler.reserve(self._room):
            self._offer(request)
        return True

    @property
    def _room(self) -> int:
        """What may still be on its way: ranks keep as much as their caches hold at most."""
        coming = (request.arriving for request in self._open.values())
        taken = sum(one.stop - one.first for one in coming if one is not None)
        return self._planner.facts.cache_tokens - taken

    def _offer(self, request: Request) -> None:
        """The request has pages."""
        arriving, cached = request.arriving, request.num_computed
        assert arriving is not None
        if arriving.ticket is None:
            arriving.first, arriving.stop = cached, len(request.token_ids)
            arriving.ticket = self._rooms.offer(request.request_no, cached, arriving.stop)
        elif cached < arriving.first:  # it was retracted, and has lost what was cached
            self._compute_here(request, "its cached prefix was evicted")
        elif arriving.is_here:
            request.num_computed = arriving.stop

    def _apply(self, event: RoomEvent) -> None:
        request = self._open.get(event.request_no)
        state = self._planner.states.get(event.request_no)
        if request is None or state is None or request.arriving is None:
            return
        if event.result is None:
            self._compute_here(request, event.why)
            return
        _take_over(request, request.arriving, event.result)
        found = ItemResult(
            token_ids=event.result.token_ids,
            logprobs=event.result.logprobs,
            top_logprobs=event.result.top_logprobs,
        )
        self._planner.metrics.counts.prompts_arrived += 1
        self._planner.begin_answer(state, found, event.result.finish)
        if request.phase is not RequestPhase.FINISHED:
            self._send(Runnable(event.request_no))

    def _compute_here(self, request: Request, why: str) -> None:
        logger.warning("request %s: its prompt is computed here: %s", shown_id(request.rid), why)
        self._planner.metrics.counts.prompts_recomputed += 1
        self._planner.scheduler.compute_here(request)
        if not request.num_output:  # else it was here, and the client has its first token
            self._recomputed[request] = time.monotonic()
        self._send(Runnable(request.request_no))


def _take_over(request: Request, arriving: ArrivingPrompt, result: PromptResult) -> None:
    """The prompt counts as computed and scored."""
    arriving.is_here = True
    if request.phase is RequestPhase.RUNNING:
        request.num_computed = arriving.stop
    request.input_logprobs += result.input_logprobs
    request.input_top_logprobs += result.input_top_logprobs
    request.num_scored = max(request.num_scored, len(request.input_logprobs))
    request.routed += result.routed
    request.cached_tokens = result.cached_tokens
