"""Requests on their way to the engine: who is in flight, who is held back, who may come."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, Protocol

from moesaic.core.request import ABORTED, FinishReason
from moesaic.core.words import shown
from moesaic.engine.errors import QueueFull
from moesaic.engine.jobs import Job
from moesaic.observe.spans import Kind, Spans

logger = logging.getLogger(__name__)

Lock = AbstractContextManager[Any]


class Core(Protocol):
    """What the engine's thread drives."""

    jobs: dict[str, Job]

    def add(self, job: Job) -> None: ...
    def abort(self, rid: str, job: Job | None = None) -> None: ...


class Desk:
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
        self._in_flight: set[str] = set()
        self._held: dict[str, Job] = {}
        """In flight, and not begun yet."""

    def __len__(self) -> int:
        """Requests in flight."""
        return len(self._in_flight)

    def submit(self, jobs: Sequence[Job]) -> None:
        """All at once."""
        with self._lock:
            self.hold(jobs, checked=True)
            self.begin(deque(jobs), len(jobs))

    def hold(self, jobs: Sequence[Job], checked: bool) -> None:
        """Takes their names, so that whoever uses one twice learns it at once. `checked`: if the
        queue has room for them."""
        held = {job.request.rid: job for job in jobs}
        with self._lock:
            if checked:
                self._check_queue(len(jobs))
            if taken := held.keys() & self._in_flight:
                raise ValueError(f"rid {shown(min(taken))} is in use: give each request its own")
            self._in_flight |= held.keys()
            self._held |= held

    def begin(self, jobs: deque[Job], number: int) -> int:
        """Of these, the first `number` that are still held go to the engine's thread."""
        with self._lock:
            chosen = self._choose(jobs, number)
            try:
                self._send(chosen)
            except RuntimeError:
                self._in_flight -= {job.request.rid for job in chosen}
                raise
        return len(chosen)

    def begin_or_end(self, jobs: deque[Job], number: int) -> int:
        """The same for somebody who waits for answers already: there a failure is one."""
        chosen = self._choose(jobs, number)
        try:
            self._send(chosen)
        except RuntimeError as error:
            for job in chosen:
                job.finish(FinishReason("abort", message=str(error), failed=True))
        return len(chosen)

    def abort(self, rid: str) -> None:
        """And those that have their names from it: further samples, or prompts of one call."""
        with self._lock:
            chosen = [name for name in self._in_flight if _belongs(name, rid)]
        for name in chosen:
            self._abort(name)

    def abort_all(self) -> None:
        with self._lock:
            chosen = [*self._in_flight]
        for name in chosen:
            self._abort(name)

    def _abort(self, rid: str) -> None:
        with self._lock:
            held = self._held.pop(rid, None)
        if held is not None:
            held.finish(FinishReason("abort", message=ABORTED))
        else:
            self._tell(partial(_abort, rid=rid))

    def leave(self, jobs: Iterable[Job]) -> None:
        """Nobody waits for these any more. One that is over, with its end unread, has no name: that
        may be another's by now."""
        for job in jobs:
            rid = job.request.rid
            with self._lock, suppress(RuntimeError):
                if self._unhold(job):
                    self._in_flight.discard(rid)
                else:
                    self._tell(partial(_abort, rid=rid, job=job))

    def ended(self, rid: str) -> None:
        with self._lock:
            self._in_flight.discard(rid)

    def _send(self, jobs: Sequence[Job]) -> None:
        begin = self._spans.clock()
        self._tell(partial(_take_in, jobs=jobs))
        self._spans.add(Kind.SUBMIT, begin, tokens=len(jobs))

    def _choose(self, jobs: deque[Job], number: int) -> list[Job]:
        chosen: list[Job] = []
        with self._lock:
            while jobs and len(chosen) < number:
                job = jobs.popleft()
                if self._unhold(job):
                    chosen.append(job)
        return chosen

    def _unhold(self, job: Job) -> bool:
        """Whether it was held."""
        held = self._held.get(job.request.rid) is job
        if held:
            del self._held[job.request.rid]
        return held

    def _check_queue(self, number: int) -> None:
        """More than can run may wait, up to --max-queued-requests."""
        limit, running = self._max_queued, self._max_running
        if limit is not None and len(self._in_flight) + number > running + limit:
            raise QueueFull(
                f"{len(self._in_flight)} requests are open and {number} more would pass "
                f"--max-running-requests {running} and --max-queued-requests {limit}: "
                "try again later"
            )


def _take_in(core: Core, jobs: Sequence[Job]) -> None:
    for job in jobs:
        try:
            core.add(job)
        except Exception as error:
            logger.exception("request %s was not taken in", job.request.rid)
            core.jobs.pop(job.request.rid, None)
            message = f"it could not be taken in: {error!r}"
            job.finish(FinishReason("abort", message=message, failed=True))


def _belongs(name: str, rid: str) -> bool:
    """rid, rid-1 or rid-0-1."""
    if name == rid:
        return True
    rest = name.removeprefix(f"{rid}-")
    return rest != name and all(number.isdigit() for number in rest.split("-"))


def _abort(core: Core, rid: str, job: Job | None = None) -> None:
    core.abort(rid, job)
