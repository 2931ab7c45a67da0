"""Running requests that decode and need nothing but their next token, as columns.

Most requests of a step are such ones. What a step does with all of them are a few operations on
arrays, where an object for each request and step would take most of the host's time.
"""

from __future__ import annotations

import numpy as np

from moesaic.core.request import Request
from moesaic.engine.schedule.inflight import PlannedDecodes
from moesaic.engine.schedule.plan import FUTURE_TOKEN, DecodeRows, Ints
from moesaic.layers.paged_cache import PageUpdate


class DecodeTable:
    """Columns by row of the page table, which every running request has to itself. A member is
    plain and known to the ranks, and all its tokens but the newest are computed; the columns repeat
    what the request says."""

    def __init__(self, rows: int, page_size: int) -> None:
        self._page_size = page_size
        self._requests: list[Request | None] = [None] * rows
        self._is_member = np.zeros(rows, bool)
        self._request_nos = np.zeros(rows, np.int64)
        self._first, self._most, self._room, self._pending = np.zeros((4, rows), np.int64)
        self._unsent: set[int] = set()
        """Rows with pages that no plan has sent."""

    def __contains__(self, request: Request) -> bool:
        return request.row >= 0 and self._requests[request.row] is request

    def enter(self, request: Request) -> None:
        row = request.row
        self._requests[row], self._is_member[row] = request, True
        self._request_nos[row], self._first[row] = request.request_no, request.num_computed
        self._most[row] = len(request.prompt_ids) + request.max_new_tokens
        self.update(request)

    def leave(self, request: Request) -> None:
        self._requests[request.row], self._is_member[request.row] = None, False
        self._unsent.discard(request.row)

    def clear(self) -> None:
        self._requests[:] = [None] * len(self._requests)
        self._is_member[:] = False
        self._unsent.clear()

    def update(self, request: Request) -> None:
        """The pages of a request have changed, or its tokens in flight by an item; it need not be a
        member."""
        if request in self:
            self._pending[request.row] = request.pending
            self._room[request.row] = len(request.pages) * self._page_size
            if request.pages_sent < len(request.pages):
                self._unsent.add(request.row)

    def choose(self, ahead: bool) -> tuple[Ints, Ints]:
        """The rows that can decode now, and those that wait for a token in flight. `ahead`: as in
        Scheduler.schedule."""
        members = np.flatnonzero(self._is_member)
        can = self._first[members] + 1 < self._most[members]
        if not ahead:
            can &= self._pending[members] == 0
        return members[can], members[~can]

    def full(self, rows: Ints) -> list[Request]:
        """Those of them that need another page, oldest first."""
        some = rows[self._first[rows] >= self._room[rows]]
        return self.requests(some[self._request_nos[some].argsort()])

    def requests(self, rows: Ints) -> list[Request]:
        """The members in these rows."""
        return [request for row in rows.tolist() if (request := self._requests[row]) is not None]

    def still_in(self, rows: Ints) -> Ints:
        return rows[self._is_member[rows]]

    def first(self, rows: Ints) -> Ints:
        """Computed tokens."""
        return self._first[rows]

    def plan(self, rows: Ints) -> tuple[PlannedDecodes, DecodeRows]:
        """Nothing counts as done before `begin`."""
        requests = self.requests(rows)
        assert len(requests) == len(rows), "only members decode"
        tokens = np.full(len(rows), FUTURE_TOKEN, np.int64)
        if len(known := np.flatnonzero(self._pending[rows] == 0)):
            tokens[known] = [requests[n].token_ids[-1] for n in known.tolist()]
        unsent = self._unsent.intersection(rows.tolist()) if self._unsent else ()
        pages = [_update(self._requests[row]) for row in sorted(unsent)]
        columns = self._request_nos[rows], rows, self._first[rows], tokens
        planned = PlannedDecodes(requests, [request.retractions for request in requests])
        return planned, DecodeRows(*columns, pages)

    def begin(self, planned: PlannedDecodes, decodes: DecodeRows) -> None:
        """Counts a step's work as done: steps run in the order in which they are planned."""
        for request in planned.requests:
            request.num_computed += 1
            request.pending += 1
        self._first[decodes.rows] += 1
        self._pending[decodes.rows] += 1
        for row, first, pages in decodes.pages:
            owner = self._requests[row]
            assert owner is not None
            owner.pages_sent = first + len(pages)
            self._unsent.discard(row)

    def end(self, planned: PlannedDecodes, decodes: DecodeRows) -> None:
        """The tokens of a step are no longer in flight."""
        for request in planned.requests:
            request.pending -= 1
        rows = decodes.rows
        same = self._is_member[rows] & (self._request_nos[rows] == decodes.request_nos)
        self._pending[rows[same]] -= 1


def _update(request: Request | None) -> PageUpdate:
    assert request is not None
    return PageUpdate(request.row, request.pages_sent, request.pages[request.pages_sent :])
