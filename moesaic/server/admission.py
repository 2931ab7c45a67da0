"""Who may begin next: requests beyond what the engine can run wait here, in a line a client.

Lines are served in turn, counted in requests, so that a client with a thousand of them waiting does
not keep one with a single request from being next. Everything happens in one event loop.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Hashable
from itertools import count
from typing import Final

from moesaic.engine.engine import QueueFull
from moesaic.engine.gate import Start

logger = logging.getLogger(__name__)

MAX_QUEUED: Final = 4096
# Beyond what runs the engine has a few at hand, for the step after one has ended.
LEAD_SHARE: Final = 8
# Over how many seconds the rate of ending requests is measured, roughly.
RATE_SECONDS: Final = 10.0
LONGEST_RETRY: Final = 60


class Full(QueueFull):
    """`retry_after`: seconds in which the engine should have got through what waits now."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Admission:
    """`waiting` and `running` are requests now, `arriving` calls that are still being made into
    requests; `refused_total` and `admitted_total` since the start."""

    def __init__(self, max_running: int, max_queued: int | None = None) -> None:
        self.slots = max_running + max(1, max_running // LEAD_SHARE)
        self.most_open = max_running + (MAX_QUEUED if max_queued is None else max_queued)
        self.waiting = self.running = self.arriving = 0
        self._max_running = max_running
        self.refused_total = self.admitted_total = 0
        self._lines: dict[Hashable, _Line] = {}
        self._turns: list[tuple[int, int, _Line]] = []
        self._turn = 0
        self._order = count()
        self._rate = _Rate()

    def ticket(self, client: Hashable) -> Ticket:
        """The gate for one call of a client."""
        return Ticket(self, client)

    def queue(self, ticket: Ticket) -> None:
        """Full if there is no room for it, and nobody has more waiting than its client would."""
        if ticket.wanted > self.most_open:
            raise ValueError(
                f"{ticket.wanted} answers at once are more than --max-running-requests and "
                f"--max-queued-requests allow, which is {self.most_open}: ask several times"
            )
        line = self._lines.get(ticket.client)
        self._make_room(ticket.wanted, 0 if line is None else line.waiting)
        line = self._lines.setdefault(ticket.client, _Line(ticket.client))
        line.tickets[ticket] = None
        line.waiting += ticket.wanted
        self.waiting += ticket.wanted
        if len(line.tickets) == 1:
            self._line_up(line, self._turn)
        self.pump()

    def unqueue(self, ticket: Ticket) -> None:
        """A ticket that wants nothing more, or whose client has left."""
        line = self._lines[ticket.client]
        del line.tickets[ticket]
        self.forget(ticket, ticket.wanted)
        if not line.tickets:
            del self._lines[ticket.client]  # its turn is passed over when it comes

    def holds(self, ticket: Ticket) -> bool:
        line = self._lines.get(ticket.client)
        return line is not None and ticket in line.tickets

    def forget(self, ticket: Ticket, number: int) -> None:
        """So many requests of a queued ticket will not begin."""
        self._lines[ticket.client].waiting -= number
        self.waiting -= number
        ticket.wanted -= number

    def free(self, number: int) -> None:
        self.running -= number
        self._rate.add(number)
        self.pump()

    def pump(self) -> None:
        """Gives free slots to whoever is next."""
        begun: dict[Ticket, int] = {}
        while self.running < self.slots and self._turns:
            turn, _, line = heapq.heappop(self._turns)
            if not self._is_current(line):
                continue
            self._turn = turn
            ticket = next(iter(line.tickets))
            begun[ticket] = begun.get(ticket, 0) + 1
            self.running += 1
            ticket.held += 1
            self.forget(ticket, 1)
            if not ticket.wanted:
                del line.tickets[ticket]
            if line.tickets:
                self._line_up(line, turn + 1)
            else:
                del self._lines[line.client]
        for ticket, number in begun.items():
            ticket.begin(number)

    def retry_after(self) -> int:
        rate = self._rate.per_second()
        seconds = 1 if rate is None else math.ceil(self.waiting / max(rate, 1e-3))
        return min(max(seconds, 1), LONGEST_RETRY)

    def _line_up(self, line: _Line, turn: int) -> None:
        heapq.heappush(self._turns, (turn, next(self._order), line))
        if len(self._turns) > 2 * len(self._lines) + 64:  # those of clients that have left
            self._turns = [entry for entry in self._turns if self._is_current(entry[2])]
            heapq.heapify(self._turns)

    def _is_current(self, line: _Line) -> bool:
        return self._lines.get(line.client) is line

    def _make_room(self, number: int, own: int) -> None:
        """By sending away the newest of whoever has most waiting. One call that has begun may have
        filled the queue: then whoever has nothing waiting goes beyond the limit."""
        while (excess := self.running + self.waiting + number - self.most_open) > 0:
            most = max(self._lines.values(), key=lambda line: line.waiting, default=None)
            if most is None or most.waiting <= own + number:
                self.refused_total += number
                raise self._full()
            newest = most.newest()
            if newest is None and not own and excess <= self.most_open:
                return
            if newest is None:
                self.refused_total += number
                raise self._full()
            self.refused_total += newest.wanted
            self.unqueue(newest)
            newest.refuse(self._full())

    def _full(self) -> Full:
        running = min(self.running, self._max_running)  # the others are at hand, and wait there
        waiting = self.running - running + self.waiting
        return Full(
            f"{running} requests are running and {waiting} are waiting, which is all "
            "that --max-running-requests and --max-queued-requests allow: try again later",
            self.retry_after(),
        )


class Ticket:
    """A call on its way in: a Gate of the engine. It counts as arriving until it enters or leaves,
    so whoever makes one has it leave at the end. `wanted`: requests that wait; `held`: slots that
    those which have begun take up."""

    def __init__(self, admission: Admission, client: Hashable) -> None:
        self.client, self.wanted, self.held = client, 0, 0
        self._admission = admission
        self._start: Start = lambda number: number
        self._begun: asyncio.Future[None] | None = None
        self._arriving = True
        admission.arriving += 1

    async def enter(self, number: int, start: Start) -> None:
        self._arrive()
        self.wanted, self._start = number, start
        self._begun = asyncio.get_running_loop().create_future()
        try:
            self._admission.queue(self)
            await self._begun
        except BaseException:
            self.leave()
            raise

    def begin(self, number: int) -> None:
        """So many slots were given to it; what it has no use for goes back."""
        admission = self._admission
        try:
            started = self._start(number)
        except Exception as error:
            logger.exception("requests could not begin")
            self._fail(error)
            return
        admission.admitted_total += started
        if self._begun is not None and not self._begun.done():
            self._begun.set_result(None)
        if started < number:
            self.finished(number - started)

    def finished(self, number: int) -> None:
        """Slots are free; what had not begun leaves the line."""
        slots = min(number, self.held)
        if never_begun := min(number - slots, self.wanted):
            if never_begun == self.wanted:
                self._admission.unqueue(self)
            else:
                self._admission.forget(self, never_begun)
            if not self.wanted and self._begun is not None and not self._begun.done():
                self._begun.set_result(None)
        if slots:
            self.held -= slots
            self._admission.free(slots)

    def refuse(self, error: Full) -> None:
        self._fail(error)

    def _fail(self, error: Exception) -> None:
        if self._begun is not None and not self._begun.done():
            self._begun.set_exception(error)

    def _arrive(self) -> None:
        self._admission.arriving -= self._arriving
        self._arriving = False

    def leave(self) -> None:
        self._arrive()
        if self._admission.holds(self):
            self._admission.unqueue(self)
        self.wanted = 0
        held, self.held = self.held, 0
        if held:
            self._admission.free(held)


class _Line:
    def __init__(self, client: Hashable) -> None:
        self.client, self.waiting = client, 0
        self.tickets: OrderedDict[Ticket, None] = OrderedDict()

    def newest(self) -> Ticket | None:
        """The last that has nothing running yet."""
        last = next(reversed(self.tickets))
        return None if last.held else last


class _Rate:
    """Requests that end in a second, with older ones counting less and less."""

    def __init__(self) -> None:
        self._sum, self._when, self._since = 0.0, 0.0, 0.0

    def add(self, number: int) -> None:
        now = time.monotonic()
        self._since = self._since or now
        self._sum = self._sum * math.exp((self._when - now) / RATE_SECONDS) + number
        self._when = now

    def per_second(self) -> float | None:
        if not self._since:
            return None
        now = time.monotonic()
        # A young average has seen less than the whole of its time.
        share = 1 - math.exp((self._since - now - 0.1) / RATE_SECONDS)
        return self._sum * math.exp((self._when - now) / RATE_SECONDS) / (RATE_SECONDS * share)
