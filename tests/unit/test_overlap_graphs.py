"""Which graphs --overlap auto captures: those that it measures, and then those that it chose."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from moesaic.comm.collectives.nccl_collective import NcclCollective
from moesaic.comm.lifecycle import Lifecycle, Membership
from moesaic.core.overlap import Overlap
from moesaic.engine.runner.graphs import GraphCache, GraphKey, MixedGraphs, MixedKey
from moesaic.engine.runner.overlap_calibration import Calibration
from moesaic.engine.runner.peer_watchdog import PeerWatchdog
from moesaic.engine.worker.step_splitter import WHOLE, StepSplitter
from moesaic.overlap.cost import ChosenOverlap, OverlapChoice, StepCosts
from moesaic.overlap.policy import NoOverlap, SingleBatch, TwoBatches

OFF, SBO, TBO = Overlap
CPU = torch.device("cpu")
Ran = list[tuple[str, GraphKey]]


class Recording:
    """In the place of a graph. `kind`: how it was captured."""

    def __init__(self, kind: str, key: GraphKey, ran: Ran) -> None:
        self._told, self._ran = (kind, key), ran

    def replay(self) -> None:
        self._ran.append(self._told)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ran]:
    """What graphs replayed, or bodies ran."""
    found: Ran = []
    for name in ("Stream", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: object())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 1))
    monkeypatch.setattr(GraphCache, "_warm_up", lambda *_: None)
    monkeypatch.setattr(
        GraphCache, "_capture", lambda cache, key, stream, pool: Recording(pool, key, found)
    )
    yield found


def decode_graphs(ran: Ran, *schedules: Overlap) -> GraphCache:
    return GraphCache(
        (1, 2, 4), lambda key: ran.append(("body", key)), CPU, schedules=schedules or tuple(Overlap)
    )


def runs(cache: GraphCache, ran: Ran, rows: int, overlap: Overlap) -> str:
    """How a step of these rows runs."""
    ran.clear()
    key = cache.bucket(rows, overlap=overlap)
    assert key is not None
    cache.run(key)
    ((kind, found),) = ran
    assert found == key == GraphKey(rows, overlap=overlap)
    return kind


def choice(tokens: int, chosen: Overlap, prefill: bool = False) -> OverlapChoice:
    rounds = {OFF: [3.0] * 5} | ({chosen: [2.0] * 5} if chosen else {})
    return OverlapChoice(prefill, StepCosts(tokens, 2.0, 1.0), None, rounds)


def test_a_start_captures_whole_steps_and_then_what_was_chosen(ran: Ran) -> None:
    cache = decode_graphs(ran)
    cache.capture_chosen("start", NoOverlap())
    assert [runs(cache, ran, 4, schedule) for schedule in (OFF, SBO, TBO)] == [
        *("start", "body", "body")
    ]
    cache.capture_chosen("later", ChosenOverlap([choice(1, OFF), choice(2, TBO), choice(4, TBO)]))
    assert runs(cache, ran, 4, OFF) == "start", "not captured twice"
    assert [runs(cache, ran, rows, TBO) for rows in (2, 4)] == ["later", "later"]
    assert runs(cache, ran, 2, SBO) == "body"


def test_flags_capture_what_they_ask_for_at_once(ran: Ran) -> None:
    for policy, schedules in ((TwoBatches(), (OFF, TBO)), (SingleBatch(), (SBO,))):
        cache = decode_graphs(ran, *schedules)
        cache.capture_chosen("start", policy)
        assert cache.uncaptured(cache.keys) == []


def test_a_choice_of_one_batch_keeps_no_graph_of_the_trial(ran: Ran) -> None:
    cache = decode_graphs(ran)
    cache.capture_chosen("start", NoOverlap())
    nbytes = cache.nbytes
    tried = [key for key in cache.keys if key.rows == 4]
    with cache.trial("trial", cache.uncaptured(tried)):
        assert [runs(cache, ran, 4, schedule) for schedule in Overlap] == [
            *("start", "trial", "trial")
        ]
        cache.capture_isolated("isolated", [GraphKey(4)])
        assert runs(cache, ran, 4, OFF) == "start"
        with cache.isolated():
            assert runs(cache, ran, 4, OFF) == "isolated"
            assert runs(cache, ran, 2, OFF) == "start", "none was made without collectives"
    with cache.isolated():
        assert runs(cache, ran, 4, OFF) == "start"
    assert runs(cache, ran, 4, TBO) == "body" and cache.nbytes == nbytes
    cache.capture_chosen("later", ChosenOverlap([choice(4, OFF)]))
    assert runs(cache, ran, 4, TBO) == "body"


def test_steps_with_prompts_have_graphs_of_what_their_size_chose() -> None:
    graphs = MixedGraphs((64, 128, 256), 16, lambda key: None, CPU, schedules=tuple(Overlap))
    policy = ChosenOverlap([choice(64, SBO, True), choice(128, OFF, True), choice(256, TBO, True)])
    chosen = [
        key
        for key in graphs.keys
        if key.overlap in policy.choices(key.prefill, graphs.tokens_of(key))
    ]
    assert {(key.tokens, key.overlap) for key in chosen} == {
        *((size, OFF) for size in (64, 128, 256)),
        *((64, SBO), (256, TBO)),
    }
    # An uneven cut may need the next size.
    assert graphs.tokens_of(MixedKey(256, 16, 256, TBO)) == range(65, 257)
    assert graphs.tokens_of(MixedKey(256, 16, 256, OFF)) == range(129, 257)
    assert graphs.tokens_of(MixedKey(64, 16, 64, TBO)) == range(1, 65)


def test_isolated_ranks_gather_their_own_rows() -> None:
    """As many as in earnest, without a communicator."""
    nccl = object.__new__(NcclCollective)
    nccl.size, nccl.rank, nccl._is_isolated = 2, 0, False
    nccl._run = lambda start: pytest.fail("it reached NCCL")  # type: ignore[method-assign]
    x_TH = torch.arange(6.0).view(2, 3)
    watch = PeerWatchdog(Lifecycle(Membership(0, (0, 1))), None, (), [nccl])
    assert watch.has_nccl and not PeerWatchdog(watch.lifecycle, None).has_nccl
    with watch.alone():
        assert torch.equal(nccl.gather_rows(x_TH, [2, 2], "dispatch"), torch.cat([x_TH, x_TH]))
        assert torch.equal(nccl.exchange_rows(x_TH, "combine"), x_TH)
    with pytest.raises(pytest.fail.Exception, match="reached NCCL"):
        nccl.exchange_rows(x_TH, "combine")


def test_measured_prompts_are_no_more_than_may_run() -> None:
    calibration = object.__new__(Calibration)
    vars(calibration)["_runner"] = SimpleNamespace(max_running=2, context_length=4096)
    assert calibration._lengths(True, 2500) == [1250, 1250]
    assert calibration._lengths(True, 8192) == [4096, 4096]
    assert calibration._lengths(True, 1500) == [1024, 476]
    assert calibration._lengths(False, 2) == [1, 1]


def test_measured_drafts_are_those_of_the_requests_that_may_run() -> None:
    """They are verified in one batch."""
    calibration = object.__new__(Calibration)
    runner = SimpleNamespace(max_running=3, context_length=64, vocab_size=99)
    vars(calibration).update(_runner=runner, _page_size=4, _number=0, _threshold=0.48)
    assert calibration._lengths(False, 8) == [3, 3, 2]
    kind = calibration._kind(False, 8)
    assert not kind.can_split and calibration._kind(False, 3).can_split
    plan = calibration._plan(kind)
    assert [item.num_drafts for item in plan.items] == [2, 2, 1] and plan.verifies
    assert [item.first + len(item.token_ids) for item in plan.items] == [64, 64, 64]
    assert {len(item.pages) for item in plan.items} == {16}
    assert StepSplitter(TwoBatches(), 0.48).first_half(plan) == WHOLE
