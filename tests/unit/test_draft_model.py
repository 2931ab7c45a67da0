"""Drafts by the checkpoint's own layer: the house model's are mostly right, those of random layers
never, and the answers are the same. Checked against steps without drafts, and against the layer run
over whole answers at once."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.mtp import Models, Reply, _attend
from moesaic.config import ServerArgs, resolve
from moesaic.core.draft_shape import chains
from moesaic.core.request import Request
from moesaic.core.sampling import SamplingParams
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.engine.sampling.sampler import SampleRow
from moesaic.engine.schedule.plan import ItemResult, PlanItem, StepPlan
from moesaic.engine.schedule.request_state import RequestState
from moesaic.engine.setup.memory_plan import plan_memory
from moesaic.engine.speculate.draft_moe import log_moves
from moesaic.engine.speculate.draft_rows import Continuation
from moesaic.engine.text.tokenizer import Tokenizer
from moesaic.engine.worker.local_core import LocalCore
from moesaic.evals.tasks.draw import TASKS, distinct
from moesaic.models.tiny import materialise
from tests.e2e.test_ngram import Moody

HOUSE = Path(__file__).parents[2] / "models" / "house-moe"
RANDOM = "tiny:deepseek_v3,num_nextn_predict_layers=1"
RANDOM_WIDE = f"{RANDOM},moe_intermediate_size=128,hidden_size=128"
NEW_TOKENS = 18
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"temperature": 0.6, "min_new_tokens": 4, "frequency_penalty": 0.3},
)
# Chunks of prompts, and a cache that is too small for all requests at once.
TIGHT = {
    "max_total_tokens": 220,
    "chunked_prefill_size": 24,
    "page_size": 4,
    "schedule_conservativeness": 0.01,
}


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(HOUSE)


@cache
def prompts() -> list[list[int]]:
    found = []
    problems = [problem for task in TASKS for problem in distinct(task, "test", 3, 2)]
    for problem in problems[:8]:
        text = tokenizer().apply_chat_template([{"role": "user", "content": problem.prompt}])
        found.append(tokenizer().encode(text, add_special_tokens=False))
    return found


def arguments(model: str, steps: int = 0, **flags: Any) -> ServerArgs:
    if steps:
        flags |= {"speculative_algorithm": "NEXTN", "speculative_num_steps": steps}
        flags.setdefault("disable_speculative_adaptive", True)
    made = ServerArgs.from_kwargs(
        model_path=model, device="cpu", dtype="float32", skip_tokenizer_init=True, **flags
    )
    args = resolve(made)
    return replace(args, model_path=materialise(args.model_path))


SCHEDULES = [
    pytest.param(False, id="synchronous", marks=pytest.mark.slow),
    pytest.param(True, id="asynchronous"),
]
"""Tests that are long wait for results before each step only where there is time."""


@cache
def runner(model: str, steps: int, asynchronous: bool, tight: bool) -> ModelRunner:
    args = arguments(model, steps, **(TIGHT if tight else {"page_size": 16}))
    return ModelRunner(args, asynchronous=asynchronous)


def make_core(model: str, steps: int, asynchronous: bool = False, tight: bool = True) -> LocalCore:
    flags = TIGHT if tight else {"page_size": 16}
    return LocalCore(arguments(model, steps, **flags), runner(model, steps, asynchronous, tight))


def requests(model: str) -> list[Request]:
    chance, found = random.Random(2), []
    for number in range(8):
        prompt = prompts()[number]
        if model != str(HOUSE):
            prompt = [chance.randrange(256) for _ in range(1 + 9 * number)]
        params = SamplingParams(**PARAMS[number % 4], ignore_eos=number == 6)
        eos = frozenset(tokenizer().eos_ids if model == str(HOUSE) else (256,))
        found.append(
            Request(
                str(number), prompt, params, 40 + number, NEW_TOKENS + number, number, eos,
                return_logprob=number in (1, 4), top_logprobs_num=2,
            )
        )  # fmt: skip
    return found


def serve(
    core: Any, served: list[Request], on_step: Callable[[int], None] = lambda number: None
) -> list[Request]:
    for request in served:
        core.add(RequestState(request, None, lambda progress: None))
    number = 0
    while core.has_work:
        core.step()
        on_step(number)
        number += 1
    assert core.planner.kv.num_used == 0
    return served


@cache
def without_drafts(model: str) -> list[Request]:
    return serve(make_core(model, 0), requests(model))


def check_equal(found: list[Request], expected: list[Request]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.output_ids == other.output_ids and one.finish_reason == other.finish_reason
        assert one.output_logprobs == pytest.approx(other.output_logprobs, abs=1e-3)


@pytest.mark.parametrize(
    ("model", "steps", "asynchronous"),
    [
        pytest.param(str(HOUSE), 1, False, id="house 1 synchronous", marks=pytest.mark.slow),
        pytest.param(str(HOUSE), 3, True, id="house 3 asynchronous"),
        pytest.param(RANDOM, 1, True, id="random 1 asynchronous"),
        pytest.param(RANDOM, 3, False, id="random 3 synchronous"),
        pytest.param(str(HOUSE), 1, True, id="house 1 asynchronous", marks=pytest.mark.slow),
        pytest.param(str(HOUSE), 3, False, id="house 3 synchronous", marks=pytest.mark.slow),
    ],
)
def test_drafts_change_no_answer(model: str, steps: int, asynchronous: bool) -> None:
    expected = without_drafts(model)
    core = make_core(model, steps, asynchronous)
    found = serve(core, requests(model))
    check_equal(found, expected)
    assert core.planner.metrics.counts.failed_steps == 0
    assert core.planner.scheduler.num_retractions > 0
    assert core.planner.scheduler.num_admitted > len(found)
    check_equal(serve(core, requests(model)), expected)  # from the prefix cache


@pytest.mark.parametrize("asynchronous", SCHEDULES)
def test_drafts_that_come_and_go_change_no_answer(asynchronous: bool) -> None:
    """As the controller may decide at any step: without them steps overlap, and requests that only
    decode are columns."""
    core = make_core(str(HOUSE), 3, asynchronous)
    core.planner.drafts.controller = Moody(chains(3))
    counts, plan, steps = count_accepted(core), core.planner.plan, list[Any]()

    def noted(parts: int = 1) -> Any:
        steps.append(plan(parts))
        return steps[-1]

    core.planner.plan = noted
    for _ in range(2):
        check_equal(serve(core, requests(str(HOUSE))), without_drafts(str(HOUSE)))
    assert core.planner.metrics.counts.failed_steps == 0
    assert counts[0] > counts[1] > 60
    columns = [step for step in steps if len(step.plan.decodes)]
    assert len(columns) > 1 and not any(step.plan.draft_steps for step in columns)
    assert any(step.plan.draft_steps for step in steps)


def count_accepted(core: Any) -> list[int]:
    """[verified drafts, accepted ones] of the steps to come."""
    counts, apply = [0, 0], core.planner.apply

    def counted(step: Any, result: Any) -> None:
        for item, found in zip(step.items, result.items, strict=True):
            counts[0] += len(item.drafts)
            counts[1] += item.accepted(len(found.token_ids))
        apply(step, result)

    core.planner.apply = counted
    return counts


def greedy(number: int, new_tokens: int = 24) -> Request:
    params = SamplingParams(temperature=0.0)
    eos = frozenset(tokenizer().eos_ids)
    return Request(str(number), prompts()[number], params, 0, new_tokens, number, eos)


@pytest.mark.parametrize("asynchronous", SCHEDULES)
def test_the_house_models_drafts_are_right_also_behind_cached_pages(asynchronous: bool) -> None:
    core = make_core(str(HOUSE), 1, asynchronous, tight=False)
    for part in (core.runner.draft.cache.keys, core.runner.draft.cache.values):
        part.fill_(math.nan)  # no entry is read that was not written
    counts = count_accepted(core)
    first = serve(core, [greedy(number) for number in range(8)])
    assert counts[0] > 60 and counts[1] >= 0.95 * counts[0]
    counts[:] = 0, 0
    again = serve(core, [greedy(number) for number in range(8)])
    assert core.planner.scheduler.num_cached_tokens > 8 * 16
    assert counts[1] >= 0.95 * counts[0] > 0
    assert [one.output_ids for one in again] == [one.output_ids for one in first]


@torch.inference_mode()
def chain_of(models: Models, ids: list[int], steps: int) -> list[int]:
    """The layer over the whole sequence at once, again for each token of the chain: behind its own
    token a row takes the layer's normed output in the place of the target's."""
    every, positions = torch.tensor(ids), torch.arange(len(ids) + steps)
    hidden_TH = models.main(every, positions[: len(ids)], _attend(models.main, [len(ids)]))[:-1]
    found: list[int] = []
    next_ids = ids[1:]
    for _ in range(steps):
        count = len(next_ids)
        given = torch.tensor(next_ids), positions[:count], hidden_TH
        y_TH = models.mtp.norm(models.mtp(*given, _attend(models.mtp, [count])))
        found.append(int(models.mtp.head(y_TH[-1:]).argmax()))
        next_ids = [*next_ids, found[-1]]
        hidden_TH = torch.cat((hidden_TH, y_TH[-1:]))
    return found


def test_drafts_are_those_of_the_layer_over_the_whole_answer() -> None:
    core = make_core(str(HOUSE), 3, tight=False)
    request = greedy(2)
    seen: dict[int, int] = {}
    chains: dict[int, list[int]] = {}

    def note(_: int) -> None:
        if request.drafts:
            seen[request.num_output] = request.drafts[0]
            chains[len(request.token_ids)] = request.drafts

    serve(core, [request], note)
    models = Models.load(HOUSE, "float32")
    (drafted,) = models.drafted([Reply(request.prompt_ids, request.output_ids)])
    assert len(seen) > 4
    for place, token in seen.items():
        # drafted[n] is for output token n + 1, from what was known with the token before it.
        if place - 1 < len(drafted):
            assert token == drafted[place - 1], place
    for length, drafts in chains.items():
        assert drafts == chain_of(models, request.token_ids[:length], 3)


def test_random_layers_are_hardly_ever_right() -> None:
    core = make_core(RANDOM, 3, tight=False)
    counts = count_accepted(core)
    serve(core, requests(RANDOM))
    assert counts[0] > 200 and counts[1] < 0.2 * counts[0]


@pytest.mark.parametrize(
    ("where", "asynchronous"), [("draft", True), ("step", False), ("step", True)], ids=str
)
def test_a_failing_and_an_aborted_request_leave_the_others_alone(
    where: str, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request whose drafts fail gets none: its tokens come from steps that look for the cause."""
    expected = without_drafts(str(HOUSE))
    core = make_core(str(HOUSE), 2, asynchronous)
    found, broken = requests(str(HOUSE)), (core.runner.draft, "run")
    if where == "step":
        broken = (core.runner.steps, "begin")
    works = getattr(*broken)

    def poisoned(plan: StepPlan, *given: Any) -> Any:
        for item in plan.items:
            if item.request_no == 3 and item.first > len(found[3].prompt_ids) + 2:
                raise RuntimeError("it breaks")
        return works(plan, *given)

    def abort(number: int) -> None:
        if number == 9:
            core.abort(5)

    monkeypatch.setattr(*broken, poisoned)
    serve(core, found, abort)
    assert found[5].finish_reason is not None and found[5].finish_reason.type == "abort"
    if where == "step":
        assert found[3].failed and "it breaks" in found[3].failure
    others = [n for n in range(8) if n != 5 and not found[n].failed]
    assert len(others) == (6 if where == "step" else 7)
    check_equal([found[n] for n in others], [expected[n] for n in others])
    assert core.planner.metrics.counts.failed_steps > 0


@pytest.mark.parametrize("asynchronous", SCHEDULES)
def test_another_model_with_the_same_vocabulary_makes_drafts(asynchronous: bool) -> None:
    """The target itself is always right where tokens are greedy; a smaller one of another family
    with random weights is not, which changes no answer."""
    expected, steps = without_drafts(RANDOM), []
    for draft in (RANDOM, "tiny:qwen3_moe,num_hidden_layers=1"):
        flags = {
            "speculative_algorithm": "STANDALONE",
            "speculative_draft_model_path": materialise(draft),
            "speculative_num_steps": 3,
            "disable_speculative_adaptive": True,
        }
        args = arguments(RANDOM, **TIGHT, **flags)
        core = LocalCore(args, ModelRunner(args, asynchronous=asynchronous))
        for _ in range(1 + (draft == RANDOM)):  # the second time from the prefix cache
            check_equal(serve(core, requests(RANDOM)), expected)
        assert core.planner.metrics.counts.failed_steps == 0
        counts, alone = count_accepted(core), Request("a", [5, 6], SamplingParams(), 0, 41, 99)
        alone.params = SamplingParams(temperature=0.0, ignore_eos=True)
        before = core.planner.num_steps
        serve(core, [alone])
        steps.append(core.planner.num_steps - before)
        assert counts[1] == counts[0] > 25 or draft != RANDOM
    assert steps[0] <= 1 + 40 // 4 + 2 and steps[1] > 35


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ("tiny:qwen3_moe,vocab_size=300", "vocab_size is 300, and the target's is 258"),
        ("tiny:qwen3_moe,max_position_embeddings=64", "lower --context-length to 64"),
    ],
)
def test_a_draft_model_that_does_not_fit_is_refused(draft: str, message: str) -> None:
    flags = {
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": materialise(draft),
    }
    with pytest.raises(ValueError, match=f"--speculative-draft-model-path: .*{message}"):
        plan_memory(arguments(RANDOM, **flags))


def test_a_missing_draft_model_is_told_by_its_own_flag() -> None:
    flags = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "/nowhere"}
    with pytest.raises(ValueError, match=r"/nowhere.* does not exist: --speculative-draft-model-p"):
        plan_memory(arguments(RANDOM, **flags))


def items() -> Iterator[PlanItem]:
    sample = SampleRow(SamplingParams(), seed=0, position=9)
    yield PlanItem(0, [11, 12, 13], 0, 0, next_id=14)  # a chunk in the middle of a prompt
    yield PlanItem(1, [21, 22], 4, 1, sample=sample, draft_until=30)  # the end of one
    yield PlanItem(2, [31, 41, 42], 6, 2, sample=sample, num_drafts=2, draft_until=30)
    yield PlanItem(3, [51, 61, 62], 6, 3, sample=sample, num_drafts=2, draft_until=30)
    yield PlanItem(4, [71, 81], 6, 4, sample=sample, num_drafts=1)  # it gets no drafts
    yield PlanItem(5, [91], 6, 5, sample=sample, draft_until=30)  # it could not be sampled


def test_what_follows_each_row() -> None:
    plan = StepPlan([*items()], draft_steps=1)
    tokens = [(), (23,), (41, 42, 43), (61 - 1,), (81, 82), ()]
    found = Continuation.of(plan, [ItemResult(token_ids=some) for some in tokens])
    expected = [12, 13, 14, 22, 23, 41, 42, 43, 60, 62, 0, 81, 82, 0]
    assert found.next_T.tolist() == expected
    assert found.last_D.tolist() == [4, 7, 8, 13] and plan.num_drafting == 4
    empty = Continuation.of(StepPlan(), [])
    assert empty.next_T.tolist() == empty.last_D.tolist() == []


def test_the_memory_plan_counts_the_draft_model() -> None:
    sizes = {"max_total_tokens": 256, "page_size": 4}
    plain, drafting = (plan_memory(arguments(str(HOUSE), steps, **sizes)) for steps in (0, 1))
    draft = runner(str(HOUSE), 1, False, True).draft
    assert draft is not None
    (one,), (other,) = plain.ranks, drafting.ranks
    assert other.draft_bytes == draft.model.nbytes > 0 == one.draft_bytes
    assert other.weight_bytes == one.weight_bytes + draft.model.nbytes
    # One layer of latents more than the four of the model.
    assert 4 * other.cache_bytes_per_token == 5 * one.cache_bytes_per_token
    per_page = draft.cache.num_bytes / draft.cache.keys.shape[1]
    assert per_page == 4 * (other.cache_bytes_per_token - one.cache_bytes_per_token)


@pytest.mark.parametrize(
    ("asked", "runner_of_drafts", "format", "chosen"),
    [
        ("unquant", "triton", "fp32", "triton"),
        (None, None, "nvfp4", "flashinfer_cutlass"),
        ("fp8", "deep_gemm", "fp8_block", "deep_gemm"),
    ],
)
def test_the_draft_model_has_a_format_and_a_runner_of_its_own(
    asked: str | None, runner_of_drafts: str | None, format: str, chosen: str
) -> None:
    """As the line of SGLang's guide: a target in fp4, drafts in the model's type by triton."""
    flags = {
        "quantization": "modelopt_fp4",
        "moe_runner_backend": "flashinfer_cutlass",
        "max_total_tokens": 256,
    }
    plain = LocalCore(arguments(RANDOM_WIDE, **flags))
    drafting = LocalCore(
        arguments(
            RANDOM_WIDE,
            2,
            **flags,
            speculative_draft_model_quantization=asked,
            speculative_moe_runner_backend=runner_of_drafts,
        )
    )
    assert drafting.runner.draft is not None
    (layer,) = drafting.runner.draft.model.experts
    assert layer.context.weight_format.name == format
    assert layer.context.resolved.runner == chosen
    assert drafting.runner.moe.weight_format.name == "nvfp4"
    served = [serve(core, requests(RANDOM)[:3]) for core in (plain, drafting)]
    assert [one.output_ids for one in served[0]] == [one.output_ids for one in served[1]]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"enable_eplb": True}, ["draft model: eplb: 8 experts of 1 layer move among 8 slots"]),
        (
            {"enable_eplb": True, "elastic_ep_backend": "mooncake"},
            ["its experts keep their places"],
        ),
        ({}, []),
    ],
)
def test_the_log_says_whether_experts_of_the_draft_model_move(
    flags: dict[str, Any], told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    draft = runner(RANDOM, 1, False, True).draft
    assert draft is not None
    with caplog.at_level(logging.INFO):
        log_moves(ServerArgs(model_path=RANDOM, **flags), draft.model.experts)
    assert len(caplog.messages) == len(told)
    assert all(part in line for part, line in zip(told, caplog.messages, strict=True))


def test_a_format_that_the_runner_does_not_compute_is_refused() -> None:
    flags = {"quantization": "modelopt_fp4", "moe_runner_backend": "flashinfer_cutedsl"}
    args = arguments(RANDOM_WIDE, 1, **flags, speculative_draft_model_quantization="unquant")
    with pytest.raises(ValueError, match=r"draft model's experts have fp32 .*flashinfer_cutedsl"):
        plan_memory(args)
    flags = {"speculative_moe_runner_backend": "flashinfer_trtllm"}
    with pytest.raises(ValueError, match=r"use --speculative-moe-runner-backend auto$"):
        plan_memory(arguments(RANDOM, 1, **flags))


def test_a_checkpoint_without_such_a_layer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"NEXTN: .*num_nextn_predict_layers is 0.*use one that"):
        plan_memory(arguments("tiny:deepseek_v3", 1))
    with pytest.raises(ValueError, match=r"NEXTN: .*not supported for architectures"):
        plan_memory(arguments("tiny:qwen3_moe", 1))


def test_positions_of_a_chain_stay_in_the_pages_of_the_request() -> None:
    """At the end of a request's pages, or of what it may have, no entry of another is written."""
    core = make_core(str(HOUSE), 3)
    request = greedy(0, 6)
    core.add(RequestState(request, None, lambda progress: None))
    most = len(request.prompt_ids) + 6
    while core.has_work:
        step = core.planner.plan()
        for item in step.plan.items:
            held = len(request.pages) * 4
            last = item.first + len(item.token_ids) - 1
            assert item.draft_until < min(held, most)
            assert item.draft_until == 0 or item.draft_until > last
        if step.plan.has_work:
            core.planner.apply(step, core.runner.begin(step.plan).wait())
    assert request.num_output <= 6
