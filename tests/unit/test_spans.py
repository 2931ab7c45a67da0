"""Recording spans, writing them as a trace, and judging which step was slow."""

from pathlib import Path

import pytest

from moesaic.comm.mesh import Mesh
from moesaic.comm.supervise.control_page import ControlPage
from moesaic.comm.supervise.step_watchdog import StepWatchdog
from moesaic.core.messages import SlowStep
from moesaic.core.rank_state import RankSnapshot, RankState
from moesaic.core.stats import GroupStats, RankStats
from moesaic.engine.frontend.queries import RankAnswers, RankReply, engine_stats
from moesaic.engine.runner.step_time import SlowStepDetector
from moesaic.engine.worker.rank_stats import RankStatsReply
from moesaic.observe.spans import Span, SpanKind, Spans, unpack
from moesaic.observe.trace import Track, write_trace
from tests import trace_format


def recorded(spans: Spans) -> list[Span]:
    return list(unpack(spans.read(0, spans.count)))


def test_nothing_is_recorded_while_it_is_off() -> None:
    spans = Spans(4)
    assert spans.clock() == 0
    spans.add(SpanKind.STEP, spans.clock())
    spans.add(SpanKind.STEP, 5)
    assert spans.count == spans.lost == 0 and recorded(spans) == []


def test_the_newest_spans_are_kept() -> None:
    spans = Spans(4)
    spans.start()
    for number in range(1, 11):
        spans.begin_step(number)
        spans.add(SpanKind.EXPERTS, 100 * number, layer=3, tokens=number, nbytes=1 << 40, end=7000)
    assert (spans.count, spans.lost, spans.oldest_step) == (4, 6, 7)
    found = recorded(spans)
    assert [span.step for span in found] == [span.tokens for span in found] == [7, 8, 9, 10]
    assert found[0][:7] == (SpanKind.EXPERTS, 3, 7, 7, 700, 7000, 1 << 40)
    assert list(unpack(spans.read(1, 2))) == found[1:3]
    spans.start()
    assert spans.count == 0 and spans.first == 11


@pytest.mark.parametrize("heard_after", range(7))
def test_a_recording_ends_after_its_steps(heard_after: int) -> None:
    """Records three steps from step 3 on. The rank learns of it `heard_after` steps later, and step
    4 has no work."""
    spans = Spans()
    spans.begin_step(1)
    spans.start()
    for number in range(2, 9):
        if number == 2 + heard_after:
            spans.end_after(3, first=3)
        spans.begin_step(number)
        if number != 4:
            spans.add(SpanKind.STEP, 10 * number, end=10 * number + 5)
    assert not spans.on
    steps = [span.step for span in recorded(spans)]
    assert steps[:4] == [2, 3, 5, 6] and len(steps) == 4 + max(0, heard_after - 5)


def test_a_seat_records_its_waits() -> None:
    page, _ = ControlPage.create(2)
    status = page.status(1)
    status.spans = Spans()
    status.enter(RankState.COMPUTING)
    status.spans.start()
    status.enter(RankState.WAITING, "dispatch")
    status.enter(RankState.COMPUTING)
    status.note_wait(1000)
    waits = recorded(status.spans)
    assert [span.kind for span in waits] == [SpanKind.WAIT, SpanKind.WAIT]
    assert waits[0].end <= waits[1].end and waits[1].end - waits[1].begin == 1000
    computed, waited = status.totals
    assert waited == pytest.approx(sum(span.end - span.begin for span in waits) / 1e9)
    assert computed + 1e-6 > page.snapshot(1).computed


def test_a_trace_follows_the_format(tmp_path: Path) -> None:
    """Other machines' clocks are corrected, outer spans come first, times begin at 0."""
    ahead = 10**15
    spans = [
        Span(SpanKind.DISPATCH, 2, 1, 5, 1200, 1300, 64, 77),
        Span(SpanKind.STEP, -1, 1, 5, 1200, 2200, 0, 77),
        Span(SpanKind.STEP, -1, 1, 5, 1100, 2300, 0, 78),
    ]
    there = [span._replace(begin=span.begin + ahead, end=span.end + ahead) for span in spans]
    path = tmp_path / "a.trace.json.gz"
    tracks = [Track(0, "here", spans), Track(1, "there", there, ahead), Track(2, "nobody", [])]
    write_trace(path, tracks, {"program": "test"})
    trace = trace_format.read(path)
    assert trace.processes == {0: "here", 1: "there", 2: "nobody"}
    assert trace.facts == {"program": "test"} and len(trace.events) == 6
    for pid in (0, 1):
        (dispatch,) = trace.of(pid, "dispatch")
        assert (dispatch.begin, dispatch.end) == (0.1, pytest.approx(0.2))
        assert dispatch.args == {"step": 1, "tokens": 5, "layer": 2, "bytes": 64}
        assert [event.begin for event in trace.of(pid, "step")] == [0.0, 0.1]
    assert [child.name for child in tmp_path.iterdir()] == [path.name]


def test_the_reader_finds_what_is_wrong(tmp_path: Path) -> None:
    crossing = [
        Span(SpanKind.STEP, -1, 1, 0, 0, 20_000, 0, 1),
        Span(SpanKind.PLAN, -1, 1, 0, 5000, 30_000, 0, 1),
    ]
    write_trace(tmp_path / "b.gz", [Track(0, "x", crossing)], {})
    with pytest.raises(AssertionError):
        trace_format.read(tmp_path / "b.gz")


def test_slow_steps() -> None:
    pace = SlowStepDetector()
    assert [pace.observe(False, 4, 0.05) for _ in range(20)] == [None] * 20
    assert pace.observe(False, 4, 0.9) is None  # 18 times the usual, but below a second
    usual = pace.observe(False, 4, 5.0)
    assert usual is not None and 0.05 <= usual < 0.2
    assert pace.observe(True, 8000, 100.0) is None  # there was no earlier prompt
    for _ in range(8):
        pace.observe(True, 1000, 2.0)
    assert pace.observe(True, 8000, 40.0) is None and pace.observe(True, 10, 1.5) is None
    assert pace.observe(True, 1000, 500.0) is not None


def test_the_rank_that_computed_longest_is_named() -> None:
    guard = StepWatchdog(Mesh(tp=3), 1.0, 5.0)

    def look(step: int, *computed: float) -> dict[int, RankSnapshot]:
        return {
            rank: RankSnapshot(RankState.COMPUTING, step, "mlp", 0.0, 0.0, step, seconds)
            for rank, seconds in enumerate(computed)
        }

    for step, seen in ((8, look(8, 1.0, 1.0, 1.0)), (9, look(9, 1.2, 1.1, 1.1))):
        assert guard.look(seen, 0.1 * step) is None
    slow = SlowStep(0, 9, 2.5, 0.1)
    text = guard.explain_slow(slow, look(9, 1.5, 3.4, 1.2))
    assert text == (
        "step 9 took 2.5 s, usually 0.10 s: rank 1 (tp 1) computed longest, for 2.3 s, the others "
        "for at most 0.3 s"
    )
    assert guard.explain_slow(SlowStep(0, 7, 2.5, 0.1), look(9, 2, 2, 2)).endswith("usually 0.10 s")
    # Later steps that arrive before the slow step's report do not hide the slow rank.
    for step in range(10, 15):
        assert guard.look(look(step, 1.5, 3.4, 1.2), 0.1 * step) is None
    assert guard.explain_slow(slow, look(15, 1.5, 3.4, 1.2)) == text
    # Time since the last change of a rank's state counts too.
    still = look(9, 1.5, 1.2, 1.2) | {
        2: RankSnapshot(RankState.COMPUTING, 9, "mlp", 0.0, 2.4, 9, 1.2)
    }
    assert "rank 2 (tp 2) computed longest, for 2.5 s" in guard.explain_slow(slow, still)


def test_ranks_that_do_not_answer_are_there_as_they_are_seen() -> None:
    own = RankStatsReply(
        RankStats(0, "rank 0", steps=5, expert_tokens=[[1]]), GroupStats(0, running=2)
    )
    seen = {"place": "p", "step": 4, "computed": 1.5, "waited": 0.5, "state_age": 9.0, "pid": 7}
    overview = [{**seen, "rank": rank, "state": "waiting"} for rank in (0, 1)]
    stats = engine_stats(RankAnswers({0: RankReply(own, 0, 1)}, overview), 8)
    assert [group.running for group in stats.groups] == [2] and stats.num_experts == 8
    first, second = stats.ranks
    assert (first.steps, first.expert_tokens, first.state, first.pid) == (5, [[1]], "waiting", 7)
    assert (second.rank, second.steps, second.compute_seconds) == (1, 4, 1.5)
    assert (second.wait_seconds, second.state_age, second.expert_tokens) == (0.5, 9.0, [])
