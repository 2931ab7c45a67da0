"""Trees of draft models: the branches against a search through all of them, their tokens against
the draft model run over each path at once, and the answers against those without drafts."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from moesaic.core.draft_shape import DraftShape, draft_shapes
from moesaic.core.draft_tree import depths, path_to
from moesaic.core.request import Request
from moesaic.core.sampling import SamplingParams
from moesaic.core.speculation import Speculation
from moesaic.core.step import PREFILL
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.engine.sampling.sampler import SampleRow
from moesaic.engine.schedule.plan import ItemResult, PlanItem, StepPlan, StepResult
from moesaic.engine.speculate.controller import DraftController
from moesaic.engine.speculate.draft_branches import Branches, Frontier
from moesaic.engine.worker.local_core import LocalCore
from moesaic.layers.paged_cache import PagedCache, PageUpdate, SequenceSpan
from moesaic.layers.torch_attention import TorchAttention
from moesaic.models.tiny import materialise
from tests.unit.test_draft_model import (
    HOUSE,
    RANDOM,
    TIGHT,
    arguments,
    check_equal,
    count_accepted,
    greedy,
    requests,
    serve,
    without_drafts,
)

WORDS = 7


def successors(path: tuple[int, ...], sequence: int) -> np.ndarray:
    """The probabilities of what may follow."""
    return np.random.default_rng([sequence, *path]).dirichlet(np.ones(WORDS))


Path = tuple[int, ...]


def search(
    behind: Callable[[Path], Mapping[int, float]], topk: int, steps: int
) -> dict[Path, float]:
    """All paths that are found, and how likely they are (logarithms): those behind the `topk`
    likeliest of each length. `behind`: the `topk` likeliest tokens behind a path."""
    pool, open_paths = dict[Path, float](), {(): 0.0}
    for _ in range(steps):
        level = {
            (*path, token): likely + more
            for path, likely in open_paths.items()
            for token, more in behind(path).items()
        }
        pool |= level
        open_paths = dict(sorted(level.items(), key=lambda one: -one[1])[:topk])
    return pool


def likeliest(pool: Mapping[Path, float], most: int) -> list[Path]:
    return sorted(pool, key=lambda path: -pool[path])[:most]


def paths_of(drafts: Sequence[int], parents: Sequence[int]) -> list[Path]:
    """The tokens up to each draft of a tree."""
    rows = range(1, len(drafts) + 1)
    return [tuple(drafts[n - 1] for n in path_to(parents, row)) for row in rows]


@pytest.mark.parametrize(("topk", "steps", "most"), [(1, 3, 3), (2, 1, 2), (3, 3, 12), (4, 4, 30)])
def test_the_likeliest_branches_are_found(topk: int, steps: int, most: int) -> None:
    count = 3
    branches = Branches(count, topk)
    paths: list[list[tuple[int, ...]]] = [[()] for _ in range(count)]
    for _ in range(steps):
        likely = [[successors(path, n) for path in some] for n, some in enumerate(paths)]
        flat = np.array(likely).reshape(-1, WORDS)
        ids = np.argsort(-flat, axis=1)[:, :topk]
        tokens, before = branches.grow(ids, np.log(np.take_along_axis(flat, ids, 1)))
        paths = [
            [(*some[place], token) for token, place in zip(tokens[n], before[n], strict=True)]
            for n, some in enumerate(paths)
        ]
    for n, (tokens, parents) in enumerate(branches.best(most)):

        def behind(path: Path, sequence: int = n) -> dict[int, float]:
            likely = np.log(successors(path, sequence))
            return {token: likely[token] for token in np.argsort(-likely)[:topk].tolist()}

        assert paths_of(tokens, parents) == likeliest(search(behind, topk, steps), most)
    assert Branches(0, topk).best(most) == []


def test_rows_of_branches_are_behind_the_accepted_ones() -> None:
    # 0 - (1, 2 - 3), of which row 3 is accepted; and a chain of which the first draft is.
    plan = StepPlan(
        [
            PlanItem(0, [9, 1, 2, 3], 20, 0, num_drafts=3, parents=[0, 0, 2], draft_until=99),
            PlanItem(1, [8, 8], 5, 1),
            PlanItem(2, [7, 1, 2], 30, 2, num_drafts=2, draft_until=99),
        ],
        draft_steps=3,
    )
    for item in plan.items[::2]:
        item.sample = requests(RANDOM)[0].params  # it samples
    root = Frontier.of(plan, np.array([3, 7]), max_pages=10)
    assert root.slots_DK.tolist() == [[23], [31]] and root.position_D.tolist() == [22, 31]
    assert root.masks_DK.tolist() == [[-5], [-1]] and root.first_D.tolist() == [0, 20]
    first = root.behind(np.zeros((2, 2), np.int64))
    assert first.slots_DK.tolist() == [[24, 25], [32, 33]]
    # Slot 21 is hidden, and 24 from 25.
    assert first.masks_DK.tolist() == [[~0b1000, ~0b10010], [-1, -3]]
    second = first.behind(np.array([[1, 0], [0, 0]]))
    assert second.position_D.tolist() == [24, 33] and second.positions.tolist() == [24, 24, 33, 33]
    assert second.slots_DK.tolist() == [[26, 27], [34, 35]]
    for n, (hidden_26, hidden_27) in enumerate([({21, 24}, {21, 25, 26}), ({33}, {33, 34})]):
        for slot, mask, hidden in zip(
            second.slots_DK[n], second.masks_DK[n], (hidden_26, hidden_27), strict=True
        ):
            assert {int(slot) - bit for bit in range(64) if not int(mask) >> bit & 1} == hidden
    assert second.sequences.kv_lens_B.tolist() == [27, 28, 35, 36]


def tree_flags(topk: int = 3, steps: int = 3, tokens: int = 9, draft: str = "") -> dict[str, Any]:
    flags: dict[str, Any] = {
        "speculative_algorithm": "STANDALONE" if draft else "NEXTN",
        "speculative_num_steps": steps,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": tokens,
        "disable_speculative_adaptive": True,
    }
    if draft:
        flags["speculative_draft_model_path"] = materialise(draft)
    return flags


@cache
def runner(model: str, asynchronous: bool, tight: bool, flags: tuple[Any, ...]) -> ModelRunner:
    args = arguments(model, **(TIGHT if tight else {"page_size": 16}), **dict(flags))
    return ModelRunner(args, asynchronous=asynchronous)


def make_core(
    model: str, asynchronous: bool = False, tight: bool = True, **flags: Any
) -> LocalCore:
    made = runner(model, asynchronous, tight, tuple(flags.items()))
    return LocalCore(arguments(model, **(TIGHT if tight else {"page_size": 16}), **flags), made)


def note_moves(core: LocalCore, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    moved, move = list[Any](), core.runner.move
    monkeypatch.setattr(core.runner, "move", lambda slots: (moved.extend(slots), move(slots)))
    return moved


@pytest.mark.parametrize(
    ("model", "draft", "asynchronous"),
    [
        pytest.param(str(HOUSE), "", False, id="house synchronous"),
        pytest.param(RANDOM, "", True, id="random layer asynchronous"),
        pytest.param(
            RANDOM, RANDOM, False, id="the model itself synchronous", marks=pytest.mark.slow
        ),
        pytest.param(RANDOM, RANDOM, True, id="the model itself asynchronous"),
        pytest.param(
            RANDOM,
            "tiny:qwen3_moe,num_hidden_layers=1",
            False,
            id="another synchronous",
            marks=pytest.mark.slow,
        ),
        pytest.param(str(HOUSE), "", True, id="house asynchronous", marks=pytest.mark.slow),
    ],
)
def test_trees_change_no_answer(
    model: str, draft: str, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = without_drafts(model)
    core = make_core(model, asynchronous, **tree_flags(draft=draft))
    moved, counts = note_moves(core, monkeypatch), count_accepted(core)
    found = serve(core, requests(model))
    check_equal(found, expected)
    assert core.planner.metrics.counts.failed_steps == 0
    assert core.planner.scheduler.num_retractions > 0
    check_equal(serve(core, requests(model)), expected)  # from the prefix cache
    assert counts[0] > counts[1]
    if draft == RANDOM:
        assert len(moved) > 10, "sampled tokens are on other branches than the first"


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_shapes_that_change_at_any_step_change_no_answer(
    asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No drafts, chains and trees, each made behind any other: also proposals that were made with
    another shape than they are verified with."""
    expected = without_drafts(RANDOM)
    core = make_core(RANDOM, asynchronous, **tree_flags(draft=RANDOM))
    shapes = draft_shapes(Speculation("STANDALONE", 3, 9, topk=3, breadth=3), True)
    controller = core.planner.drafts.controller = DraftController(shapes, adaptive=False)
    chance = random.Random(4)
    moved, counts, seen = note_moves(core, monkeypatch), count_accepted(core), set[DraftShape]()
    observe = core.planner.drafts.observe

    def noted(step: Any, *given: Any) -> None:
        seen.add(step.drafting)
        for item in step.items:
            drafts, shape = len(item.drafts), step.drafting
            assert drafts <= shape.drafts and (not item.parents or shape.is_tree)
            assert not item.parents or max(depths(item.parents)) <= shape.steps
        observe(step, *given)
        controller.chosen = chance.randrange(len(shapes))

    core.planner.drafts.observe = noted
    for _ in range(2):
        check_equal(serve(core, requests(RANDOM)), expected)
    assert core.planner.metrics.counts.failed_steps == 0
    assert counts[1] > 60 and len(moved) > 3
    assert len(seen) >= 8 and {shape.branches for shape in seen} == {0, 1, 3}


def test_the_second_choice_is_right() -> None:
    """The target itself makes the drafts: at random its likeliest token is often not the one. A
    tree of as many levels as the chain accepts more a step. Greedily the chain is always right, and
    a tree in which it is not likely enough is cut."""
    lengths = []
    for flags in (tree_flags(1, 3, 4, RANDOM), tree_flags(4, 3, 14, RANDOM)):
        core = make_core(RANDOM, tight=False, **flags)
        for sampling in ({"temperature": 0.0}, {"top_k": 3}):
            params = SamplingParams(**sampling, ignore_eos=True)
            served = [Request(str(n), [n, 5, 6], params, n, 40, n) for n in range(6)]
            before = core.planner.num_steps
            serve(core, served)
            lengths.append(6 * 40 / (core.planner.num_steps - before))
    chain_greedy, chain, tree_greedy, tree = lengths
    assert chain_greedy > 6 * 3 and tree_greedy > 6 * 2
    assert tree > 1.3 * chain, (tree, chain)


@torch.inference_mode()
def most_likely(core: LocalCore, ids: list[int], topk: int) -> dict[int, float]:
    """What the draft model says behind these tokens, run over them at once."""
    net = core.runner.draft.model.net
    pages = -(-len(ids) // 16)
    cache = PagedCache(core.runner.draft.model.cache, pages, 16, torch.float32)
    span = SequenceSpan(0, len(ids), len(ids), range(1, pages + 1))
    given = torch.tensor(ids), torch.arange(len(ids)), TorchAttention(cache, [span]), PREFILL
    likely, found = net.logits(net(*given)[-1:]).float().log_softmax(-1)[0].topk(topk)
    return dict(zip(found.tolist(), likely.tolist(), strict=True))


def test_branches_are_those_of_the_model_over_each_path() -> None:
    """Also behind steps that accepted another branch than the first."""
    topk, steps, most = 3, 3, 8
    core = make_core(RANDOM, tight=False, **tree_flags(topk, steps, most + 1, RANDOM))
    params = SamplingParams(temperature=1.0, ignore_eos=True)
    request = Request("a", [5, 6, 7], params, 3, 24, 0)
    seen: dict[int, tuple[list[int], list[int]]] = {}

    def note(_: int) -> None:
        seen[len(request.token_ids)] = request.drafts, request.draft_parents

    serve(core, [request], note)
    checked = 0
    for length, (drafts, parents) in seen.items():
        if not drafts or length > 20:
            continue
        tokens = request.token_ids[:length]
        pool = search(lambda path: most_likely(core, [*tokens, *path], topk), topk, steps)  # noqa: B023
        want, found = likeliest(pool, most), paths_of(drafts, parents)
        assert len(found) == most
        assert [pool[path] for path in found] == pytest.approx(
            [pool[path] for path in want], abs=1e-3
        )
        checked += 1
    assert checked > 3


@torch.inference_mode()
def test_rows_that_the_host_samples_are_stored_where_their_tree_has_them() -> None:
    """In a step without drafts, as one that looks for a request that breaks it, with a tree of the
    step before. The cache is that of a step whose tokens are all known at once."""
    core = make_core(RANDOM, asynchronous=True, **tree_flags())
    runner, draft = core.runner, core.runner.draft
    params, tokens = SamplingParams(ignore_eos=True), [7, 6, 8, 9]
    item = PlanItem(0, [9, 6, 7, 8], 21, 0, num_drafts=3, parents=[0, 0, 2])
    item.sample = SampleRow(params, 1, 22)
    plan = StepPlan([item])
    runner.page_table.write([PageUpdate(0, 0, list(range(1, 11)))])
    hidden_TH = torch.randn(4, draft.model.hidden_size)
    stored = []
    for on_host in ([], [2, 3]):
        draft.clear(range(draft.cache.keys.shape[1]))
        known = [0 if n in on_host else token for n, token in enumerate(tokens)]
        found_2R = torch.tensor([known, [0] * 4])
        rest = draft.begin_store(plan, hidden_TH, found_2R, on_host)
        assert (rest is not None) == bool(on_host)
        if rest is not None:  # the last draft of the tree is accepted
            rest(StepResult([ItemResult(token_ids=[7, 8, 9])]))
        stored.append(draft.cache.keys.clone())
    written = stored[0].abs().sum((0, 3, 4)).flatten().nonzero()[:, 0]
    assert written.tolist() == [4 + 21, 4 + 22, 4 + 23, 4 + 24]
    torch.testing.assert_close(*stored, atol=1e-5, rtol=0)


def test_branches_stay_within_the_context() -> None:
    """Behind the last position of the context there are no rotations, and pages may end later."""
    answers, params = list[list[int]](), SamplingParams(temperature=0.0, ignore_eos=True)
    for flags in ({}, tree_flags(2, 4, 6, RANDOM)):
        args = arguments(RANDOM, page_size=16, context_length=50, **flags)
        core = LocalCore(args, ModelRunner(args, asynchronous=False))
        (request,) = serve(core, [Request("0", [5, 6, 7, 8, 9], params, 0, 45, 0)])
        answers.append(request.output_ids)
        assert core.planner.metrics.counts.failed_steps == 0
    assert answers[0] == answers[1] and len(answers[0]) == 45


def test_a_step_fails_before_it_has_moved_accepted_drafts() -> None:
    """The draft model computes them anew, too: the target's likeliest token is the first draft."""
    core = make_core(RANDOM, tight=False, **tree_flags(2, 3, 6, RANDOM))
    begin, apply, moving, firsts = core.runner.begin, core.planner.apply, [0], list[bool]()

    def failing(plan: StepPlan, *given: Any) -> Any:
        moving[0] += bool(plan.moves)
        if plan.moves and moving[0] % 4 == 2:
            raise ZeroDivisionError
        return begin(plan, *given)

    def noted(step: Any, result: Any) -> None:
        for item, found in zip(step.items, result.items, strict=True):
            firsts.extend([item.drafts[0] == found.token_ids[0]] if item.drafts else [])
        apply(step, result)

    core.runner.begin, core.planner.apply = failing, noted
    try:
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        served = serve(core, [Request(str(n), [n, 5, 6, 7], params, 0, 40, n) for n in range(6)])
    finally:
        core.runner.begin = begin
    assert not any(request.failed for request in served)
    assert core.planner.metrics.counts.failed_steps > 1 and len(firsts) > 40 and all(firsts)


def test_no_entry_is_read_that_was_not_written() -> None:
    core = make_core(str(HOUSE), tight=False, **tree_flags(2, 2, 5))
    for part in (core.runner.draft.cache.keys, core.runner.draft.cache.values):
        part.fill_(math.nan)
    counts = count_accepted(core)
    before = core.planner.num_steps
    first = serve(core, [greedy(number) for number in range(8)])
    assert counts[1] > 60 and core.planner.num_steps - before < 24
    again = serve(core, [greedy(number) for number in range(8)])
    assert [one.output_ids for one in again] == [one.output_ids for one in first]
