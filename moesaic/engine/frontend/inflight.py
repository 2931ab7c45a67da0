"""The requests in flight: their ids, and which of them the engine's thread has."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from moesaic.core.redact import shown_id
from moesaic.core.request import ABORTED, FinishReason, Request, failure
from moesaic.disagg.lobby import Lobby
from moesaic.engine.errors import IdInUse, QueueFull
from moesaic.engine.frontend.engine_thread import Core, EngineThread
from moesaic.engine.schedule.request_state import RequestState
from moesaic.observe.spans import SpanKind, Spans

logger = logging.getLogger(__name__)


class InflightRequests:
    """Its lock is that of the engine's thread, which is re-entrant."""

    def __init__(
        self, thread: EngineThread, max_running: int, max_queued: int | None, spans: Spans
    ) -> None:
        self._submit_command, self._lock, self._spans = thread.submit, thread.lock, spans
        self._max_running, self._max_queued = max_running, max_queued
        self._states: dict[str, RequestState] = {}
        self._by_id: dict[str, dict[RequestState, None]] = {}
        """By the ids of requests, prompts and calls, each until its last request has ended."""
        self._waiting: set[RequestState] = set()
        """Reserved, but not started yet."""
        self.lobby: Lobby | None = None
        """Where the instances that continue requests learn of them at once."""

    def __len__(self) -> int:
        return len(self._states)

    def waiting(self) -> tuple[int, int]:
        """Requests that have not started, and the tokens of their prompts."""
        with self._lock:
            found = list(self._waiting)
        return len(found), sum(state.request.prompt_len for state in found)

    def requests(self) -> list[Request]:
        with self._lock:
            return [state.request for state in self._states.values()]

    def rooms_except(self, told: Collection[int]) -> list[dict[str, Any]]:
        """Rooms of requests that have no token yet, but those with these numbers."""
        now = time.monotonic()
        with self._lock:
            found = [(state.request, state in self._waiting) for state in self._states.values()]
        return [
            {
                "room": request.room.number,
                "phase": "waits in the queue" if waits else "waits for its rank",
                "peer": request.room.address,
                "seconds": round(now - request.created, 3),
            }
            for request, waits in found
            if request.room is not None
            and request.room.number not in told
            and not (request.output_ids or request.finish_reason)
        ]

    def submit(self, states: Sequence[RequestState]) -> None:
        with self._lock:
            self.reserve(states, check_queue=True)
            self.start(deque(states), len(states))

    def reserve(self, states: Sequence[RequestState], check_queue: bool) -> None:
        """Takes the requests' ids; IdInUse if one is in use, QueueFull if there is no room."""
        with self._lock:
            if check_queue:
                self._check_queue(len(states))
            self._insert(states)
            self._waiting.update(states)

    def start(
        self, states: deque[RequestState], number: int, errors_as_outputs: bool = False
    ) -> int:
        """Sends the first `number` of the waiting requests to the engine's thread; how many were
        left to send. With `errors_as_outputs`, an error becomes their finish reason."""
        # Choosing and sending share the lock: an abort in between would miss the requests.
        with self._lock:
            chosen = self._choose(states, number)
            try:
                self._send(chosen)
            except RuntimeError as error:
                if not errors_as_outputs:
                    for state in chosen:
                        self._discard(state.request.rid)
                    raise
                for state in chosen:
                    state.finish(failure(str(error)))
        return len(chosen)

    def abort(self, name: str, client: Hashable = None) -> int:
        """Aborts the requests of a request's, prompt's or call's id, with `client` only its own."""
        with self._lock:
            found = [*self._by_id.get(name, ())]
        return self._abort([state for state in found if client in (None, state.client)])

    def abort_all(self) -> int:
        with self._lock:
            found = [*self._states.values()]
        return self._abort(found)

    def _abort(self, states: Sequence[RequestState]) -> int:
        for state in states:
            with self._lock:
                waited = self._stop_waiting(state)
            if waited:
                state.finish(FinishReason("abort", message=ABORTED))
            else:
                self._submit_command(partial(_abort, state=state))
        return len(states)

    def abandon(self, states: Iterable[RequestState]) -> None:
        """Aborts requests whose caller has gone; not one that has ended, whose id may be reused."""
        for state in states:
            with self._lock, suppress(RuntimeError):
                if self._stop_waiting(state):
                    self._discard(state.request.rid)
                else:
                    self._submit_command(partial(_abort, state=state))

    def release(self, rid: str) -> None:
        with self._lock:
            self._discard(rid)

    def _insert(self, states: Sequence[RequestState]) -> None:
        """IdInUse if another call uses one of their ids."""
        if taken := self._by_id.keys() & {name for state in states for name in state.ids}:
            raise IdInUse(f"rid {shown_id(min(taken))} is in use: give each request its own")
        new = {state.request.rid: state for state in states}
        assert len(new) == len(states), "requests of one call have the same id"
        self._states |= new
        for state in states:
            for name in state.ids:
                self._by_id.setdefault(name, {})[state] = None
            if self.lobby is not None and (room := state.request.room) is not None:
                self.lobby.expect(state.request.request_no, room.number)

    def _discard(self, rid: str) -> None:
        state = self._states.pop(rid, None)
        if state is None:
            return
        if self.lobby is not None:
            self.lobby.leave(state.request.request_no, "its client has left")
        for name in state.ids:
            states = self._by_id[name]
            del states[state]
            if not states:
                del self._by_id[name]

    def _send(self, states: Sequence[RequestState]) -> None:
        begin = self._spans.clock()
        self._submit_command(partial(_add, states=states))
        self._spans.add(SpanKind.SUBMIT, begin, tokens=len(states))

    def _choose(self, states: deque[RequestState], number: int) -> list[RequestState]:
        chosen: list[RequestState] = []
        while states and len(chosen) < number:
            state = states.popleft()
            if self._stop_waiting(state):
                chosen.append(state)
        return chosen

    def _stop_waiting(self, state: RequestState) -> bool:
        """Whether it was waiting."""
        waited = state in self._waiting
        self._waiting.discard(state)
        return waited

    def _check_queue(self, number: int) -> None:
        limit, running = self._max_queued, self._max_running
        if limit is not None and len(self) + number > running + limit:
            raise QueueFull(
                f"{len(self)} requests are open and {number} more would exceed "
                f"--max-running-requests {running} and --max-queued-requests {limit}: "
                "try again later"
            )


def _add(core: Core, states: Sequence[RequestState]) -> None:
    for state in states:
        try:
            core.add(state)
        except Exception as error:
            logger.exception("request %s could not be added", state.request.rid)
            state.finish(failure(f"it could not be added: {error!r}"))


def _abort(core: Core, state: RequestState) -> None:
    core.abort(state.request.request_no)
