"""Plans name only pages that are new to the ranks, in a row that no other running request has."""

import random
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from moesaic.config import ServerArgs, resolve
from moesaic.core.request import Request, RequestPhase
from moesaic.core.sampling import SamplingParams
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.engine.schedule.inflight import InflightStep
from moesaic.engine.schedule.kv_cache import PrefixNode
from moesaic.engine.schedule.plan import ItemResult, StepResult
from moesaic.engine.schedule.request_state import RequestState
from moesaic.engine.schedule.scheduler import RESERVE_TOKENS, Scheduler
from moesaic.engine.schedule.waiting_queue import WaitingQueue
from moesaic.engine.worker.planner import Planner
from moesaic.layers.paged_cache import PageTable, PageUpdate, Sequences
from moesaic.models.tiny import materialise

PAGE = 4


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    args = resolve(
        ServerArgs.from_kwargs(
            model_path="tiny:qwen3_moe",
            page_size=PAGE,
            max_total_tokens=160,
            max_running_requests=6,
            chunked_prefill_size=24,
            schedule_conservativeness=0.1,
        )
    )
    runner = ModelRunner(replace(args, model_path=materialise(args.model_path)))
    runner.args = args  # type: ignore[attr-defined]
    return runner


class Traffic:
    """Random requests, aborts and rollbacks, with up to `ahead` steps in flight. The ranks' page
    table is a plain one that is written as plans say, and lost in a rollback."""

    def __init__(self, runner: ModelRunner, seed: int, ahead: int = 2) -> None:
        self.planner = Planner(runner.args, runner)  # type: ignore[attr-defined]
        self.chance, self.ahead, self.number = random.Random(seed), ahead, 0
        self.inflight: deque[InflightStep] = deque()
        self.table: dict[int, list[int]] = {}
        self.known: dict[int, tuple[int, int]] = {}
        """The row and the number of pages that each request had last."""
        self.seen: Counter[str] = Counter()

    @property
    def running(self) -> list[Request]:
        return self.planner.scheduler.running

    def add(self, prompt: list[int], max_new: int) -> Request:
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        request = Request(str(self.number), prompt, params, 0, max_new, self.number)
        self.number += 1
        self.planner.add(RequestState(request, None, lambda progress: None))
        return request

    def arrive(self) -> None:
        """Equal prompts with equal answers, so that pages are replaced by equal ones."""
        start = self.chance.randrange(3)
        self.add([start] * self.chance.randrange(1, 30), self.chance.randrange(2, 40))

    def plan(self) -> None:
        step = self.planner.plan(1)
        if not step.has_requests:
            return
        self.seen["decodes"] += len(step.plan.decodes)
        updates = {update.row: update for update in step.plan.page_updates()}
        requests = [*step.decoding.requests, *(planned.request for planned in step.items)]
        assert step.plan.rows.tolist() == [request.row for request in requests]
        for request in requests:
            self.carry_out(request, updates.get(request.row, PageUpdate(request.row, 0, ())))
        self.inflight.append(step)

    def carry_out(self, request: Request, update: PageUpdate) -> None:
        number, first, pages = request.request_no, update.first, update.pages
        row = self.table.setdefault(request.row, [])
        self.seen["new"] += len(pages)
        self.seen["all"] += len(request.pages)
        before, count = self.known.get(number, (request.row, 0))
        self.known[number] = request.row, len(request.pages)
        self.seen["moved"] += request.row != before
        self.seen["replaced"] += 0 < first < count and request.row == before
        row[first : first + len(pages)] = pages
        assert row[: len(request.pages)] == request.pages, f"request {number}"

    def apply(self) -> None:
        step = self.inflight.popleft()
        results = [ItemResult(token_ids=[7]) if i.sample else ItemResult() for i in step.plan.items]
        tokens = [7] * len(step.plan.decodes)
        self.planner.apply(step, StepResult(results, token_ids=tokens))

    def roll_back(self) -> None:
        self.plan()
        self.seen["undone"] += len(self.inflight)
        self.planner.rollback(self.inflight)
        self.inflight.clear()
        self.table = {}

    def check(self) -> None:
        rows = [request.row for request in self.running]
        assert len(set(rows)) == len(rows) and all(0 <= row < 6 for row in rows)
        for request in self.planner.scheduler.waiting:
            assert request.row == -1 and request.pages_sent == 0 and request.pages == []
        assert len(self.planner.scheduler._free_rows) == 6 - len(rows)
        self.check_decodes()

    def check_decodes(self) -> None:
        """The table of decodes says what its requests say."""
        scheduler = self.planner.scheduler
        table = scheduler.decode_table
        members = [request for request in self.running if request in table]
        assert scheduler._others == [request for request in self.running if request not in table]
        assert np.flatnonzero(table._is_member).tolist() == sorted(r.row for r in members)
        for request in members:
            row, room = request.row, len(request.pages) * PAGE
            columns = (table._first, table._pending, table._room, table._request_nos)
            said = (request.num_computed, request.pending, room, request.request_no)
            assert tuple(column[row] for column in columns) == said
            assert request.is_decoding and request.sampling_sent
            assert (row in table._unsent) is (request.pages_sent < len(request.pages))

    def run(self, turns: int) -> Iterator[None]:
        for _ in range(turns):
            choice = self.chance.random()
            if choice < 0.3:
                self.arrive()
            elif choice < 0.34 and self.planner.states:
                self.planner.abort(self.chance.choice([*self.planner.states]))
            elif choice < 0.36:
                self.roll_back()
            else:
                self.plan()
                if len(self.inflight) >= self.ahead or (self.inflight and choice > 0.9):
                    self.apply()
            self.check()
            yield


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_tables_that_follow_plans_have_all_pages(
    runner: ModelRunner, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "overlaps", ahead > 1)
    traffic = Traffic(runner, seed=ahead, ahead=ahead)
    for _ in traffic.run(3000):
        pass
    seen = traffic.seen
    assert min(seen["moved"], seen["replaced"], seen["undone"]) > 5, seen
    assert seen["decodes"] > 1000, seen
    assert traffic.planner.scheduler.num_retractions > 5 and traffic.number > 500
    assert traffic.planner.metrics.counts.failed_steps == 0
    assert seen["new"] < seen["all"] / 2


def test_only_new_pages_are_sent(runner: ModelRunner) -> None:
    traffic = Traffic(runner, seed=0)
    request = traffic.add([1] * 6, 9)
    sent = []
    while request.phase is not RequestPhase.FINISHED:
        traffic.plan()
        sent.append([(u.first, len(u.pages)) for u in traffic.inflight[0].plan.page_updates()])
        traffic.apply()
    # Positions 0 to 5, then one token a step: pages 2 and 3 begin with positions 8 and 12.
    assert sent == [[(0, 2)], [], [], [(2, 1)], [], [], [], [(3, 1)], []]


def test_a_page_that_the_tree_has_already_is_sent_again(runner: ModelRunner) -> None:
    """Two requests compute the same page; the second one then reads that of the first."""
    traffic = Traffic(runner, seed=0)
    first, second = traffic.add([5, 7, 7], 6), traffic.add([5, 7, 7], 6)
    for _ in range(2):  # the prompts, and the tokens that fill their first pages
        traffic.plan()
        traffic.apply()
    assert first.pages[0] == second.pages[0]
    assert (first.pages_sent, second.pages_sent) == (1, 0)
    traffic.plan()
    updates = {update.row: update for update in traffic.inflight[0].plan.page_updates()}
    assert [*updates[first.row][1:]] == [1, first.pages[1:]] and len(first.pages) == 2
    assert [*updates[second.row][1:]] == [0, second.pages] and second.pages[0] == first.pages[0]


def test_a_retracted_request_resumes_with_all_its_pages_in_another_row(
    runner: ModelRunner,
) -> None:
    traffic = Traffic(runner, seed=0)
    scheduler = traffic.planner.scheduler
    old, young = traffic.add([1] * 9, 30), traffic.add([2] * 9, 30)
    traffic.plan()
    traffic.apply()
    rows = old.row, young.row
    scheduler._retract(young)
    assert (young.row, young.pages_sent, young.phase) == (-1, 0, RequestPhase.WAITING)
    other = traffic.add([3], 30)
    scheduler.waiting.remove(young)
    scheduler.waiting.append(young)
    traffic.plan()
    item = {i.request_no: i for i in traffic.inflight[0].plan.items}[young.request_no]
    assert other.row == rows[1] and young.row not in rows
    assert item.first_page == 0 and list(item.pages) == young.pages and len(young.pages) == 3


def test_a_rollback_sends_all_pages_again(runner: ModelRunner) -> None:
    traffic = Traffic(runner, seed=0)
    request, gone = traffic.add([1] * 9, 9), traffic.add([2] * 9, 9)
    traffic.plan()
    traffic.apply()
    traffic.plan()
    traffic.planner.abort(gone.request_no)
    assert request.pages_sent == 3
    assert traffic.planner.rollback(traffic.inflight) == [request]
    traffic.inflight.clear()
    assert request.pages_sent == 0
    traffic.plan()
    assert traffic.inflight[0].plan.page_updates() == [PageUpdate(request.row, 0, request.pages)]


def expected_pages(scheduler: Scheduler, request: Request) -> int:
    growth = int(scheduler._reserve * min(request.remaining_tokens, RESERVE_TOKENS))
    tokens = max(len(request.token_ids) + growth, request.num_computed)
    return scheduler.kv.pages_for(tokens) - len(request.pages)


def test_admission_counts_what_every_running_request_is_likely_to_need(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    decisions: list[tuple[bool, bool]] = []
    fits = Scheduler._fits

    def compare(self: Scheduler, request: Request, node: PrefixNode, num_cached: int) -> bool:
        needed = self.kv.pages_for(len(request.token_ids) + 1) - num_cached
        available = self.kv.num_available - self.kv.tree.num_idle(node)
        promised = sum(expected_pages(self, one) for one in self.running)
        found = fits(self, request, node, num_cached)
        decisions.append((found, needed + promised <= available))
        assert not self.running or self._promised == promised
        return found

    monkeypatch.setattr(Scheduler, "_fits", compare)
    traffic = Traffic(runner, seed=4)
    for _ in traffic.run(1500):
        pass
    assert traffic.planner.metrics.counts.failed_steps == 0
    assert all(found == expected for found, expected in decisions)
    assert Counter(found for found, _ in decisions).keys() == {False, True}


def test_the_queue_keeps_its_order() -> None:
    requests = [Request(str(n), [0] * n, SamplingParams(), 0, 1, n) for n in range(6)]
    queue = WaitingQueue()
    for request in requests[1:]:
        queue.append(request)
    queue.append_first(requests[0])
    queue.remove(requests[4])
    assert [r.request_no for r in queue] == [0, 1, 2, 3, 5] and queue.prompt_tokens == 11
    with closing(queue.scan()) as scan:
        for request in scan:
            if request.request_no % 2:
                queue.remove(request)
            if request.request_no == 3:
                break
    assert [r.request_no for r in queue] == [0, 2, 5] and queue.prompt_tokens == 7
    assert [r.request_no for r in queue.scan()] == [0, 2, 5] and len(queue) == 3
    assert requests[2] in queue and requests[3] not in queue


def test_a_table_is_written_where_it_changes() -> None:
    table = PageTable(3, 4)
    table.write([PageUpdate(2, 0, [7, 8]), PageUpdate(0, 1, [9])])
    table.write([])
    table.write([PageUpdate(2, 1, [5, 6, 4])])
    expected = [[0, 9, 0, 0], [0, 0, 0, 0], [7, 5, 6, 4]]
    assert table.host.reshape(3, 4).tolist() == table.pages.view(3, 4).tolist() == expected
    first = np.array([8, 0], np.int32)
    two = np.array([1, 1], np.int32)
    sequences = Sequences(np.array([0, 1], np.int32), two, np.array([13, 6], np.int32), first)
    spans = table.spans(sequences)
    assert [span.slots(span.positions, PAGE).tolist() for span in spans] == [[16], [37]]
    assert table.slots(PAGE, first, np.array([12, 5], np.int32)).tolist() == [16, 37]
    with pytest.raises(ValueError, match="a sequence of 5 pages does not fit into a table for 4"):
        table.write([PageUpdate(1, 3, [1, 2])])
