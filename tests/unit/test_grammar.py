"""Grammars before they reach a model: refusals, their reasons, and the cost of checks."""

from __future__ import annotations

import ast
import asyncio
import json
import math
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import moesaic
from moesaic import SamplingParams
from moesaic.core.sampling import MAX_GRAMMAR_BYTES, Grammar
from moesaic.engine.errors import QueueFull
from moesaic.engine.runner import matchers as matchers_module
from moesaic.engine.runner.matchers import Matchers, RequestMatcher
from moesaic.engine.sampling.sampler import NonFiniteLogits, SampleRow, sample
from moesaic.engine.sampling.token_masks import forbid
from moesaic.engine.schedule.plan import PlanItem, StepPlan
from moesaic.engine.text import grammar_check
from moesaic.engine.text.grammar import Compiler
from moesaic.engine.text.grammar_check import MAX_OPEN, GrammarChecker
from moesaic.engine.text.grammar_child import GrammarSetup
from moesaic.engine.text.json_schema import strict
from moesaic.engine.text.tokenizer import Tokenizer
from moesaic.models.tiny import materialise

FOLDER = materialise("tiny:qwen3_moe")
VOCAB, EOS = 258, 256
# Seconds within which every compilation of these tests ends.
PATIENT = 300.0
MANY = {"type": "object", "properties": {f"p{n}": {} for n in range(1500)}}


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    made = GrammarChecker(GrammarSetup(FOLDER, VOCAB, [EOS]), None)
    yield made
    made.close()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(FOLDER)


def grammar(kind: str, given: Any) -> Grammar:
    found = SamplingParams(**{kind: given}).grammar
    assert found is not None
    return found


def nested(depth: int) -> dict[str, Any]:
    return {"type": "array", "items": nested(depth - 1)} if depth else {"type": "null"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"regex": "a", "ebnf": "b"}, "regex and ebnf exclude each other"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos=True .* ends where the grammar does"),
        ({"lark": "a", "min_new_tokens": 2}, "min_new_tokens=2 .* ends where the grammar does"),
        ({"regex": 5}, "regex .* give a text"),
        ({"json_schema": [1]}, "json_schema .* text or dict"),
        ({"json_schema": {"const": math.nan}}, "is not serialisable as JSON"),
        ({"json_schema": {"const": object()}}, "is not serialisable as JSON"),
        ({"ebnf": "a\ud800"}, "half of a character"),
        ({"regex": "ä" * (MAX_GRAMMAR_BYTES // 2 + 1)}, "65538 bytes, give at most 65536"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_parameters_that_cannot_be(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        SamplingParams.from_dict(given)
    assert len(str(caught.value)) < 300


def test_a_schema_may_be_a_dict() -> None:
    schema = {"type": "object", "title": "größe"}
    params = SamplingParams(json_schema=schema)  # type: ignore[arg-type]
    assert params.grammar is not None and json.loads(params.grammar.text) == schema
    assert SamplingParams().grammar is None


NO_STRICT = " (leave it out, or drop strict: then it is not enforced)"


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        ("regex", "([", "unclosed character class"),
        ("regex", "(?=a)b", "look-ahead"),
        ("regex", "(" * 65 + "a" + ")" * 65, "nested 65 deep, give at most 64"),
        ("json_schema", "[" * 20000, "nested too deep"),
        ("json_schema", nested(20), None),
        ("json_schema", nested(70), "nested 72 deep, give at most 64"),
        ("json_schema", "{", "not JSON"),
        ("json_schema", '{"const": NaN}', "NaN"),
        ("json_schema", '{"type": "foo"}', "Invalid type"),
        ("json_schema", strict({"not": {"type": "string"}}), f'["not"]{NO_STRICT}'),
        ("json_schema", strict({"type": "array", "uniqueItems": True}), '"uniqueItems"'),
        ("json_schema", strict({"if": {}, "then": {}}), f'["if", "then"]{NO_STRICT}'),
        ("json_schema", strict({"type": "string", "format": "klingon"}), f"klingon{NO_STRICT}"),
        ("json_schema", {"type": "string", "format": "klingon"}, None),
        ("json_schema", {"$ref": "http://example.com/x.json"}, "leads nowhere"),
        ("json_schema", {"$ref": "#"}, "nothing matches it"),
        ("json_schema", strict({"oneOf": [{"minimum": 1}, {"maximum": 9}]}), f"anyOf{NO_STRICT}"),
        ("json_schema", {"oneOf": [{"minimum": 1}, {"maximum": 9}]}, None),
        ("json_schema", MANY, "max is 2000"),
        ("json_schema", {"type": "integer", "multipleOf": 99999989}, "to compile"),
        ("ebnf", 'root ::= "a', "not GBNF"),
        ("ebnf", 'main ::= "a"', "root"),
        ("ebnf", "root ::= missing", "missing"),
        ("lark", "start: missing", "missing"),
        ("lark", "start: " + "(" * 3000, "nested 3000 deep"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_grammars_that_are_refused(
    checker: GrammarChecker, kind: str, given: Any, words: str | None
) -> None:
    if words is None:
        checker.check(grammar(kind, given))
        return
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        checker.check(grammar(kind, given))
    assert str(caught.value).startswith(f"{kind} is not possible: ")
    assert len(str(caught.value)) < 400


def test_memory_is_bounded_and_the_next_grammar_is_tried_anew() -> None:
    checker = GrammarChecker(GrammarSetup(FOLDER, VOCAB, [EOS]), None)
    try:
        greedy = {"type": "integer", "multipleOf": 99999989, "maximum": 10**15, "minimum": 0}
        with pytest.raises(ValueError, match="to compile: simplify it"):
            checker.check(grammar("json_schema", greedy))
        assert checker._child.pid is None
        checker.check(grammar("regex", "a+"))
        child = checker._child.pid
        assert child is not None
        # A refused grammar is refused again without a new attempt.
        with pytest.raises(ValueError, match="to compile: simplify it"):
            checker.check(grammar("json_schema", greedy))
        assert checker._child.pid == child
    finally:
        checker.close()
    assert checker._child.pid is None
    with pytest.raises(RuntimeError, match="shut down"):
        checker.check(grammar("regex", "b+"))


def test_a_client_with_many_new_grammars_keeps_nobody_out(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event blocks the process that compiles, so the test does not depend on time."""
    monkeypatch.setattr(grammar_check, "REMEMBERED", 3)
    for number in range(6):
        checker.check(grammar("regex", f"a{number}"))
    assert len(checker._verdicts) == 3
    release, order = threading.Event(), []

    async def ask(text: str, client: str) -> None:
        await checker.check_in_turn(grammar("regex", text), client)
        order.append(client)

    async def main() -> list[BaseException | None]:
        held = checker.turns.submit("operator", release.wait)
        many = [asyncio.create_task(ask(f"many{number}", "many")) for number in range(40)]
        await asyncio.sleep(0)
        full = [task for task in many if task.done()]
        assert full == many[MAX_OPEN - 1 :]  # the operator's task also takes a place
        one = asyncio.create_task(ask("one", "one"))
        while not many[MAX_OPEN - 2].done():  # the newest one in the queue
            await asyncio.sleep(0)
        await checker.check_in_turn(grammar("regex", "a5"), "many")  # a known grammar does not wait
        assert not one.done() and checker.turns.open == MAX_OPEN
        release.set()
        found = await asyncio.gather(*many, one, return_exceptions=True)
        assert held.result()
        return found

    *many, one = asyncio.run(main())
    assert one is None and order.index("one") <= 1
    assert many[: MAX_OPEN - 2] == [None] * (MAX_OPEN - 2)
    for error in many[MAX_OPEN - 2 :]:
        assert isinstance(error, QueueFull) and str(error).startswith(f"{MAX_OPEN} new grammars")
    assert checker.turns.open == 0


def test_a_client_that_leaves_gives_up_its_place(checker: GrammarChecker) -> None:
    release = threading.Event()

    async def main() -> None:
        checker.turns.submit("operator", release.wait)
        asked = [
            asyncio.create_task(checker.check_in_turn(grammar("regex", f"left{n}"), "one"))
            for n in range(5)
        ]
        await asyncio.sleep(0)
        assert checker.turns.open == 6
        for task in asked[1:]:
            task.cancel()
        await asyncio.wait(asked[1:])
        assert checker.turns.open == 2
        release.set()
        await asked[0]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("setup", "backend", "words"),
    [
        (GrammarSetup(FOLDER, VOCAB, [EOS]), "none", "--grammar-backend none"),
        (None, "llguidance", "need a tokenizer"),
    ],
)
def test_engines_without_grammars(setup: GrammarSetup | None, backend: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GrammarChecker(setup, backend).check(Grammar("regex", "a"))


def test_without_llguidance_the_fix_is_named(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"not installed: pip install 'moesaic\[structured\]'"):
        checker.check(Grammar("regex", "a"))


def test_llguidance_is_imported_only_where_it_is_used() -> None:
    for path in sorted((Path(moesaic.__file__).parent).rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not any(name.startswith("llguidance") for name in names), path


def test_masks_are_added_to_scores() -> None:
    torch.manual_seed(0)
    scores_RV = torch.randn(3, 20)
    bits = torch.zeros(24, dtype=torch.bool)
    bits[[1, 7, 8, 19, 21]] = True
    mask_B = (bits.view(3, 8).int() << torch.arange(8)).sum(1).to(torch.uint8)
    for masks in ([None, mask_B, None], [mask_B] * 3):
        found = forbid(scores_RV, masks)
        for row, mask in zip(range(3), masks, strict=True):
            kept = torch.ones(20, dtype=torch.bool) if mask is None else bits[:20]
            assert torch.equal(found[row][kept], scores_RV[row][kept])
            assert (found[row][~kept] == -math.inf).all()
    assert forbid(scores_RV, [None] * 3) is scores_RV and forbid(scores_RV, ()) is scores_RV


def test_sampling_stays_inside_the_mask() -> None:
    torch.manual_seed(1)
    logits_RV = torch.randn(64, 300) * 3
    allowed = {3, 150, 299}
    mask_B = torch.zeros(40, dtype=torch.uint8)
    for token in allowed:
        mask_B[token // 8] |= 1 << token % 8
    settings: list[dict[str, Any]] = [
        {},
        {"temperature": 0},
        {"top_k": 5},
        {"top_p": 0.3},
        {"min_p": 0.5},
        {"top_k": 2, "top_p": 0.9, "repetition_penalty": 1.5},
        {"logit_bias": {7: 100.0, 3: -100.0}, "temperature": 0},
        {"temperature": 50.0},
    ]
    rows = [SampleRow(SamplingParams(**settings[i % 8]), seed=i, position=4) for i in range(64)]
    found = sample(logits_RV, rows, [mask_B] * 64)
    assert set(found.token_ids) <= allowed and len(set(found.token_ids[::8])) > 1
    with pytest.raises(NonFiniteLogits) as caught:
        sample(logits_RV, rows, [torch.zeros(40, dtype=torch.uint8)] + [mask_B] * 63)
    assert caught.value.rows == (0,)
    logits_RV[5, 200] = math.nan  # NaN outside of the mask is an error too
    with pytest.raises(NonFiniteLogits) as caught:
        sample(logits_RV, rows, [mask_B] * 64)
    assert caught.value.rows == (5,)


def allowed_tokens(mask_B: torch.Tensor | None) -> list[int]:
    assert mask_B is not None
    return [token for token in range(len(mask_B) * 8) if mask_B[token // 8] >> token % 8 & 1]


def plan_of(outputs: dict[int, list[int]], ended: list[int], regex: str) -> StepPlan:
    params = SamplingParams(regex=regex)
    rows = {key: SampleRow(params, 0, 9, output_ids=ids) for key, ids in outputs.items()}
    items = [PlanItem(key, [1], 8, 0, sample=row) for key, row in rows.items()]
    return StepPlan(items, [], False, ended)


def test_matchers_follow_the_data_and_forget(tokenizer: Tokenizer) -> None:
    made: list[Compiler] = []

    def make() -> Compiler:
        made.append(Compiler(tokenizer, VOCAB, [EOS]))
        return made[-1]

    matchers = Matchers(make, limit=3, patience=PATIENT)
    a, b, c, d = tokenizer.encode("abcd")
    none: list[int] = []
    matchers.begin(StepPlan([], []))
    assert matchers.wait() == {} and not made  # the compiler is built on first use
    steps = [
        ({1: [], 2: [a]}, [], {1: [a], 2: [b, c]}),
        ({1: [a], 2: [a, b]}, [], {1: [b, c], 2: [d]}),
        ({1: [], 2: [a, c]}, [], {1: [a], 2: [d]}),  # shorter or other tokens restart the matcher
        ({2: [a, c, d], 3: [a]}, [1], {2: [EOS], 3: [b, c]}),
    ]
    for outputs, ended, expected in steps:
        matchers.begin(plan_of(outputs, ended, "a[bc]d"))
        found = matchers.wait()
        keys = list(outputs)
        assert {keys[n]: allowed_tokens(one.bits) for (n, _), one in found.items()} == expected
    assert len(matchers._matchers) == 2 and len(made) == 1
    matchers.begin(plan_of({4: [b]}, none, "a[bc]d"))
    assert "grammar failed" in matchers.wait()[0, 0].broken and len(matchers._matchers) == 2
    matchers.begin(plan_of(dict.fromkeys(range(10, 18), none), none, "a"))
    assert len(matchers.wait()) == 8 and len(matchers._matchers) == 3


def test_masks_of_drafted_tokens(tokenizer: Tokenizer) -> None:
    """Each draft that the grammar allows gets a mask behind it; the matcher forgets all of them."""
    matchers = Matchers(lambda: Compiler(tokenizer, VOCAB, [EOS]), 3, PATIENT)
    a, b, c, d = tokenizer.encode("abcd")
    steps = [
        ([a], [b, d], [[b, c], [d], [EOS]]),
        ([a], [b, d, EOS, EOS], [[b, c], [d], [EOS]]),
        ([a], [c, c, d], [[b, c], [d]]),
        ([a], [d, d], [[b, c]]),
        ([], [a, b, d], [[a], [b, c], [d], [EOS]]),
        ([a, b], [d, EOS], [[d], [EOS]]),
        ([a, b, d], [EOS, a], [[EOS]]),
        ([a, b, d], [], [[EOS]]),
        ([a, c], [d], [[d], [EOS]]),
    ]
    for outputs, drafts, expected in steps:
        plan = plan_of({1: outputs}, [], "a[bc]d")
        plan.items[0].token_ids += drafts
        plan.items[0].num_drafts = len(drafts)
        matchers.begin(plan)
        masks = matchers.wait()
        found = [masks[key] for key in sorted(masks) if not masks[key].unready]
        assert [allowed_tokens(one.bits) for one in found] == expected
        assert list(matchers._matchers) == [1], "it needs no new matcher"


def test_masks_of_drafts_that_are_trees(tokenizer: Tokenizer) -> None:
    """Each draft has the mask behind its own path, whichever were tried before; none that the
    grammar forbids, nor what follows it."""
    matchers = Matchers(lambda: Compiler(tokenizer, VOCAB, [EOS]), 3, PATIENT)
    a, b, c, d, e = tokenizer.encode("abcde")
    plan = plan_of({1: [a]}, [], "a(b[cd]|c(d|ea?))")
    # a - (b - (c - EOS, e), c - (e - a, d), d - d)
    drafts, parents = [b, c, d, c, e, e, d, d, EOS, a], [0, 0, 0, 1, 1, 2, 2, 3, 4, 6]
    plan.items[0].token_ids += drafts
    plan.items[0].num_drafts, plan.items[0].parents = len(drafts), parents
    expected = {
        0: [b, c],
        1: [c, d],
        2: [d, e],
        4: [EOS],
        6: [a, EOS],
        7: [EOS],
        10: [EOS],
    }
    for _ in range(2):
        matchers.begin(plan)
        masks = matchers.wait()
        assert masks.pop((0, 9)).unready, "a matcher cannot go back behind its end"
        found = {row: allowed_tokens(one.bits) for (_, row), one in masks.items()}
        assert found == {row: sorted(tokens) for row, tokens in expected.items()}
        assert list(matchers._matchers) == [1], "it needs no new matcher"


def test_nothing_is_sampled_where_a_matcher_fails(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither behind the draft that it did not take, nor behind those that were to come later:
    without a mask any token would do."""
    matchers = Matchers(lambda: Compiler(tokenizer, VOCAB, [EOS]), 3, PATIENT)
    a, b, c = tokenizer.encode("abc")
    consume = RequestMatcher.consume
    monkeypatch.setattr(RequestMatcher, "consume", lambda self, t: t != b and consume(self, t))
    plan = plan_of({1: [a]}, [], "a[bc]d")
    plan.items[0].token_ids += [b, c]
    plan.items[0].num_drafts, plan.items[0].parents = 2, [0, 0]
    matchers.begin(plan)
    masks = matchers.wait()
    assert allowed_tokens(masks[0, 0].bits) == [b, c]
    assert [masks[0, row].unready for row in range(3)] == [False, True, True]


def test_without_an_end_token_the_request_just_ends(tokenizer: Tokenizer) -> None:
    matchers = Matchers(lambda: Compiler(tokenizer, VOCAB, []), 3, PATIENT)
    a, b = tokenizer.encode("ab")
    matchers.begin(plan_of({1: [a], 2: [a, b]}, [], "ab"))
    first, second = matchers.wait().values()
    assert allowed_tokens(first.bits) == [b] and not first.ended
    assert second.ended and second.bits is None


def test_several_end_tokens_all_work(tokenizer: Tokenizer) -> None:
    matchers = Matchers(lambda: Compiler(tokenizer, VOCAB + 50, [EOS, EOS + 1, 5000]), 3, PATIENT)
    a, b = tokenizer.encode("ab")
    matchers.begin(plan_of({1: [a, b]}, [], "ab"))
    assert allowed_tokens(matchers.wait()[0, 0].bits) == [EOS, EOS + 1]


def test_masks_of_others_do_not_wait_for_a_compilation(tokenizer: Tokenizer) -> None:
    """Events hold up the compiler, so the test does not depend on time."""
    begin, made = threading.Event(), Compiler(tokenizer, VOCAB, [EOS])
    errors = [RuntimeError("no memory for tables")]

    def make() -> Compiler:
        begin.wait()
        if errors:
            raise errors.pop()
        return made

    matchers = Matchers(make, limit=3, patience=0.0)
    (a,) = tokenizer.encode("a")
    for ended in ([], [2]):
        matchers.begin(plan_of({1: [], 2: []}, ended, "a"))
        assert [one.unready for one in matchers.wait().values()] == [True, True]
    first = matchers._unready[1].matcher
    assert matchers._unready[2].matcher is first  # one compilation serves both
    matchers.begin(plan_of({1: []}, [2], "a"))
    assert matchers.wait()[0, 0].unready and list(matchers._unready) == [1]
    begin.set()
    assert isinstance(first.exception(), RuntimeError)
    matchers.begin(plan_of({1: []}, [], "a"))
    assert matchers.wait()[0, 0].broken == "its grammar failed: no memory for tables"
    assert not matchers._unready
    begin.clear()
    matchers.begin(plan_of({3: []}, [], "a"))  # another request tries again
    assert matchers.wait()[0, 0].unready
    begin.set()
    matchers._unready[3].matcher.result()
    matchers.begin(plan_of({3: []}, [], "a"))
    assert allowed_tokens(matchers.wait()[0, 0].bits) == [a]


def test_grammars_of_waiting_requests_are_not_displaced(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More new grammars than the cache holds: each is compiled once all the same."""
    monkeypatch.setattr(matchers_module, "MAX_COMPILED", 2)
    begin, compiler = threading.Event(), Compiler(tokenizer, VOCAB, [EOS])

    def make() -> Compiler:
        begin.wait()
        return compiler

    matchers = Matchers(make, limit=9, patience=0.0)
    letters = dict(enumerate("abcdef"))
    rows = [SampleRow(SamplingParams(regex=letter), 0, 9) for letter in letters.values()]
    items = [PlanItem(key, [1], 8, key, sample=row) for key, row in enumerate(rows)]
    begun, wait = list[int](), matchers_module.wait

    def record(*given: Any) -> Any:
        begun.append(len(matchers._unready))
        return wait(*given)

    monkeypatch.setattr(matchers_module, "wait", record)
    matchers.begin(StepPlan(items))
    assert all(one.unready for one in matchers.wait().values())
    assert begun == [len(items)] * len(items), "a step waits for one before it begins another"
    begin.set()
    for compilation in matchers._unready.values():
        compilation.matcher.result()
    matchers.begin(StepPlan(items))
    found = [allowed_tokens(one.bits) for one in matchers.wait().values()]
    assert found == [tokenizer.encode(letter) for letter in letters.values()]
    assert len(matchers._compiled) == 2
