"""Steps that fail are taken back without a trace; the request to blame is found in few steps."""

import math
import random
from collections import deque

import pytest

from moesaic.comm.supervise.recall import MOST_IN_VAIN, Recalls
from moesaic.core.messages import Abandoned, Recall, Resume, StepFailed
from moesaic.core.request import Request
from moesaic.core.sampling import SamplingParams
from moesaic.engine.core import EngineCore
from moesaic.engine.jobs import Job
from moesaic.engine.plan import StepResult
from moesaic.engine.quarantine import Quarantine
from tests.unit.test_under_way import make_core, requests

FLAGS = [
    {},
    {"chunked_prefill_size": 24, "max_total_tokens": 160, "page_size": 4},
    {"disable_radix_cache": True, "max_running_requests": 3, "chunked_prefill_size": 16},
]


def serve(core: EngineCore, parts: int, chance: random.Random | None) -> tuple[list[Request], int]:
    """With `chance`, every now and then all that is under way is lost, and half of it not even
    begun: pages are full of NaN then."""
    served = requests()
    for request in served:
        core.add(Job(request, None, lambda progress: None))
    results: deque[StepResult] = deque()
    losses = 0
    while core.has_work:
        plan = core.plan(parts)
        lost = chance is not None and chance.random() < 0.35
        if plan.items and not (lost and chance is not None and chance.random() < 0.5):
            results.append(core.runner.step(plan))
        elif plan.clear:
            core.runner.cache.keys[:, plan.clear] = math.nan
            core.runner.cache.values[:, plan.clear] = math.nan
        if lost:
            core.retreat("lost", alone=False)
            results.clear()
            losses += 1
        elif results and (not plan.items or len(results) >= parts):
            core.apply(results.popleft())
    assert core.kv.num_used == 0 and core.num_suspects == 0
    return served, losses


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("parts", [1, 3])
def test_lost_steps_change_nothing(flags, parts):
    expected, _ = serve(make_core(**flags), 1, None)
    core, losses = make_core(**flags), 0
    for seed in range(2):
        found, lost = serve(core, parts, random.Random(seed))
        losses += lost
        for one, other in zip(expected, found, strict=True):
            assert other.output_ids == one.output_ids
            assert other.finish_reason == one.finish_reason
            assert len(other.input_logprobs) == len(one.input_logprobs)
            assert other.input_logprobs == pytest.approx(one.input_logprobs, abs=1e-4)
    assert losses > 5


def suspects(count: int, decoding: int) -> list[Request]:
    made = [Request(str(n), [1, 2], SamplingParams(), 0, 4, n) for n in range(count)]
    for request in made[:decoding]:
        request.token_ids.append(3)
        request.num_computed = 2
    return made


@pytest.mark.parametrize("count", [1, 2, 3, 7, 16, 64])
def test_the_guilty_one_is_found_in_few_steps(count):
    for decoding in {0, count // 2, count - 1}:
        everybody = suspects(count, decoding)
        for guilty in everybody:
            quarantine, failed, tried = Quarantine(), 1, set()
            found = quarantine.accuse(everybody, alone=True)
            steps = 0
            while quarantine:
                steps += 1
                chosen = quarantine.take()
                if guilty in chosen:
                    failed += 1
                    found = quarantine.accuse(chosen, alone=True)
                else:
                    tried |= set(chosen)
            assert found is guilty and tried == set(everybody) - {guilty}
            assert failed <= math.ceil(math.log2(count)) + 2
            assert steps <= 2 * (math.ceil(math.log2(count)) + 1)


def test_one_of_several_groups_is_accused_only_when_it_was_alone():
    quarantine, (request,) = Quarantine(), suspects(1, 0)
    assert quarantine.accuse([request], alone=False) is None
    assert quarantine.take() == [request] and not quarantine
    assert quarantine.accuse([request], alone=True) is request
    assert quarantine.accuse([], alone=True) is None and not quarantine


def test_ranks_resume_when_the_last_has_abandoned_its_step():
    recalls = Recalls(1, range(4, 8), [4, 6])
    assert recalls.begin(StepFailed(5, 0, "why")) == Recall(1, 1, "why")
    # Another rank failed in the same step.
    assert recalls.begin(StepFailed(4, 0, "also")) is None and recalls.under_way
    told = [Abandoned(6, 1, 30, 2), Abandoned(4, 1, 31), Abandoned(7, 1, 29)]
    assert [recalls.take(one) for one in told] == [None] * 3
    assert recalls.take(Abandoned(5, 0, 99)) is None  # of another generation
    assert recalls.take(Abandoned(5, 1, 31)) == Resume(1, 31, [0, 2])
    assert not recalls.under_way
    # A late word of the generation before calls nobody back.
    assert recalls.begin(StepFailed(7, 0, "late")) is None and recalls.generation == 1


def test_steps_that_fail_whoever_takes_part_are_given_up():
    recalls = Recalls(0, range(1), [0])
    for generation in range(MOST_IN_VAIN):
        recalls.begin(StepFailed(0, generation, "why"))
        recalls.take(Abandoned(0, generation + 1, 5))
        assert not recalls.is_hopeless
    recalls.note_progress()
    recalls.begin(StepFailed(0, MOST_IN_VAIN, "why"))
    assert recalls.in_vain == 1 and not recalls.is_hopeless
