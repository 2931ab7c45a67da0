"""Requests that only decode travel as columns, from the scheduler to the runner and back."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from moesaic.core.request import Request
from moesaic.core.sampling import SamplingParams
from moesaic.engine.runner.future_tokens import FutureTokens
from moesaic.engine.runner.row_results import KnownRows
from moesaic.engine.sampling.gpu_sampler import DrawTable, draw_rows
from moesaic.engine.sampling.sampler import SampleRow, sample
from moesaic.engine.schedule.inflight import InflightStep
from moesaic.engine.schedule.plan import (
    FUTURE_TOKEN,
    NOT_FINITE,
    DecodeRows,
    ItemResult,
    PlanItem,
    PromptScore,
    StepPlan,
    StepResult,
)
from moesaic.engine.schedule.plan_codec import PlanReceiver, PlanSender
from moesaic.engine.worker.local_core import LocalCore
from moesaic.layers.paged_cache import PageUpdate
from tests.unit.test_inflight_steps import make_core
from tests.unit.test_page_rows import RequestState

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


def decodes(*columns: list[int], pages: tuple[PageUpdate, ...] = ()) -> DecodeRows:
    return DecodeRows(*(np.array(column, np.int64) for column in columns), list(pages))


def row(position: int, **params: float) -> SampleRow:
    return SampleRow(SamplingParams(**params), 9, position)  # type: ignore[arg-type]


def test_sequences_of_a_plan_are_its_decodes_and_then_its_items():
    score = PromptScore(0, [8, 9], 0)
    items = [
        PlanItem(5, [7, 8, 9], 2, 3, [6], 1, score=score),
        PlanItem(6, [4, 1, 2], 10, 1, sample=row(11), num_drafts=2, num_routed=1),
    ]
    columns = ([1, 2], [4, 0], [20, 30], [FUTURE_TOKEN, 77])
    plan = StepPlan(items, decodes=decodes(*columns, pages=(PageUpdate(0, 3, [9]),)))
    assert plan.has_work and plan.num_sequences == 4 and plan.num_tokens == 8
    assert plan.request_nos.tolist() == [1, 2, 5, 6] and plan.rows.tolist() == [4, 0, 3, 1]
    assert plan.first.tolist() == [20, 30, 2, 10] and plan.lengths.tolist() == [1, 1, 3, 3]
    assert plan.token_ids.tolist() == [-1, 77, 7, 8, 9, 4, 1, 2]
    # The decodes sample, the second item after its first token and each draft; the first scores.
    assert plan.logit_rows().tolist() == [0, 1, 5, 6, 7, 2, 3]
    assert plan.sampled_positions().tolist() == [21, 31, 11, 12, 13]
    assert plan.routed_rows() == [7]
    assert plan.page_updates() == [PageUpdate(0, 3, [9]), PageUpdate(3, 1, [6])]
    received = PlanReceiver().decode(PlanSender().encode(plan))
    for name in ("request_nos", "rows", "first", "token_ids"):
        assert getattr(received, name).tolist() == getattr(plan, name).tolist()
    assert received.page_updates() == plan.page_updates()


def serve(requests: list[Request]) -> tuple[list[InflightStep], list[StepResult]]:
    core, steps, results = make_core(), [], []
    for request in requests:
        core.add(RequestState(request, None, lambda progress: None))
    while core.has_work:
        steps.append(core.planner.plan())
        results.append(core.runner.begin(steps[-1].plan).wait())
        core.planner.apply(steps[-1], results[-1])
    return steps, results


@pytest.mark.parametrize(
    ("extra", "is_plain"),
    [
        ({}, True),
        ({"params": replace(GREEDY, temperature=0.8, top_p=0.9)}, True),
        ({"params": replace(GREEDY, frequency_penalty=0.5)}, False),
        ({"params": replace(GREEDY, logit_bias={3: 1.0})}, False),
        ({"params": replace(GREEDY, min_new_tokens=2)}, False),
        ({"return_logprob": True}, False),
        ({"routed_start": 0, "routed_row": 8}, False),
    ],
    ids=str,
)
def test_only_what_the_ranks_know_is_left_out_of_plans(extra, is_plain):
    given = {"rid": "0", "prompt_ids": [1, 2, 3], "params": GREEDY, "seed": 4, "request_no": 0}
    request = Request(**given | {"max_new_tokens": 6} | extra)
    steps, results = serve([request])
    assert [len(step.items) for step in steps] == [1] + [int(not is_plain)] * 5
    assert [len(result.token_ids) for result in results] == [0] + [int(is_plain)] * 5
    assert len(request.output_ids) == 6


def decoding(count: int) -> tuple[LocalCore, list[Request]]:
    """Requests that have their first tokens."""
    core = make_core()
    requests = [Request(str(n), [n + 1, 2, 3], GREEDY, n, 6, n) for n in range(count)]
    for request in requests:
        core.add(RequestState(request, None, lambda progress: None))
    step = core.planner.plan()
    core.planner.apply(step, core.runner.begin(step.plan).wait())
    return core, requests


def test_a_row_without_a_token_fails_alone():
    core, requests = decoding(3)
    step = core.planner.plan()
    assert step.decoding.requests == requests
    core.planner.apply(step, StepResult([], token_ids=[5, 6, 7], broken=[1]))
    assert [request.output_ids[1:] for request in requests] == [[5], [], [7]]
    assert requests[1].failed and NOT_FINITE in requests[1].failure
    assert core.planner.plan().decoding.requests == [requests[0], requests[2]]


def test_an_end_that_fails_harms_nobody_else():
    class Text:
        text = ""

        def push_one(self, token: int) -> None: ...

        def finish(self) -> None:
            raise ZeroDivisionError("made up")

    core = make_core()
    requests = [Request(str(n), [n + 1, 2, 3], GREEDY, n, 6, n) for n in range(3)]
    for n, request in enumerate(requests):
        text = Text() if n == 1 else None
        core.add(RequestState(request, text, lambda progress: None))  # type: ignore[arg-type]
    for broken in ([], [1]):
        step = core.planner.plan()
        result = core.runner.begin(step.plan).wait()
        result.broken = broken
        core.planner.apply(step, result)
    assert [len(request.output_ids) for request in requests] == [2, 1, 2] and requests[1].failed


def test_a_rollback_restores_the_decoding_requests():
    core, requests = decoding(2)
    before = [(request.num_computed, request.pending, [*request.token_ids]) for request in requests]
    step = core.planner.plan()
    assert [request.pending for request in requests] == [1, 1]
    assert core.planner.rollback([step]) == requests
    after = [(request.num_computed, request.pending, request.token_ids) for request in requests]
    assert after == before
    # Ranks may have lost what they knew: the next plan says it again.
    assert [item.sample is not None for item in core.planner.plan().plan.items] == [True, True]


def test_rows_that_no_step_has_sampled_are_refused():
    unknown = StepPlan(decodes=decodes([8], [1], [4], [3]))
    future, known = FutureTokens(3, torch.device("cpu")), KnownRows(3)
    future.slots_for(StepPlan([PlanItem(7, [5], 0, 1, sample=row(1))]))
    known.learn([PlanItem(7, [5], 0, 1, sample=row(1))])
    with pytest.raises(ValueError, match="request 8 decodes, but no earlier step samples it"):
        future.slots_for(unknown)
    with pytest.raises(ValueError, match="request 8 decodes, but no earlier step samples it"):
        known.sampled(unknown.decodes)
    same = decodes([7], [1], [4], [3])
    assert [one.sample.position for one in known.sampled(same)] == [5]
    assert future.slots_for(StepPlan(decodes=same)).numbers.tolist() == [1]


def test_rows_are_drawn_as_each_request_asks():
    torch.manual_seed(0)
    logits = torch.randn(5, 40)
    asked = [
        row(3, temperature=0.0),
        row(4, temperature=1.0),
        row(5, temperature=0.7, top_k=5),
        row(6, temperature=1.3, top_p=0.6),
        row(7, temperature=0.9, min_p=0.1),
    ]
    table, order = DrawTable(9), [6, 2, 8, 0, 3]
    for number, one in zip(order, asked, strict=True):
        table.set(number, replace_position(one, 1))  # as when its first token was sampled
    positions = np.array([one.position for one in asked])
    found = table.draw(logits, np.array(order), positions)
    assert found.tolist() == [sample(logits, asked).token_ids, [0] * 5]
    assert found.tolist() == draw_rows(logits, asked).tolist()
    later = table.draw(logits, np.array(order), positions + 50)[0].tolist()
    assert later[0] == found[0, 0] and later != found[0].tolist()


def replace_position(one: SampleRow, position: int) -> SampleRow:
    return SampleRow(one.params, one.seed, position)


def test_results_that_are_missing_are_noticed():
    core = make_core()
    core.add(RequestState(Request("0", [1, 2], GREEDY, 0, 4, 0), None, lambda progress: None))
    core.loop.runner.begin = lambda *_: Short()  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ValueError, match="0 results for 1 others"):
        core.loop.step()


class Short:
    hidden_TH = None

    def wait(self) -> StepResult:
        return StepResult(list[ItemResult]())
