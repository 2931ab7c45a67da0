"""A queue with one line for each client, served in turn: a client that has much waiting delays its
own work, and never keeps one that has nothing waiting out of the queue.
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
    """A member of a line. `wanted`: the slots that it waits for; `held`: those that it has."""

    client: Hashable
    wanted: int
    held: int

    def begin(self, number: int) -> None:
        """The queue gives it more slots, which it returns by `FairQueue.free`."""

    def refuse(self, error: Exception) -> None:
        """The queue has put it out, because another client needs its place."""


WaiterT = TypeVar("WaiterT", bound=Waiter)


class FairQueue(Generic[WaiterT]):
    """Gives `slots` to waiters. Turns are counted in slots, and at most `most_open` are held or
    waited for. A caller with several threads holds a lock around each call."""

    def __init__(self, slots: int, most_open: int) -> None:
        self.slots, self.most_open = slots, most_open
        self.waiting = self.running = self.refused_total = 0
        self._lines: dict[Hashable, _Line[WaiterT]] = {}
        self._turns: list[tuple[int, int, _Line[WaiterT]]] = []
        self._turn = 0
        self._order = count()

    def full(self) -> Exception:
        """What a waiter gets for which there is no room."""
        raise NotImplementedError

    def queue(self, waiter: WaiterT) -> None:
        """Raises `full()` if there is no room and no client has more waiting than this one."""
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
        """Takes a waiter out of its line."""
        line = self._lines[waiter.client]
        del line.waiters[waiter]
        self.forget(waiter, waiter.wanted)
        if not line.waiters:
            del self._lines[waiter.client]  # its turn is passed over when it comes

    def holds(self, waiter: WaiterT) -> bool:
        line = self._lines.get(waiter.client)
        return line is not None and waiter in line.waiters

    def waiters(self) -> list[WaiterT]:
        return [waiter for line in self._lines.values() for waiter in line.waiters]

    def forget(self, waiter: WaiterT, number: int) -> None:
        """A queued waiter wants fewer slots."""
        self._lines[waiter.client].waiting -= number
        self.waiting -= number
        waiter.wanted -= number

    def free(self, number: int) -> None:
        self.running -= number
        self.pump()

    def pump(self) -> None:
        """Gives free slots to the waiters that are next."""
        begun: dict[WaiterT, int] = {}
        while self.running < self.slots and self._turns:
            turn, _, line = heapq.heappop(self._turns)
            if not self._is_current(line):
                continue
            self._turn = turn
            waiter = next(iter(line.waiters))
            begun[waiter] = begun.get(waiter, 0) + 1
            self.running += 1
            waiter.held += 1
            self.forget(waiter, 1)
            if not waiter.wanted:
                del line.waiters[waiter]
            if line.waiters:
                self._line_up(line, turn + 1)
            else:
                del self._lines[line.client]
        for waiter, number in begun.items():
            waiter.begin(number)

    def _line_up(self, line: _Line[WaiterT], turn: int) -> None:
        heapq.heappush(self._turns, (turn, next(self._order), line))
        if len(self._turns) > 2 * len(self._lines) + 64:  # those of clients that have left
            self._turns = [entry for entry in self._turns if self._is_current(entry[2])]
            heapq.heapify(self._turns)

    def _is_current(self, line: _Line[WaiterT]) -> bool:
        return self._lines.get(line.client) is line

    def _make_room(self, number: int, own: int) -> None:
        """Puts out the newest waiter of the client with most waiting. One waiter that has begun may
        have filled the queue: then a client with nothing waiting goes beyond the limit."""
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
        """The last waiter, unless it has slots already."""
        last = next(reversed(self.waiters))
        return None if last.held else last


class FairExecutor:
    """Runs work in one thread of its own, by the turns of the clients. Any thread may call it.
    `full`: the error for a client whose work finds no room among `most_open`."""

    def __init__(
        self,
        name: str,
        most_open: int = NO_LIMIT,
        full: Callable[[], Exception] = lambda: RuntimeError("the queue is full"),
    ) -> None:
        self._tasks = _Tasks(most_open, full)
        self._lock = threading.RLock()
        self._thread = ThreadPoolExecutor(1, name)
        self._closed: Exception | None = None

    @property
    def open(self) -> int:
        """Work that runs or waits."""
        return self._tasks.running + self._tasks.waiting

    def submit(self, client: Hashable, work: Callable[[], Result]) -> Future[Result]:
        """The result, or a future that is refused later where another client needs the place.
        A future that is cancelled leaves the line."""
        task = _Task(self, client, work)
        with self._lock:
            if self._closed is not None:
                raise self._closed
            self._tasks.queue(task)
        task.future.add_done_callback(lambda _: self._leave(task))
        return task.future

    def close(self, error: Exception) -> None:
        """All that waits gets the error, and so does all that comes; it may be repeated."""
        with self._lock:
            self._closed = error
            for task in self._tasks.waiters():
                self._tasks.unqueue(task)
                task.refuse(error)
        self._thread.shutdown(wait=False)

    def start(self, task: _Task) -> None:
        self._thread.submit(self._run, task)

    def _run(self, task: _Task) -> None:
        tell = task.run()
        with self._lock:  # first: a client that has its result has nothing open
            self._tasks.free(1)
        tell()

    def _leave(self, task: _Task) -> None:
        with self._lock:
            if self._tasks.holds(task):
                self._tasks.unqueue(task)


class _Task:
    def __init__(self, executor: FairExecutor, client: Hashable, work: Callable[[], Any]) -> None:
        self.client, self.wanted, self.held = client, 1, 0
        self.future: Future[Any] = Future()
        self._executor, self._work = executor, work

    def begin(self, number: int) -> None:
        self._executor.start(self)

    def refuse(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def run(self) -> Callable[[], None]:
        """What tells the client how it went."""
        if not self.future.set_running_or_notify_cancel():
            return lambda: None
        try:
            return partial(self.future.set_result, self._work())
        except BaseException as error:
            return partial(self.future.set_exception, error)


class _Tasks(FairQueue[_Task]):
    """One slot: the thread."""

    def __init__(self, most_open: int, full: Callable[[], Exception]) -> None:
        super().__init__(1, most_open)
        self._full = full

    def full(self) -> Exception:
        return self._full()
