"""Asynchronous steps on CPU tensors, against synchronous ones: buckets, padding and future tokens;
and on a GPU if there is one."""

from __future__ import annotations

import random
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch

from moesaic import Engine
from moesaic.comm.errors import WindowAborted
from moesaic.config import ServerArgs, resolve
from moesaic.core.overlap import Overlap, schedules_of
from moesaic.core.request import Request
from moesaic.core.sampling import SamplingParams
from moesaic.engine.runner.future_tokens import NOBODY, FutureTokens, SamplingPath
from moesaic.engine.runner.graphs import GraphCache, GraphKey
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.engine.runner.row_results import NOT_FINITE
from moesaic.engine.runner.steps import AsynchronousSteps
from moesaic.engine.sampling.gpu_sampler import draw_rows
from moesaic.engine.sampling.sampler import SampleRow, sample
from moesaic.engine.schedule.plan import ItemResult, PlanItem, PromptScore, StepPlan
from moesaic.engine.schedule.request_state import RequestState
from moesaic.engine.setup.graph_sizes import graph_sizes, verify_graph_sizes
from moesaic.engine.worker.local_core import LocalCore
from moesaic.kernels.sampling import greedy_rows
from moesaic.models.tiny import FAMILIES, materialise
from moesaic.overlap.policy import policy_of

pytestmark = pytest.mark.timeout(300)
FUTURE = -1
PAGE = 4


def arguments(family: str, **changes: Any) -> ServerArgs:
    args = resolve(
        ServerArgs.from_kwargs(
            model_path=f"tiny:{family}",
            page_size=PAGE,
            max_total_tokens=512,
            max_running_requests=6,
            chunked_prefill_size=16,
            skip_server_warmup=True,
            **changes,
        )
    )
    return replace(args, model_path=materialise(args.model_path))


def asynchronous(args: ServerArgs) -> ModelRunner:
    return ModelRunner(args, asynchronous=True)


def steps_of(runner: ModelRunner) -> AsynchronousSteps:
    assert isinstance(runner.steps, AsynchronousSteps)
    return runner.steps


def row(position: int, **params: Any) -> SampleRow:
    given = {"temperature": 0.0, **params}
    logprob = given.pop("return_logprob", False)
    return SampleRow(SamplingParams(**given), seed=7, position=position, return_logprob=logprob)


class Sequences:
    """Makes plans for some sequences, each with its own pages and way to sample."""

    def __init__(self, prompts: list[list[int]], params: list[dict[str, Any]], pages: int) -> None:
        self.tokens = [list(prompt) for prompt in prompts]
        self.params = params
        self.pages = [list(range(1 + n * pages, 1 + (n + 1) * pages)) for n in range(len(prompts))]
        self.computed = [0] * len(prompts)

    def item(self, n: int, length: int, future: bool = False) -> PlanItem:
        first = self.computed[n]
        ids = [FUTURE] if future else self.tokens[n][first : first + length]
        stop = first + length
        samples = stop >= len(self.tokens[n])
        self.computed[n] = stop
        sampled = row(stop, **self.params[n]) if samples else None
        return PlanItem(100 + n, ids, first, n, self.pages[n], sample=sampled)

    def take(self, items: list[int], results: list[ItemResult]) -> None:
        for n, result in zip(items, results, strict=True):
            assert len(result.token_ids) == 1, result
            self.tokens[n].append(result.token_ids[0])


KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "top_p": 0.9},
    {"logit_bias": {5: 3.0}},
    {"return_logprob": True, "temperature": 1.0},
    {},
]


def prompts(count: int = 5) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(250) for _ in range(rng.randrange(1, 12))] for _ in range(count)]


def plainly(runner: ModelRunner, steps: int) -> list[list[int]]:
    work = Sequences(prompts(), KINDS, 8)
    everyone = list(range(5))
    for turn in range(steps):
        length = [len(t) - c for t, c in zip(work.tokens, work.computed, strict=True)]
        items = [work.item(n, length[n]) for n in everyone]
        plan = StepPlan(items, [p for pages in work.pages for p in pages] if turn == 0 else [])
        work.take(everyone, runner.begin(plan).wait().items)
    return work.tokens


def ahead(runner: ModelRunner, steps: int, count: int = 5) -> list[list[int]]:
    """Every step begins before the results of the one before are known."""
    work = Sequences(prompts()[:count], KINDS[:count], 8)
    everyone = list(range(count))
    length = [len(tokens) for tokens in work.tokens]
    items = [work.item(n, length[n]) for n in everyone]
    under_way = [runner.begin(StepPlan(items, [p for pages in work.pages for p in pages], True))]
    for turn in range(1, steps + 1):
        if turn < steps:
            items = [work.item(n, 1, future=True) for n in everyone]
            under_way.append(runner.begin(StepPlan(items, [])))
        work.take(everyone, under_way.pop(0).wait().items)
    return work.tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_to_come_are_those_that_come(family: str):
    args = arguments(family)
    expected = plainly(ModelRunner(args), 6)
    runner = asynchronous(args)
    assert steps_of(runner).graphs.sizes == (1, 2, 4, 6)
    assert ahead(runner, 6) == expected
    # The same without buckets: every step by itself.
    assert ahead(asynchronous(replace(args, disable_cuda_graph=True)), 6) == expected


def serve(runner: ModelRunner, args: ServerArgs, seed: int) -> list[Any]:
    """Requests of many kinds through the whole engine core."""
    core = LocalCore(args, runner)
    rng = random.Random(seed)
    jobs = []
    for n in range(9):
        params = SamplingParams(
            max_new_tokens=rng.randrange(1, 9),
            ignore_eos=True,
            **rng.choice(
                [
                    {"temperature": 0.0},
                    {"temperature": 0.7, "top_k": 20},
                    {"temperature": 0.0, "frequency_penalty": 0.5},
                    {"temperature": 1.0, "min_new_tokens": 3},
                ]
            ),
        )
        request = Request(
            rid=str(n),
            prompt_ids=[rng.randrange(250) for _ in range(rng.randrange(1, 40))],
            params=params,
            seed=n,
            max_new_tokens=params.max_new_tokens or 1,
            request_no=n,
            eos_ids=frozenset({256}),
            return_logprob=n % 4 == 1,
            logprob_start=0 if n % 8 == 1 else 10**6,
            top_logprobs_num=2,
            routed_start=0 if n % 3 == 2 else None,
            routed_row=runner.num_layers * runner.top_k * 2,
        )
        jobs.append(RequestState(request, None, lambda progress: None))
        core.add(jobs[-1])
    while core.has_work:
        core.step()
    assert core.planner.metrics.counts.failed_steps == 0
    for request in (job.request for job in jobs):
        tokens = len(request.token_ids) - 1 if request.routed_start == 0 else 0
        assert len(request.routed) == tokens * request.routed_row
    return [
        (
            job.request.output_ids,
            job.request.finish_reason,
            bytes(job.request.routed),
            rounded(job.request),
        )
        for job in jobs
    ]


def rounded(request: Request) -> list[float]:
    return [round(x, 4) for x in request.input_logprobs if x is not None]


def test_the_engine_gives_the_same_answers():
    args = arguments("qwen3_moe")
    expected = serve(ModelRunner(args), args, seed=5)
    assert any(logprobs for *_, logprobs in expected)
    assert len({routed for _, _, routed, _ in expected}) == 4
    assert serve(asynchronous(args), args, seed=5) == expected


def test_a_step_that_fails_leaves_the_runner_able(monkeypatch: pytest.MonkeyPatch):
    args = arguments("mixtral")
    runner = asynchronous(args)
    expected = ahead(runner, 4)
    broken = Sequences(prompts(), KINDS, 8)
    plan = StepPlan([broken.item(0, len(broken.tokens[0]))], [])
    with monkeypatch.context() as patch:
        patch.setattr(runner.model, "logits", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            runner.begin(plan)
    assert ahead(runner, 4) == expected
    with pytest.raises(ValueError, match="request 999 continues from a token that no"):
        runner.begin(StepPlan([PlanItem(999, [FUTURE], 3, 0, [1], sample=row(4))], []))
    assert ahead(runner, 4) == expected


def test_a_gpu_that_hangs_is_not_waited_for_again(monkeypatch: pytest.MonkeyPatch):
    runner = asynchronous(arguments("qwen3_moe"))
    work = Sequences(prompts(1), KINDS[:1], 8)
    plan = StepPlan([work.item(0, len(work.tokens[0]))], [], True)

    def late(*_: object) -> None:
        raise TimeoutError("step 1 did not end")

    monkeypatch.setattr("moesaic.engine.runner.pinned.DeviceEvent.wait", late)
    with pytest.raises(TimeoutError):
        runner.begin(plan).wait()
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="unusable in this process: step 1 did not end"):
        runner.begin(plan)


def test_rows_that_are_not_finite_fail_alone(monkeypatch: pytest.MonkeyPatch):
    args = arguments("mixtral")
    runner = asynchronous(args)
    work = Sequences(prompts(3), [{}, {"temperature": 1.0}, {}], 8)
    logits = runner.model.logits

    def spoil(*given: Any) -> torch.Tensor:
        out = logits(*given)
        out[0, 3] = torch.nan
        out[1:2] = torch.inf
        return out

    monkeypatch.setattr(runner.model, "logits", spoil)
    items = [work.item(n, len(work.tokens[n])) for n in range(3)]
    found = runner.begin(StepPlan(items, [p for pages in work.pages for p in pages])).wait().items
    assert [bool(result.broken) for result in found] == [True, True, False]
    assert found[0].broken == NOT_FINITE and len(found[2].token_ids) == 1


def test_scores_of_a_prompt():
    args = arguments("gpt_oss")
    tokens = prompts()[1] * 3
    score, sample = PromptScore(0, tokens[1:], 2), row(len(tokens))
    item = PlanItem(1, tokens, 0, 0, list(range(1, 12)), score=score, sample=sample)
    plan = StepPlan([item], list(range(1, 12)), True)
    runners = (asynchronous(args), ModelRunner(args))
    (mine,), (theirs,) = (runner.begin(plan).wait().items for runner in runners)
    assert mine.token_ids == theirs.token_ids and len(mine.token_ids) == 1
    assert len(mine.input_logprobs) == len(tokens) - 1
    assert mine.input_logprobs == pytest.approx(theirs.input_logprobs, abs=1e-5)
    assert [len(top) for top in mine.input_top_logprobs] == [2] * (len(tokens) - 1)


def test_padding_rows_reach_no_expert_and_no_cache():
    runner = asynchronous(arguments("qwen3_moe"))
    work = Sequences(prompts(3), [{}] * 3, 8)
    items = [work.item(n, len(work.tokens[n])) for n in range(3)]
    results = runner.begin(StepPlan(items, [p for pages in work.pages for p in pages])).wait().items
    work.take([0, 1, 2], results)
    before = [sum(layer.load.tokens) for layer in runner.moe_layers]
    bits = runner.cache.keys.view(torch.uint8)  # unused pages may hold NaN, which equals nothing
    cache = bits.clone()
    runner.begin(StepPlan([work.item(n, 1) for n in range(3)], [])).wait()
    after = [sum(layer.load.tokens) for layer in runner.moe_layers]
    assert [b - a for a, b in zip(before, after, strict=True)] == [3 * 2] * len(before)
    written = (bits != cache).flatten(2).any(-1)[0].nonzero().flatten().tolist()
    homes = {work.pages[n][(work.computed[n] - 1) // PAGE] for n in range(3)}
    assert set(written) == homes


def test_buckets(caplog: pytest.LogCaptureFixture):
    args = ServerArgs()
    expected = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
    assert graph_sizes(args, 256) == expected
    assert graph_sizes(args, 100) == (*expected[:13], 100)
    assert graph_sizes(args, 1) == (1,)
    assert graph_sizes(replace(args, cuda_graph_max_bs=20), 256) == (1, 2, 4, 8, 16, 20)
    assert caplog.text == ""
    assert graph_sizes(replace(args, cuda_graph_bs=(32, 1, 512)), 256) == (1, 32)
    assert "nothing is captured for 512, as at most 256 requests run at once" in caplog.text
    assert graph_sizes(replace(args, disable_cuda_graph=True), 256) == ()
    ran: list[GraphKey] = []
    cache = GraphCache((1, 4, 6), ran.append, torch.device("cpu"))
    one, four, six = GraphKey(1), GraphKey(4), GraphKey(6)
    assert cache.keys == [one, four, six]
    expected_keys = [None, one, four, four, four, six, six, None, None]
    assert [cache.bucket(rows) for rows in range(9)] == expected_keys
    assert cache.bucket(2, verifies=True) is None
    cache.run(four)
    assert ran == [four]


def test_buckets_of_steps_with_drafts():
    """Rows of a verify step beyond what attention fuses need no graph of their own; larger ones
    than without drafts serve ranks without drafts, too."""
    plain = graph_sizes(ServerArgs(), 40)
    verify = verify_graph_sizes(plain, 40, 20)
    assert plain == (1, 2, 4, 8, 16, 24, 32, 40) and verify == (*plain, 48, 56, 60)
    assert verify_graph_sizes(plain, 40, 0) == verify_graph_sizes((), 40, 20) == ()
    assert verify_graph_sizes((4,), 40, 40) == (4, 8)
    cache = GraphCache(plain, print, torch.device("cpu"), verify)
    assert cache.sizes == verify
    assert sorted(key.rows for key in cache.keys if key.verifies) == [*plain[:-1], 48, 56, 60]
    found = [cache.bucket(rows) for rows in (3, 33, 41, 60)]
    assert found == [GraphKey(4), GraphKey(40), GraphKey(48, True), GraphKey(60, True)]
    drafted = [cache.bucket(rows, verifies=True) for rows in (3, 32, 33, 41, 61)]
    wanted = [GraphKey(4, True), GraphKey(32, True), GraphKey(40), GraphKey(48, True), None]
    assert drafted == wanted and all(key in cache.keys for key in wanted if key is not None)
    both = GraphCache(plain, print, torch.device("cpu"), verify, schedules_of("tbo"))
    assert both.bucket(3, overlap=Overlap.TBO) == GraphKey(4, overlap=Overlap.TBO) in both.keys
    assert both.bucket(41, overlap=Overlap.TBO) is None
    assert not any(key.verifies for key in both.keys if key.overlap == Overlap.TBO)


def test_the_slot_of_a_token_is_the_row_of_its_request():
    future = FutureTokens(3, torch.device("cpu"))

    def take(key: int, row_no: int, token: int = 5, **params: Any) -> tuple[int, int]:
        found = future.slots_for(
            StepPlan([PlanItem(key, [token], 0, row_no, sample=row(1, **params))])
        )
        return int(found.numbers[0]), int(found.paths[0])

    assert take(10, 0) == take(10, 0, FUTURE) == (0, SamplingPath.GREEDY)
    assert take(11, 2, temperature=1.0) == take(11, 2, FUTURE) == (2, SamplingPath.DRAW)
    with pytest.raises(ValueError, match="request 12 continues from a token that no in-flight"):
        take(12, 2, FUTURE)
    # A chunk that does not sample has the row all the same: its former owner must take it again.
    future.slots_for(StepPlan([PlanItem(12, [5, 6], 0, 2)]))
    assert future.owner(2) == NOBODY
    assert take(11, 2, temperature=1.0) == (2, SamplingPath.DRAW)
    assert take(12, 2, min_new_tokens=2) == (2, SamplingPath.ADJUSTED) and future.owner(2) == 12
    # No step continues from a token that is sampled together with drafts.
    verified = PlanItem(10, [5, 6], 0, 0, sample=row(1, temperature=1.0), num_drafts=1)
    found = future.slots_for(StepPlan([verified, PlanItem(12, [FUTURE], 0, 2)]))
    assert found.numbers.tolist() == [future.padding, 2] == [3, 2]
    assert found.paths.tolist() == [SamplingPath.DRAW, SamplingPath.ADJUSTED]
    with pytest.raises(ValueError, match=r"request 10 continues from a token .* without drafts"):
        take(10, 0, FUTURE)
    future.clear()
    with pytest.raises(ValueError, match="request 12"):
        take(12, 2, FUTURE)


@pytest.mark.parametrize(
    ("params", "path"),
    [
        ({}, SamplingPath.GREEDY),
        ({"temperature": 1.0, "top_k": 1}, SamplingPath.GREEDY),
        ({"temperature": 1.0}, SamplingPath.DRAW),
        ({"temperature": 1.0, "min_p": 0.1, "top_k": 9}, SamplingPath.DRAW),
        ({"return_logprob": True}, SamplingPath.HOST),
        ({"presence_penalty": 0.1}, SamplingPath.ADJUSTED),
        ({"logit_bias": {1: 2.0}, "temperature": 1.0}, SamplingPath.ADJUSTED),
        ({"min_new_tokens": 1}, SamplingPath.ADJUSTED),
        ({"presence_penalty": 0.1, "return_logprob": True}, SamplingPath.HOST),
        ({"regex": "a+"}, SamplingPath.HOST),
    ],
)
def test_sampling_paths(params: dict[str, Any], path: SamplingPath):
    assert SamplingPath.of(row(1, **params)) is path


def test_drawn_tokens_are_the_samplers():
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(0))
    rows = [row(n, temperature=1.0, top_k=50) for n in range(6)]
    assert draw_rows(logits, rows).tolist() == [sample(logits, rows).token_ids, [0] * 6]
    assert greedy_rows(logits)[0].tolist() == logits.argmax(-1).tolist()
    logits[2] = torch.nan
    tokens, broken = draw_rows(logits, rows).tolist()
    assert broken == [0, 0, 1, 0, 0, 0] == greedy_rows(logits)[1].tolist()
    kept = [n for n in range(6) if n != 2]
    expected = sample(logits[kept], [rows[n] for n in kept]).token_ids
    assert [tokens[n] for n in kept] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_the_code_of_a_gpu_by_its_twins(family: str, monkeypatch: pytest.MonkeyPatch):
    """All that a GPU runs but its kernels, on CPU tensors: attention, experts and samplers are
    those of a GPU, whose twins compute here."""
    cpu = arguments(family)
    plain = ModelRunner(cpu)
    expected, served = plainly(plain, 6), serve(plain, cpu, seed=8)
    monkeypatch.setattr(
        "moesaic.engine.runner.model_runner.compute_device", lambda *_: torch.device("cpu")
    )
    args = replace(cpu, device="cuda")
    runner = asynchronous(args)
    assert runner.moe.resolved.device == "cuda"
    assert ahead(runner, 6) == expected
    assert [job[:3] for job in serve(runner, args, seed=8)] == [job[:3] for job in served]
    assert ahead(asynchronous(replace(args, disable_cuda_graph=True)), 6) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_give_what_launches_give(family: str, monkeypatch: pytest.MonkeyPatch):
    """On a GPU: captured, kernel by kernel, and with tokens that the host does not know."""
    args = arguments(family, device="cuda", dtype="float32")
    captured = asynchronous(args)
    assert steps_of(captured).graphs.sizes == (1, 2, 4, 6)
    ran: list[GraphKey] = []
    monkeypatch.setattr(steps_of(captured).graphs, "_body", ran.append)
    for key in steps_of(captured).graphs.keys:
        steps_of(captured).graphs.run(key)
    launched = asynchronous(replace(args, disable_cuda_graph=True))
    expected = plainly(launched, 6)
    assert ahead(captured, 6) == expected
    assert ahead(launched, 6) == expected
    assert ahead(captured, 6) == expected
    assert [job[:3] for job in serve(captured, args, 8)] == [
        job[:3] for job in serve(launched, args, 8)
    ]
    assert ran == [], "sizes that were not captured"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_that_start_early_change_no_bit(family: str, monkeypatch: pytest.MonkeyPatch):
    """All of a step, in the type that all kernels are made for: with five rows, two and one."""
    launch = import_module("moesaic.kernels.triton.launch")  # needs Triton
    args = arguments(family, device="cuda", dtype="bfloat16")
    found = []
    for early in (True, False):
        if not early:
            monkeypatch.setattr(launch, "_launch_on", lambda device: launch.OFF)
        runner = asynchronous(args)
        for count in (5, 2, 1):
            tokens = ahead(runner, 6, count)
            found.append((tokens, steps_of(runner).graph_batch.logits_BV[:count].clone()))
    for on, off in zip(found[:3], found[3:], strict=True):
        assert on[0] == off[0] and torch.equal(on[1], off[1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_large_shape_fits_and_answers():
    """Random weights of the whole model, the cache that is left, all buckets."""
    with Engine(
        model_path="shape:qwen3-30b-a3b",
        load_format="dummy",
        device="cuda",
        context_length=2048,
        cuda_graph_bs=[1, 8, 64],
    ) as engine:
        ids = [[n * 31 % 150_000 + k for k in range(100)] for n in range(40)]
        params = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
        answers = engine.generate(input_ids=ids, sampling_params=params)
    assert [len(answer["output_ids"]) for answer in answers] == [16] * 40
    assert len({tuple(answer["output_ids"]) for answer in answers}) > 20


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.timeout(300)
def test_graphs_of_thousands_of_tokens_change_no_answer():
    """Few layers of a large shape, in deterministic mode: kernels that are wrong only for many rows
    show. A request decodes meanwhile, so that steps have prompts and a token."""
    params = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    sizes = ((4097,), (5000,), (8192,), (700,) * 12, (1, 8190), (3000, 3000, 2447))
    found = []
    for disable in (False, True):
        with Engine(
            model_path="shape:qwen3-30b-a3b",
            load_format="dummy",
            device="cuda",
            context_length=16_384,
            json_model_override_args='{"num_hidden_layers": 3}',
            enable_deterministic_inference=True,
            disable_radix_cache=True,
            disable_prefill_cuda_graph=disable,
            max_step_ms=0.0,
        ) as engine:
            decoding = {**params, "max_new_tokens": 200}
            stream = engine.generate(input_ids=[1, 2, 3], sampling_params=decoding, stream=True)
            next(iter(stream))
            for lengths in sizes:
                ids = [[(7 * n + 31 * k) % 150_000 for k in range(n)] for n in lengths]
                told = engine.generate(input_ids=ids, sampling_params=params)
                found.append([answer["output_ids"] for answer in told])
            found.append(list(stream)[-1]["output_ids"])
    half = len(found) // 2
    assert found[:half] == found[half:]


class Replays:
    """In the place of a graph: notes what is replayed."""

    def __init__(self, key: GraphKey, replayed: list[GraphKey]) -> None:
        self.key, self.replayed = key, replayed

    def replay(self) -> None:
        self.replayed.append(self.key)


def test_dropped_graphs_are_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second step that needs one; not if there is no memory left."""
    ran: list[GraphKey] = []
    replayed: list[GraphKey] = []
    errors: list[Exception] = []

    def capture(key: GraphKey, stream: object, pool: object) -> Replays:
        if errors:
            raise errors.pop()
        return Replays(key, replayed)

    for name in ("Stream", "graph_pool_handle", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: object())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 1))
    one, four = GraphKey(1), GraphKey(4)
    cache = GraphCache((1, 4), ran.append, torch.device("cpu"))
    monkeypatch.setattr(cache, "_warm_up", lambda key, stream: None)
    monkeypatch.setattr(cache, "_capture", capture)
    cache.capture(None)
    cache.run(four)
    assert (ran, replayed) == ([], [four])
    for _ in range(2):  # also before all are captured again
        ran.clear(), replayed.clear()
        cache.drop()
        for key in (four, four, four, one):
            cache.run(key)
        assert (ran, replayed) == ([four, one], [four, four])
    errors.append(WindowAborted("a peer failed"))
    with pytest.raises(WindowAborted):
        cache.run(one)
    cache.drop()
    ran.clear(), replayed.clear()
    errors.append(torch.OutOfMemoryError("CUDA out of memory"))
    for key in (four, four, four, one, one):
        cache.run(key)
    assert (ran, replayed) == ([four, four, four, one], [one])
    # A rank that returns has none at first.
    late = GraphCache((1, 4), ran.append, torch.device("cpu"))
    monkeypatch.setattr(late, "_capture", capture)
    late.postpone(policy_of("off", (Overlap.OFF,)))
    ran.clear(), replayed.clear()
    for key in (four, one, four, one, four):
        late.run(key)
    assert (ran, replayed) == ([four, one], [four, one, four])


def test_a_graph_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(key: GraphKey, stream: object, pool: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 1))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    cache = GraphCache((1, 4), lambda key: None, torch.device("cpu"))
    monkeypatch.setattr(cache, "_warm_up", lambda key, stream: None)
    monkeypatch.setattr(cache, "_capture", full)
    with pytest.raises(ValueError, match=r"of 4 rows does not fit.*--mem-fraction-static"):
        cache.capture(None)
