"""NGRAM's drafts change no answer: in any mix of requests, on all families, and on ranks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import pytest
import torch

from moesaic import Engine
from moesaic.config import ServerArgs
from moesaic.config.speculation import speculation_of
from moesaic.core.draft_shape import DraftShape, draft_shapes
from moesaic.core.request import Request
from moesaic.core.sampling import SamplingParams
from moesaic.engine.runner.graphs import GraphKey
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.engine.runner.steps import AsynchronousSteps
from moesaic.engine.schedule.request_state import RequestState
from moesaic.engine.speculate.controller import DraftController
from moesaic.engine.speculate.ngram import NgramDrafter
from moesaic.engine.worker.local_core import LocalCore
from moesaic.models.tiny import FAMILIES
from tests.ahead import AheadRunner
from tests.e2e.grid import arguments, model_path
from tests.e2e.test_overlap import FLAGS, POISON, compare, draw_cases, make_core, serve

NGRAM = {"speculative_algorithm": "NGRAM", "disable_speculative_adaptive": True}


class Moody(DraftController):
    """Turns drafts on and off at any step, and chooses among their shapes."""

    def __init__(self, shapes: Sequence[DraftShape]) -> None:
        super().__init__(shapes, adaptive=False)
        self._chance = random.Random(3)

    def observe_step(self, *given: Any) -> None:
        if self._chance.random() < 0.2:
            chance, most = self._chance, self.largest
            self.chosen = chance.choice((0, 0, 1 + chance.randrange(most), most, most))


def remember(core: LocalCore, served: list[tuple[Request, str]], chance: random.Random) -> None:
    """Adds what requests will answer to what drafts are looked for in, some of it wrong."""
    drafter = core.planner.drafts.drafter
    assert isinstance(drafter, NgramDrafter)
    for request, _ in served:
        for turn in range(3):
            tokens = [t + (chance.random() < 0.1) for t in request.token_ids]
            number = (1 + turn) * 10**6 + request.request_no
            drafter.index.begin(number, tokens, request.cache_namespace)
            drafter.index.extend(number, len(tokens))
            drafter.index.end(number)


def check_mixes(flags: str, poison: bool, overlaps: bool, seeds: range) -> tuple[int, int, int]:
    """Drafted and accepted tokens, and those of them that were not on the first branch."""

    def ahead(args: ServerArgs) -> AheadRunner:
        return AheadRunner(args, poison=POISON if poison else ())

    def plain(args: ServerArgs) -> AheadRunner:
        runner = ahead(args)
        runner.overlaps, runner.mode = False, "begin"
        return runner

    expecting = make_core(FLAGS[flags], plain)
    drafting = make_core(FLAGS[flags] | NGRAM, ahead if overlaps else plain)
    if overlaps:
        shapes = draft_shapes(speculation_of(drafting.args), drafting.runner.verifies_trees)
        assert any(shape.is_tree for shape in shapes)
        drafting.planner.drafts.controller = Moody(shapes)
    moved, move = [], drafting.runner.move
    drafting.runner.move = lambda slots: (moved.extend(slots), move(slots))
    for seed in seeds:
        cases = draw_cases(random.Random(seed), poison)
        expected = serve(expecting, cases, 1000 * seed)
        remember(drafting, expected, random.Random(seed))
        compare(cases, expected, serve(drafting, cases, 1000 * seed))
    counts = drafting.planner.metrics.counts
    return sum(counts.drafted_tokens), sum(counts.accepted_tokens), len(moved)


@pytest.mark.parametrize(("flags", "overlaps"), [("few pages", True), ("plain", False)])
def test_drafts_change_no_answer(flags: str, overlaps: bool) -> None:
    """Grammars, penalties, logprobs, stops, aborts and retraction; with overlap drafts come and go
    between steps that run ahead."""
    drafted, accepted, moved = check_mixes(flags, False, overlaps, range(4))
    assert drafted > accepted > 80 and moved > 5


def test_a_request_that_breaks_a_verify_step_ends_alone() -> None:
    drafted, accepted, _ = check_mixes("few at once", True, True, range(3))
    assert drafted >= accepted > 20


@pytest.mark.slow
@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("flags", FLAGS)
def test_drafts_change_no_answer_of_many_mixes(flags: str, overlaps: bool, poison: bool) -> None:
    check_mixes(flags, poison, overlaps, range(4, 30))


def repetitive(count: int) -> list[list[int]]:
    chance = random.Random(7)
    prompts = []
    for _ in range(count):
        loop = [chance.randrange(97, 123) for _ in range(chance.randrange(4, 9))]
        prompts.append(loop * 4 + loop[: chance.randrange(len(loop))])
    return prompts


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in ("gpt_oss", "deepseek_v3") else pytest.mark.slow)
        for family in FAMILIES
    ],
)
def test_greedy_answers_of_all_families(family: str) -> None:
    """Alone and eight at once, in chunks that cut the prompts."""
    flags: dict[str, Any] = {
        "model_path": f"tiny:{family}",
        "enable_deterministic_inference": True,
        "chunked_prefill_size": 24,
    }
    sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    found = []
    for more in ({}, NGRAM):
        with Engine(**flags, **more) as engine:
            prompts = repetitive(8)
            alone = engine.generate(input_ids=prompts[:1], sampling_params=sampling)
            found.append(alone + engine.generate(input_ids=prompts, sampling_params=sampling))
    plain, drafted = found
    assert [one["output_ids"] for one in drafted] == [one["output_ids"] for one in plain]
    assert any(one["meta_info"].get("spec_verify_ct", 0) for one in drafted)
    assert not any("spec_verify_ct" in one["meta_info"] for one in plain)


def test_repeated_text_is_accepted() -> None:
    """A greedy answer that comes back is drafted from the first time: eleven tokens a step."""
    core = make_core(NGRAM, AheadRunner)
    requests = []
    for number in range(2):
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        request = Request(str(number), [5, 6, 7, 8], params, 0, 48, number)
        core.add(RequestState(request, None, lambda progress: None))
        while core.has_work:
            core.step()
        requests.append(request)
    first, second = requests
    assert second.output_ids == first.output_ids
    verified, drafted, accepted = second.draft_counts
    assert verified > 0 and drafted >= accepted > 5 * verified


def test_the_second_choice_is_right() -> None:
    """What came last is always wrong, and what came before it is right: a chain has none of it."""
    accepted = {}
    for breadth in (1, 2):
        sizes = {f"speculative_ngram_{end}_bfs_breadth": breadth for end in ("min", "max")}
        core = make_core(NGRAM | sizes, AheadRunner)
        drafter = core.planner.drafts.drafter
        assert isinstance(drafter, NgramDrafter)
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        first, second = (Request(str(n), [5, 6, 7, 8], params, 0, 48, n) for n in range(2))
        for request in (first, second):
            core.add(RequestState(request, None, lambda progress: None))
            while core.has_work:
                core.step()
            # Each context goes on with another token than in the answer.
            tokens, number = request.token_ids, 10**6
            for stop in range(len(tokens) - 1, 2, -1):
                wrong = [*tokens[max(0, stop - 18) : stop], (tokens[stop] + 1) % 250, 251]
                drafter.index.begin(number + stop, wrong)
                drafter.index.extend(number + stop, len(wrong))
        assert second.output_ids == first.output_ids
        accepted[breadth] = second.draft_counts
    (verified, _, right), (fewer, _, more) = accepted[1], accepted[2]
    assert right < 10 and more > 20 and fewer < verified / 2, accepted


SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 0.0, "min_new_tokens": 9, "logit_bias": {7: 1.5}},
]


def asynchronous_answers(flags: dict[str, Any]) -> tuple[list[list[int]], set[GraphKey], LocalCore]:
    """Of the steps of a GPU, kernel by kernel by their twins: the second time that requests ask;
    and the graphs that they used."""
    core = make_core(flags, partial(ModelRunner, asynchronous=True))
    steps, used, served = core.runner.steps, set[GraphKey](), list[list[int]]()
    assert isinstance(steps, AsynchronousSteps)
    body = steps.graphs._body
    steps.graphs._body = lambda key: (used.add(key), body(key))[1]
    for turn in range(2):
        made = []
        for number, prompt in enumerate(repetitive(8)):
            params = SamplingParams(**SAMPLED[number % 4], ignore_eos=True)
            given = (prompt, params, number, 20, 8 * turn + number)
            made.append(Request(str(given[-1]), *given, return_logprob=number == 5))
            core.add(RequestState(made[-1], None, lambda progress: None))
        while core.has_work:
            core.step()
        served.append([request.output_ids for request in made])
    assert served[0] == served[1] and core.planner.metrics.counts.failed_steps == 0
    return served[1], used, core


@pytest.mark.parametrize("flags", [{}, {"max_total_tokens": 160, "page_size": 4}], ids=str)
def test_the_steps_of_a_gpu_verify_in_graphs(flags: dict[str, Any]) -> None:
    plain, keys, _ = asynchronous_answers(flags)
    assert not any(key.verifies for key in keys)
    drafted, keys, core = asynchronous_answers(flags | NGRAM)
    assert drafted == plain
    assert any(key.verifies for key in keys) and any(key.rows > 8 for key in keys)
    counts = core.planner.metrics.counts
    assert sum(counts.accepted_tokens) > 40
    limits = core.runner.limits
    assert limits.drafts == 64 * 11 and limits.decode_tokens == 64 * 12


RANKS = ("qwen3_moe --tp 2 --enable-dp-attention --dp 2 --moe-a2a-backend deepep",)
MORE_RANKS = (
    "gpt_oss --tp 2 --ep 2",
    "deepseek_v3 --tp 4 --enable-dp-attention --dp 2 --moe-a2a-backend deepep",
    "mixtral --tp 2 --pp 2",
    "qwen2_moe --tp 4 --enable-dp-attention --dp 4 --moe-a2a-backend mooncake",
)


def repeated_answers(flags: dict[str, Any]) -> list[dict[str, Any]]:
    """Half of them greedy, the others drawn; the second time, when the first is drafted from."""
    sampling = [
        {"temperature": 0.3 * (n % 2), "max_new_tokens": 24, "ignore_eos": True, "sampling_seed": n}
        for n in range(8)
    ]
    given = {"enable_deterministic_inference": True, **flags}
    with Engine(**given) as engine:
        first, second = (
            engine.generate(input_ids=repetitive(8), sampling_params=sampling) for _ in range(2)
        )
    assert [one["output_ids"] for one in first] == [one["output_ids"] for one in second]
    assert isinstance(second, list)
    return second


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "line", [*RANKS, *(pytest.param(line, marks=pytest.mark.slow) for line in MORE_RANKS)]
)
def test_ranks_verify_as_one_rank_answers(line: str) -> None:
    plain = repeated_answers({"model_path": model_path(line.split()[0])})
    drafted = repeated_answers(asdict(arguments(line)) | NGRAM)
    assert [one["output_ids"] for one in drafted] == [one["output_ids"] for one in plain]
    metas = [one["meta_info"] for one in drafted]
    assert sum(meta.get("spec_accept_token_num", 0) for meta in metas) > 8
    for meta in metas:
        if "spec_verify_ct" in meta:
            accepted = meta["spec_accept_token_num"]
            assert meta["spec_accept_length"] == 1 + accepted / meta["spec_verify_ct"]
            assert meta["spec_accept_rate"] == accepted / meta["spec_draft_token_num"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_ngram_in_graphs_on_a_gpu() -> None:
    flags = {"model_path": "tiny:qwen3_moe", "device": "cuda"}
    plain, drafted = (repeated_answers(flags | more) for more in ({}, NGRAM))
    assert [one["output_ids"] for one in drafted] == [one["output_ids"] for one in plain]
    assert sum(one["meta_info"].get("spec_accept_token_num", 0) for one in drafted) > 8
