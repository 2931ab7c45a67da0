"""A GPU of made-up times behind the real planner and step loop, on a clock of its own: what drafts,
overlap and the controller are worth is then arithmetic.

The device computes steps one after the other. The host takes a while to plan and launch a step, and
to take its results; the device computes meanwhile if it has a step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from moesaic.config import ServerArgs, resolve
from moesaic.config.speculation import speculation_of
from moesaic.core.draft_shape import DraftShape
from moesaic.core.draft_tree import depths
from moesaic.core.request import Request
from moesaic.core.sampling import SamplingParams
from moesaic.engine.schedule.inflight import InflightStep
from moesaic.engine.schedule.plan import ItemResult, StepAgreement, StepPlan, StepResult
from moesaic.engine.schedule.request_state import RequestState
from moesaic.engine.schedule.step_budget import StepCost
from moesaic.engine.setup.moe_setup import StepLimits
from moesaic.engine.speculate.draft_branches import Branches
from moesaic.engine.speculate.drafters import Drafter
from moesaic.engine.worker.planner import Planner
from moesaic.engine.worker.stage import SingleStage
from moesaic.engine.worker.step_loop import StepLoop
from moesaic.observe.spans import Spans

Text = Callable[[int, int], int]
"""The token of a request at a position."""
# Milliseconds of Qwen3-30B's decode steps on an H200, by rows, without the host's part
# (bench/results/h200_speculation.json).
ROWS = (1, 2, 4, 8, 32, 128, 512, 1024)
MS = (2.4, 3.1, 3.95, 7.3, 13.0, 18.2, 27.0, 39.0)
# What the host takes for a step: before it is launched, and with its results.
LAUNCH_MS, RESULT_MS = 0.45, 0.2
VOCABULARY = 1 << 17


def step_ms(rows: int) -> float:
    return float(np.interp(np.log2(rows), np.log2(ROWS), MS))


@dataclass
class Clock:
    ms: float = 1e6


@dataclass
class Handle:
    device: TimedDevice
    result: StepResult
    end: float
    hidden_TH: None = None

    @property
    def is_done(self) -> bool:
        return self.device.clock.ms >= self.end

    def wait(self) -> StepResult:
        clock = self.device.clock
        clock.ms = max(clock.ms, self.end) + RESULT_MS
        return self.result


class TimedDevice:
    """Has the attributes of a ModelRunner that plan and loop read. `rate`: with which probability
    each draft of a model on the device is right, of which steps propose `steps`, each in
    `draft_ms`; without them there is none. Of a tree the n-th branch behind a token is right with
    the n-th of the `rates`."""

    overlaps, rebalancer, waited_ns, placement_version = True, None, 0, 0
    num_pages, max_running, vocab_size, context_length = 1 << 16, 256, VOCABULARY, 1 << 16
    eos_ids, num_experts, num_layers, top_k = frozenset[int](), 0, 0, 0
    limits = StepLimits(8192 + 256 + 2816, 256 + 2816, drafts=2816)
    prefill_wave = 64
    page_table = SimpleNamespace(max_pages=1 << 10)

    def __init__(
        self, clock: Clock, text: Text, steps: int, rates: Sequence[float], draft_ms: float
    ) -> None:
        self.clock, self.text, self.rates, self.draft_ms = clock, text, rates, draft_ms
        self.verifies_trees = False
        self.spans, self.free_at, self.chance = Spans(), 0.0, random.Random(7)
        self.draft = None
        if steps:
            facts = {"positions_ahead": steps - 1, "fills_gaps": False}
            self.draft = SimpleNamespace(num_steps=steps, **facts)

    def begin(self, plan: StepPlan, agreement: StepAgreement, x_TH: object) -> Handle:
        self.clock.ms += LAUNCH_MS
        took = step_ms(plan.num_tokens) + self.draft_ms * plan.draft_steps
        self.free_at = max(self.free_at, self.clock.ms) + took
        columns = plan.decodes.request_nos.tolist(), plan.decodes.first.tolist()
        decoded = [self.text(number, first + 1) for number, first in zip(*columns, strict=True)]
        items = [self._item(item, plan) for item in plan.items]
        return Handle(self, StepResult(items, b"", decoded), self.free_at)

    def _item(self, item: Any, plan: StepPlan) -> ItemResult:
        if item.sample is None:
            return ItemResult()
        first, number = item.first + len(item.token_ids) - item.num_drafts, item.request_no
        tokens, last = [self.text(number, first)], 0
        for row, draft in enumerate(item.drafts, 1):
            parent = item.parents[row - 1] if item.parents else row - 1
            if parent == last and draft == tokens[-1]:
                tokens.append(self.text(number, first + len(tokens)))
                last = row
        found = ItemResult(token_ids=tokens)
        if plan.draft_steps and item.draft_until:
            behind = range(first + len(tokens), first + len(tokens) + plan.draft_steps)
            if plan.draft_branches > 1:
                given = (self.rates, plan.draft_branches, 1 << 10, self.chance)
                found.drafts, found.parents = proposed_tree(self.text, number, behind, *given)
            else:
                given_chain = (self.rates[0], self.chance)
                found.drafts = proposed(self.text, number, behind, *given_chain)
        return found


def proposed_tree(
    text: Text,
    number: int,
    positions: range,
    rates: Sequence[float],
    topk: int,
    most: int,
    chance: random.Random,
) -> tuple[list[int], list[int]]:
    """The likeliest branches, where the n-th token behind each is as likely as the n-th rate."""
    likely = np.log(np.maximum(np.array(rates[:topk]), 1e-9))
    branches, count = Branches(1, topk), 1
    right = [chance.choices(range(topk + 1), (*rates[:topk], 1 - sum(rates[:topk])))[0]]
    for _ in positions:
        branches.grow(np.tile(np.arange(topk), (count, 1)), np.tile(likely, (count, 1)))
        count = topk
        right.append(chance.choices(range(topk + 1), (*rates[:topk], 1 - sum(rates[:topk])))[0])
    ((choices, parents),) = branches.best(most)
    levels, drafts, on_path = depths(parents), list[int](), {0}
    for row, (choice, parent) in enumerate(zip(choices, parents, strict=True), 1):
        level = levels[row] - 1
        is_right = parent in on_path and choice == right[level]
        on_path |= {row} if is_right else set()
        token = text(number, positions[level])
        drafts.append(token if is_right else token ^ (1 + choice))
    return drafts, parents


def proposed(
    text: Text, number: int, positions: range, rate: float, chance: random.Random
) -> list[int]:
    """Tokens that are right with a probability each, up to the first wrong one."""
    tokens = [text(number, position) for position in positions]
    wrong = next((n for n in range(len(tokens)) if chance.random() >= rate), len(tokens))
    return [token ^ (n >= wrong) for n, token in enumerate(tokens)]


@dataclass
class Rate:
    """A drafter whose tokens are right with this probability."""

    text: Text
    rate: float
    drafts: int
    chance: random.Random

    def propose(self, requests: Sequence[Request], shape: DraftShape) -> None:
        for request in requests:
            behind = range(len(request.token_ids), len(request.token_ids) + self.drafts)
            given = (self.text, request.request_no, behind, self.rate, self.chance)
            request.drafts = proposed(*given)


class Group:
    """Plans for the loop, as LocalCore does."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner

    @property
    def step_cost(self) -> StepCost:
        return self.planner.scheduler.step_budget.cost

    def plan(self, parts: int) -> InflightStep:
        return self.planner.plan(parts)

    def apply(self, step: InflightStep, result: StepResult, seconds: float) -> None:
        self.planner.observe(step, result, seconds)
        self.planner.apply(step, result)


class Service:
    """A loop over one device; `flags` as of a server. The clock has to be that of `time`."""

    def __init__(
        self,
        clock: Clock,
        text: Text,
        drafter: Drafter | None = None,
        steps: int = 0,
        rate: float = 0.0,
        draft_ms: float = 0.0,
        rates: Sequence[float] = (),
        **flags: Any,
    ) -> None:
        given = {"model_path": "tiny:qwen3_moe", "page_size": 64, "decode_log_interval": 10**9}
        args: ServerArgs = resolve(ServerArgs.from_kwargs(**given, **flags))
        self.clock, self.text = clock, text
        self.device = TimedDevice(clock, text, steps, rates or (rate,), draft_ms)
        speculation = speculation_of(args)
        self.device.verifies_trees = speculation is not None and speculation.asks_for_trees
        self.planner = Planner(args, self.device, drafter=drafter)  # type: ignore[arg-type]
        stats = SimpleNamespace(count_step=lambda seconds: None)
        stage = SingleStage(self.planner)
        group = Group(self.planner)
        self.loop = StepLoop(self.device, stage, group, stats)  # type: ignore[arg-type]
        self.requests = list[Request]()

    def open(self, batch: int, prompt: int = 64) -> None:
        for _ in range(batch):
            number = len(self.requests)
            tokens = [self.text(number, position) for position in range(prompt)]
            params = SamplingParams(temperature=0.0, ignore_eos=True)
            request = Request(str(number), tokens, params, number, 60_000, number)
            self.requests.append(request)
            self.planner.add(RequestState(request, None, lambda progress: None))

    def run(self, ms: float) -> float:
        """Tokens a millisecond."""
        begin, tokens = self.clock.ms, self._tokens
        while self.clock.ms < begin + ms:
            self.loop.step()
        assert self.planner.metrics.counts.failed_steps == 0
        return (self._tokens - tokens) / (self.clock.ms - begin)

    @property
    def _tokens(self) -> int:
        return sum(request.num_output for request in self.requests)
