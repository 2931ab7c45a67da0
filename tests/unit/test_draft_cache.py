"""What a draft model knows behind steps without drafts: as much as if all steps had had some."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from moesaic.core.disagg import KVTarget, Room
from moesaic.core.draft_shape import chains
from moesaic.core.request import Request
from moesaic.core.sampling import SamplingParams
from moesaic.disagg.sender import KVSender
from moesaic.disagg.staging import StagedCaches
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.engine.runner.step_transfers import StepTransfers
from moesaic.engine.schedule.request_state import RequestState
from moesaic.engine.speculate.controller import DraftController
from moesaic.engine.worker.kv_share import kv_shares
from moesaic.engine.worker.local_core import LocalCore
from moesaic.models.tiny import materialise
from tests.server.serving import wait_until
from tests.unit.kv_instances import PROMPT, is_complete, outlets_of, receivers
from tests.unit.test_draft_model import (
    HOUSE,
    RANDOM,
    SCHEDULES,
    TIGHT,
    arguments,
    count_accepted,
    greedy,
    make_core,
    requests,
    serve,
)


class Turns(DraftController):
    """Steps without drafts, then steps with some, and so on."""

    def __init__(self, most: int, without: int, having: int) -> None:
        super().__init__(chains(most), adaptive=False)
        self._turns, self._step = (without, having), 0
        self.chosen = 0

    def observe_step(self, *given: Any) -> None:
        pass

    def turn(self) -> None:
        self._step = (self._step + 1) % sum(self._turns)
        self.chosen = self.largest if self._step >= self._turns[0] else 0


def take_turns(core: Any, without: int, having: int) -> None:
    controller, plan = Turns(3, without, having), core.planner.plan
    core.planner.drafts.controller = controller

    def turned(parts: int = 1) -> Any:
        controller.turn()
        return plan(parts)

    core.planner.plan = turned


def same_model(asynchronous: bool, **flags: Any) -> LocalCore:
    """Drafts are made by the target itself."""
    given = {
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": materialise(RANDOM),
        "speculative_num_steps": 3,
    }
    args = arguments(RANDOM, **flags, **given)
    return LocalCore(args, ModelRunner(args, asynchronous=asynchronous))


def mixed(first: int, count: int, prompt: int) -> list[Request]:
    """Every second prompt begins with the one before it."""
    found = []
    for number in range(count):
        tokens = [(number // 2 * 37 + place * 11) % 256 for place in range(prompt)]
        tokens += [number % 2 + 3] * (number % 2)
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        found.append(Request(str(number), tokens, params, 0, 24 + number, first + number))
    return found


@pytest.mark.parametrize(
    ("flags", "asynchronous"),
    [
        pytest.param({"page_size": 4}, False, id="roomy synchronous"),
        pytest.param(TIGHT, True, id="tight asynchronous"),
        pytest.param(TIGHT, False, id="tight synchronous", marks=pytest.mark.slow),
        pytest.param({"page_size": 4}, True, id="roomy asynchronous", marks=pytest.mark.slow),
    ],
)
def test_every_draft_of_the_target_itself_is_right(
    flags: dict[str, Any], asynchronous: bool
) -> None:
    """Also behind steps without drafts, of prompts that were computed in such steps, and of pages
    that come from ended requests."""
    core = same_model(asynchronous, **flags)
    for part in (core.runner.draft.cache.keys, core.runner.draft.cache.values):
        part[:, 1:] = math.nan
    counts = count_accepted(core)
    expected = [request.output_ids for request in serve(core, mixed(0, 6, 30))]
    assert counts[0] == counts[1] > 30
    for first, without, having in ((100, 7, 5), (200, 1, 2), (300, 11, 6)):
        take_turns(core, without, having)
        counts[:] = 0, 0
        found = serve(core, mixed(first, 6, 30))
        assert [request.output_ids for request in found] == expected
        assert counts[0] == counts[1] > 10, (without, having)
    assert core.planner.metrics.counts.failed_steps == 0
    assert core.planner.scheduler.num_cached_tokens > 200
    assert (core.planner.scheduler.num_retractions > 0) is (flags is TIGHT)


def test_a_long_gap_takes_several_steps() -> None:
    """No more tokens are computed in a step than there are buffers for, and no draft is proposed
    before all are there."""
    core, widest = same_model(False, page_size=4), 0
    take_turns(core, 4, 13)
    core.planner.drafts._most_tokens = 16
    counts, run = count_accepted(core), core.runner.draft.run

    def noted(plan: Any, agreement: Any, *given: Any) -> None:
        nonlocal widest
        run(plan, agreement, *given)
        assert agreement.extending == (plan.extending,)
        widest = max(widest, plan.extending)

    core.runner.draft.run = noted
    serve(core, mixed(0, 3, 60))
    assert counts[0] == counts[1] > 10 and widest == 16


@pytest.mark.parametrize(("draft", "layers"), [("NEXTN", [4]), ("STANDALONE", [5, 6, 7])])
def test_the_experts_of_draft_models_are_counted(draft: str, layers: list[int]) -> None:
    """Behind those of the target, in steps with drafts: each row goes to as many experts."""
    if draft == "NEXTN":
        core = make_core(str(HOUSE), 1, False, tight=False)
    else:
        flags = {"speculative_algorithm": draft, "speculative_draft_model_path": str(HOUSE)}
        args = arguments(str(HOUSE), speculative_num_steps=1, **flags)
        core = LocalCore(args, ModelRunner(args, asynchronous=False))
    core.runner.reset_statistics()
    take_turns(core, 3, 5)
    plan, rows, chained = core.planner.plan, [0], [0]

    def counted(parts: int = 1) -> Any:
        step = plan(parts)
        if step.plan.draft_steps:
            rows[0] += step.plan.extending
            chained[0] += step.plan.num_drafting
        return step

    core.planner.plan = counted
    serve(core, [greedy(number) for number in range(3)])
    stats = core.stats.stats()
    found = dict(zip(stats.layers, map(sum, stats.expert_tokens), strict=True))
    assert [layer for layer in found if layer >= core.runner.num_layers] == layers
    # A layer of the target makes a draft of the last row, another model one more row of it.
    passes = rows[0] + (draft == "STANDALONE") * chained[0]
    sparse = [layer for layer in layers if found[layer]]
    assert sparse and all(found[n] == core.runner.top_k * passes > 100 for n in sparse)


def test_a_failed_step_with_a_gap_is_repeated() -> None:
    core = same_model(True, page_size=4)
    take_turns(core, 6, 8)
    counts, forward, failures = count_accepted(core), core.runner.draft.model.forward, [0]

    def failing(rows: Any, *given: Any) -> Any:
        found = forward(rows, *given)
        if len(rows.positions_T) > 30 and failures[0] < 2:
            failures[0] += 1
            raise RuntimeError("it breaks")
        return found

    core.runner.draft.model.forward = failing
    found = serve(core, mixed(0, 3, 60))
    assert not any(request.failed for request in found)
    assert failures == [2] and core.planner.metrics.counts.failed_steps >= 2
    assert counts[0] == counts[1]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_the_layer_stores_the_rows_of_steps_without_drafts(asynchronous: bool) -> None:
    """Its cache is that of a run in which all steps have drafts, up to the last token."""
    held, answers = list[torch.Tensor](), list[list[int]]()
    for turns in ((0, 1), (5, 3)):
        core = make_core(str(HOUSE), 3, asynchronous, tight=False)
        core.planner.kv.flush()
        keys = core.runner.draft.cache.keys
        keys[:, 1:] = math.nan
        take_turns(core, *turns)
        request, pages = greedy(2), list[int]()

        def note(_: int, request: Request = request, pages: list[int] = pages) -> None:
            pages[:] = request.pages or pages

        serve(core, [request], note)
        answers.append(request.output_ids)
        count = len(request.token_ids) - 1
        held.append(keys[0, pages].flatten(0, 1)[: count - 1].clone())
    assert answers[0] == answers[1]
    torch.testing.assert_close(held[1], held[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("asynchronous", SCHEDULES)
def test_the_house_models_drafts_are_right_behind_steps_without(asynchronous: bool) -> None:
    core = make_core(str(HOUSE), 1, asynchronous)
    take_turns(core, 4, 3)
    counts = count_accepted(core)
    for _ in range(2):  # the second time from the prefix cache
        counts[:] = 0, 0
        serve(core, [greedy(number) for number in range(5)])
        assert counts[1] >= 0.95 * counts[0] > 10
    asked = [greedy(number) for number in range(5)]
    for request in asked[::2]:  # the host samples these
        request.return_logprob = True
    counts[:] = 0, 0
    serve(core, asked)
    assert counts[1] >= 0.95 * counts[0] > 10
    assert core.planner.metrics.counts.failed_steps == 0


def halves(core: LocalCore, tokens: int) -> tuple[list[Request], list[StagedCaches]]:
    """Requests whose prompts are computed by a core and sent, and what came of each."""
    asked, [share, draft] = requests(RANDOM), kv_shares(core.runner)
    with receivers([(share, draft)]) as ((receiver,), rooms):
        outlets = outlets_of(0, "shm")
        core.runner.transfers = StepTransfers(sender=KVSender([(share, draft)], 0, outlets))
        tickets = []
        for request in asked:
            request.max_new_tokens = tokens
            rooms.announce(request.request_no, Room(request.request_no, "127.0.0.1", 1), PROMPT)
            ticket = rooms.offer(request.request_no, 0, len(request.prompt_ids))
            request.kv_target = KVTarget(ticket, 0, len(request.prompt_ids), rooms._ranks)
            tickets.append(ticket)
        try:
            serve(core, asked)
        finally:
            core.runner.transfers = StepTransfers()  # others have the same runner
        wait_until(lambda: all(is_complete(receiver, ticket) for ticket in tickets), 20)
        return asked, [receiver.staged(ticket) for ticket in tickets]


@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
@pytest.mark.parametrize("asynchronous", SCHEDULES)
def test_another_instance_gets_the_cache_of_a_whole_run(asynchronous: bool, tight: bool) -> None:
    """Of all prompts, whoever samples the first token, which is in the last entry."""
    core = make_core(RANDOM, 2, tight=False)
    whole: dict[int, list[torch.Tensor]] = {}
    expected = requests(RANDOM)

    def note(number: int) -> None:
        for request in expected:
            if len(request.output_ids) > 1 and request.request_no not in whole and request.pages:
                slots = slots_of(request, core)
                parts = core.runner.draft.cache.keys, core.runner.draft.cache.values
                whole[request.request_no] = [part.flatten(1, 2)[:, slots] for part in parts]

    serve(core, expected, note)
    asked, staged = halves(make_core(RANDOM, 2, asynchronous, tight), 1)
    for request, other, found in zip(asked, expected, staged, strict=True):
        assert request.output_ids == other.output_ids[:1]
        parts = found.parts[1].keys_LTMD, found.parts[1].values_LTMD
        for part, wanted in zip(parts, whole[other.request_no], strict=True):
            torch.testing.assert_close(part, wanted, atol=1e-4, rtol=1e-4)


def slots_of(request: Request, core: LocalCore) -> torch.Tensor:
    """Of the prompt."""
    size = core.planner.kv.page_size
    pages = torch.tensor(request.pages)
    places = torch.arange(len(request.prompt_ids))
    return pages[places // size] * size + places % size


def test_a_core_that_others_continue_makes_no_drafts() -> None:
    core = make_core(RANDOM, 2, tight=False)
    plans, plan = [], core.planner.plan

    def noted(parts: int = 1) -> Any:
        step = plan(parts)
        plans.append(step.plan.draft_steps)
        return step

    core.planner.plan = noted  # type: ignore[method-assign]
    halves(core, 1)
    assert plans and not any(plans)


def test_no_step_has_drafts_while_a_rank_is_away() -> None:
    """Not even the first one, for which all groups had agreed on some before."""
    core, (request, *_) = make_core(RANDOM, 1, tight=False), requests(RANDOM)
    core.add(RequestState(request, None, lambda progress: None))
    core.step()
    drafts = core.planner.drafts
    for rests, steps in ((False, 1), (True, 0), (False, 1)):
        drafts.agreed, drafts.rests = 1, rests
        step = core.planner.plan()
        assert step.plan.draft_steps == steps and step.plan.has_work
        core.planner.rollback([step], failed=False)
    core.abort(request.request_no)
