"""The distribution of answers that steps with drafts give, over many requests with the same prompt:
against products of what transformers' model and processors give, and with acceptance thresholds
against SGLang's rule written out over these. A chi-square test whose seeds are fixed.

Drafts are drawn from a distribution of their own, as a draft model that samples would; with
thresholds they follow from the tokens before them, so that what is right can be summed up."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.generation import logits_process as hf

from moesaic.config import ServerArgs, resolve
from moesaic.core.draft_shape import DraftShape
from moesaic.core.request import Request
from moesaic.core.sampling import SamplingParams
from moesaic.core.speculation import AcceptThresholds
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.engine.schedule.request_state import RequestState
from moesaic.engine.worker.local_core import LocalCore
from tests.oracle import Case, Oracle, build, load

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(1200)]

VOCABULARY, PROMPT = 6, [1, 4, 2]
# Tokens of an answer, and how many of them are compared: drafts are cut to what is left.
LENGTH, COMPARED = 6, 3
SIGNIFICANCE = 1e-3
# Cells that are expected less often are merged.
LEAST_EXPECTED = 10
PARAMS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 2.0},
    "top_k": {"temperature": 2.5, "top_k": 4},
    "top_p": {"temperature": 2.5, "top_p": 0.85},
    "all": {"temperature": 2.5, "top_k": 5, "top_p": 0.9},
}
CHAIN, TREE = (0, 1, 2), (0, 0, 0, 1, 2)
"""Parents of drafts."""
Tokens = tuple[int, ...]
Drafts = Callable[[Tokens], list[int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"vocab_size": VOCABULARY, "num_hidden_layers": 1}
    changes |= {"bos_token_id": None, "eos_token_id": None}
    return build(
        Case("statistics", "mixtral", changes, seed=3), tmp_path_factory.mktemp("statistics")
    )


@dataclass
class Proposing:
    """A drafter. `drafts`: of an answer so far."""

    parents: Sequence[int]
    drafts: Drafts

    def propose(self, requests: Sequence[Request], shape: DraftShape) -> None:
        for request in requests:
            request.drafts = self.drafts(tuple(request.output_ids))
            request.draft_parents = list(self.parents)


def siblings_differ(parents: Sequence[int], draw: Callable[[], int]) -> list[int]:
    """A draft for each parent."""
    found = list[int]()
    for row, parent in enumerate(parents):
        taken = {found[n] for n in range(row) if parents[n] == parent}
        found.append(next(token for token in iter(draw, None) if token not in taken))
    return found


def sampled_drafts(parents: Sequence[int]) -> Drafts:
    """From a distribution of their own."""
    chance, weights = random.Random(11), [5, 1, 3, 2, 4, 1]
    draw = lambda: chance.choices(range(VOCABULARY), weights)[0]  # noqa: E731
    return lambda output: siblings_differ(parents, draw)


def fixed_drafts(parents: Sequence[int]) -> Drafts:
    """The same behind the same tokens."""

    @cache
    def drafts(output: Tokens) -> list[int]:
        chance = random.Random(str(output))
        return siblings_differ(parents, lambda: chance.randrange(VOCABULARY))

    return lambda output: list(drafts(output))


class Target:
    """The model's distribution of the next token."""

    def __init__(self, folder: Path, params: dict[str, Any]) -> None:
        self._oracle, given = Oracle(load(folder)), params.get
        wanted = [
            (given("temperature"), hf.TemperatureLogitsWarper),
            (given("top_k"), hf.TopKLogitsWarper),
            (given("top_p"), hf.TopPLogitsWarper),
        ]
        self._processors = hf.LogitsProcessorList([kind(value) for value, kind in wanted if value])
        self._known = dict[Tokens, list[float]]()

    def __call__(self, output: Tokens) -> list[float]:
        if output not in self._known:
            ids = [*PROMPT, *output]
            logits_V = self._oracle.logits(ids)[-1].double()
            scores = self._processors(torch.tensor([ids]), logits_V[None])
            self._known[output] = scores.softmax(-1)[0].tolist()
        return self._known[output]


Chances = Iterator[tuple[Tokens, float]]


def without_drafts(target: Target, output: Tokens = (), chance: float = 1.0) -> Chances:
    if len(output) == COMPARED:
        yield output, chance
        return
    for token, share in enumerate(target(output)):
        if share:
            yield from without_drafts(target, (*output, token), chance * share)


def with_thresholds(
    target: Target,
    parents: Sequence[int],
    drafts: Drafts,
    thresholds: AcceptThresholds,
    output: Tokens = (),
    chance: float = 1.0,
    tree: Sequence[int] | None = None,
    row: int = 0,
) -> Chances:
    """`row`: that of the last token in the tree of the step; no `tree`: the next step's begins."""
    if len(output) == COMPARED:
        yield output, chance
        return
    if tree is None:  # the prompt's step has none
        tree = drafts(output)[: LENGTH - len(output) - 1] if output else []
    left, follow = list(target(output)), dict[int, tuple[float, int]]()
    reached = taken = 0.0
    for number, (draft, parent) in enumerate(zip(tree, parents, strict=False), 1):
        if parent != row:
            continue
        share, left[draft] = left[draft], 0.0
        reached = min(1.0, reached + share / thresholds.acc) if share else reached
        takes = reached - taken if share < thresholds.single else 1.0 - taken
        if share and takes > 0:
            follow[draft], taken = (takes, number), taken + takes
    for draft, (takes, number) in follow.items():
        given = (parents, drafts, thresholds, (*output, draft), chance * takes, tree, number)
        yield from with_thresholds(target, *given)
    total = sum(left)
    for token, share in enumerate(left):
        if share and 1 - taken > 1e-12:
            then = chance * (1 - taken) * share / total
            yield from with_thresholds(
                target, parents, drafts, thresholds, (*output, token), then, None
            )


def answers(core: LocalCore, params: dict[str, Any], number: int) -> Counter[Tokens]:
    """How often each beginning of an answer came, among the answers to `number` requests."""
    made, found = SamplingParams(**params, ignore_eos=True), Counter[Tokens]()
    open_requests, seeds = list[Request](), count(1)
    while found.total() < number:
        room = min(core.runner.max_running, number - found.total()) - len(open_requests)
        for seed, _ in zip(seeds, range(room), strict=False):
            request = Request(str(seed), PROMPT, made, seed * 2**20, LENGTH, seed)
            open_requests.append(request)
            core.add(RequestState(request, None, lambda progress: None))
        core.step()
        ended = [request for request in open_requests if request.finish_reason is not None]
        found.update(tuple(request.output_ids[:COMPARED]) for request in ended)
        open_requests = [request for request in open_requests if request.finish_reason is None]
    return found


def likelihood(found: Counter[Tokens], right: dict[Tokens, float]) -> float:
    """The probability that right answers differ from what is right at least as much."""
    assert sum(right.values()) == pytest.approx(1, abs=1e-9)
    if found.keys() - right.keys():
        return 0.0
    number, cells, rest = found.total(), list[tuple[float, int]](), [0.0, 0]
    for tokens, chance in right.items():
        if chance * number < LEAST_EXPECTED:
            rest = [rest[0] + chance * number, rest[1] + found[tokens]]
        else:
            cells.append((chance * number, found[tokens]))
    cells.append((max(rest[0], 1e-9), rest[1]))
    assert len(cells) > 5  # else the test tells little
    statistic = sum((seen - expected) ** 2 / expected for expected, seen in cells)
    freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, torch.tensor(statistic / 2).double()).item()


def make_core(
    folder: Path, parents: Sequence[int], drafts: Drafts, asynchronous: bool = False, **flags: Any
) -> LocalCore:
    made = ServerArgs.from_kwargs(
        model_path=str(folder),
        device="cpu",
        dtype="float32",
        skip_tokenizer_init=True,
        speculative_algorithm="NGRAM",
        disable_speculative_adaptive=True,
        page_size=4,
        max_running_requests=128,
        context_length=32,
        **flags,
    )
    args = resolve(made)
    core = LocalCore(args, ModelRunner(args, asynchronous=asynchronous))
    core.planner.drafts.drafter = Proposing(parents, drafts)
    return core


FULL = pytest.mark.slow


@pytest.mark.parametrize("parents", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize(
    ("kind", "asynchronous", "number"),
    [
        ("all", False, 600),
        pytest.param("all", True, 2500, marks=FULL),
        *(pytest.param(kind, False, 12_500, marks=FULL) for kind in PARAMS),
    ],
)
def test_answers_have_the_targets_distribution(
    folder: Path, kind: str, asynchronous: bool, number: int, parents: Sequence[int]
) -> None:
    core = make_core(folder, parents, sampled_drafts(parents), asynchronous)
    right = dict(without_drafts(Target(folder, PARAMS[kind])))
    assert likelihood(answers(core, PARAMS[kind], number), right) > SIGNIFICANCE
    counts = core.planner.metrics.counts
    assert 0 < sum(counts.accepted_tokens) < sum(counts.drafted_tokens)


@pytest.mark.parametrize("parents", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize(
    ("kind", "single", "acc", "asynchronous", "number"),
    [
        ("all", 0.45, 0.7, False, 600),
        pytest.param("all", 0.45, 0.7, True, 2500, marks=FULL),
        pytest.param("temperature", 0.3, 1.0, False, 6000, marks=FULL),
        pytest.param("top_k", 1.0, 0.5, False, 6000, marks=FULL),
        pytest.param("top_p", 0.4, 0.8, False, 6000, marks=FULL),
        pytest.param("all", 0.0, 0.0, False, 2000, marks=FULL),
    ],
)
def test_thresholds_have_sglangs_distribution(
    folder: Path,
    kind: str,
    single: float,
    acc: float,
    asynchronous: bool,
    number: int,
    parents: Sequence[int],
) -> None:
    drafts, target = fixed_drafts(parents), Target(folder, PARAMS[kind])
    names = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")
    flags = dict(zip(names, (single, acc), strict=True))
    core = make_core(folder, parents, drafts, asynchronous, **flags)
    thresholds = AcceptThresholds.of(single, acc)
    assert thresholds is not None
    right = dict(with_thresholds(target, parents, drafts, thresholds))
    found = answers(core, PARAMS[kind], number)
    assert likelihood(found, right) > SIGNIFICANCE
    assert likelihood(found, dict(without_drafts(target))) < SIGNIFICANCE
