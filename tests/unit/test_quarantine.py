"""Failed steps are rolled back without a trace; few steps find the request to blame."""

import math
import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace as replace_struct

from moesaic.comm.mesh import Mesh
from moesaic.comm.supervise.step_rollback import MAX_FAILURES, StepRollbacks
from moesaic.core.messages import (
    RequestDelta,
    ResumeSteps,
    RollbackStep,
    StepAbandoned,
    StepFailed,
    Submit,
)
from moesaic.core.request import NewRequest, Request
from moesaic.core.sampling import SamplingParams
from moesaic.engine.sampling.token_history import TokenHistory
from moesaic.engine.schedule.inflight import InflightStep, PlannedItem
from moesaic.engine.schedule.plan import PlanItem, StepResult
from moesaic.engine.schedule.quarantine import Quarantine
from moesaic.engine.schedule.request_state import RequestState
from moesaic.engine.worker import planner as planner_module
from moesaic.engine.worker.leader import Leader
from moesaic.engine.worker.local_core import LocalCore
from moesaic.engine.worker.planner import Planner
from tests.pairs import every_second
from tests.unit.test_inflight_steps import make_core, requests

FLAGS = [
    {},
    {"chunked_prefill_size": 24, "max_total_tokens": 160, "page_size": 4},
    {"disable_radix_cache": True, "max_running_requests": 3, "chunked_prefill_size": 16},
]


def serve(core: LocalCore, parts: int, chance: random.Random | None) -> tuple[list[Request], int]:
    """With `chance`, all in-flight steps are lost at times, half of them before they begin; their
    pages are then full of NaN."""
    served = requests()
    for request in served:
        core.add(RequestState(request, None, lambda progress: None))
    results: deque[tuple[InflightStep, StepResult]] = deque()
    inflight: list[InflightStep] = []
    planner, losses = core.planner, 0
    while core.has_work or inflight:
        step = planner.plan(parts)
        plan = step.plan
        inflight += [step] * plan.has_work
        lost = chance is not None and chance.random() < 0.35
        if plan.has_work and not (lost and chance is not None and chance.random() < 0.5):
            results.append((step, core.runner.begin(plan).wait()))
        elif plan.clear:
            core.runner.cache.keys[:, plan.clear] = math.nan
            core.runner.cache.values[:, plan.clear] = math.nan
        if lost:
            planner.report_failure(planner.rollback(inflight), "lost", alone=False)
            results.clear()
            inflight.clear()
            losses += 1
        elif results and (not plan.has_work or len(results) >= parts):
            inflight.remove(results[0][0])
            planner.apply(*results.popleft())
    assert planner.kv.num_used == 0 and planner.num_suspects == 0
    return served, losses


@pytest.mark.parametrize(("flags", "parts"), every_second(FLAGS, [3, 1]))
def test_lost_steps_change_nothing(flags, parts):
    expected, _ = serve(make_core(**flags), 1, None)
    core, losses = make_core(**flags), 0
    for seed in range(2):
        found, lost = serve(core, parts, random.Random(seed))
        losses += lost
        for one, other in zip(expected, found, strict=True):
            assert other.output_ids == one.output_ids
            assert other.finish_reason == one.finish_reason
            assert len(other.input_logprobs) == len(one.input_logprobs)
            assert other.input_logprobs == pytest.approx(one.input_logprobs, abs=1e-4)
    assert losses > 5


def poison_plans(core: LocalCore, where: str, patch: pytest.MonkeyPatch) -> None:
    """Makes the plan fail at the lookup of request 4, or at its second token."""
    kv = core.planner.kv
    lookup, plan_item = kv.lookup, planner_module.plan_item

    def fail_in_lookup(request: Request) -> Any:
        if request.rid == "4":
            raise ZeroDivisionError("made up")
        return lookup(request)

    def fail_in_item(work: PlannedItem, history: TokenHistory | None) -> PlanItem:
        if work.request.rid == "4" and work.request.num_output == 1:
            raise ZeroDivisionError("made up")
        return plan_item(work, history)

    if where == "lookup":
        patch.setattr(kv, "lookup", fail_in_lookup)
    else:
        patch.setattr(planner_module, "plan_item", fail_in_item)


@pytest.mark.parametrize(("flags", "parts"), [(FLAGS[0], 1), (FLAGS[1], 3)], ids=str)
@pytest.mark.parametrize("where", ["lookup", "item"])
def test_a_request_that_cannot_be_planned_ends_alone(flags, parts, where, monkeypatch):
    expected, _ = serve(make_core(**flags), 1, None)
    core = make_core(**flags)
    poison_plans(core, where, monkeypatch)
    found, _ = serve(core, parts, None)
    guilty = found.pop(4)
    assert guilty.failed and "ZeroDivisionError('made up')" in guilty.failure
    assert guilty.output_ids == expected.pop(4).output_ids[: where == "item"]
    assert [one.output_ids for one in found] == [one.output_ids for one in expected]
    assert [one.finish_reason for one in found] == [one.finish_reason for one in expected]
    # Few plans find the one of nine, although it may be tried beside others first.
    assert 1 <= core.planner.metrics.counts.failed_steps <= 8


def test_every_request_ends_though_the_scheduler_is_broken(monkeypatch):
    core, ended = make_core(), list[str]()
    for request in requests():
        core.add(RequestState(request, None, lambda progress: ended.append(progress.rid)))
    core.step()

    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("made up")

    monkeypatch.setattr(core.planner.scheduler, "finish", fail)
    core.fail_all("why")
    assert ended == [request.rid for request in requests()] and not core.states


def test_a_request_of_another_rank_is_told_from_where_it_was():
    """Tokens from the other rank have no logprobs; all later tokens have them."""
    told, core = dict[int, list[RequestDelta]](), make_core()
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    asked = NewRequest("mine", [5, 6, 7, 8], params, 0, 6, 7, frozenset(), True, 1, 2)
    for emitted in (0, 1, 4):
        sent = told[emitted] = []
        mesh = Mesh()
        link = SimpleNamespace(
            mesh=mesh, place=mesh.place(0), send=lambda m, sent=sent: sent.extend(m.deltas)
        )
        planner = Planner(core.args, core.runner)
        leader = Leader(link, planner)
        before = [token for delta in told[0] for token in delta.token_ids][:emitted]
        leader.handle(Submit([replace_struct(asked, emitted=before)]))
        while planner.scheduler.has_work:
            step = leader.plan(1)
            planner.apply(step, core.runner.begin(step.plan).wait())
        leader.report()

    def column(emitted: int, name: str) -> list[Any]:
        return [value for delta in told[emitted] for value in getattr(delta, name)]

    for emitted in (0, 1, 4):
        assert column(emitted, "token_ids") == column(0, "token_ids")[emitted:]
        expected = column(0, "logprobs")[emitted:]
        assert len(expected) == 6 - emitted
        assert column(emitted, "logprobs") == pytest.approx(expected, abs=1e-4)
        tops = [[token for _, token in row] for row in column(emitted, "top_logprobs")]
        assert tops == [[token for _, token in row] for row in column(0, "top_logprobs")][emitted:]
    # The prompt's logprobs come with the first token.
    assert len(column(0, "input_logprobs")) == 2 == len(column(0, "input_top_logprobs"))
    assert column(1, "input_logprobs") == column(4, "input_logprobs") == []


def suspects(count: int, decoding: int) -> list[Request]:
    made = [Request(str(n), [1, 2], SamplingParams(), 0, 4, n) for n in range(count)]
    for request in made[:decoding]:
        request.token_ids.append(3)
        request.num_computed = 2
    return made


@pytest.mark.parametrize("count", [1, 2, 3, 7, 16, 64])
def test_the_guilty_one_is_found_in_few_steps(count):
    for decoding in {0, count // 2, count - 1}:
        tried_together = suspects(count, decoding)
        for guilty in tried_together:
            quarantine, failed, tried = Quarantine(), 1, set()
            found = quarantine.report_failure(tried_together, alone=True)
            steps = 0
            while quarantine:
                steps += 1
                chosen = quarantine.next_suspects()
                if guilty in chosen:
                    failed += 1
                    found = quarantine.report_failure(chosen, alone=True)
                else:
                    tried |= set(chosen)
            assert found is guilty and tried == set(tried_together) - {guilty}
            assert failed <= math.ceil(math.log2(count)) + 2
            assert steps <= 2 * (math.ceil(math.log2(count)) + 1)


def test_one_of_several_groups_is_accused_only_when_it_was_alone():
    quarantine, (request,) = Quarantine(), suspects(1, 0)
    assert quarantine.report_failure([request], alone=False) is None
    assert quarantine.next_suspects() == [request] and not quarantine
    assert quarantine.report_failure([request], alone=True) is request
    assert quarantine.report_failure([], alone=True) is None and not quarantine


def test_ranks_resume_when_the_last_has_abandoned_its_step():
    rollbacks = StepRollbacks(1, range(4, 8), [4, 6])
    assert rollbacks.start(StepFailed(5, 0, 31, "why")) == RollbackStep(1, 1, 31, "why")
    # Another rank failed in the same step.
    assert rollbacks.start(StepFailed(4, 0, 31, "also")) is None and rollbacks.in_progress
    told = [StepAbandoned(6, 1, 30, 2), StepAbandoned(4, 1, 31), StepAbandoned(7, 1, 29)]
    assert [rollbacks.note_abandoned(one) for one in told] == [None] * 3
    assert rollbacks.note_abandoned(StepAbandoned(5, 0, 99)) is None  # another generation
    assert rollbacks.note_abandoned(StepAbandoned(5, 1, 31)) == ResumeSteps(1, 31, [0, 2])
    assert not rollbacks.in_progress
    # A late report of the previous generation starts no rollback.
    assert rollbacks.start(StepFailed(7, 0, 31, "late")) is None and rollbacks.generation == 1


def test_steps_that_fail_whoever_takes_part_are_given_up():
    rollbacks = StepRollbacks(0, range(1), [0])
    for generation in range(MAX_FAILURES):
        rollbacks.start(StepFailed(0, generation, 5, "why"))
        rollbacks.note_abandoned(StepAbandoned(0, generation + 1, 5))
        assert not rollbacks.is_hopeless
    rollbacks.note_progress()
    rollbacks.start(StepFailed(0, MAX_FAILURES, 5, "why"))
    assert rollbacks.failures == 1 and not rollbacks.is_hopeless


@pytest.mark.parametrize("with_leader", [False, True])
def test_who_is_left_of_a_failed_step_is_tried_alone(with_leader: bool):
    """The other request of the step has ended since: it may have been the cause."""
    core, (gone, other) = make_core(), requests()[1:3]
    for request in (gone, other):
        core.add(RequestState(request, None, lambda progress: None))
    while not (gone.num_output and other.num_output):
        core.step()
    while core.loop.inflight:
        core.loop.complete_oldest()
    step = core.planner.plan()
    assert {gone, other} == {*step.decoding.requests, *(item.request for item in step.items)}
    core.planner.abort(gone.request_no)
    if with_leader:
        link = SimpleNamespace(mesh=Mesh(), place=Mesh().place(0), send=lambda message: None)
        assert Leader(link, core.planner).rollback([step], "it failed", alone=True) == 1
    else:
        core.loop.inflight.append(step)
        core._undo_steps("it failed")
    assert not other.failed and core.planner.num_suspects == 1
    while core.has_work:
        core.step()
    assert other.num_output == other.max_new_tokens and not other.failed
