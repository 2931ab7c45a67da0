"""Answers that max_tokens cuts: calls that have begun never become content, and text stays."""

import itertools
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moesaic import SamplingParams
from moesaic.engine.text.detokenizer import IncrementalDetokenizer
from moesaic.engine.text.tokenizer import Tokenizer
from moesaic.models.tiny import materialise
from moesaic.server.parsers.formats import Format, choose_format
from moesaic.server.parsers.parts import Tool
from moesaic.server.parsers.syntax import CALLS, HARMONY, THINKING, all_markers
from tests.unit.chat_parts import calls_of, summed
from tests.unit.test_parsers import HARMONY as HARMONY_CALL
from tests.unit.test_parsers import PARIS, PUBLISHED, SUM, TOOLS, fragments

# Its tokens are single bytes, so answers end inside characters.
TOKENIZER = Tokenizer.from_folder(materialise("tiny:qwen3_moe"))
TEXT, THOUGHT = "Let me look.", "I look it up."
THINK = {name: f"{THINKING[name].open}\n{THOUGHT}\n{THINKING[name].close}\n\n" for name in THINKING}


def harmony(text: str, thought: str) -> str:
    preamble = f"<|channel|>commentary<|message|>{text}<|end|><|start|>assistant"
    before = preamble if text else ""
    return before + HARMONY_CALL if thought else before + HARMONY_CALL.partition("assistant")[2]


def answers() -> dict[str, tuple[Format, str, str, str, list[Any]]]:
    """Answers by name: their format, the answer, its reasoning, its content and its calls."""
    found: dict[str, tuple[Format, str, str, str, list[Any]]] = {}
    for name, call in PUBLISHED.items():
        if name in ("hermes", "qwen"):  # the same as qwen25
            continue
        tools, calls = name.split()[0], call.removesuffix("</s>")
        for text in ("", TEXT):
            plain = choose_format(tools, None, "")
            found[f"{name} {text}"] = (plain, f"{text}\n{calls}", "", text, [PARIS, SUM])
        thinks = choose_format(tools, "qwen3", "")
        whole = f"{THINK['qwen3']}{TEXT}\n{calls}"
        found[f"{name} thought"] = (thinks, whole, THOUGHT, TEXT, [PARIS, SUM])
    for name in THINKING:
        form = choose_format("qwen25", name, "")
        whole = THINK[name] + TEXT + PUBLISHED["qwen25"]
        found[f"thought of {name}"] = (form, whole, THOUGHT, TEXT, [PARIS, SUM])
    for text, thought in (("", ""), ("", "x"), (TEXT, "x")):
        form, reasoning = choose_format(HARMONY, HARMONY, ""), "Need to look it up."
        whole, reasoning = harmony(text, thought), reasoning if thought else ""
        found[f"gpt-oss {text} {thought}"] = (form, whole, reasoning, text, [PARIS])
    return found


ANSWERS = answers()


def read(
    form: Format,
    pieces: list[str],
    cut: bool,
    forced: bool = False,
    tools: Sequence[Tool] = TOOLS,
) -> list[tuple[str, str]]:
    parser = form.parser(tools, form.begins_inside())
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return summed([*parts, *parser.finish(cut, forced)])


def joined(items: list[tuple[str, str]], kind: str) -> str:
    return "".join(text for one, text in items if one == kind)


def first_call(name: str) -> int:
    """Where the first call has begun: its marker is whole."""
    form, whole, *_ = ANSWERS[name]
    if form.tools == HARMONY:
        return whole.rindex("<|channel|>") + len("<|channel|>")
    syntax = CALLS[form.tools or ""]
    starts = {syntax.begin, (syntax.section or (syntax.begin,))[0]}
    return min(whole.index(start) + len(start) for start in starts if start in whole)


def can_end(name: str, end: int) -> bool:
    """Whether a model whose markers are single tokens can end the answer here, before its calls."""
    form, whole, *_ = ANSWERS[name]
    marks = "|".join(map(re.escape, all_markers(form.tools, form.reasoning)))
    return not any(found.start() < end < found.end() for found in re.finditer(marks, whole))


def check(name: str, text: str, forced: bool) -> None:
    """An answer that is cut here is the beginning of the whole answer, part by part."""
    form, _, reasoning, content, calls = ANSWERS[name]
    items = read(form, [text], True, forced)
    assert items == read(form, list(text), True, forced), text
    assert content.startswith(joined(items, "Content").rstrip("\n")), text
    assert reasoning.startswith(joined(items, "Reasoning").rstrip("\n")), text
    names = [called for kind, called in items if kind == "call"]
    assert names == [called for called, _ in calls][: len(names)], text
    assert "<" not in joined(items, "ToolArguments"), text


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_that_are_cut_at_any_character(name: str):
    form, whole, reasoning, content, calls = ANSWERS[name]
    begun, free = first_call(name), 0
    for end in range(len(whole) + 1):
        check(name, whole[:end], forced=True)
        if end >= begun or can_end(name, end):
            check(name, whole[:end], forced=False)
            free += 1
    assert len(whole) - begun < free <= len(whole) + 1
    items = read(form, [whole], cut=True)
    assert (joined(items, "Reasoning"), joined(items, "Content")) == (reasoning, content)
    assert calls_of(items) == calls


@pytest.mark.parametrize("name", [n for n in ANSWERS if not ANSWERS[n][1].isascii()])
def test_answers_that_are_cut_inside_characters(name: str):
    whole = ANSWERS[name][1]
    tokens = TOKENIZER.encode(whole, add_special_tokens=False)
    assert len(tokens) == len(whole.encode())
    halves = 0
    for end in range(len(tokens)):
        detokenizer = IncrementalDetokenizer(TOKENIZER, [], SamplingParams())
        detokenizer.push(tokens[:end])
        text = detokenizer.finish()
        halves += text.endswith("\ufffd")
        check(name, text, forced=True)
        if len(text) > first_call(name):
            check(name, text, forced=False)
    assert halves > 0


@pytest.mark.parametrize("name", [*CALLS, HARMONY])
@given(data=st.data())
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
def test_how_a_cut_answer_is_split_does_not_matter(name: str, data: st.DataObject):
    text = "".join(data.draw(st.lists(st.sampled_from([*fragments(name), "\ufffd"]), max_size=14)))
    reasoning = HARMONY if name == HARMONY else data.draw(st.sampled_from([None, *THINKING]))
    form = choose_format(name, reasoning, "")
    end = data.draw(st.integers(0, len(text)))
    forced = data.draw(st.booleans())
    whole = read(form, [text], True, forced)
    assert read(form, [text[:end], text[end:]], True, forced) == whole
    assert read(form, list(text), True, forced) == whole


@pytest.mark.parametrize("name", [*CALLS, HARMONY])
def test_answers_keep_what_looks_like_a_marker(name: str):
    """Only a forced call has no text of its own."""
    form = choose_format(name, HARMONY if name == HARMONY else None, "")
    begin = "<|channel|>" if name == HARMONY else CALLS[name].begin
    for length in range(1, len(begin)):
        text = f"See {begin[:length]}"
        for cut, tools in itertools.product((False, True), (TOOLS, ())):
            assert read(form, [text], cut, tools=tools) == [("Content", text)]
        assert read(form, [text], cut=True, forced=True)[0][1].rstrip() == "See"
    half = "See <\ufffd"
    for cut in (False, True):
        assert read(form, [half], cut) == [("Content", half)]


@pytest.mark.parametrize("tools", [(), TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize(
    ("model", "before", "text"),
    [
        ("gpt_oss", "<|channel|>final<|message|>", "Vec<"),
        ("gpt_oss", "<|channel|>final<|message|>", "if a <"),
        ("gpt_oss", "", "to"),
        ("qwen3_moe", "", "if a <"),
        ("qwen3_moe", "<think>\nx\n</think>\n\n", "if a <"),
        ("mixtral", "", "Total: ["),
    ],
)
def test_text_at_the_end_of_a_cut_answer_stays(
    model: str, before: str, text: str, tools: Sequence[Tool]
):
    items = read(choose_format(None, None, model), [before + text], True, tools=tools)
    assert items[-1] == ("Content", text)
    assert [kind for kind, _ in items[:-1]] == ["Reasoning"] * ("<think>" in before)


def test_reasoning_at_the_end_of_a_cut_answer_stays():
    for model, before in (
        ("gpt_oss", "<|channel|>analysis<|message|>"),
        ("qwen3_moe", "<think>"),
    ):
        items = read(choose_format(None, None, model), [f"{before}if a <"], cut=True)
        assert items == [("Reasoning", "if a <")]


def test_text_that_is_no_call_is_kept_when_the_answer_is_cut():
    form = choose_format("qwen25", None, "")
    for text in ("a < b and", "<tool_call>no call", "ends with a space ", "<tool_call>{5 and"):
        assert read(form, [text], cut=True) == [("Content", text)]
    # Special tokens of the tokenizer come whole, so "<" is not the beginning of "</s>".
    special = choose_format("mistral", None, "")
    assert read(special, ["a <"], cut=True) == [("Content", "a <")]


@pytest.mark.parametrize("name", ["qwen25", HARMONY])
def test_parsers_tell_that_a_call_was_cut(name: str):
    begin = "<|start|>" if name == HARMONY else "<tool_call>"
    form = choose_format(name, HARMONY if name == HARMONY else None, "")
    for tools, text, cut, forced, expected in [
        (TOOLS, begin[:3], True, True, True),
        (TOOLS, begin[:3], True, False, False),
        (TOOLS, begin, True, False, True),
        (TOOLS, begin, False, False, False),
        (TOOLS, "a", True, False, False),
        (TOOLS, "a", True, True, False),
        ((), begin[:3], True, False, False),
    ]:
        parser = form.parser(tools, False)
        parser.feed(text)
        parser.finish(cut, forced)
        assert parser.cut_call is expected


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('<tool_call>{"name": "add", "arguments": "{\\"a', [("add", "")]),
        ('<tool_call>{"arguments": {"a": 1}', []),
        ('<tool_call>{"name": "add", "arguments": {"a": !}<', [("add", '{"a": !}')]),
    ],
)
def test_odd_calls_that_are_cut(text: str, calls: list[Any]):
    items = read(choose_format("hermes", None, ""), [text], cut=True)
    assert (joined(items, "Content"), calls_of(items)) == ("", calls)
