"""Penalties, biases and least lengths on the device: the tokens of the host's sampler, with steps
that run ahead, retraction, aborts and failed steps."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from moesaic.config import ServerArgs
from moesaic.core.request import Request
from moesaic.core.sampling import SamplingParams
from moesaic.engine.runner.device_penalties import DevicePenalties
from moesaic.engine.runner.future_tokens import FutureTokens, SamplingPath, TokenSlots
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.engine.runner.pinned import PinnedRing
from moesaic.engine.runner.row_results import sampled_rows
from moesaic.engine.runner.steps import AsynchronousSteps
from moesaic.engine.sampling.adjust import adjust
from moesaic.engine.sampling.sampler import SampleRow
from moesaic.engine.sampling.token_history import TokenHistory
from moesaic.engine.schedule.plan import FUTURE_TOKEN, PlanItem, StepPlan
from moesaic.engine.worker.local_core import LocalCore
from tests.e2e.test_overlap import EOS, FLAGS, Case, draw_cases, make_core, serve

pytestmark = pytest.mark.timeout(300)
Served = list[tuple[Request, str]]
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.9, "top_p": 0.8, "frequency_penalty": 0.7, "presence_penalty": 0.2},
    {"temperature": 0.0, "frequency_penalty": -0.4, "logit_bias": dict.fromkeys(range(40), 0.5)},
    {"temperature": 1.0, "min_new_tokens": 6, "logit_bias": {EOS: 30.0}},
    {"temperature": 0.0, "min_new_tokens": 3, "stop_token_ids": tuple(range(97, 123))},
    {"temperature": 0.8},
    {"temperature": 0.0},
]


def adjusted_cases(seed: int) -> list[Case]:
    chance = random.Random(seed)
    return [
        replace(
            case,
            params=SamplingParams(**chance.choice(ASKED)),
            max_new_tokens=max(case.max_new_tokens, 6),
            return_logprob=chance.random() < 0.15,
        )
        for case in draw_cases(chance, poison=False)
    ]


def check_tokens(cases: list[Case], expected: Served, found: Served) -> None:
    for case, (one, _), (other, _) in zip(cases, expected, found, strict=True):
        if case.abort_after is None:
            assert other.output_ids == one.output_ids
            assert other.finish_reason == one.finish_reason
        else:
            shorter = min(len(one.output_ids), len(other.output_ids))
            assert other.output_ids[:shorter] == one.output_ids[:shorter]


def on_device(args: ServerArgs) -> ModelRunner:
    return ModelRunner(args, asynchronous=True)


def penalties_of(core: LocalCore) -> DevicePenalties:
    assert isinstance(core.runner.steps, AsynchronousSteps)
    found = core.runner.steps._penalties
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("flags", "off"), [("plain", False), ("few pages", False), ("few pages", True)]
)
def test_tokens_are_those_of_the_host(flags: str, off: bool) -> None:
    host = make_core(FLAGS[flags], ModelRunner)
    device = make_core({**FLAGS[flags], "disable_overlap_schedule": off}, on_device)
    assert device.runner.overlaps is not off and not host.runner.overlaps
    for seed in range(2):
        cases = adjusted_cases(seed)
        expected = serve(host, cases, 1000 * seed)
        check_tokens(cases, expected, serve(device, cases, 1000 * seed))
    assert device.planner.scheduler.num_retractions > 0 or flags != "few pages"
    assert len(penalties_of(device)._known) <= 12 and not device.planner._histories


def test_a_failed_step_loses_no_count() -> None:
    """Steps fail at their logits, when their tokens are counted already."""
    cases = [
        Case([97 + n, 98, 99], SamplingParams(**ASKED[n]), 12, False, 0, 0, None) for n in range(5)
    ]
    flags = {"page_size": 4}
    expected = serve(make_core(flags, ModelRunner), cases, 0)
    device = make_core({**flags, "disable_cuda_graph": True}, on_device)
    logits, calls = device.runner.model.logits, 0

    def fail_sometimes(*given: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls in (4, 9):
            raise ZeroDivisionError("made up")
        return logits(*given)

    device.runner.model.logits = fail_sometimes  # type: ignore[method-assign]
    check_tokens(cases, expected, serve(device, cases, 0))
    assert calls > 12 and device.planner.metrics.counts.failed_steps == 2


VOCAB = 300
PENALISED = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=0.25)


class Answers:
    """Requests whose tokens are counted by hand, without a model."""

    def __init__(self, requests: int) -> None:
        self.uploads = PinnedRing(torch.device("cpu"), 16, 1.0)
        self.future = FutureTokens(4, torch.device("cpu"))
        self.penalties = DevicePenalties(requests, VOCAB, self.uploads)
        self.histories: dict[int, TokenHistory] = {}

    def start(self, number: int, params: SamplingParams, prompt: list[int]) -> None:
        self.histories[number] = TokenHistory(params, frozenset([3]), [*prompt], len(prompt))

    def check(self, number: int, drafts: tuple[int, ...] = (), future: int | None = None) -> None:
        """Adjusts the rows of one request; `future`: its newest token, on the device alone."""
        history = self.histories[number]
        ids, prompt = history.ids, history.ids[: history.prompt_len]
        answer = [*ids[history.prompt_len :], *([] if future is None else [future])]
        newest = ids[-1] if future is None else FUTURE_TOKEN
        given = (history.params, 0, len(prompt) + len(answer), prompt)
        sample = SampleRow(*given, history.outputs(), frozenset([3]))
        item = PlanItem(number, [newest, *drafts], 0, 0, sample=sample, num_drafts=len(drafts))
        self.future.store(torch.tensor([1]), torch.tensor([-1 if future is None else future]))
        slots = TokenSlots(np.array([1]), np.array([SamplingPath.ADJUSTED]))
        plan = StepPlan([item])
        self.penalties.count(plan, slots, self.future)
        right = [
            SampleRow(*given, [*answer, *drafts[:n]], frozenset([3]))
            for n in range(len(drafts) + 1)
        ]
        logits = torch.randn(len(right), VOCAB)
        found = logits.clone()
        self.penalties.adjust(found, plan, sampled_rows(plan))
        assert torch.equal(found, adjust(logits, right)) and not torch.equal(found, logits)


def test_more_requests_than_rows() -> None:
    work = Answers(2)
    for number in range(3):
        work.start(number, PENALISED, [number, 7, 7])
    for turn in range(4):
        for number in (0, 1, 2, 1):
            work.check(number)
            work.histories[number].ids.append(10 + turn)
    assert sorted(work.penalties._known) == [1, 2]
    work.penalties.free([1, 2, 99])
    assert len(work.penalties._free) == 2


def test_drafts_and_tokens_that_the_host_does_not_know() -> None:
    work = Answers(1)
    work.start(5, PENALISED, [1, 2, 2])
    ids = work.histories[5].ids
    work.check(5)
    work.check(5, future=8)
    ids.append(8)
    work.check(5, future=8)
    ids.append(8)
    work.check(5, drafts=(8, 9, 1))
    ids += [8, 9, 4]  # two drafts were right
    work.check(5, drafts=(4,))
    ids.append(6)
    work.check(5, future=11)  # which a rollback takes back
    work.check(5, future=12)
    work.penalties.clear()
    work.check(5)


def test_edits_of_any_number() -> None:
    work = Answers(3)
    work.start(0, SamplingParams(logit_bias={7: 2.0}), [1])
    work.start(1, SamplingParams(logit_bias={n: 0.25 * n for n in range(1, 200)}), [1])
    stops = tuple(range(10, 900))
    work.start(2, SamplingParams(min_new_tokens=2, stop_token_ids=stops), [1])
    for number in (0, 1, 2, 0, 1):
        work.check(number)
    work.check(2, future=4)
    assert work.penalties._tables.edit_ids_SE.shape == (3, 398)


def test_no_end_before_the_least_length_with_drafts() -> None:
    work = Answers(1)
    work.start(0, SamplingParams(min_new_tokens=3, logit_bias={3: 1.0, 5: 1.0}), [1])
    work.check(0, drafts=(4, 4, 4, 4))
