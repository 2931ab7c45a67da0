"""No page is lost or doubly owned, whatever happens; and the scheduler never gets stuck."""

from __future__ import annotations

import gc
import tracemalloc
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moesaic.core.request import ArrivingPrompt, Request, RequestPhase
from moesaic.core.sampling import SamplingParams
from moesaic.engine.schedule.inflight import MovedTokens
from moesaic.engine.schedule.kv_cache import PageAllocator, PrefixTree
from moesaic.engine.schedule.kv_manager import KVManager
from moesaic.engine.schedule.scheduler import Scheduler, SchedulerConfig

PAGES = 12


def make_request(tokens: list[int], max_new: int = 8, number: int = 0, **more: object) -> Request:
    params = SamplingParams(max_new_tokens=max_new)
    return Request("r", tokens, params, 0, max_new, number, **more)  # type: ignore[arg-type]


def check_ownership(kv: KVManager, running: list[Request]) -> None:
    """Every page is free, in the tree, or private to one request: exactly one of them."""
    free = list(kv.allocator._free)
    nodes = list(kv.tree.nodes())
    cached = [node.page for node in nodes]
    private = [page for r in running for page in r.pages[kv.frontier(r)[0].depth :]]
    assert sorted(free + cached + private) == list(range(1, kv.allocator.num_pages + 1))
    assert kv.tree.num_nodes == len(nodes)
    assert kv.tree.num_evictable == sum(node.readers == 0 for node in nodes)
    expected = dict.fromkeys(nodes, 0)
    for request in running:
        node, _ = kv.frontier(request)
        pages = []
        while node is not kv.tree.root:
            expected[node] += 1
            pages.append(node.page)
            node = kv.tree.parent(node)
        assert request.pages[: len(pages)] == pages[::-1]
    assert {node: node.readers for node in nodes} == expected
    for node in nodes:
        assert node.depth == 1 or node.readers <= kv.tree.parent(node).readers


class Pages(RuleBasedStateMachine):
    """Random admissions, growth, sharing, releases, evictions and flushes."""

    def __init__(self) -> None:
        super().__init__()
        self.kv: KVManager | None = None
        self.running: list[Request] = []
        self.taken: list[int] = []

    @precondition(lambda self: self.kv is None)
    @rule(page_size=st.integers(1, 4), enabled=st.booleans())
    def start(self, page_size: int, enabled: bool) -> None:
        self.kv = KVManager(PAGES, page_size, enabled, self.taken.extend)

    @precondition(lambda self: self.kv is not None)
    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=16), start=st.integers(0, 16))
    def admit(self, tokens: list[int], start: int) -> None:
        request = make_request(tokens, return_logprob=start < 8, logprob_start=start)
        node, pages = self.kv.lookup(request)
        assert len(pages) * self.kv.page_size < len(tokens)
        if request.lacks_input_logprobs:
            assert len(pages) * self.kv.page_size <= start
        self.kv.admit(request, node, pages)
        self.running.append(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.running))
        length = data.draw(st.integers(1, 6))
        goal = min(len(request.token_ids), request.num_computed + length)
        room, before = self.kv.num_available, len(request.pages)
        self.taken.clear()
        grown = self.kv.grow(request, goal)
        assert grown == (self.kv.pages_for(goal) - before <= room)
        if grown:
            assert request.pages[before:] == self.taken
            request.num_computed = goal

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token=st.integers(0, 1))
    def emit(self, data: st.DataObject, token: int) -> None:
        request = data.draw(st.sampled_from(self.running))
        if request.num_computed == len(request.token_ids):
            self.kv.share(request, request.num_computed)
            request.token_ids.append(token)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.running))
        self.running.remove(request)
        self.kv.release(request)
        assert request.pages == [] and request.num_computed == 0

    @precondition(lambda self: self.kv is not None)
    @rule(number=st.integers(0, PAGES))
    def evict(self, number: int) -> None:
        evictable = self.kv.tree.num_evictable
        assert self.kv.tree.evict(number) == min(number, evictable)

    @precondition(lambda self: self.kv is not None)
    @rule()
    def flush(self) -> None:
        self.kv.flush()
        assert self.kv.tree.num_evictable == 0

    @invariant()
    def every_page_has_one_owner(self) -> None:
        if self.kv is not None:
            check_ownership(self.kv, self.running)

    def teardown(self) -> None:
        for request in self.running:
            self.kv.release(request)
        if self.kv is not None:
            self.kv.flush()
            assert self.kv.allocator.num_free == PAGES


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


class Serving(RuleBasedStateMachine):
    """The scheduler over a cache that is too small, with arrivals and aborts at any time: every
    request that is not aborted ends, and older ones do not wait for younger ones."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVManager(PAGES, 2, True, lambda pages: None)
        self.scheduler = Scheduler(SchedulerConfig(max_running=4, chunk_tokens=5), self.kv)
        self.open: list[Request] = []
        self.arrivals = 0

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14), max_new=st.integers(1, 10))
    def arrive(self, tokens: list[int], max_new: int) -> None:
        self.arrivals += 1
        request = make_request(tokens, min(max_new, PAGES * 2 - len(tokens)), self.arrivals)
        self.open.append(request)
        self.scheduler.add(request)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.open))
        self.open.remove(request)
        self.scheduler.finish(request)

    @rule()
    def step(self) -> None:
        schedule, table = self.scheduler.schedule(), self.scheduler.decode_table
        work, (planned, decodes) = schedule.items, table.plan(schedule.rows)
        assert schedule.is_empty is (not self.open)
        prompt_tokens = sum(w.length for w in work if not w.request.is_decoding)
        assert prompt_tokens <= 5 and len(work) + len(decodes) <= 4
        table.begin(planned, decodes)
        table.end(planned, decodes)
        for request in planned.requests:
            assert request.num_computed == len(request.token_ids)
            assert len(request.pages) == self.kv.pages_for(request.num_computed)
            self._emit(request)
        for item in work:
            assert item.length >= 1 and item.stop <= len(item.request.token_ids)
            assert len(item.request.pages) == self.kv.pages_for(item.stop)
            item.begin()
            if item.samples:
                item.end(1)
                self._emit(item.request)

    def _emit(self, request: Request) -> None:
        self.kv.share(request, request.num_computed)
        self.scheduler.decode_table.update(request)
        request.token_ids.append(len(request.token_ids) % 2)
        if request.remaining_tokens == 0:
            self.open.remove(request)
            self.scheduler.finish(request)

    @invariant()
    def every_page_has_one_owner(self) -> None:
        check_ownership(self.kv, self.scheduler.running)
        assert set(self.open) == {*self.scheduler.running, *self.scheduler.waiting}
        assert {request.phase for request in self.scheduler.running} <= {RequestPhase.RUNNING}
        assert {request.phase for request in self.scheduler.waiting} <= {RequestPhase.WAITING}

    def teardown(self) -> None:
        for _ in range(2000):
            if not self.open:
                break
            self.step()
        assert not self.open, "requests are stuck"
        self.kv.flush()
        assert self.kv.allocator.num_free == PAGES


TestServing = Serving.TestCase
TestServing.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_least_recently_used_leaf_goes_first() -> None:
    allocator = PageAllocator(6)
    tree = PrefixTree(1, allocator)
    for tokens in ([1, 2], [1, 3], [4]):
        Walker(tree, tokens).leave()
    Walker(tree, [1, 2]).leave()
    assert tree.evict(1) == 1 and tree.match([1, 3], 2)[0].depth == 1
    assert tree.evict(1) == 1 and tree.match([4], 1)[0] is tree.root
    assert tree.match([1, 2], 2)[0].depth == 2
    assert tree.evict(5) == 2 and allocator.num_free == 6


class Walker:
    """A request: it reads the cached part of its tokens and adds the rest to the tree."""

    def __init__(self, tree: PrefixTree, tokens: list[int]) -> None:
        self.tree, self.tokens = tree, tokens
        self.node, pages = tree.match(tokens, len(tokens))
        tree.acquire(self.node)
        self.end = len(pages)

    def extend(self) -> None:
        key = self.tree.key(self.tokens, self.end)
        self.node = self.tree.extend(self.node, key, self.tree.allocator.take(1)[0])
        self.end += 1

    def leave(self) -> None:
        while self.end < len(self.tokens):
            self.extend()
        self.tree.release(self.node)


class LeastRecentlyUsed:
    """What eviction must do, by a search over all nodes: each is named by the tokens to it."""

    def __init__(self) -> None:
        self.readers: dict[tuple[int, ...], int] = {}
        self.last_used: dict[tuple[int, ...], int] = {}
        self.clock = 0

    def read(self, path: tuple[int, ...], change: int) -> None:
        self.clock += 1
        for end in range(1, len(path) + 1):
            self.readers[path[:end]] = self.readers.get(path[:end], 0) + change
            self.last_used[path[:end]] = self.clock

    def evict(self) -> tuple[int, ...]:
        parents = {path[:-1] for path in self.readers}
        leaves = [p for p, readers in self.readers.items() if not readers and p not in parents]
        oldest = min(leaves, key=self.last_used.__getitem__)
        del self.readers[oldest], self.last_used[oldest]
        return oldest


@pytest.mark.parametrize("seed", range(8))
def test_eviction_has_the_order_of_a_search_over_all_nodes(seed: int) -> None:
    draw, tree, model = Random(seed), PrefixTree(1, PageAllocator(60)), LeastRecentlyUsed()
    walkers: list[Walker] = []
    evicted = 0
    for _ in range(1500):
        action = draw.choice(["enter", "extend", "extend", "leave", "evict"])
        if action == "enter" and len(walkers) < 5:
            walkers.append(Walker(tree, draw.choices([1, 2, 3], k=draw.randint(1, 8))))
            model.read(tuple(walkers[-1].tokens[: walkers[-1].end]), 1)
        elif action == "leave" and walkers:
            walker = walkers.pop(draw.randrange(len(walkers)))
            tree.release(walker.node)
            model.read(tuple(walker.tokens[: walker.end]), -1)
        elif action == "extend" and walkers and tree.allocator.num_free:
            walker = draw.choice(walkers)
            if walker.end < len(walker.tokens):
                walker.extend()
                path = tuple(walker.tokens[: walker.end])
                model.readers[path] = model.readers.get(path, 0) + 1
        elif action == "evict" and tree.num_evictable:
            assert tree.evict(1) == 1
            gone = model.evict()
            assert len(tree.match(gone, len(gone))[1]) == len(gone) - 1
            evicted += 1
        assert tree.num_evictable == sum(not readers for readers in model.readers.values())
        assert tree.num_nodes == len(model.readers)
    assert evicted > 100


def test_pages_of_a_large_tree_are_freed_without_the_garbage_collector() -> None:
    """Also a chain of many nodes, both by eviction and with the tree as a whole."""
    kv: KVManager | None = KVManager(30_000, 1, True, lambda pages: None)
    sizes = []
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        tracked = len(gc.get_objects())
        for evicts in (True, False):
            chain, *short = [[9] * 20_000, *([n, n, n] for n in range(1000, 4000))]
            for tokens in (chain, *short):
                Walker(kv.tree, tokens).leave()
            assert kv.tree.num_nodes == 29_000
            if evicts:
                del tokens, chain, short
                sizes.append(tracemalloc.get_traced_memory()[0])
                assert len(gc.get_objects()) - tracked < 100
                assert kv.flush() == 29_000
                sizes.append(tracemalloc.get_traced_memory()[0])
        del kv, tokens, chain, short
        sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
        gc.enable()
    assert sizes[1] < 0.3 * sizes[0] and sizes[2] < 0.1 * sizes[0], sizes


@pytest.mark.parametrize(("tokens", "shared"), [(7, 4), (8, 4), (9, 8), (4, 0), (5, 4)])
def test_the_last_token_is_always_computed(tokens: int, shared: int) -> None:
    kv = KVManager(8, 4, True, lambda pages: None)
    first = make_request([1] * 12)
    kv.admit(first, *kv.lookup(first))
    kv.grow(first, 12)
    first.num_computed = 12
    kv.share(first, 12)
    _, pages = kv.lookup(make_request([1] * tokens))
    assert len(pages) * 4 == shared
    assert pages == first.pages[: len(pages)]


def test_pages_of_lost_drafts_are_not_taken_as_drafted() -> None:
    """The draft model has computed three pages of a request, and a move in the second was undone:
    another request knows that the draft model has only the first one."""
    kv = KVManager(8, 4, True, lambda pages: None)
    first, second = make_request([1] * 13), make_request([1] * 13, number=1)
    kv.admit(first, *kv.lookup(first))
    kv.grow(first, 13)
    first.num_computed = 13
    kv.draft_until(first, 13)
    MovedTokens(first, 6, [7], first.retractions).lose(kv)
    assert (first.num_computed, first.draft_computed) == (6, 6)
    first.num_computed = 13  # by steps without drafts
    kv.share(first, 12)
    kv.admit(second, *kv.lookup(second))
    assert (second.num_computed, second.draft_computed) == (12, 4)


def test_a_prompt_that_another_computes_is_waited_for() -> None:
    kv = KVManager(16, 2, True, lambda pages: None)
    scheduler = Scheduler(SchedulerConfig(max_running=8, chunk_tokens=4), kv)
    same = [make_request([1, 2, 3, 4, 5, 6], 2, number) for number in range(3)]
    other = make_request([9, 9], 2, 3)
    for request in [*same, other]:
        scheduler.add(request)
    assert [w.request for w in scheduler.schedule().items] == [same[0]]
    same[0].num_computed = 4
    assert {w.request: w.length for w in scheduler.schedule().items} == {same[0]: 2, other: 2}
    same[0].num_computed = 6
    kv.share(same[0], same[0].num_computed)
    same[0].token_ids.append(7)
    work = {w.request: w.length for w in scheduler.schedule().items}
    assert work[same[1]] == 2 and same[1].cached_tokens == 4


def test_only_the_common_part_is_waited_for() -> None:
    kv = KVManager(32, 2, True, lambda pages: None)
    scheduler = Scheduler(SchedulerConfig(max_running=8, chunk_tokens=4), kv)
    long, short = make_request(list(range(20)), 2, 0), make_request([0, 1, 2, 3, 99, 98], 2, 1)
    scheduler.add(long)
    scheduler.add(short)
    assert {w.request: w.length for w in scheduler.schedule().items} == {long: 4}
    long.num_computed = 4
    kv.share(long, long.num_computed)
    # The older request takes the whole budget; the younger one no longer waits for its pages.
    assert kv.lookup(short)[1] == long.pages[:2]
    scheduler.config = SchedulerConfig(max_running=8, chunk_tokens=6)
    assert {w.request: w.length for w in scheduler.schedule().items} == {long: 6}
    scheduler.config = SchedulerConfig(max_running=8, chunk_tokens=20)
    long.num_computed = 10
    kv.share(long, long.num_computed)
    assert {w.request: w.length for w in scheduler.schedule().items} == {long: 10, short: 2}


def test_prompts_of_a_step_are_limited() -> None:
    kv = KVManager(64, 2, True, lambda pages: None)
    config = SchedulerConfig(max_running=8, chunk_tokens=6, max_prompts=2)
    scheduler = Scheduler(config, kv)
    requests = [make_request([number] * 4, 2, number) for number in range(1, 6)]
    for request in requests:
        scheduler.add(request)
    one, two, three, four, _ = requests
    assert {w.request: w.length for w in scheduler.schedule().items} == {one: 4, two: 2}
    one.num_computed, two.num_computed = 4, 2
    one.token_ids.append(9)  # it decodes from now on, beside two prompts
    assert {w.request: w.length for w in scheduler.schedule().items} == {one: 1, two: 2, three: 4}
    two.num_computed = three.num_computed = 4
    two.token_ids.append(9)
    three.token_ids.append(9)
    one.num_computed = 5
    one.token_ids.append(9)
    work = {w.request: w.length for w in scheduler.schedule().items}
    assert work == {one: 1, two: 1, three: 1, four: 4, requests[4]: 2}


def admissions(scheduler: Scheduler, requests: list[Request]) -> list[int]:
    """The number of identical requests that each step admits, until all run."""
    for request in requests:
        scheduler.add(request)
    counts = []
    while scheduler.waiting:
        counts.append(-len(scheduler.running))
        work = scheduler.schedule().items
        counts[-1] += len(scheduler.running)
        assert work, "a step without work"
        for item in work:
            request = item.request
            request.num_computed = item.stop
            scheduler.kv.share(request, request.num_computed)
            if request.num_computed == len(request.token_ids):
                request.token_ids.append(99)
    return counts


@pytest.mark.parametrize(
    ("page_size", "length", "start", "expected"),
    [
        (4, 9, None, [1, 7]),
        (4, 8, None, [1, 7]),
        (4, 7, None, [1, 7]),
        (4, 4, None, [8]),  # its only page holds the last token, which is computed anew
        (4, 3, None, [8]),
        (1, 6, None, [1, 7]),
        (1, 1, None, [8]),
        (4, 12, 7, [1, 7]),  # logprobs start within the second page
        (4, 12, 4, [1, 7]),
        (4, 12, 3, [8]),
        (4, 12, 0, [8]),
    ],
)
def test_only_pages_that_can_be_reused_are_waited_for(
    page_size: int, length: int, start: int | None, expected: list[int]
) -> None:
    kv = KVManager(200, page_size, True, lambda pages: None)
    scheduler = Scheduler(SchedulerConfig(max_running=8, chunk_tokens=200), kv)
    scored = {} if start is None else {"return_logprob": True, "logprob_start": start}
    same = [make_request(list(range(length)), 4, number, **scored) for number in range(8)]
    assert admissions(scheduler, same) == expected


def test_nothing_is_waited_for_without_a_prefix_cache() -> None:
    kv = KVManager(200, 4, False, lambda pages: None)
    scheduler = Scheduler(SchedulerConfig(max_running=8, chunk_tokens=200), kv)
    assert admissions(scheduler, [make_request([1] * 8, 4, number) for number in range(8)]) == [8]


@pytest.mark.parametrize("leaves", ["aborted", "retracted"])
def test_pages_of_a_request_that_leaves_are_computed_by_the_next(leaves: str) -> None:
    """Chunks have one page: the request that leaves has computed one page of three."""
    kv = KVManager(200, 4, True, lambda pages: None)
    scheduler = Scheduler(SchedulerConfig(max_running=8, chunk_tokens=4), kv)
    same = [make_request([1] * 12, 4, number) for number in range(4)]
    for request in same:
        scheduler.add(request)
    assert [work.request for work in scheduler.schedule().items] == same[:1]
    same[0].num_computed = 4
    kv.share(same[0], 4)
    scheduler.finish(same[0])
    if leaves == "retracted":
        scheduler.waiting.append_first(same[0])
    scheduler.config = SchedulerConfig(max_running=8, chunk_tokens=200)
    rest = [request for request in same if request in scheduler.waiting]
    for request in rest:
        scheduler.waiting.remove(request)
    assert admissions(scheduler, rest) == [1, len(rest) - 1]
    assert [request.cached_tokens for request in rest] == [4] + [8] * (len(rest) - 1)


def test_prompts_of_other_instances_wait_in_the_same_line() -> None:
    """Also those that are computed here after all: none overtakes an older one."""
    kv = KVManager(6, 2, True, lambda pages: None)
    scheduler = Scheduler(SchedulerConfig(max_running=8, chunk_tokens=16), kv)
    requests = [make_request([number] * 6, 2, number) for number in range(6)]
    for request in requests:
        if request.request_no not in (2, 5):
            request.arriving = ArrivingPrompt()
        scheduler.add(request)
    first, failed, *_ = requests
    assert scheduler.reserve(100) == [first]  # the second one does not fit beside it
    assert [w.request for w in scheduler.schedule().items] == []
    scheduler.compute_here(failed)
    order = [first]
    while scheduler.has_work:
        for request in list(scheduler.running):
            scheduler.finish(request)
        begun = scheduler.reserve(100) + [w.request for w in scheduler.schedule().items]
        assert len(begun) == 1 or not scheduler.has_work
        order += begun
    assert order == requests
