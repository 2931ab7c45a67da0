"""A fair queue: one line per client, served round-robin.

A client with much work delays only its own, and cannot keep an idle client out of the queue.
"""

from __future__ import annotations

import heapq
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any, Final, Generic, Protocol, TypeVar

Result = TypeVar("Result")

NO_LIMIT: Final = 1 << 62


class Waiter(Protocol):
    """A member of a line."""

    client: Hashable
    wanted: int
    """Slots that it waits for."""
    held: int
    """Slots that it has."""

    def begin(self, number: int) -> None:
        """It gets `number` more slots, and returns them by `FairQueue.free`."""

    def refuse(self, error: Exception) -> None:
        """The queue has evicted it in favour of another client."""


WaiterT = TypeVar("WaiterT", bound=Waiter)


class FairQueue(Generic[WaiterT]):
    """Grants `slots` to waiters in turn, with up to `most_open` held or waited for. No lock."""

    def __init__(self, slots: int, most_open: int) -> None:
        self.slots, self.most_open = slots, most_open
        self.waiting = self.running = self.refused_total = 0
        self._lines: dict[Hashable, _Line[WaiterT]] = {}
        self._turns: list[tuple[int, int, _Line[WaiterT]]] = []
        self._turn = 0
        self._order = count()

    def full(self) -> Exception:
        """The error of a refused waiter."""
        raise NotImplementedError

    def queue(self, waiter: WaiterT) -> None:
        """Queues a waiter, or raises `full()` if there is no room and no other client has more."""
        line = self._lines.get(waiter.client)
        self._make_room(waiter.wanted, 0 if line is None else line.waiting)
        line = self._lines.setdefault(waiter.client, _Line(waiter.client))
        line.waiters[waiter] = None
        line.waiting += waiter.wanted
        self.waiting += waiter.wanted
        if len(line.waiters) == 1:
            self._line_up(line, self._turn)
        self.pump()

    def unqueue(self, waiter: WaiterT) -> None:
        line = self._lines[waiter.client]
        del line.waiters[waiter]
        self.forget(waiter, waiter.wanted)
        if not line.waiters:
            del self._lines[waiter.client]  # `pump` skips its turn

    def holds(self, waiter: WaiterT) -> bool:
        line = self._lines.get(waiter.client)
        return line is not None and waiter in line.waiters

    def waiters(self) -> list[WaiterT]:
        return [waiter for line in self._lines.values() for waiter in line.waiters]

    def forget(self, waiter: WaiterT, number: int) -> None:
        """A queued waiter waits for `number` fewer slots."""
        self._lines[waiter.client].waiting -= number
        self.waiting -= number
        waiter.wanted -= number

    def free(self, number: int) -> None:
        self.running -= number
        self.pump()

    def pump(self) -> None:
        """Grants free slots to the next waiters."""
        granted: dict[WaiterT, int] = {}
        while self.running < self.slots and self._turns:
            turn, _, line = heapq.heappop(self._turns)
            if not self._is_current(line):
                continue
            self._turn = turn
            waiter = next(iter(line.waiters))
            granted[waiter] = granted.get(waiter, 0) + 1
            self.running += 1
            waiter.held += 1
            self.forget(waiter, 1)
            if not waiter.wanted:
                del line.waiters[waiter]
            if line.waiters:
                self._line_up(line, turn + 1)
            else:
                del self._lines[line.client]
        for waiter, number in granted.items():
            waiter.begin(number)

    def _line_up(self, line: _Line[WaiterT], turn: int) -> None:
        heapq.heappush(self._turns, (turn, next(self._order), line))
        if len(self._turns) > 2 * len(self._lines) + 64:  # of clients that have left
            self._turns = [entry for entry in self._turns if self._is_current(entry[2])]
            heapq.heapify(self._turns)

    def _is_current(self, line: _Line[WaiterT]) -> bool:
        return self._lines.get(line.client) is line

    def _make_room(self, number: int, own: int) -> None:
        """Evicts the newest waiter of the client with most waiting. If a single waiter that already
        has slots fills the queue, an idle client may exceed the limit."""
        while (excess := self.running + self.waiting + number - self.most_open) > 0:
            most = max(self._lines.values(), key=lambda line: line.waiting, default=None)
            if most is None or most.waiting <= own + number:
                self.refused_total += number
                raise self.full()
            newest = most.newest()
            if newest is None and not own and excess <= self.most_open:
                return
            if newest is None:
                self.refused_total += number
                raise self.full()
            self.refused_total += newest.wanted
            self.unqueue(newest)
            newest.refuse(self.full())


class _Line(Generic[WaiterT]):
    def __init__(self, client: Hashable) -> None:
        self.client, self.waiting = client, 0
        self.waiters: OrderedDict[WaiterT, None] = OrderedDict()

    def newest(self) -> WaiterT | None:
        """The last waiter, unless it already has slots."""
        last = next(reversed(self.waiters))
        return None if last.held else last


class FairExecutor(FairQueue["_Task"]):
    """Runs the tasks of all clients in one thread, fairly. `full`: the error beyond `most_open`."""

    def __init__(
        self,
        name: str,
        most_open: int = NO_LIMIT,
        full: Callable[[], Exception] = lambda: RuntimeError("the queue is full"),
    ) -> None:
        super().__init__(1, most_open)
        self._full = full
        self._lock = threading.RLock()
        self._thread = ThreadPoolExecutor(1, name)
        self._closed: Exception | None = None

    def full(self) -> Exception:
        return self._full()

    @property
    def open(self) -> int:
        """Tasks that run or wait."""
        return self.running + self.waiting

    def submit(self, client: Hashable, work: Callable[[], Result]) -> Future[Result]:
        """Queues a task. Its future fails if another client evicts it, and may be cancelled."""
        task = _Task(client, work, self._start)
        with self._lock:
            if self._closed is not None:
                raise self._closed
            self.queue(task)
        task.future.add_done_callback(lambda _: self._leave(task))
        return task.future

    def close(self, error: Exception) -> None:
        """Fails waiting and future tasks with this error. May be repeated."""
        with self._lock:
            self._closed = error
            for task in self.waiters():
                self.unqueue(task)
                task.refuse(error)
        self._thread.shutdown(wait=False)

    def _start(self, task: _Task) -> None:
        self._thread.submit(self._run, task)

    def _run(self, task: _Task) -> None:
        set_result = task.run()
        with self._lock:  # before the result: a client that has it has no open task
            self.free(1)
        set_result()

    def _leave(self, task: _Task) -> None:
        with self._lock:
            if self.holds(task):
                self.unqueue(task)


class _Task:
    def __init__(
        self, client: Hashable, work: Callable[[], Any], start: Callable[[_Task], object]
    ) -> None:
        self.client, self.wanted, self.held = client, 1, 0
        self.future: Future[Any] = Future()
        self._work, self._start = work, start

    def begin(self, number: int) -> None:
        self._start(self)

    def refuse(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def run(self) -> Callable[[], None]:
        """Runs the work; returns a function that sets the future."""
        if not self.future.set_running_or_notify_cancel():
            return lambda: None
        try:
            return partial(self.future.set_result, self._work())
        except BaseException as error:
            return partial(self.future.set_exception, error)
