"""Several steps in flight at once, as in a pipeline, change no token."""

import random
from collections import deque
from dataclasses import replace
from functools import cache

import pytest

from moesaic.config import ServerArgs, resolve
from moesaic.core.request import Request
from moesaic.core.sampling import SamplingParams
from moesaic.engine.schedule.inflight import InflightStep
from moesaic.engine.schedule.plan import StepResult, decode_result, encode
from moesaic.engine.schedule.plan_codec import NOTHING, PlanReceiver, PlanSender
from moesaic.engine.schedule.request_state import RequestState
from moesaic.engine.worker.local_core import LocalCore
from moesaic.models.tiny import materialise
from tests.pairs import every_second


def make_core(**flags: object) -> LocalCore:
    args = resolve(ServerArgs.from_kwargs(model_path="tiny:qwen3_moe", **flags))
    return LocalCore(replace(args, model_path=materialise(args.model_path)))


def requests() -> list[Request]:
    chooser = random.Random(3)
    stem = [chooser.randrange(256) for _ in range(30)]
    found = []
    for number in range(9):
        own = [chooser.randrange(256) for _ in range(chooser.randrange(1, 40))]
        prompt = stem + own if number % 3 == 0 else own
        params = SamplingParams(
            temperature=0.7 if number % 2 else 0.0,
            repetition_penalty=1.2 if number == 4 else 1.0,
            ignore_eos=True,
        )
        wants = number in (0, 3, 5)
        new_tokens = 5 + number
        found.append(
            Request(str(number), prompt, params, number, new_tokens, number, return_logprob=wants)
        )
    return found


def serve(core: LocalCore, parts: int, late: int) -> list[Request]:
    """Computes each step when it is planned, and applies its result `late` steps later."""
    served = requests()
    for request in served:
        core.add(RequestState(request, None, lambda progress: None))
    results: deque[tuple[InflightStep, StepResult]] = deque()
    planner = core.planner
    sender, receiver = PlanSender(), PlanReceiver()
    sizes = []
    while core.has_work or results:
        step = planner.plan(parts)
        made = step.plan
        data = sender.encode(made)
        sizes.append(len(data))
        plan = receiver.decode(data)
        assert plan.rows.tolist() == made.rows.tolist()
        if plan.has_work:
            results.append((step, decode_result(encode(core.runner.begin(plan).wait()))))
        if results and (not plan.has_work or len(results) > late):
            planner.apply(*results.popleft())
    assert sender._known.keys() == receiver._known.keys() <= {r.request_no for r in served}
    assert sizes[-1] < 200  # one request decodes
    return served


def test_tokens_that_penalties_need_are_sent_once():
    core = make_core()
    params = SamplingParams(repetition_penalty=1.2, temperature=0.0, ignore_eos=True)
    request = Request("0", list(range(60)), params, 0, 40, 0)
    core.add(RequestState(request, None, lambda progress: None))
    sender, receiver, sizes = PlanSender(), PlanReceiver(), []
    while core.has_work:
        step = core.planner.plan()
        data = sender.encode(step.plan)
        (item,) = receiver.decode(data).items
        assert item.sample is not None and [*item.sample.prompt_ids] == request.prompt_ids
        assert [*item.sample.output_ids] == request.output_ids
        sizes.append(len(data))
        core.planner.apply(step, core.runner.begin(step.plan).wait())
    assert len(sizes) == len(request.output_ids) == 40
    assert max(sizes[1:]) < min(sizes[0], 64)


def test_nothing_is_always_told_alike():
    sender = PlanSender()
    assert sender.encode(make_core().planner.plan().plan) == NOTHING


@cache
def one_at_a_time(**flags: object) -> list[Request]:
    return serve(make_core(**flags), 1, 0)


@pytest.mark.parametrize(
    ("flags", "parts", "late"),
    every_second(
        [
            {},
            {"chunked_prefill_size": 16},
            {"chunked_prefill_size": 24, "max_total_tokens": 160, "page_size": 4},
            {"disable_radix_cache": True, "max_running_requests": 3},
            {"disable_mixed_chunk": True, "chunked_prefill_size": 16},
        ],
        [(2, 1), (4, 3), (3, 3)],
    ),
)
def test_tokens_are_those_of_one_step_at_a_time(flags, parts, late):
    found = serve(make_core(**flags), parts, late)
    for one, other in zip(one_at_a_time(**flags), found, strict=True):
        assert other.output_ids == one.output_ids
        assert other.finish_reason == one.finish_reason
        assert len(other.input_logprobs) == len(one.input_logprobs)
        assert other.input_logprobs == pytest.approx(one.input_logprobs, abs=1e-4)
    assert all(len(request.output_ids) == request.max_new_tokens for request in found)


def test_steps_share_the_requests_that_decode():
    core = make_core()
    planner = core.planner
    for request in requests():
        if request.request_no % 3:  # requests without a common prefix
            core.add(RequestState(request, None, lambda progress: None))
    first = planner.plan(3)
    assert first.plan.prefill and planner.plan(3).items == []
    planner.apply(first, core.runner.begin(first.plan).wait())
    plans = [planner.plan(3).plan for _ in range(4)]
    assert [plan.num_sequences for plan in plans] == [2, 2, 2, 0]
    assert not any(plan.prefill for plan in plans)


def test_a_request_may_end_while_its_step_is_in_flight():
    core = make_core(max_total_tokens=128, page_size=4)
    served = requests()[:2]
    for request in served:
        core.add(RequestState(request, None, lambda progress: None))
    step = core.planner.plan(2)
    core.abort(0)
    core.planner.apply(step, core.runner.begin(step.plan).wait())
    while core.has_work:
        core.step()
    assert served[0].output_ids == [] and served[0].finish_reason.type == "abort"
    assert len(served[1].output_ids) == served[1].max_new_tokens
    kv = core.planner.kv
    kv.flush()
    assert kv.allocator.num_free == kv.allocator.num_pages


def test_retracted_requests_go_on_where_they_were():
    core = make_core(
        max_total_tokens=96, page_size=4, chunked_prefill_size=16, schedule_conservativeness=0.01
    )
    served = serve(core, 3, 2)
    assert core.planner.scheduler.num_retractions > 0
    assert [len(r.output_ids) for r in served] == [r.max_new_tokens for r in served]
