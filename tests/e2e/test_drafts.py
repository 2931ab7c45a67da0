"""Steps that verify drafts give the tokens of steps of one token; and pipeline stages, by either
kind of step."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from moesaic.comm.mesh import Mesh
from moesaic.core.sampling import SamplingParams
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.engine.runner.row_results import NOT_FINITE
from moesaic.engine.sampling.sampler import SampleRow
from moesaic.engine.schedule.plan import (
    FUTURE_TOKEN,
    ItemResult,
    PlanItem,
    PromptScore,
    StepAgreement,
    StepPlan,
    StepResult,
)
from moesaic.engine.setup.rank_context import RankContext
from tests.e2e.test_gpu_runner import KINDS, Sequences, arguments, prompts

pytestmark = pytest.mark.timeout(300)
EOS = 7
PAGES = 12
NEW_TOKENS = 14
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 20, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    {"temperature": 0.0, "repetition_penalty": 1.4},
    {"temperature": 1.1, "min_new_tokens": 6, "logit_bias": {EOS: 30.0}},
    {"temperature": 0.7, "min_p": 0.05},
]


@dataclass
class Sequence:
    """A request, its tokens so far, and how many of them are computed."""

    number: int
    prompt: list[int]
    params: SamplingParams
    return_logprob: bool
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[Any] = field(default_factory=list)
    computed: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def pages(self) -> list[int]:
        return list(range(1 + self.number * PAGES, 1 + (self.number + 1) * PAGES))

    def item(self, drafts: list[int], length: int = 100) -> PlanItem:
        """The next `length` tokens; if these are all, the last one samples and `drafts` follow."""
        ids = self.tokens[self.computed : self.computed + length]
        stop = self.computed + len(ids)
        if stop < len(self.tokens):
            return PlanItem(self.number, ids, self.computed, self.number, self.pages)
        sample = SampleRow(
            self.params,
            seed=3 + self.number,
            position=stop,
            prompt_ids=self.prompt if self.params.penalised else (),
            output_ids=list(self.output) if self.params.looks_back else (),
            eos_ids=frozenset({EOS}),
            return_logprob=self.return_logprob,
            top_logprobs_num=2,
        )
        given = (ids + drafts, self.computed, self.number, self.pages)
        return PlanItem(self.number, *given, sample=sample, num_drafts=len(drafts))

    def extend(self, item: PlanItem, result: ItemResult) -> None:
        assert not result.broken
        self.computed = item.first + len(item.token_ids) - item.num_drafts
        if item.sample is None:
            assert not result.token_ids
            return
        assert len(result.token_ids) == len(result.logprobs) or not self.return_logprob
        self.computed += len(result.token_ids) - 1
        self.output += result.token_ids
        self.logprobs += result.logprobs
        self.tops += [[token for _, token in top] for top in result.top_logprobs]


def sequences() -> list[Sequence]:
    chance = random.Random(11)
    return [
        Sequence(
            n, [chance.randrange(250) for _ in range(3 + 2 * n)], SamplingParams(**given), asks
        )
        for n, (given, asks) in enumerate([(one, asks) for one in PARAMS for asks in (False, True)])
    ]


def clear(work: list[Sequence]) -> list[int]:
    return [page for one in work for page in one.pages]


def one_at_a_time(runner: ModelRunner) -> list[Sequence]:
    work = sequences()
    for step in range(NEW_TOKENS):
        items = [one.item([]) for one in work]
        results = (
            runner.begin(StepPlan(items, clear(work) if step == 0 else [], step == 0)).wait().items
        )
        for one, item, result in zip(work, items, results, strict=True):
            one.extend(item, result)
    return work


def propose(one: Sequence, answer: list[int], chance: random.Random) -> list[int]:
    """Some of the tokens to come, of which one may be wrong, and tokens beyond it."""
    drafts = answer[len(one.output) : len(one.output) + chance.randrange(5)]
    if drafts and chance.random() < 0.5:
        place = chance.randrange(len(drafts))
        drafts[place] = (drafts[place] + 1 + chance.randrange(200)) % 250
    return drafts


def verified(
    runner: ModelRunner, answers: list[list[int]], seed: int
) -> tuple[list[Sequence], int]:
    """All requests by steps with drafts, beside others without and chunks of prompts; and how many
    drafts were accepted."""
    work, chance, accepted, pages = sequences(), random.Random(seed), 0, clear(sequences())
    while any(len(one.output) < NEW_TOKENS for one in work):
        open_work = [one for one in work if len(one.output) < NEW_TOKENS]
        chosen = [one for one in open_work if chance.random() < 0.8] or open_work[:1]
        items = [
            one.item(propose(one, answers[one.number], chance), chance.randrange(2, 9))
            for one in chosen
        ]
        prefill = any(one.computed < len(one.prompt) for one in chosen)
        results, pages = runner.begin(StepPlan(items, pages, prefill)).wait().items, []
        for one, item, result in zip(chosen, items, results, strict=True):
            one.extend(item, result)
            accepted += max(0, len(result.token_ids) - 1)
    return work, accepted


@pytest.fixture(scope="module")
def synchronous() -> ModelRunner:
    return runner_of(False)


def runner_of(asynchronous: bool, **changes: Any) -> ModelRunner:
    args = replace(
        arguments("qwen3_moe", enable_deterministic_inference=True, **changes),
        max_running_requests=len(PARAMS) * 2,
        max_total_tokens=len(PARAMS) * 2 * PAGES * 4,
    )
    return ModelRunner(args, asynchronous=asynchronous)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_drafts_change_no_token(synchronous: ModelRunner, asynchronous: bool) -> None:
    expected = one_at_a_time(synchronous)
    answers = [one.output for one in expected]
    assert len({tuple(answer) for answer in answers}) > 6
    assert EOS not in answers[8][:6] and answers[8][6] == EOS
    runner = runner_of(True) if asynchronous else synchronous
    for seed in range(3):
        found, accepted = verified(runner, answers, seed)
        assert accepted > 50
        for one, other in zip(expected, found, strict=True):
            assert other.output[:NEW_TOKENS] == one.output
            if one.return_logprob:
                assert other.logprobs[:NEW_TOKENS] == pytest.approx(one.logprobs, abs=1e-4)
                assert other.tops[:NEW_TOKENS] == one.tops
            else:
                assert other.logprobs == []


def test_drafts_beside_future_tokens(synchronous: ModelRunner) -> None:
    """One request continues from tokens that the host does not know while others verify; no request
    continues from a token that is sampled with drafts."""
    answers = [one.output for one in one_at_a_time(synchronous)]
    runner, work = runner_of(True), sequences()
    future, drafted = work[2], [work[4], work[6]]
    first = [one.item([]) for one in (future, *drafted)]
    in_flight = [runner.begin(StepPlan(first, clear(work), True))]

    def future_item(position: int) -> PlanItem:
        sample = SampleRow(future.params, seed=3 + future.number, position=position + 1)
        return PlanItem(future.number, [FUTURE_TOKEN], position, future.number, sample=sample)

    in_flight.append(runner.begin(StepPlan([future_item(len(future.prompt))], [])))
    results = in_flight.pop(0).wait().items
    for one, item, result in zip((future, *drafted), first, results, strict=True):
        one.extend(item, result)
    items = [one.item(answers[one.number][1:4]) for one in drafted]
    plan = StepPlan([items[0], future_item(len(future.prompt) + 1), items[1]], [])
    in_flight.append(runner.begin(plan))
    with pytest.raises(ValueError, match="request 4 continues from a token"):
        runner.begin(StepPlan([PlanItem(4, [FUTURE_TOKEN], 20, 4)], []))
    found = [step.wait().items for step in in_flight]
    assert found[0][0].token_ids == answers[2][1:2]
    assert [result.token_ids for result in found[1]] == [
        answers[4][1:5],
        answers[2][2:3],
        answers[6][1:5],
    ]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("number", [0, 2, 4, 1])
def test_rows_that_are_not_finite(
    synchronous: ModelRunner, asynchronous: bool, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first draft they fail the request; behind an accepted one the next step does, and
    behind a rejected one they are not looked at."""
    answer = one_at_a_time(synchronous)[number].output
    runner = runner_of(True) if asynchronous else synchronous
    logits = runner.model.logits

    def spoil(at: int, drafts: list[int]) -> ItemResult:
        work = sequences()[number]
        monkeypatch.setattr(runner.model, "logits", lambda *given: spoiled(logits(*given), at))
        found = runner.begin(StepPlan([work.item(drafts)], clear([work]), True)).wait().items[0]
        monkeypatch.undo()
        return found

    def spoiled(logits_RV: torch.Tensor, at: int) -> torch.Tensor:
        logits_RV[at] = torch.nan
        return logits_RV

    assert spoil(0, answer[:2]).broken == NOT_FINITE and not spoil(0, answer[:2]).token_ids
    accepted = spoil(2, answer[:3])
    assert accepted.token_ids == answer[:2] and not accepted.broken
    rejected = spoil(2, [answer[0], (answer[1] + 1) % 250, answer[2]])
    assert rejected.token_ids == answer[:2] and not rejected.broken


def test_scores_beside_drafts(synchronous: ModelRunner) -> None:
    """Logits of prompts come behind those of all sampled rows."""
    answers = [one.output for one in one_at_a_time(synchronous)]
    work = sequences()
    scored, drafted = work[1], work[3]
    targets = scored.prompt[1:]
    plans = []
    for drafts in ([], answers[3][:3]):
        first = scored.item([])
        first.score = PromptScore(0, targets, 2)
        plans.append(StepPlan([first, drafted.item(drafts)], clear(work), True))
    for runner in (synchronous, runner_of(True)):
        (plain, _), (found, other) = (runner.begin(plan).wait().items for plan in plans)
        assert found.input_logprobs == pytest.approx(plain.input_logprobs, abs=1e-4)
        assert len(found.input_logprobs) == len(targets)
        assert found.token_ids == plain.token_ids and other.token_ids == answers[3][:4]


def stages(asynchronous: bool, **changes: Any) -> list[ModelRunner]:
    mesh, args = Mesh(pp=2), arguments("qwen3_moe", **changes)
    contexts = [RankContext(mesh=mesh, place=mesh.place(rank)) for rank in range(2)]
    return [ModelRunner(args, ranks, asynchronous=asynchronous) for ranks in contexts]


def through_stages(runners: list[ModelRunner], plan: StepPlan) -> StepResult:
    rows = len(plan.logit_rows())
    agreement = StepAgreement(1, (plan.num_tokens,), (rows,), plan.prefill)
    first = runners[0].begin(plan, agreement)
    assert first.hidden_TH is not None and len(first.hidden_TH) == plan.num_tokens
    handed_on = first.hidden_TH.clone()
    last = runners[1].begin(plan, agreement, first.hidden_TH)
    runners[0].begin(plan, agreement)  # overwrites nothing that was handed on
    assert torch.equal(first.hidden_TH, handed_on)
    assert last.hidden_TH is None and first.wait().items == []
    return last.wait()


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_pipeline_stages(asynchronous: bool, graphs: bool) -> None:
    whole = ModelRunner(arguments("qwen3_moe"))
    runners = stages(asynchronous, disable_cuda_graph=not graphs)
    assert not any(runner.overlaps for runner in runners)
    assert [runner.samples for runner in runners] == [False, True]
    works = [Sequences(prompts(), KINDS, 8) for _ in range(2)]
    everyone = list(range(5))
    for step in range(5):
        results = []
        for work in works:
            lengths = [len(t) - c for t, c in zip(work.tokens, work.computed, strict=True)]
            items = [work.item(n, lengths[n]) for n in everyone]
            pages = [page for pages in work.pages for page in pages]
            plan = StepPlan(items, pages if step == 0 else [], step == 0)
            results.append(
                whole.begin(plan).wait() if work is works[0] else through_stages(runners, plan)
            )
        for work, result in zip(works, results, strict=True):
            work.take(everyone, result.items)
    assert works[0].tokens == works[1].tokens
