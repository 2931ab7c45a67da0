"""Steps with prompts in buckets of tokens, against steps of any shape: on CPU tensors by the
kernels' twins, and on a GPU if there is one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from moesaic.config import ServerArgs
from moesaic.core.request import Request
from moesaic.core.sampling import SamplingParams
from moesaic.engine.runner.graphs import MixedGraphs, MixedKey
from moesaic.engine.runner.mixed_batch import MixedBatch
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.engine.schedule.plan import NOT_FINITE, StepPlan
from moesaic.engine.schedule.request_state import RequestState
from moesaic.engine.setup.graph_sizes import mixed_graph_sizes
from moesaic.engine.worker.local_core import LocalCore
from tests.e2e.test_gpu_runner import arguments, serve, steps_of

pytestmark = pytest.mark.timeout(300)
GPU = torch.cuda.is_available()


@pytest.fixture(params=["twins", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "gpu" and not GPU:
        pytest.skip("needs a CUDA device")
    if request.param == "twins":
        monkeypatch.setattr(
            "moesaic.engine.runner.model_runner.compute_device", lambda *_: torch.device("cpu")
        )
    return str(request.param)


def runner_of(args: ServerArgs, **changes: Any) -> ModelRunner:
    given = {"device": "cuda", **changes}
    return ModelRunner(replace(args, **given), asynchronous=True)


class Ran(NamedTuple):
    tokens: int
    bucket: int
    prompts: int
    """Sequences with more than one new token."""


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Ran]:
    """The steps with prompts that ran on static buffers."""
    steps, run = list[Ran](), MixedBatch.run

    def noted(self: MixedBatch, plan: Any, bucket: int, *rest: Any) -> Any:
        steps.append(Ran(plan.num_tokens, bucket, int((plan.lengths > 1).sum())))
        return run(self, plan, bucket, *rest)

    monkeypatch.setattr(MixedBatch, "run", noted)
    return steps


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that nobody wrote is not a number."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def test_requests_of_all_kinds(device, ran):
    """Routed experts and scores of prompts are asked for, too: such steps use no static buffers."""
    args = arguments("qwen3_moe")
    expected = serve(runner_of(args, disable_prefill_cuda_graph=True), args, seed=5)
    assert ran == []
    assert serve(runner_of(args), args, seed=5) == expected
    assert ran


def test_deterministic_mode(device, ran):
    args = arguments("qwen3_moe", enable_deterministic_inference=True)
    expected = serve(runner_of(args, disable_prefill_cuda_graph=True), args, seed=5)
    assert serve(runner_of(args, cuda_graph_bs_prefill=(8, 22)), args, seed=5) == expected
    assert ran


def traffic(runner: ModelRunner, args: ServerArgs, seed: int) -> list[Answer]:
    """Requests that arrive while others decode; some are aborted, some make a step fail, and some
    compute numbers that are not finite. Pages are so few that some are retracted. The answers of
    those that were not aborted."""
    spoil(runner)
    core, rng = LocalCore(args, runner), random.Random(seed)
    jobs: list[RequestState] = []
    aborted: set[int] = set()
    while len(jobs) < 24 or core.has_work:
        if len(jobs) < 24 and rng.random() < 0.5:
            jobs.append(RequestState(_request(len(jobs), rng), None, lambda progress: None))
            core.add(jobs[-1])
        if jobs and rng.random() < 0.1:
            aborted.add(number := rng.randrange(len(jobs)))
            core.abort(number)
        core.step()
    assert core.planner.metrics.counts.failed_steps >= 2
    assert core.planner.scheduler.num_retractions > 0
    answers = [answer_of(job.request) for job in jobs]
    ends = {n: answer.end for n, answer in enumerate(answers) if n not in aborted}
    assert all(NOT_FINITE in ends[n] for n in ends if n % SPOILED == POISON)
    assert all("a broken step" in ends[n] for n in ends if n % SPOILED == BREAKING)
    return [answer for n, answer in enumerate(answers) if n not in aborted]


# Of so many requests one begins with a token that is not a number, and one breaks its step.
SPOILED, POISON, BREAKING = 8, 3, 5
POISON_ID = 251


class Answer(NamedTuple):
    tokens: list[int]
    end: str


def answer_of(request: Request) -> Answer:
    assert request.finish_reason is not None
    return Answer(request.output_ids, request.finish_reason.message or request.finish_reason.type)


def spoil(runner: ModelRunner) -> None:
    """Steps with the last token of a breaking request's prompt fail after their launch."""
    embedding, begin = runner.model.model.embed_tokens, runner.steps.begin
    assert embedding is not None and not runner.model.config.tie_word_embeddings
    embedding.weight.data[POISON_ID] = torch.nan

    def breaking(plan: StepPlan, *rest: Any) -> Any:
        step = begin(plan, *rest)
        sampled = (item.request_no for item in plan.items if item.sample is not None)
        if any(number % SPOILED == BREAKING for number in sampled):
            raise RuntimeError("a broken step")
        return step

    runner.steps.begin = breaking  # type: ignore[method-assign]


def _request(number: int, rng: random.Random) -> Request:
    count = rng.randrange(1, 24)
    temperature = rng.choice([0.0, 0.8])
    prompt = [rng.randrange(250) for _ in range(rng.randrange(1, 40))]
    if number % SPOILED == POISON:
        prompt[0] = POISON_ID
    return Request(
        rid=str(number),
        prompt_ids=prompt,
        params=SamplingParams(max_new_tokens=count, ignore_eos=True, temperature=temperature),
        seed=number,
        max_new_tokens=count,
        request_no=number,
        eos_ids=frozenset({256}),
    )


@pytest.mark.parametrize(
    "family", ["qwen3_moe", "gpt_oss", pytest.param("mixtral", marks=pytest.mark.slow)]
)
def test_random_traffic(family, device, ran, poisoned):
    args = replace(arguments(family), max_total_tokens=100)
    expected = traffic(runner_of(args, disable_cuda_graph=True), args, seed=1)
    assert ran == []
    sizes = (3, 8, 13, 16, 22)
    assert traffic(runner_of(args, cuda_graph_bs_prefill=sizes), args, seed=1) == expected
    assert len(ran) > 10
    assert all(step.bucket == min(s for s in sizes if s >= step.tokens) for step in ran)
    assert any(step.tokens < step.bucket for step in ran), "no step has padding"


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_step_of_many_short_prompts(device, ran, poisoned, deterministic):
    """As many as requests may run, of two tokens each."""
    args = arguments("qwen3_moe", enable_deterministic_inference=deterministic)
    args = replace(args, max_running_requests=90, chunked_prefill_size=200, max_total_tokens=90 * 8)

    def answers(runner: ModelRunner) -> list[Answer]:
        core, params = LocalCore(args, runner), SamplingParams(max_new_tokens=3, ignore_eos=True)
        requests = [
            Request(str(n), [n, 7], params, seed=n, max_new_tokens=3, request_no=n)
            for n in range(90)
        ]
        for request in requests:
            core.add(RequestState(request, None, lambda progress: None))
        while core.has_work:
            core.step()
        return [answer_of(request) for request in requests]

    expected = answers(runner_of(args, disable_cuda_graph=True))
    assert ran == []
    assert answers(runner_of(args)) == expected
    assert max(step.prompts for step in ran) == 90


def test_latents_have_no_buckets(device):
    args = arguments("deepseek_v2")
    assert steps_of(runner_of(args)).mixed_batch.graphs.keys == []


def test_buckets():
    args = ServerArgs()
    assert mixed_graph_sizes(ServerArgs(cuda_graph_backend_prefill="disabled"), 8192) == ()
    sizes = mixed_graph_sizes(args, 8192 + 256)
    assert sizes[:10] == (64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
    assert sizes[12:15] == (512, 576, 640)
    assert sizes[34:38] == (3584, 3840, 4096, 5120)
    assert sizes[38:] == (6144, 7168, 8192, 8192 + 256)
    assert mixed_graph_sizes(args, 100) == (64, 80, 96, 100)
    assert mixed_graph_sizes(args, 22) == (22,)
    assert mixed_graph_sizes(replace(args, cuda_graph_max_bs_prefill=90), 8192) == (64, 80, 90)
    chosen = replace(args, cuda_graph_bs_prefill=(512, 32, 9999))
    assert mixed_graph_sizes(chosen, 8192) == (32, 512)
    for off in ({"disable_cuda_graph": True}, {"disable_prefill_cuda_graph": True}):
        assert mixed_graph_sizes(replace(args, **off), 8192) == ()
    graphs = MixedGraphs((64, 512), 100, lambda key: None, torch.device("cpu"))
    assert graphs.keys == [
        MixedKey(64, 16, 64),
        MixedKey(64, 64, 64),
        *(MixedKey(512, some, 512) for some in (16, 64, 100)),
    ]
    assert [graphs.bucket(tokens) for tokens in (1, 64, 65, 512, 513)] == [64, 64, 512, 512, None]
    assert graphs.key(512, 512, 65) == MixedKey(512, 100, 512)
    assert graphs.key(64, 0, 0) == MixedKey(64, 16, 64)
    for tokens, singles in ((64, 64), (512, 100), (512, 16)):
        assert graphs.key(tokens, tokens, singles) in graphs.keys


def test_ranks_without_prompts_have_few_rows():
    sizes, sequences = (64, 128, 512), 100
    graphs = MixedGraphs(
        sizes, sequences, lambda key: None, torch.device("cpu"), tokens_differ=True
    )
    assert graphs.keys == [
        *(MixedKey(64, some, 64) for some in (16, 64)),
        *(MixedKey(128, some, 128) for some in (16, 64, 100)),
        *(MixedKey(512, some, 512) for some in (16, 64, 100)),
        MixedKey(128, 100, 512),
    ]
    for agreed in sizes:
        for tokens in range(agreed + 1):
            for singles in range(min(tokens, sequences) + 1):
                key = graphs.key(agreed, tokens, singles)
                assert key in graphs.keys and tokens <= key.tokens and singles <= key.sequences
                assert key.tokens == (agreed if tokens > 128 else min(agreed, 128))
    # Decodes alone may not fit a captured size.
    few = MixedGraphs((64,), sequences, lambda key: None, torch.device("cpu"), tokens_differ=True)
    assert {key.tokens for key in few.keys} == {64} and few.key(64, 3, 3) == MixedKey(64, 16, 64)
