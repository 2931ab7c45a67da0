"""Steps that begin before the results of the last are known change nothing but the time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from moesaic import Engine
from moesaic.config import ServerArgs, resolve
from moesaic.core.request import Request
from moesaic.core.sampling import SamplingParams
from moesaic.engine.frontend import core_client as remote
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.engine.schedule.plan import FUTURE_TOKEN
from moesaic.engine.schedule.request_state import RequestState
from moesaic.engine.text.detokenizer import IncrementalDetokenizer
from moesaic.engine.text.tokenizer import Tokenizer
from moesaic.engine.worker import local_core
from moesaic.engine.worker.local_core import LocalCore
from moesaic.models.tiny import materialise
from moesaic.observe.spans import SpanKind, unpack
from tests import ahead
from tests.ahead import MODES, AheadRunner
from tests.e2e.poison_rank import POISONS

POISON = (200, 201)
EOS = 256
FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "few pages": {
        "max_total_tokens": 112,
        "page_size": 4,
        "chunked_prefill_size": 24,
        "schedule_conservativeness": 0.01,
    },
    "few at once": {"max_running_requests": 3, "chunked_prefill_size": 16, "page_size": 4},
    "no sharing": {"disable_radix_cache": True, "chunked_prefill_size": 32},
}
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 0.8, "top_p": 0.9, "ignore_eos": True},
    {"temperature": 1.0, "repetition_penalty": 1.3},
    {"temperature": 0.7, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    {"temperature": 1.0, "min_new_tokens": 4},
    {"temperature": 1.2, "logit_bias": {5: 2.0}},
    {"temperature": 1.0, "regex": "[a-z]{3,9}[0-9]"},
]


def make_core(flags: dict[str, Any], runner: Callable[..., ModelRunner]) -> LocalCore:
    args = resolve(
        ServerArgs.from_kwargs(
            model_path="tiny:qwen3_moe", enable_deterministic_inference=True, **flags
        )
    )
    folder = materialise(args.model_path)
    args = replace(args, model_path=folder, tokenizer_path=folder)
    return LocalCore(args, runner(args))


@dataclass(frozen=True)
class Case:
    """`abort_after`: tokens after which its caller leaves; `arrives`: in which step."""

    prompt: list[int]
    params: SamplingParams
    max_new_tokens: int
    return_logprob: bool
    logprob_start: int
    arrives: int
    abort_after: int | None


def draw_cases(chance: random.Random, poison: bool) -> list[Case]:
    stems = [[chance.randrange(97, 123) for _ in range(24)] for _ in range(2)]
    cases = []
    for _ in range(chance.randrange(4, 12)):
        own = [chance.randrange(97, 123) for _ in range(chance.randrange(1, 30))]
        stem = chance.choice([[], [], *stems])
        prompt = stem + own[: 30 - len(stem)] if chance.random() < 0.9 else stems[0]
        if poison and chance.random() < 0.2:
            prompt = [*prompt, chance.choice(POISON)]
        chosen = chance.choice(PARAMS)
        if poison and chance.random() < 0.2:
            chosen = {"temperature": 0.0, "logit_bias": {POISON[0]: 100.0}}
        params = SamplingParams(
            **chosen,
            stop=chance.choice([(), (), (), ("a", "xyz"), ("e",)]),
            stop_token_ids=tuple(chance.sample(range(256), chance.choice([0, 0, 0, 12]))),
        )
        wants = chance.random() < 0.4
        cases.append(
            Case(
                prompt,
                params,
                max_new_tokens=chance.choice([0, 1, 2, 3, 9, 16, 24]),
                return_logprob=wants,
                logprob_start=chance.choice([len(prompt) - 1, len(prompt) - 1, 0, 3]),
                arrives=chance.choice([0, 0, chance.randrange(20)]),
                abort_after=chance.randrange(6) if chance.random() < 0.15 else None,
            )
        )
    return cases


def serve(core: LocalCore, cases: list[Case], base: int) -> list[tuple[Request, str]]:
    """`base`: of their numbers, which must be new."""
    tokenizer = Tokenizer.from_folder(str(core.args.tokenizer_path))
    jobs, turn = list[RequestState](), 0
    waiting = sorted(range(len(cases)), key=lambda n: cases[n].arrives)

    def listen(progress: Any) -> None:
        case = cases[int(progress.rid) - base]
        if case.abort_after is not None and progress.num_output > case.abort_after:
            leaving.append(progress.rid)

    leaving: list[str] = []
    made: dict[int, RequestState] = {}
    while core.has_work or waiting:
        while waiting and (cases[waiting[0]].arrives <= turn or not core.has_work):
            number = waiting.pop(0)
            case = cases[number]
            request = Request(
                str(base + number),
                case.prompt,
                case.params,
                seed=number,
                max_new_tokens=case.max_new_tokens,
                request_no=base + number,
                eos_ids=frozenset([EOS]),
                return_logprob=case.return_logprob,
                logprob_start=min(case.logprob_start, len(case.prompt) - 1),
                top_logprobs_num=2 * case.return_logprob,
            )
            detokenizer = IncrementalDetokenizer(tokenizer, case.prompt, case.params)
            made[number] = RequestState(request, detokenizer, listen, stream_interval=1)
            core.add(made[number])
        core.step()
        turn += 1
        while leaving:
            core.abort(int(leaving.pop()))
    jobs = [made[number] for number in range(len(cases))]
    assert core.planner.kv.num_used == 0 and core.planner.num_suspects == 0 and not core.states
    core.planner.kv.flush()
    assert core.planner.kv.allocator.num_free == core.planner.kv.allocator.num_pages
    return [(job.request, job.detokenizer.text) for job in jobs if job.detokenizer is not None]


def compare(
    cases: list[Case], expected: list[tuple[Request, str]], found: list[tuple[Request, str]]
) -> None:
    for case, (one, one_text), (other, other_text) in zip(cases, expected, found, strict=True):
        if case.abort_after is not None:  # when it hears of that is not said
            shorter = min(len(one.output_ids), len(other.output_ids))
            assert other.output_ids[:shorter] == one.output_ids[:shorter]
            continue
        assert other.output_ids == one.output_ids
        assert other_text == one_text
        assert other.finish_reason == one.finish_reason
        assert other.output_logprobs == one.output_logprobs
        assert other.output_top_logprobs == one.output_top_logprobs
        # Of a prompt that failed, as many as there were by then.
        known = len(one.prompt_ids)
        if one.failed:
            known = min(len(one.input_logprobs), len(other.input_logprobs))
        assert other.input_logprobs[:known] == one.input_logprobs[:known]
        assert other.input_top_logprobs[:known] == one.input_top_logprobs[:known]


def check_mixes(flags: dict[str, Any], mode: str, seeds: range, poison: bool) -> tuple[int, int]:
    """How many tokens were to come when they were asked for, and requests that were retracted."""

    def poisoned(args: ServerArgs) -> AheadRunner:
        return AheadRunner(args, mode=mode, poison=POISON if poison else ())

    def plain(args: ServerArgs) -> AheadRunner:
        runner = poisoned(args)
        runner.overlaps, runner.mode = False, "begin"
        return runner

    expecting, overlapping = make_core(flags, plain), make_core(flags, poisoned)
    for seed in seeds:
        cases = draw_cases(random.Random(seed), poison)
        expected = serve(expecting, cases, 1000 * seed)
        compare(cases, expected, serve(overlapping, cases, 1000 * seed))
    runner = overlapping.runner
    assert isinstance(runner, AheadRunner) and len(runner.last) <= 12
    return runner.futures, overlapping.planner.scheduler.num_retractions


@pytest.mark.parametrize(
    ("flags", "mode"), [("plain", "late"), ("few pages", "late"), ("few at once", "wait")]
)
def test_answers_are_those_of_one_step_at_a_time(flags: str, mode: str) -> None:
    futures, retractions = check_mixes(FLAGS[flags], mode, range(3), poison=False)
    assert futures > 20
    assert retractions > 0 or flags != "few pages"


@pytest.mark.parametrize(("flags", "mode"), [("few pages", "late"), ("plain", "begin")])
def test_a_request_that_breaks_a_step_ends_alone(flags: str, mode: str) -> None:
    check_mixes(FLAGS[flags], mode, range(3), poison=True)


@pytest.mark.slow
@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("flags", FLAGS)
def test_many_mixes(flags: str, mode: str, poison: bool) -> None:
    check_mixes(FLAGS[flags], mode, range(3, 40), poison)


def one_request(max_new_tokens: int, return_logprob: bool = False, **params: Any) -> RequestState:
    params = {"temperature": 0.0, "ignore_eos": True, **params}
    request = Request(
        "one",
        [97, 98, 99],
        SamplingParams(**params),
        seed=0,
        max_new_tokens=max_new_tokens,
        request_no=0,
        return_logprob=return_logprob,
        logprob_start=2,
    )
    return RequestState(request, None, lambda progress: None)


def tokens_of_plans(core: LocalCore, job: RequestState) -> list[list[int]]:
    """The tokens of each step, until nothing is left to do."""
    plans, begin = list[list[int]](), core.runner.begin

    def note(plan: Any, *rest: Any) -> Any:
        plans.append(plan.token_ids.tolist())
        return begin(plan, *rest)

    core.runner.begin = note  # type: ignore[method-assign]
    core.add(job)
    while core.has_work:
        core.step()
    del core.runner.begin  # type: ignore[method-assign]
    return plans


@pytest.fixture(scope="module")
def overlapping() -> LocalCore:
    return make_core({"page_size": 4}, AheadRunner)


def test_nothing_is_planned_beyond_the_last_token(overlapping: LocalCore) -> None:
    """Four tokens take one step of the prompt and three of tokens that are to come."""
    job = one_request(4)
    assert tokens_of_plans(overlapping, job) == [
        [97, 98, 99],
        [FUTURE_TOKEN],
        [FUTURE_TOKEN],
        [FUTURE_TOKEN],
    ]
    assert len(job.request.output_ids) == 4
    assert tokens_of_plans(overlapping, one_request(1)) == [[97, 98, 99]]
    assert tokens_of_plans(overlapping, one_request(0)) == [[97, 98, 99]]


def test_an_end_that_nobody_foresaw_leaves_one_step_that_is_dropped(
    overlapping: LocalCore,
) -> None:
    job = one_request(6, temperature=2.0)
    tokens_of_plans(overlapping, job)
    third = job.request.output_ids[2]
    assert third not in job.request.output_ids[:2]
    job = one_request(6, temperature=2.0, stop_token_ids=(third,))
    plans = tokens_of_plans(overlapping, job)
    assert len(job.request.output_ids) == 3 and len(plans) == 4
    assert overlapping.planner.kv.num_used == 0 and not overlapping.has_work


@pytest.mark.parametrize(
    ("params", "logprob", "waits"),
    [
        ({"repetition_penalty": 1.1}, False, False),
        ({"min_new_tokens": 2}, False, False),
        ({"logit_bias": {5: 1.0}}, True, False),
        ({"repetition_penalty": 1.1}, True, True),
        ({"min_new_tokens": 2}, True, True),
        ({"regex": "[a-z]{9}", "ignore_eos": False}, False, True),
    ],
    ids=str,
)
def test_only_who_is_sampled_on_the_host_by_its_tokens_waits_for_them(
    overlapping: LocalCore, params: dict[str, Any], logprob: bool, waits: bool
) -> None:
    job = one_request(4, return_logprob=logprob, **params)
    plans = tokens_of_plans(overlapping, job)
    known = job.request.output_ids[:-1]
    assert len(known) == 3
    assert plans == [[97, 98, 99], *([token] if waits else [FUTURE_TOKEN] for token in known)]


def test_the_flag_turns_it_off() -> None:
    core = make_core({"disable_overlap_schedule": True}, AheadRunner)
    job = one_request(3)
    plans = tokens_of_plans(core, job)
    assert plans == [[97, 98, 99], *([token] for token in job.request.output_ids[:-1])]
    assert not core.runner.overlaps and core.loop.depth == 1


def test_steps_taken_back_say_again_who_has_ended(overlapping: LocalCore) -> None:
    core = overlapping
    tokens_of_plans(core, one_request(2))
    core.add(one_request(9))
    core.step()  # in flight, and names the first, which has ended
    planner = core.planner
    assert [step.plan.ended for step in core.loop.inflight] == [[0]] and planner._ended == []
    planner.rollback(core.loop.inflight)
    core.loop.inflight.clear()
    assert planner._ended == [0] and core.states[0].request.pending == 0
    core.abort(0)


@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=pytest.mark.timeout(300))])
def test_engine(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process and on a rank of its own; with a request that breaks a step in between."""
    banned = dict.fromkeys(POISONS.values(), -100.0)
    safe = {"temperature": 0.8, "max_new_tokens": 12, "logit_bias": banned, "sampling_seed": 3}
    chooses = {**safe, "logit_bias": {POISONS["router"]: 100.0}}
    calls = [([97 + i, 98, 99] * (i + 1), {**safe, "ignore_eos": i % 2 == 0}) for i in range(5)]
    calls[3][1]["repetition_penalty"] = 1.2
    flags = {"model_path": "tiny:qwen3_moe", "enable_deterministic_inference": True}
    with Engine(**flags) as engine:
        expected = engine.generate(
            input_ids=[prompt for prompt, _ in calls], sampling_params=[p for _, p in calls]
        )
    monkeypatch.setattr(local_core, "ModelRunner", AheadRunner)
    monkeypatch.setattr(remote, "TARGET", ahead.TARGET)
    calls.insert(2, ([97, 98], chooses))
    with Engine(**flags, apart=apart, page_size=4) as engine:
        if not apart:
            ahead.Poison(engine._core.runner)  # type: ignore[union-attr]
        found = engine.generate(
            input_ids=[prompt for prompt, _ in calls], sampling_params=[p for _, p in calls]
        )
        assert isinstance(found, list) and isinstance(expected, list)
        bad = found.pop(2)
        assert bad["output_ids"] == [POISONS["router"]]
        assert "poison in router" in bad["meta_info"]["finish_reason"]["message"]
        for one, other in zip(expected, found, strict=True):
            assert other["output_ids"] == one["output_ids"] and other["text"] == one["text"]
            for key in ("finish_reason", "prompt_tokens", "completion_tokens"):
                assert other["meta_info"][key] == one["meta_info"][key]
        info = engine.get_server_info()
        assert info["pages_used"] == 0 and info["running"] == info["waiting"] == 0


def test_each_step_is_recorded_once(overlapping: LocalCore) -> None:
    """Steps that are under way at once share the time: none begins before the last has ended."""
    core, spans = overlapping, overlapping.runner.spans
    spans.start()
    first = core.loop.stage.number + 1
    plans = tokens_of_plans(core, one_request(7))
    spans.stop()
    steps = [s for s in unpack(spans.read(0, spans.count)) if s.kind == SpanKind.STEP]
    assert [step.step for step in steps] == list(range(first, first + len(plans)))
    assert [step.tokens for step in steps] == [3, 1, 1, 1, 1, 1, 1]
    for one, other in pairwise(steps):
        assert one.begin < one.end <= other.begin
    spans.free()


def test_an_error_of_the_engine_leaves_steps_that_nobody_waits_for(
    overlapping: LocalCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = overlapping
    expected = one_request(5)
    tokens_of_plans(core, expected)
    core.add(one_request(5))
    core.step()
    core.fail_all("made up")
    assert core.has_work and not core.states
    core.step()
    assert not core.has_work
    unplanned = one_request(5)
    core.add(unplanned)
    core.step()

    def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("made up")

    monkeypatch.setattr(core.planner.scheduler, "schedule", fail)
    core.step()
    assert unplanned.request.failed and "made up" in unplanned.request.failure
    assert not core.has_work and not core.states
    monkeypatch.undo()
    again = one_request(5)
    tokens_of_plans(core, again)
    assert again.request.output_ids == expected.request.output_ids
    assert core.planner.kv.num_used == 0 and not core.has_work


def test_numbers_that_are_not_finite_fail_their_request_alone() -> None:
    """It is computed once more before that is known; nobody else sees anything of it."""
    core = make_core({"page_size": 4, "max_total_tokens": 96}, AheadRunner)
    core.runner.model.model.embed_tokens.weight.data[5] = float("nan")
    calm = SamplingParams(temperature=0.0, logit_bias={5: -100.0}, ignore_eos=True)
    cases = [Case([97 + n, 98, 99], calm, 9, False, 0, 0, None) for n in range(4)]
    alone = [serve(core, [case], 10 * n)[0][0].output_ids for n, case in enumerate(cases)]
    chooses = SamplingParams(temperature=0.0, logit_bias={5: 100.0}, ignore_eos=True)
    cases.append(Case([100, 101], chooses, 9, False, 0, 0, None))
    for base in (1000, 2000):
        *good, (bad, _) = serve(core, cases, base)
        assert bad.output_ids == [5] and bad.finish_reason is not None
        assert "not finite" in str(bad.finish_reason.message)
        assert [request.output_ids for request, _ in good] == alone


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("count", [1, 5])
def test_on_a_gpu_overlap_changes_nothing(count: int) -> None:
    """All requests take part in all steps, so that both ways compute the same batches."""
    prompts = [[97 + n, 98, 99, 100 + n] * 3 for n in range(count)]
    params = [
        {"temperature": 0.8 * (n % 2), "sampling_seed": n, "max_new_tokens": 40, "ignore_eos": True}
        for n in range(count)
    ]
    answers = []
    for off in (True, False):
        flags = {"device": "cuda", "disable_overlap_schedule": off}
        with Engine(model_path="tiny:qwen3_moe", **flags) as engine:
            core = engine._core
            assert isinstance(core, LocalCore) and core.runner.overlaps is not off
            found = engine.generate(input_ids=prompts, sampling_params=params)
            assert isinstance(found, list)
            answers.append([one["output_ids"] for one in found])
            assert engine.get_server_info()["pages_used"] == 0
    assert answers[0] == answers[1]
    assert all(len(ids) == 40 for ids in answers[1])
