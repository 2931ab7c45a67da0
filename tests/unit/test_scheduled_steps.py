"""The steps that a scheduler makes within its budget: which prompts share one with decodes."""

import pytest

from moesaic.engine.schedule.inflight import PlannedItem, work_of
from moesaic.engine.schedule.kv_manager import KVManager
from moesaic.engine.schedule.scheduler import Scheduler, SchedulerConfig
from moesaic.engine.schedule.step_budget import PromptBudget, StepBudget, StepWork, heaviest
from tests.unit.step_costs import Device, attending, carry_out, fitted
from tests.unit.test_kv_cache import make_request


def test_short_prompts_do_not_wait_for_the_end_of_a_long_one():
    """Chats decode, a long prompt is far ahead, and a short one comes."""
    device, cost = Device(), attending()
    for max_ms in (None, 30.0):
        scheduler = scheduler_of()
        scheduler.step_budget = StepBudget(max_ms, cost, wave=256)
        scheduler.add(make_request(list(range(10)), 400, 1))
        scheduler.add(make_request(list(range(100, 12100)), 50, 2))
        waited = None
        for step in range(60):
            if step == 30:
                scheduler.add(make_request(list(range(20000, 20100)), 50, 3))
            work = carry_out(scheduler)
            cost.observe(work, device.ms(work) + 0.0009 * work.reach)
            if waited is None and step >= 30 and len(scheduler.running) == 3:
                waited = step - 30
        assert waited is not None and waited <= 1


def test_short_prompts_of_a_prefill_instance_pass_a_long_one():
    scheduler = scheduler_of(max_prompts=8)
    scheduler.add(make_request(list(range(1000, 3000)), 1, 1))
    assert carry_out(scheduler).prompt_tokens == 512
    for number in (2, 3):
        scheduler.add(make_request(list(range(100 * number, 100 * number + 60)), 1, number))
    work = carry_out(scheduler)
    assert work.prompt_tokens == 384 + 120
    assert [request.num_output for request in scheduler.running] == [0, 1, 1]


class FixedBudget(StepBudget):
    def prompt_tokens(self, *_: object) -> PromptBudget:
        return PromptBudget(long_tokens=64, short_tokens=200, most_short=400)


def test_short_prompts_pass_a_long_one():
    """A prompt that takes many steps leaves room for short ones in each."""
    scheduler = scheduler_of()
    scheduler.step_budget = FixedBudget()
    scheduler.add(make_request(list(range(1000, 1401)), 50, 1))
    scheduler.add(make_request(list(range(100)), 50, 2))
    scheduler.add(make_request(list(range(2000, 2100)), 50, 3))
    assert run(scheduler, 8) == [(0, 200), (1, 128), *[(2, 64)] * 4, (2, 17), (3, 0)]


def test_a_long_prompt_is_not_passed_before_it_has_begun():
    scheduler = scheduler_of()
    scheduler.step_budget = FixedBudget()
    for number, length in enumerate((150, 500, 100), 1):
        scheduler.add(make_request(list(range(1000 * number, 1000 * number + length)), 50, number))
    assert run(scheduler, 4) == [(0, 150), (1, 164), (2, 64), (2, 64)]


def test_the_work_of_a_step():
    long, short, one = (make_request(list(range(n)), 8, n) for n in (100, 10, 5))
    one.token_ids.append(1)
    one.num_computed, long.num_computed = 5, 40
    items = [PlannedItem.decoding(one, 5, 0), PlannedItem.of(long, 50), PlannedItem.of(short, 10)]
    pairs = sum(range(41, 91)) + sum(range(1, 11))
    assert work_of(items) == StepWork(1, 60, 6, pairs, 90)
    assert heaviest([work_of(items), StepWork(3, 5, 4, 0)]) == StepWork(3, 60, 6, pairs, 90)
    assert work_of([]) == StepWork()


def scheduler_of(**config: object) -> Scheduler:
    kv = KVManager(4096, 4, True, lambda pages: None)
    return Scheduler(SchedulerConfig(max_running=8, chunk_tokens=512, **config), kv)  # type: ignore[arg-type]


def run(scheduler: Scheduler, steps: int) -> list[tuple[int, int]]:
    """Decode and prompt tokens of each step; requests emit their tokens at once."""
    found = []
    for _ in range(steps):
        work = carry_out(scheduler)
        found.append((work.decode_tokens, work.prompt_tokens))
    return found


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, [(0, 100), (1, 512), (1, 88), (2, 0)]),
        # Ten milliseconds are less than the decodes take: the least chunk.
        ({"max_step_ms": 10.0}, [(0, 100), (1, 64), (1, 64), (1, 64)]),
        ({"max_step_ms": 10_000.0}, [(0, 100), (1, 512), (1, 88), (2, 0)]),
        ({"mixed": False}, [(0, 100), (0, 512), (0, 88), (2, 0)]),
    ],
    ids=str,
)
def test_steps_of_a_scheduler(config: dict[str, object], expected: list[tuple[int, int]]):
    scheduler = scheduler_of(**config)
    scheduler.add(make_request(list(range(100)), 50, 1))
    found = run(scheduler, 1)
    scheduler.add(make_request(list(range(1000, 1600)), 50, 2))
    assert found + run(scheduler, 3) == expected


def test_decodes_go_on_while_a_prompt_does_not_fit():
    kv = KVManager(40, 4, True, lambda pages: None)
    scheduler = Scheduler(SchedulerConfig(max_running=8, chunk_tokens=512, mixed=False), kv)
    scheduler.add(make_request(list(range(60)), 50, 1))
    assert run(scheduler, 1) == [(0, 60)]
    scheduler.add(make_request(list(range(1000, 1120)), 4, 2))
    assert run(scheduler, 3) == [(1, 0)] * 3


def test_prompts_are_bounded_also_if_the_decoding_requests_wait_for_their_token():
    scheduler = scheduler_of(max_step_ms=10.0)
    scheduler.add(make_request(list(range(100)), 50, 1))
    run(scheduler, 1)
    in_flight = scheduler.decode_table.plan(scheduler.schedule().rows)
    assert len(in_flight[1]) == 1
    scheduler.decode_table.begin(*in_flight)
    scheduler.add(make_request(list(range(1000, 1600)), 50, 2))
    work = work_of(scheduler.schedule().items)
    assert (work.decode_tokens, work.prompt_tokens) == (0, 64)


def test_the_attention_to_cached_tokens_counts_for_the_bound():
    """30 prompts of 64 new tokens each, behind 16,000 that are cached: all would take 86 ms."""
    device, shared = Device(), list(range(16_000))
    kv = KVManager(100_000, 4, True, lambda pages: None)
    scheduler = Scheduler(SchedulerConfig(max_running=64, chunk_tokens=8192), kv)
    scheduler.add(make_request(shared, 200, 1))
    for _ in range(4):
        carry_out(scheduler)
    kv.share(scheduler.running[0], len(shared))
    scheduler.step_budget = StepBudget(50.0, fitted(device))
    for number in range(30):
        new = [10**6 + 1000 * number + place for place in range(64)]
        scheduler.add(make_request([*shared, *new], 50, 10 + number))
    work = carry_out(scheduler)
    assert 35.0 < device.ms(work) < 50.0 and work.prompt_tokens % 64 == 0
    assert work.prompt_tokens > 500
