"""The cost of steps, and the prompt tokens that it allows."""

import random

import pytest

from moesaic.engine.schedule.step_budget import PromptBudget, StepBudget, StepCost, StepWork
from tests.unit.step_costs import Device, attending, fitted, some_work

MOST = 8192


def worst_error(cost: StepCost, device: Device) -> float:
    """As a share of the step, or of 20 ms if it takes less."""
    draw = random.Random(6)
    works = [some_work(draw) for _ in range(300)]
    return max(
        abs(cost.predict(work) - device.ms(work)) / max(20.0, device.ms(work)) for work in works
    )


@pytest.mark.parametrize(
    "device",
    [Device(), Device(step=1.5, decode=0.05), Device(120.0, 2.0, 0.8, 1e-4, 2e-5, 200.0)],
    ids=str,
)
def test_a_linear_cost_is_found(device: Device):
    assert worst_error(fitted(device), device) < 0.03
    assert worst_error(fitted(device, noise=0.1), device) < 0.1


def test_outliers_hardly_count():
    """One step in fifty takes fifty times as long, which doubles the mean."""
    assert worst_error(fitted(Device(), outliers=0.02), Device()) < 0.3


def test_another_speed_is_learned():
    cost, slower = fitted(Device()), Device(16.0, 0.12, 0.025, 4e-5, 3e-6, 32.0)
    draw = random.Random(7)
    assert worst_error(cost, slower) > 0.4
    for _ in range(300):
        work = some_work(draw)
        cost.observe(work, slower.ms(work))
    assert worst_error(cost, slower) < 0.1


def test_without_steps_costs_are_high():
    work = StepWork(64, 1024 - 64, 65536, 10**6)
    assert StepCost().predict(work) == pytest.approx(20 + 50 + 5 + 4)
    assert StepCost().predict(StepWork(64, 0, 65536, 0)) == pytest.approx(8 + 2 + 3)


def test_steps_that_all_have_prompts_correct_the_decodes():
    """The defaults say 50 ms for 256 decode tokens, so with a bound of 40 no prompt fits."""
    device, budget = Device(), StepBudget(40.0)
    decodes = StepWork(256, 0, 256 * 800, 0)
    chunks = []
    for _ in range(300):
        chunks.append(budget.prompt_tokens(MOST, decodes, [(0, 20000)], 1).long_tokens)
        work = decodes.with_prompt(0, chunks[-1])
        budget.cost.observe(work, device.ms(work))
    assert chunks[0] == 64
    assert chunks[-1] > 400 and device.ms(decodes.with_prompt(0, chunks[-1])) < 41


def test_chunks_fill_the_bound_by_what_they_cost():
    device = Device()
    cost, decodes = fitted(device), StepWork(64, 0, 64 * 1000, 0)
    budget = StepBudget(50.0, cost)
    chunks = []
    for first in (0, 8192, 16384, 65536):
        chunk = budget.prompt_tokens(MOST, decodes, [(first, 100_000)], 1).long_tokens
        chunks.append(chunk)
        assert chunk % 64 == 0
        assert device.ms(decodes.with_prompt(first, chunk)) <= 50 * 1.01
        # The first chunk is capped by the rate of large steps, which attend to more.
        assert device.ms(decodes.with_prompt(first, chunk + 64)) > 50 * (0.99 if first else 0.85)
    assert chunks == sorted(chunks, reverse=True) and chunks[0] > 2 * chunks[-1]


ALL = PromptBudget(MOST, MOST)
CLOSED_LOOPS = [
    (256, Device()),
    (128, Device()),
    (256, Device(4.0, 0.05, 0.0085, 1.4e-5, 1.2e-6, 9.0)),
]


def test_short_prompts_share_a_step():
    budget = StepBudget(50.0, fitted(Device()))
    decodes = StepWork(64, 0, 64 * 1000, 0)
    assert budget.prompt_tokens(MOST, decodes, [(0, 200)] * 9, 9).long_tokens >= 1800
    many = budget.prompt_tokens(MOST, decodes, [(0, 200)] * 100, 100)
    # Short prompts attend to little, so more of their tokens fit than of one long prompt.
    assert (
        budget.prompt_tokens(MOST, decodes, [(8192, 20000)], 1).long_tokens
        < many.long_tokens
        < MOST
    )
    assert many.long_tokens == many.short_tokens
    assert budget.prompt_tokens(1000, decodes, [(0, 200)] * 100, 100).short_tokens == 1000


@pytest.mark.parametrize("max_ms", [0.0, 50.0, None])
def test_a_prompt_is_whole_where_no_request_decodes(max_ms: float | None):
    budget = StepBudget(max_ms, fitted(Device()))
    assert budget.prompt_tokens(MOST, StepWork(), [(0, 20000)], 1) == ALL
    budget.others = StepWork(0, 4000, 0, 0)
    assert budget.prompt_tokens(MOST, StepWork(), [(0, 20000)], 1) == ALL
    # Requests of another group wait for the step, too.
    budget.others = StepWork(64, 4000, 64 * 1000, 0)
    alone = StepBudget(max_ms, budget.cost).prompt_tokens(
        MOST, StepWork(64, 0, 64 * 1000, 0), [(0, 20000)], 1
    )
    assert budget.prompt_tokens(MOST, StepWork(), [(0, 20000)], 1) == alone
    assert (alone == ALL) == (max_ms == 0)


def test_bounds():
    """Multiples of what the decodes take; more where many prompts wait for each of them."""
    device = Device(8.0, 0.06, 0.0125, 2e-5, 1.5e-6, 9.0)
    cost, prompt = fitted(device), [(0, 700)] * 60
    many, one = StepWork(256, 0, 256 * 1000, 0), StepWork(1, 0, 1000, 0)
    auto = StepBudget(None, cost)
    for decodes, count, ms, times in (
        (many, 1, 9 + 256 * 0.0125 + 256 * 0.02, 3 + 1 / 256),
        (many, 128, 9 + 256 * 0.0125 + 256 * 0.02, 3.5),
        (one, 1, 8 + 0.06 + 0.02, 4.0),
    ):
        found = auto.prompt_tokens(MOST, decodes, prompt, count)
        long_ms = max(30, 2 * ms)
        long = StepBudget(long_ms, cost).prompt_tokens(MOST, decodes, prompt, count)
        assert (
            long.long_tokens == long.short_tokens
            and abs(found.long_tokens - long.long_tokens) <= 64
        )
        most = cost.most_tokens(times * ms) - decodes.decode_tokens
        short = min(found.long_tokens + (times * ms - long_ms) / 0.0125, most)
        assert found.long_tokens < found.short_tokens == pytest.approx(short, rel=0.03)
        assert StepBudget(0.0, cost).prompt_tokens(MOST, decodes, prompt, count) == ALL
    least = StepBudget(5.0, cost).prompt_tokens(MOST, many, prompt, 1)
    assert (least.long_tokens, least.short_tokens, least.multiple) == (64, 64, 64)
    quick = StepBudget(None, fitted(Device(1.0, 0.03, 0.01, 1e-5, 1e-6, 3.0)))
    found = quick.prompt_tokens(MOST, one, [(0, 200)] * 100, 100)
    assert 1500 < found.long_tokens < 2700 and found.short_tokens == found.long_tokens


def test_prompts_get_a_part_of_steps_that_cost_much_without_them():
    """A step with prompts takes 25 ms before the first of their tokens, one without them 8."""
    cost = fitted(Device(8.0, 0.06, 0.0125, 2e-5, 1.5e-6, 25.0))
    decodes, base = StepWork(4, 0, 4000, 0), 25 + 4 * 0.0125 + 0.08
    for count, times in ((0, 1.5), (2, 2.5), (4, 3.5), (8, 5.5), (1000, 5.5)):
        found = StepBudget(None, cost).prompt_tokens(MOST, decodes, [(0, 700)] * 60, count)
        long_ms = base + found.long_tokens * 0.0125
        assert long_ms == pytest.approx(1.5 * base, rel=0.04)
        short_ms = (found.short_tokens - found.long_tokens) * 0.0125 + 1.5 * base
        most = cost.most_tokens(times * base) - 4
        assert short_ms == pytest.approx(times * base, rel=0.01) or (
            found.short_tokens == pytest.approx(most, rel=0.02)
        )


def test_more_tokens_than_were_seen_cost_as_in_large_steps():
    """Up to some number of tokens a step takes as long as reading the weights does."""
    cost, decodes = StepCost(), StepWork(16, 0, 16 * 1000, 0)

    def observe(length: int) -> None:
        work = decodes.with_prompt(0, length)
        cost.observe(work, max(20.0, 0.012 * (length + 16)))

    assert cost.most_tokens(36.0) == 4096
    for _ in range(10):
        observe(8192)
    assert cost.most_tokens(36.0) == pytest.approx(3000, rel=0.01)
    for _ in range(100):
        observe(64)
    # Little by little it is tried whether more fit.
    assert 3000 < cost.most_tokens(36.0) < 4000
    found = StepBudget(36.0, cost).prompt_tokens(MOST, decodes, [(0, 200)] * 100, 100)
    assert 1500 < found.long_tokens == found.short_tokens <= cost.most_tokens(36.0) - 16


@pytest.mark.parametrize(("waiting", "bound"), [(4, 36.0), (16, 61.0)])
def test_a_burst_after_small_prompts_stays_within_the_bound(waiting: int, bound: float):
    """Small steps all take as long as reading the weights does, so that tokens seem free; when
    larger ones come, their time must not count as what every step takes."""
    cost, decodes = StepCost(), StepWork(16, 0, 16 * 500, 0)
    budget = StepBudget(None, cost)

    def run(prompt_tokens: int) -> float:
        work = decodes.with_prompt(0, prompt_tokens) if prompt_tokens else decodes
        tokens = work.decode_tokens + work.prompt_tokens
        ms = max(18.0, 0.012 * tokens) if prompt_tokens else 10.8
        cost.observe(work, ms)
        return ms

    for _ in range(10):
        run(8192)
    for _ in range(1000):
        run(0), run(96)
    times = [
        run(budget.prompt_tokens(MOST, decodes, [(0, 400)] * 100, waiting).short_tokens)
        for _ in range(40)
    ]
    assert max(times) < 1.1 * bound and times[-1] > 0.9 * bound


def test_a_first_step_that_took_long_is_forgotten():
    """It may have waited for a compilation, and says that no large step fits any more."""
    device, decodes = Device(), StepWork(64, 0, 64 * 1000, 0)
    budget = StepBudget(None)
    budget.cost.observe(StepWork().with_prompt(0, 8192), 5000.0)
    lengths = []
    for _ in range(3000):
        budget.cost.observe(decodes, device.ms(decodes))
        lengths.append(budget.prompt_tokens(MOST, decodes, [(0, 200)] * 30, 30).short_tokens)
        work = decodes.with_prompt(0, lengths[-1])
        budget.cost.observe(work, device.ms(work))
    assert lengths[0] < 1000 < 1500 < lengths[-1]


@pytest.mark.parametrize(("open_requests", "device"), CLOSED_LOOPS)
def test_a_service_that_starts_under_load_does_not_starve_prompts(
    open_requests: int, device: Device
):
    """Every step has prompts, and mostly as many: what these cost is hard to tell from what all
    steps cost. As many requests are open at any time, of 768 tokens and 96 in the answer."""
    draw, budget = random.Random(1), StepBudget(None)
    waiting, decoding = open_requests, list[int]()
    queued = []
    for _ in range(1500):
        decodes = StepWork(len(decoding), 0, len(decoding) * 800, 0)
        found = budget.prompt_tokens(MOST, decodes, [(0, 768)] * waiting, waiting)
        new = min(waiting, max(1, found.short_tokens // 768))
        work = decodes.with_prompt(0, 768 * new) if new else decodes
        if work.decode_tokens + work.prompt_tokens:
            budget.cost.observe(work, device.ms(work) * draw.uniform(0.97, 1.03))
        decoding = [left - 1 for left in decoding if left > 1] + [draw.randrange(64, 128)] * new
        waiting = open_requests - len(decoding)
        queued.append(waiting)
    assert sum(queued[-500:]) / 500 < open_requests / 3


def test_short_chunks_of_long_prompts_take_as_long_as_their_reach():
    cost, decodes = fitted(Device()), StepWork(16, 0, 16 * 1000, 0)
    for _ in range(200):
        for first in (0, 4096, 12288):
            for length in (64, 512):
                work = decodes.with_prompt(first, length)
                cost.observe(work, Device().ms(work) + 0.0005 * work.reach)
    assert cost.prompt_ms.reach == pytest.approx(0.0005, rel=0.1)
    work = decodes.with_prompt(8192, 256)
    expected = Device().ms(work) + 0.0005 * (8192 + 256)
    assert cost.predict(work) == pytest.approx(expected, rel=0.03)
    budget = StepBudget(expected, cost)
    assert abs(budget.prompt_tokens(MOST, decodes, [(8192, 9000)], 1).long_tokens - 256) <= 64


def test_short_prompts_may_take_more_than_long_ones():
    budget = PromptBudget(long_tokens=500, short_tokens=1200, most_short=2400)
    assert budget.length(600, 1801, begun=True) == 500
    assert budget.length(600, 1800, begun=True) == 600, "two steps are enough for all of it"
    assert budget.length(600, 9000, begun=False) == 600, "this one is"
    assert budget.length(2400, begun=False) == 1200
    assert budget.length(2401, begun=False) == 500
    budget.used = 400
    assert [budget.length(n, 9000, begun=True) for n in (50, 100, 900)] == [50, 100, 100]
    assert [budget.length(n, begun=False) for n in (50, 800, 2400, 2401)] == [50, 800, 800, 100]
    budget.used = 700
    assert [budget.length(n, begun=False) for n in (500, 501, 9000)] == [500, 500, 0]
    assert budget.length(1, 9000, begun=True) == 0


@pytest.mark.parametrize("wave", [512, 4096])
def test_chunks_far_into_a_prompt(wave: int):
    """At least as many tokens as are computed while the device attends to those before, up to a
    wave; more only in whole waves."""
    cost, decodes = attending(), StepWork(16, 0, 16 * 1000, 0)
    token_ms, attend_ms = cost.prompt_ms.token, cost.prompt_ms.reach + wave * cost.prompt_ms.pair
    for ms in (5.0, 28.0, 200.0):
        budget, plain = StepBudget(ms, cost, wave), StepBudget(ms, cost, 64)
        for computed in (64, 2048, 8192, 30000):
            prompt = [(computed, 100_000)]
            found = budget.prompt_tokens(MOST, decodes, prompt, 1).long_tokens
            bound = plain.prompt_tokens(MOST, decodes, prompt, 1).long_tokens
            least = min(wave, attend_ms * computed / token_ms)
            assert abs(found - max(least, bound)) <= (wave if found > wave else 64)
            assert found % 64 == 0 and (found < wave or computed < 4 * wave or found % wave == 0)


def test_a_long_prompt_leaves_room_for_short_ones():
    cost, decodes = attending(), StepWork(16, 0, 16 * 1000, 0)
    for most in (64, 100, 128, 512, 2048, MOST):
        for computed in (0, 64, 9000, 30000):
            for max_ms in (None, 5.0, 30.0):
                budget = StepBudget(max_ms, cost, wave=512)
                prompts = [(computed, 100_000), (0, 200)]
                found = budget.prompt_tokens(most, decodes, prompts, 2)
                length = found.length(100_000, computed, begun=computed > 0)
                assert 0 < length <= found.long_tokens <= found.short_tokens <= most
                found.used = length
                room = found.length(60, begun=False)
                assert room == (60 if most >= 124 else 0)
                assert found.length(200, begun=False) == 200 or most < 456


@pytest.mark.parametrize("max_ms", [0.0, None])
def test_short_prompts_have_a_part_of_steps_without_decodes(max_ms: float | None):
    """An instance that only computes prompts would serve a chat behind all of a long prompt."""
    budget = StepBudget(max_ms, fitted(Device()))

    def found(*prompts: tuple[int, int], most: int = MOST) -> tuple[int, int, int]:
        made = budget.prompt_tokens(most, StepWork(), prompts, len(prompts))
        return made.long_tokens, made.short_tokens, made.most_short

    assert found((0, 20_000), (0, 100)) == (8064, MOST, 2048)
    assert found((8064, 11_936), *[(0, 1000)] * 40) == (6144, MOST, 2048)
    # Nobody short is next, or the long prompt ends with this step.
    for prompts in ([(0, 20_000), (0, 3000), (0, 100)], [(16_000, MOST), (0, 100)], []):
        assert found(*prompts) == (MOST, MOST, 0)
    # Small chunks are not cut.
    assert found((0, 900), (0, 10), most=64) == (64, 64, 16)


def test_steps_of_one_size_keep_their_whole_cost():
    """Where the fit gives tokens more than their part of large steps, the rest of the step has what
    they have not."""
    cost, decodes = StepCost(), StepWork(64, 0, 64 * 1000, 0)
    large, usual = decodes.with_prompt(0, 4000), decodes.with_prompt(0, 1000)
    for work, ms in [(large, 56.0)] * 20 + [(usual, 40.0)] * 600:
        cost.observe(work, ms)
    token_ms = cost.prompt_ms.token
    assert token_ms < 0.9 * cost._mixed.coefficients[1], "the fit alone would give more"
    assert cost.without_tokens(decodes) + 1000 * token_ms == pytest.approx(40.0, rel=0.05)
