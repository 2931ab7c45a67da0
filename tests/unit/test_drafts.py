"""Steps that verify a drafter's proposals yield exactly the tokens of steps without any."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
from msgspec import structs

from moesaic.config import ServerArgs, resolve
from moesaic.core.draft_shape import DraftShape
from moesaic.core.request import Request
from moesaic.core.sampling import SamplingParams
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.engine.schedule.inflight import PlannedItem
from moesaic.engine.schedule.plan import StepHandle, StepPlan
from moesaic.engine.schedule.request_state import RequestState
from moesaic.engine.worker.local_core import LocalCore
from moesaic.models.tiny import materialise
from tests.pairs import every_pair

PARAMS = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
    {"temperature": 0.0, "min_new_tokens": 9},
)

# The bytes of a token's experts: two layers, two experts, two bytes.
ROW = 8


def make_core(asynchronous: bool, **flags: object) -> LocalCore:
    own = {"model_path": "tiny:qwen3_moe", "page_size": 4}
    flags = {"enable_deterministic_inference": True, **own, **flags}
    args = resolve(ServerArgs.from_kwargs(**flags))
    args = replace(args, model_path=materialise(args.model_path))
    return LocalCore(args, ModelRunner(args, asynchronous=asynchronous))


def requests() -> list[Request]:
    chooser, found = random.Random(5), []
    for number in range(8):
        params = SamplingParams(**PARAMS[number % 4], ignore_eos=number != 5)
        prompt = [chooser.randrange(97, 123) for _ in range(chooser.randrange(1, 20))]
        logprobs = {"return_logprob": number in (0, 1, 6), "top_logprobs_num": 2}
        request = Request(str(number), prompt, params, number, 6 + number, number, **logprobs)
        request.routed_start, request.routed_row = len(prompt) // 2 if number % 2 else None, ROW
        found.append(request)
    return found


def serve(core: LocalCore, served: list[Request] | None = None) -> list[Request]:
    served = requests() if served is None else served
    for request in served:
        core.add(RequestState(request, None, lambda progress: None))
    while core.has_work:
        core.step()
    assert core.planner.metrics.counts.failed_steps == 0
    assert core.planner.kv.num_used == 0
    return served


class Drafter:
    """Proposes the right tokens; replaces each with probability `wrong`."""

    def __init__(self, answers: list[Request], wrong: float) -> None:
        self.answers, self.wrong, self.chance = answers, wrong, random.Random(1)

    def propose(self, requests: Sequence[Request], shape: DraftShape) -> None:
        for request in requests:
            ahead = self.answers[int(request.rid)].output_ids[request.num_output :]
            ahead = ahead[: self.chance.randrange(5)]
            wrong = [self.chance.random() < self.wrong for _ in ahead]
            request.drafts = [(t + w) % 256 for t, w in zip(ahead, wrong, strict=True)]


class TreeDrafter(Drafter):
    """Hides the right tokens, as far as they are proposed, among others in a random tree."""

    def propose(self, requests: Sequence[Request], shape: DraftShape) -> None:
        chance = self.chance
        for request in requests:
            ahead = self.answers[int(request.rid)].output_ids[request.num_output :][:6]
            drafts, parents, right = list[int](), list[int](), 0
            for row in range(1, chance.randrange(2, 12)):
                if ahead and chance.random() > self.wrong:
                    parent, token = right, ahead.pop(0)
                    right = row
                else:
                    parent = chance.randrange(row)
                    behind = {d for d, p in zip(drafts, parents, strict=True) if p == parent}
                    token = chance.choice([t for t in range(256) if t not in {*behind, *ahead[:1]}])
                parents.append(parent)
                drafts.append(token)
            request.drafts, request.draft_parents = drafts, parents


@cache
def without_drafts(asynchronous: bool, **flags: object) -> tuple[list[Request], int]:
    """The answers, and the number of steps they took."""
    core = make_core(asynchronous, **flags)
    return serve(core), core.planner.num_steps


@pytest.mark.parametrize(
    ("wrong", "asynchronous", "flags"),
    every_pair(
        [0.0, 0.4, 1.0], [True, False], [{"max_total_tokens": 72, "chunked_prefill_size": 16}, {}]
    ),
)
def test_drafts_change_no_token(asynchronous: bool, wrong: float, flags: dict[str, int]) -> None:
    expected, num_steps = without_drafts(asynchronous, **flags)
    core = make_core(asynchronous, **flags)
    core.planner.drafts.drafter = Drafter(expected, wrong)
    found = serve(core)
    for one, other in zip(expected, found, strict=True):
        assert other.output_ids == one.output_ids and other.finish_reason == one.finish_reason
        assert other.output_logprobs == pytest.approx(one.output_logprobs, abs=1e-5)
        assert len(other.output_top_logprobs) == len(one.output_top_logprobs)
        assert other.routed == one.routed
        if one.routed_start is not None:
            assert len(one.routed) == (len(one.token_ids) - 1 - one.routed_start) * ROW
    # Right proposals need fewer steps for the same tokens.
    if wrong == 0.0:
        assert core.planner.num_steps < num_steps
    core.planner.drafts.drafter = None
    again = serve(core)  # the prefix cache holds no rejected token
    assert [one.output_ids for one in again] == [one.output_ids for one in expected]
    assert [one.routed for one in again] == [one.routed for one in expected]


@pytest.mark.parametrize(
    ("family", "asynchronous", "flags"),
    every_pair(
        ["qwen3_moe", "deepseek_v3", "gpt_oss"],
        [True, False],
        [{"max_total_tokens": 96, "chunked_prefill_size": 16}, {}],
    ),
)
def test_trees_change_no_token(asynchronous: bool, family: str, flags: dict[str, int]) -> None:
    """Accepted tokens are wherever their rows were, and moved before they are read: also those
    of a request that is retracted, or whose pages the prefix cache gets."""
    given = {**flags, "model_path": f"tiny:{family}"}
    expected, num_steps = without_drafts(asynchronous, **given)
    core = make_core(asynchronous, **given)
    core.planner.drafts.drafter = TreeDrafter(expected, 0.5)
    moved, move = [], core.runner.move
    core.runner.move = lambda slots: (moved.extend(slots), move(slots))
    found = serve(core)
    for one, other in zip(expected, found, strict=True):
        assert other.output_ids == one.output_ids and other.finish_reason == one.finish_reason
        assert other.output_logprobs == pytest.approx(one.output_logprobs, abs=1e-5)
        assert other.routed == one.routed
    assert core.planner.num_steps < num_steps and len(moved) > 10
    core.planner.drafts.drafter = None
    again = serve(core)  # the prefix cache holds no rejected token
    assert [one.output_ids for one in again] == [one.output_ids for one in expected]
    assert [one.routed for one in again] == [one.routed for one in expected]


def test_accepted_tokens_of_a_step_that_is_undone_are_computed_anew() -> None:
    """A step that moves them fails once it has run, when it may have written over the rows from
    which they moved."""
    expected, _ = without_drafts(False)
    core = make_core(False)
    core.planner.drafts.drafter = TreeDrafter(expected, 0.3)
    broken, begin = list[int](), core.runner.begin

    def fail_some(plan: StepPlan, *given: object) -> StepHandle:
        handle = begin(plan, *given)
        if plan.moves and not broken:
            broken.append(len(plan.moves))
            core.runner.cache.move([(1, target) for _, target in plan.moves])
            raise ZeroDivisionError
        return handle

    core.runner.begin = fail_some
    served = requests()
    for request in served:
        core.add(RequestState(request, None, lambda progress: None))
    while core.has_work:
        core.step()
    assert core.planner.metrics.counts.failed_steps == len(broken) == 1 and broken[0] > 1
    assert [one.output_ids for one in served] == [one.output_ids for one in expected]
    assert [one.routed for one in served] == [one.routed for one in expected]


def test_a_group_that_gets_its_requests_anew_moves_nothing_of_before() -> None:
    """They have the same numbers, and other pages."""
    expected, _ = without_drafts(False)
    core, served = make_core(False), requests()
    core.planner.drafts.drafter = TreeDrafter(expected, 0.3)
    for request in served:
        core.add(RequestState(request, None, lambda progress: None))
    moving = core.planner._moves
    while not moving:
        core.step()
    numbers = sorted(moving)
    core.planner.drop_all()
    again = [Request(*structs.astuple(served[number].submission())) for number in numbers]
    for request in serve(core, again):
        assert request.output_ids == expected[request.request_no].output_ids


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_drafts_are_verified_also_where_steps_overlap(asynchronous: bool) -> None:
    """A drafter needs the newest token on the host: no step runs ahead of it."""

    class EveryToken:
        def propose(self, requests: Sequence[Request], shape: DraftShape) -> None:
            for request in requests:
                request.drafts = expected.output_ids[request.num_output :][:4]

    greedy = SamplingParams(temperature=0.0, ignore_eos=True)
    args = ([1, 2, 3], greedy, 0, 21, 0)
    core = make_core(asynchronous)
    (expected,) = serve(core, [Request("0", *args)])
    assert core.planner.num_steps >= 21
    core = LocalCore(core.args, core.runner, EveryToken())
    (found,) = serve(core, [Request("0", *args)])
    assert found.output_ids == expected.output_ids
    assert core.planner.num_steps == 1 + 20 // 5  # the prompt, then five tokens a step


def test_a_request_is_tried_without_the_drafts_that_it_has_left() -> None:
    """Else it would be blamed for what they break."""
    core = make_core(False)
    request = requests()[0]
    core.add(RequestState(request, None, lambda progress: None))
    while not request.num_output:
        core.step()
    request.drafts, request.draft_parents = [7, 8, 9], [0, 0, 1]
    core.planner.report_failure([request], "a step failed", alone=False)
    step = core.planner.plan()
    assert [item.num_drafts for item in step.plan.items] == [0] and request.drafts == []
    core.planner.rollback([step])


def test_a_request_alone_in_a_step_that_its_drafts_break_goes_on() -> None:
    core = make_core(False)
    begin, broken, (request,) = core.runner.begin, list[int](), requests()[:1]

    def fail(plan: StepPlan, *given: object) -> StepHandle:
        if any(item.num_drafts for item in plan.items):
            broken.append(1)
            raise ZeroDivisionError
        return begin(plan, *given)

    class Always:
        def propose(self, requests: Sequence[Request], shape: DraftShape) -> None:
            for one in requests:
                one.drafts = [7, 8] if one.may_draft else []

    core.runner.begin, core.planner.drafts.drafter = fail, Always()
    core.add(RequestState(request, None, lambda progress: None))
    while core.has_work:
        core.step()
    assert broken == [1] and not request.failed
    assert request.output_ids == without_drafts(False)[0][0].output_ids


@pytest.mark.parametrize("failed", [True, False])
def test_only_a_step_that_failed_takes_drafts_from_its_requests(failed: bool) -> None:
    """One that is undone as ranks were lost does not: its requests go on with drafts."""

    class Always:
        def propose(self, requests: Sequence[Request], shape: DraftShape) -> None:
            for one in requests:
                one.drafts = [7, 8]

    core, request = make_core(False), requests()[0]
    core.planner.drafts.drafter = Always()
    core.add(RequestState(request, None, lambda progress: None))
    while not request.num_output:
        core.step()
    step = core.planner.plan()
    assert [item.num_drafts for item in step.plan.items] == [2]
    assert core.planner.rollback([step], failed) == [request]
    assert request.may_draft is not failed and request.num_computed == len(request.prompt_ids)
    assert core.planner.drafts.have_broken(request) is failed
    again = core.planner.plan()
    assert sum(item.num_drafts for item in again.plan.items) == (0 if failed else 2)
    core.planner.rollback([again])


def test_a_rollback_takes_the_drafts_away() -> None:
    (request,) = requests()[:1]
    request.token_ids.append(5)
    request.num_computed, request.drafts = len(request.prompt_ids), [7, 8, 9]
    item = PlannedItem.decoding(request, request.num_computed, 2)
    item.begin()
    assert item.drafts == [7, 8] and item.samples and request.verifying
    assert not request.can_run_ahead and request.drafts == [] and request.pending == 1
    item.undo()
    assert request.drafts == [] and not request.verifying and request.pending == 0
    assert not request.may_draft
    assert request.num_computed == len(request.prompt_ids)


def test_rejected_drafts_are_computed_anew() -> None:
    (request,) = requests()[:1]
    first = len(request.prompt_ids)
    request.token_ids.append(5)
    for num_tokens, computed in ((1, first + 1), (2, first + 2), (3, first + 3)):
        request.num_computed, request.drafts = first, [7, 8]
        item = PlannedItem.decoding(request, request.num_computed, 2)
        item.begin()
        assert item.confirmed == first + 1
        item.end(num_tokens)
        assert request.num_computed == computed and request.pending == 0


def test_requests_that_cannot_verify_get_no_drafts() -> None:
    scheduler = make_core(False).planner.scheduler
    plain, pending, masked, nearly_done = (
        Request(str(n), [1, 2, 3], params, n, 9, n)
        for n, params in enumerate(
            (SamplingParams(), SamplingParams(), SamplingParams(regex="[a-z]+"), SamplingParams())
        )
    )
    pending.pending, nearly_done.max_new_tokens = 1, 2
    for request in (plain, pending, masked, nearly_done):
        request.drafts = [7, 8]
    counts = [scheduler._drafts_that_fit(r) for r in (plain, pending, masked, nearly_done)]
    assert counts == [2, 0, 2, 1]
