"""What the tests of steps share: devices on which the cost of each step is known, and a step of a
scheduler."""

import random
from dataclasses import dataclass

from moesaic.engine.schedule.inflight import work_of
from moesaic.engine.schedule.scheduler import Scheduler
from moesaic.engine.schedule.step_budget import StepCost, StepWork


@dataclass(frozen=True)
class Device:
    """Milliseconds of a step with and without prompts, of each decode token without prompts, of
    each token beside some, of each held token and pair."""

    step: float = 8.0
    decode: float = 0.06
    token: float = 0.0125
    held: float = 2e-5
    pair: float = 1.5e-6
    mixed: float = 16.0

    def ms(self, work: StepWork) -> float:
        held = self.held * work.held
        if not work.prompt_tokens:
            return self.step + self.decode * work.decode_tokens + held
        tokens = work.decode_tokens + work.prompt_tokens
        return self.mixed + self.token * tokens + held + self.pair * work.pairs


def some_work(draw: random.Random) -> StepWork:
    rows = draw.choice([0, 1, 16, 64, 256])
    work = StepWork(rows, 0, sum(draw.randrange(100, 3000) for _ in range(rows)), 0)
    if not rows or draw.random() < 0.5:
        work = work.with_prompt(draw.choice([0, 0, 4096, 12288]), draw.randrange(64, 8192))
    return work


def fitted(device: Device, noise: float = 0.0, outliers: float = 0.0, steps: int = 600) -> StepCost:
    draw, cost = random.Random(5), StepCost()
    for _ in range(steps):
        work = some_work(draw)
        ms = device.ms(work) * draw.uniform(1 - noise, 1 + noise)
        cost.observe(work, ms * 50 if draw.random() < outliers else ms)
    return cost


def attending(device: Device = Device(), attend: float = 0.0009) -> StepCost:
    """The cost of a device on which a wave of 512 tokens attends in `attend` ms for each token."""
    cost, decodes = fitted(device), StepWork(16, 0, 16 * 1000, 0)
    for _ in range(200):
        for first in (0, 4096, 8192, 12288):
            for length in (64, 256, 512):
                work = decodes.with_prompt(first, length)
                cost.observe(work, device.ms(work) + attend * work.reach)
    return cost


def carry_out(scheduler: Scheduler) -> StepWork:
    """A step whose tokens are known at once."""
    schedule, table = scheduler.schedule(), scheduler.decode_table
    planned, decodes = table.plan(schedule.rows)
    table.begin(planned, decodes)
    table.end(planned, decodes)
    for request in planned.requests:
        request.token_ids.append(1)
    for item in schedule.items:
        item.begin()
        if item.samples:
            item.end(1)
            item.request.token_ids.append(1)
    return work_of(schedule.items, decodes.first)
