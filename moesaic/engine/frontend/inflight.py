"""Requests on their way to the engine: which are in flight, held back or refused."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, Protocol

from moesaic.core.redact import shown_id
from moesaic.core.request import ABORTED, FinishReason
from moesaic.engine.errors import QueueFull
from moesaic.engine.schedule.request_state import RequestState
from moesaic.observe.spans import SpanKind, Spans

logger = logging.getLogger(__name__)

Lock = AbstractContextManager[Any]


class Core(Protocol):
    """What the engine's thread drives."""

    states: dict[str, RequestState]

    def add(self, job: RequestState) -> None: ...
    def abort(self, rid: str, job: RequestState | None = None) -> None: ...


class OpenRequests:
    """The requests in flight, by their own ids and by those of their prompts and calls. An id is
    free again when the last request that has it is over."""

    def __init__(self) -> None:
        self._jobs: dict[str, RequestState] = {}
        self._by_id: dict[str, dict[RequestState, None]] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, jobs: Sequence[RequestState]) -> None:
        """The requests of one call; ValueError if another call has one of their ids."""
        if taken := self._by_id.keys() & {name for job in jobs for name in job.ids}:
            raise ValueError(f"rid {shown_id(min(taken))} is in use: give each request its own")
        new = {job.request.rid: job for job in jobs}
        assert len(new) == len(jobs), "requests of one call have the same id"
        self._jobs |= new
        for job in jobs:
            for name in job.ids:
                self._by_id.setdefault(name, {})[job] = None

    def discard(self, rid: str) -> None:
        job = self._jobs.pop(rid, None)
        if job is None:
            return
        for name in job.ids:
            jobs = self._by_id[name]
            del jobs[job]
            if not jobs:
                del self._by_id[name]

    def found(self, name: str) -> list[RequestState]:
        """The one request or all requests that have this id."""
        return [*self._by_id.get(name, ())]

    def all(self) -> list[RequestState]:
        return [*self._jobs.values()]


class InflightRequests:
    """`tell` hands a command to the engine's thread, and raises RuntimeError if it has ended.
    `lock` is the engine's own, and re-entrant."""

    def __init__(
        self,
        tell: Callable[[Callable[[Any], None]], None],
        lock: Lock,
        max_running: int,
        max_queued: int | None,
        spans: Spans,
    ) -> None:
        self._tell, self._lock, self._spans = tell, lock, spans
        self._max_running, self._max_queued = max_running, max_queued
        self._open = OpenRequests()
        self._held: set[RequestState] = set()
        """In flight, and not begun yet."""

    def __len__(self) -> int:
        """Requests in flight."""
        return len(self._open)

    def submit(self, jobs: Sequence[RequestState]) -> None:
        """All at once."""
        with self._lock:
            self.hold(jobs, checked=True)
            self.begin(deque(jobs), len(jobs))

    def hold(self, jobs: Sequence[RequestState], checked: bool) -> None:
        """Takes their ids, so that a caller who uses one twice learns it at once. `checked`: if the
        queue has room for them."""
        with self._lock:
            if checked:
                self._check_queue(len(jobs))
            self._open.add(jobs)
            self._held.update(jobs)

    def begin(self, jobs: deque[RequestState], number: int) -> int:
        """Of these, the first `number` that are still held go to the engine's thread."""
        # Under the lock, as an abort that came between the two would not find them.
        with self._lock:
            chosen = self._choose(jobs, number)
            try:
                self._send(chosen)
            except RuntimeError:
                for job in chosen:
                    self._open.discard(job.request.rid)
                raise
        return len(chosen)

    def begin_or_end(self, jobs: deque[RequestState], number: int) -> int:
        """The same for a caller who waits for answers already: there a failure is one."""
        with self._lock:
            chosen = self._choose(jobs, number)
            try:
                self._send(chosen)
            except RuntimeError as error:
                for job in chosen:
                    job.finish(FinishReason("abort", message=str(error), failed=True))
        return len(chosen)

    def abort(self, name: str, client: Hashable = None) -> int:
        """Ends the requests that have this id, of this client alone if one is given; their number.
        The id is that of a request, of a prompt (all its samples) or of a call."""
        with self._lock:
            chosen = self._open.found(name)
        return self._abort([job for job in chosen if client is None or job.client == client])

    def abort_all(self) -> int:
        with self._lock:
            chosen = self._open.all()
        return self._abort(chosen)

    def _abort(self, jobs: Sequence[RequestState]) -> int:
        for job in jobs:
            with self._lock:
                held = self._unhold(job)
            if held:
                job.finish(FinishReason("abort", message=ABORTED))
            else:
                self._tell(partial(_abort, job=job))
        return len(jobs)

    def leave(self, jobs: Iterable[RequestState]) -> None:
        """The caller no longer waits for these. The id of one that is over, with its end unread,
        may be another's by now."""
        for job in jobs:
            with self._lock, suppress(RuntimeError):
                if self._unhold(job):
                    self._open.discard(job.request.rid)
                else:
                    self._tell(partial(_abort, job=job))

    def ended(self, rid: str) -> None:
        with self._lock:
            self._open.discard(rid)

    def _send(self, jobs: Sequence[RequestState]) -> None:
        begin = self._spans.clock()
        self._tell(partial(_take_in, jobs=jobs))
        self._spans.add(SpanKind.SUBMIT, begin, tokens=len(jobs))

    def _choose(self, jobs: deque[RequestState], number: int) -> list[RequestState]:
        chosen: list[RequestState] = []
        with self._lock:
            while jobs and len(chosen) < number:
                job = jobs.popleft()
                if self._unhold(job):
                    chosen.append(job)
        return chosen

    def _unhold(self, job: RequestState) -> bool:
        """Whether it was held."""
        held = job in self._held
        self._held.discard(job)
        return held

    def _check_queue(self, number: int) -> None:
        """More than can run may wait, up to --max-queued-requests."""
        limit, running = self._max_queued, self._max_running
        if limit is not None and len(self._open) + number > running + limit:
            raise QueueFull(
                f"{len(self._open)} requests are open and {number} more would pass "
                f"--max-running-requests {running} and --max-queued-requests {limit}: "
                "try again later"
            )


def _take_in(core: Core, jobs: Sequence[RequestState]) -> None:
    for job in jobs:
        try:
            core.add(job)
        except Exception as error:
            logger.exception("request %s was not taken in", job.request.rid)
            if core.states.get(job.request.rid) is job:
                del core.states[job.request.rid]
            message = f"it could not be taken in: {error!r}"
            job.finish(FinishReason("abort", message=message, failed=True))


def _abort(core: Core, job: RequestState) -> None:
    core.abort(job.request.rid, job)
