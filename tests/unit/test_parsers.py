"""Tool calls and reasoning in the syntaxes of the published chat templates and model cards."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from moesaic.config.args import ServerArgs
from moesaic.config.resolve import resolve
from moesaic.core.chat import REASONING_PARSERS, TOOL_PARSERS
from moesaic.server.parsers.formats import Format, choose_format
from moesaic.server.parsers.parts import Content, Reasoning, Tool, ToolArguments, ToolStart
from moesaic.server.parsers.syntax import CALLS, THINKING
from tests.unit.chat_parts import Calls, calls_of, parts_of, summed

WEATHER = Tool(
    "get_weather",
    "Weather of a city",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "detail": {"type": ["boolean", "null"]},
            "extra": {},
        },
        "required": ["city"],
    },
)
ADD = Tool(
    "add", "", {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}
)
TOOLS = (WEATHER, ADD)


def read(
    form: Format, text: str, prompt: str = "", split: bool = True, tools: Any = TOOLS
) -> tuple[str, str, Calls]:
    """Returns (reasoning, content, calls); arguments are parsed if they are valid JSON."""
    inside = form.begins_inside(prompt)
    whole = summed(parts_of(form.parser(tools, inside, split), [text]))
    each = summed(parts_of(form.parser(tools, inside, split), list(text)))
    assert whole == each
    return (
        "".join(t for kind, t in whole if kind == "Reasoning"),
        "".join(t for kind, t in whole if kind == "Content"),
        calls_of(whole),
    )


def form(tools: str | None = None, reasoning: str | None = None, model: str = "none") -> Format:
    return choose_format(tools, reasoning, model)


PARIS = ("get_weather", {"city": "Paris", "days": 2})
SUM = ("add", {"a": 1, "b": 2.5})
# The two calls above as the checkpoints' chat templates write them.
PUBLISHED = {
    "qwen25": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n'
    '</tool_call>\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2.5}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=add>\n"
    "<parameter=a>\n1\n</parameter>\n<parameter=b>\n2.5\n</parameter>\n</function>\n</tool_call>",
    "mistral": '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}, '
    '{"name": "add", "arguments": {"a": 1, "b": 2.5}}]</s>',
    "mistral new": '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 2}'
    '[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{"a": 1, "b": 2.5}</s>',
    "deepseekv3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
    '```json\n{"city": "Paris", "days": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function'
    '<｜tool▁sep｜>add\n```json\n{"a": 1, "b": 2.5}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseekv31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    '{"city": "Paris", "days": 2}<｜tool▁call▁end｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>'
    '{"a": 1, "b": 2.5}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    '<|tool_call_argument_begin|>{"city": "Paris", "days": 2}<|tool_call_end|><|tool_call_begin|>'
    'functions.add:1<|tool_call_argument_begin|>{"a": 1, "b": 2.5}<|tool_call_end|>'
    "<|tool_calls_section_end|>",
}
PUBLISHED["hermes"] = PUBLISHED["qwen"] = PUBLISHED["qwen25"]
HARMONY = (
    "<|channel|>analysis<|message|>Need to look it up.<|end|><|start|>assistant<|channel|>"
    "commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Paris", "days": 2}<|call|>'
)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_calls(name: str):
    chosen = form(name.split()[0])
    assert read(chosen, PUBLISHED[name]) == ("", "", [PARIS, SUM])
    # Whitespace that touches a call is layout, the rest of the content is not.
    assert read(chosen, f"Let me look.\n\n{PUBLISHED[name]}") == ("", "Let me look.", [PARIS, SUM])
    mixed = summed(parts_of(chosen.parser(TOOLS, False), [f"A b \n{PUBLISHED[name]}\n c d"]))
    if "[ARGS]" not in PUBLISHED[name]:
        assert [mixed[0], mixed[-1]] == [("Content", "A b"), ("Content", "c d")]
    # Without tools nothing is a call; markers that are special tokens are taken out.
    visible = PUBLISHED[name].replace("</s>", "")
    for special in ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"):
        visible = visible.replace(special, "")
    assert read(chosen, PUBLISHED[name], tools=()) == ("", visible, [])


def test_harmony_channels():
    chosen = form(model="gpt_oss")
    assert read(chosen, HARMONY) == ("Need to look it up.", "", [PARIS])
    final = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
    assert read(chosen, final + "It is 4.<|return|>") == ("Hm.", "It is 4.", [])
    preamble = "<|channel|>commentary<|message|>I will call it.<|end|><|start|>assistant"
    assert read(chosen, preamble + HARMONY.replace("analysis", "final", 1)) == (
        "",
        "I will call it.Need to look it up.",
        [PARIS],
    )
    first = ' to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": 2.5}<|call|>'
    assert read(chosen, first) == ("", "", [SUM])
    unsplit = read(chosen, final + "It is 4.<|return|>", split=False)
    assert unsplit == ("", "<|channel|>analysis<|message|>Hm.<|end|>It is 4.", [])
    assert read(chosen, "no channel at all") == ("", "no channel at all", [])
    unknown = HARMONY.replace("get_weather", "nothing")
    reasoning, content, calls = read(chosen, unknown)
    assert (reasoning, calls) == ("Need to look it up.", [])
    assert "to=functions.nothing" in content and '{"city": "Paris", "days": 2}' in content


@pytest.mark.parametrize(
    ("name", "prompt", "text", "reasoning"),
    [
        # Models that think always, whether the template opens the reasoning or not.
        ("deepseek-r1", "<｜Assistant｜>", "So 2+2.\n</think>\n\nIt is 4.", "So 2+2."),
        ("deepseek-r1", "<｜Assistant｜><think>\n", "So 2+2.\n</think>\n\nIt is 4.", "So 2+2."),
        ("deepseek-r1", "", "<think>\nSo 2+2.\n</think>\n\nIt is 4.", "So 2+2."),
        ("qwen3-thinking", "", "So 2+2.\n</think>\n\nIt is 4.", "So 2+2."),
        ("qwen3-thinking", "assistant\n<think>\n", "So 2+2.\n</think>\n\nIt is 4.", "So 2+2."),
        # DeepSeek-V3.1 with and without the switch, and a template that ignores it.
        ("deepseek-v3", "<｜Assistant｜><think>", "So 2+2.</think>It is 4.", "So 2+2."),
        ("deepseek-v3", "<｜Assistant｜></think>", "It is 4.", ""),
        ("deepseek-v3", "<|assistant|>", "It is 4.", ""),
        ("qwen3", "assistant\n", "<think>\nSo 2+2.\n</think>\n\nIt is 4.", "So 2+2."),
        ("qwen3", "assistant\n", "It is 4.", ""),
        ("qwen3", "assistant\n<think>\n", "So 2+2.\n</think>\n\nIt is 4.", "So 2+2."),
        ("qwen3", "assistant\n<think>\n\n</think>\n\n", "It is 4.", ""),
        ("kimi", "", "◁think▷So 2+2.◁/think▷It is 4.", "So 2+2."),
        ("kimi", "", "It is 4.", ""),
        ("kimi_k2", "", "<think>So 2+2.</think>It is 4.", "So 2+2."),
        ("kimi_k2", "", "It is 4.", ""),
    ],
)
def test_reasoning(name: str, prompt: str, text: str, reasoning: str):
    chosen = form(reasoning=name)
    assert read(chosen, text, prompt) == (reasoning, "It is 4.", [])
    assert read(chosen, text, prompt, split=False) == ("", text, [])


def test_markers_count_only_where_they_can_stand():
    qwen = form("qwen25", "qwen3")
    # A mentioned marker is content within the answer, and reasoning within reasoning.
    assert read(qwen, "Use <think> and </think>.")[1] == "Use <think> and </think>."
    assert read(qwen, "<think>a <think> b</think>c")[:2] == ("a <think> b", "c")
    # Some models call a tool and forget to close the thinking part.
    assert read(qwen, f"<think>I call it.\n{PUBLISHED['qwen25']}") == (
        "I call it.",
        "",
        [PARIS, SUM],
    )
    # R1's thinking may quote a call; only text after the thinking is parsed as one.
    r1 = form("qwen25", "deepseek-r1")
    reasoning, _, calls = read(r1, f"Say {PUBLISHED['qwen25']}?</think>{PUBLISHED['qwen25']}")
    assert (reasoning, calls) == (f"Say {PUBLISHED['qwen25']}?", [PARIS, SUM])


@pytest.mark.parametrize("name", [name for name in THINKING if name != "kimi"])
def test_the_clients_opening_of_an_answer(name: str):
    chosen = form(reasoning=name)
    assert chosen.begins_inside("…<think>", opening="So 2")
    assert chosen.begins_inside("…", opening="<think>\nSo 2")
    assert not chosen.begins_inside("…<think>", opening="So 2+2.</think>\n\nIt is")
    assert not chosen.begins_inside("…</think>", opening="It is")


HERMES_ODD = [
    ("<tool_call>", "<tool_call>", []),
    ("<tool_call>\n\nno", "<tool_call>\n\nno", []),
    ("<tool_call>{</tool_call>", "<tool_call>{</tool_call>", []),
    ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
    ('<tool_call>{"a" 5}</tool_call>', '<tool_call>{"a" 5}</tool_call>', []),
    (
        '<tool_call>{"name": "rm", "arguments": {}}',
        '<tool_call>{"name": "rm", "arguments": {}}',
        [],
    ),
    ('<tool_call>{"name": "ad', '<tool_call>{"name": "ad', []),
    ('<tool_call>{"name": "add"', "", [("add", "")]),
    ('<tool_call>{"name": "add"}</tool_call>', "", [("add", {})]),
    ('<tool_call>{"name": "add", "arguments": null}</tool_call>', "", [("add", {})]),
    ('<tool_call>{"name": "add", "arguments": {"a": [1', "", [("add", '{"a": [1')]),
    ('<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', "", [("add", {"a": 1})]),
    ('<tool_call>{"name": "add", "arguments": {"a": !}}</tool_call>x', "x", [("add", '{"a": !}}')]),
    ('<tool_call>{"name": "add", "parameters": {"a": 1}}</tool_call>', "", [("add", {"a": 1})]),
    ('<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", [("add", {"a": 1})]),
    (
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}", "id": [{"x": "}"}]}</tool_call>',
        "",
        [("add", {"a": 1})],
    ),
    (
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        [],
    ),
    (
        '<tool_call>{"name": "get_weather", "arguments": {"city": "</tool_call>\\"}"}}</tool_call>',
        "",
        [("get_weather", {"city": '</tool_call>"}'})],
    ),
    (
        '<tool_call>oops <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
        "<tool_call>oops",
        [("add", {"a": 1})],
    ),
]


@pytest.mark.parametrize(("text", "content", "calls"), HERMES_ODD)
def test_odd_hermes_calls(text: str, content: str, calls: Calls):
    assert read(form("hermes"), text) == ("", content, calls)


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("mistral", "[TOOL_CALLS] []", "[TOOL_CALLS] []", []),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "rm"}] x',
            ', {"name": "rm"}] x',
            [("add", {"a": 1})],
        ),
        ("mistral", '[TOOL_CALLS]rm[ARGS]{"a": 1}', '[TOOL_CALLS]rm[ARGS]{"a": 1}', []),
        ("kimi_k2", "<|tool_calls_section_begin|>hm", "<|tool_calls_section_begin|>hm", []),
        (
            "kimi_k2",
            '<|tool_call_begin|>functions.add:7<|tool_call_argument_begin|>{"a": 1}',
            "",
            [("add", {"a": 1})],
        ),
        (
            "kimi_k2",
            "<|tool_call_begin|>functions.add:7<|tool_call_argument_begin|> ",
            "",
            [("add", "")],
        ),
        (
            "deepseekv31",
            "<｜tool▁call▁begin｜>" + "x" * 900,
            "<｜tool▁call▁begin｜>" + "x" * 900,
            [],
        ),
        (
            "deepseekv31",
            "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{'a': 1}<｜tool▁call▁end｜>z",
            "z",
            [("add", "{'a': 1}")],
        ),
        (
            "deepseekv3",
            '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n``',
            "",
            [("add", {"a": 1})],
        ),
        ("qwen3_coder", "<function=rm></function>", "<function=rm></function>", []),
        ("qwen3_coder", "<function=add></function>", "", [("add", {})]),
        ("qwen3_coder", "<function=add>hello", "hello", [("add", {})]),
        ("qwen3_coder", "<function=add>\n<param", "", [("add", "{")]),
        (
            "qwen3_coder",
            "<function=get_weather><parameter=city>\nPa\nris",
            "",
            [("get_weather", '{"city": "Pa\\nris')],
        ),
    ],
)
def test_odd_calls(name: str, text: str, content: str, calls: Calls):
    assert read(form(name), text) == ("", content, calls)


def test_xml_values_have_the_types_of_the_schema():
    values = {
        "city": ("123", "123"),
        "days": ("123", 123),
        "detail": ("True", True),
        "extra": ('{"x": [1, null]}', {"x": [1, None]}),
        "unknown": ("plain words", "plain words"),
    }
    body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, (v, _) in values.items())
    got = read(form("qwen3_coder"), f"<tool_call>\n<function=get_weather>\n{body}</function>")[2]
    assert got == [("get_weather", {key: value for key, (_, value) in values.items()})]
    body = "<parameter=detail>None</parameter><parameter=days>NaN</parameter>"
    got = read(form("qwen3_coder"), f"<function=get_weather>{body}</function>")[2]
    assert got == [("get_weather", {"detail": None, "days": "NaN"})]


def test_ids():
    def ids(name: str, text: str) -> list[str]:
        parts = parts_of(form(name).parser(TOOLS, False), [text])
        return [part.id for part in parts if isinstance(part, ToolStart)]

    for name in ("qwen25", "qwen3_coder", "deepseekv3", "deepseekv31"):
        found = ids(name, PUBLISHED[name])
        assert len(set(found)) == 2
        assert all(re.fullmatch("call_[0-9a-f]{24}", one) for one in found)
    assert ids("kimi_k2", PUBLISHED["kimi_k2"]) == ["functions.get_weather:0", "functions.add:1"]
    # Mistral's templates accept only ids of nine letters and digits.
    assert all(re.fullmatch("[0-9a-zA-Z]{9}", i) for i in ids("mistral", PUBLISHED["mistral"]))
    assert ids("mistral", PUBLISHED["mistral new"])[1] == "123456789"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 10**12) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["city", "extra", "x y"]), VALUES, max_size=3)
CALL_LISTS = st.lists(st.tuples(st.sampled_from(["get_weather", "add"]), ARGUMENTS), max_size=3)
WORDS = st.text(st.characters(exclude_characters="<[`", exclude_categories=["Cs"]), max_size=12)


def dumped(name: str, arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def each(around: tuple[str, str], one: Callable[[int, str, str], str]) -> Callable[[Calls], str]:
    def render(calls: Calls) -> str:
        texts = (one(n, name, json.dumps(args)) for n, (name, args) in enumerate(calls))
        return around[0] + "".join(texts) + around[1] if calls else ""

    return render


DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
RENDER: dict[str, Callable[[Calls], str]] = {
    "qwen25": lambda calls: "\n".join(f"<tool_call>\n{dumped(*c)}\n</tool_call>" for c in calls),
    "mistral": lambda calls: (
        f"[TOOL_CALLS] [{', '.join(dumped(*c) for c in calls)}]" if calls else ""
    ),
    "mistral new": each(("", ""), lambda _, name, args: f"[TOOL_CALLS]{name}[ARGS]{args}"),
    "deepseekv3": each(
        DEEPSEEK,
        lambda _, name, args: (
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{args}\n```<｜tool▁call▁end｜>"
        ),
    ),
    "deepseekv31": each(
        DEEPSEEK,
        lambda _, name, args: f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{args}<｜tool▁call▁end｜>",
    ),
    "kimi_k2": each(
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        lambda n, name, args: (
            f"<|tool_call_begin|>functions.{name}:{n}<|tool_call_argument_begin|>{args}"
            "<|tool_call_end|>"
        ),
    ),
}


@pytest.mark.parametrize("name", RENDER)
@given(content=WORDS, calls=CALL_LISTS)
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_round_trip(name: str, content: str, calls: Calls):
    text = f"{content.strip()}\n{RENDER[name](calls)}"
    reasoning, said, got = read(form(name.split()[0]), text)
    assert (reasoning, said.strip(), got) == ("", content.strip(), calls)


@given(calls=st.lists(st.dictionaries(st.sampled_from("abc"), st.text(max_size=9)), max_size=3))
@settings(max_examples=30, deadline=None)
def test_round_trip_of_xml(calls: list[dict[str, str]]):
    schema = {"properties": {key: {"type": "string"} for key in "abc"}}
    text = "".join(
        "<tool_call>\n<function=f>\n"
        + "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in call.items())
        + "</function>\n</tool_call>\n"
        for call in calls
    )
    got = read(form("qwen3_coder"), text, tools=[Tool("f", "", schema)])
    assert got == ("", "", [("f", call) for call in calls])


def fragments(name: str) -> list[str]:
    """Draws markers, pieces of markers and pieces of calls, which confuse a parser most."""
    if name == "gpt-oss":
        marks = re.findall(r"<\|\w+\|>", HARMONY) + ["<|start|>assistant", "to=functions."]
        sample = HARMONY
    else:
        marks, sample = sorted(CALLS[name].markers), PUBLISHED[name]
    marks += ["<think>", "</think>", "◁think▷", "</s>", "<|im_end|>"]
    cut = [mark[: len(mark) // 2] for mark in marks]
    json_bits = [
        '{"name": ',
        '"add"',
        ', "arguments": ',
        "{",
        "}",
        '"',
        "\\",
        "[",
        "]",
        ",",
        ":",
        "é",
    ]
    words = ["add", "<parameter=a>", "</parameter>", ">", "\n", " ", "text", sample, sample[:40]]
    return [*marks, *cut, *json_bits, *words, dumped("add", {"a": 1})]


@pytest.mark.parametrize("name", [*CALLS, "gpt-oss"])
@given(data=st.data())
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_how_the_text_is_cut_does_not_matter(name: str, data: st.DataObject):
    text = "".join(data.draw(st.lists(st.sampled_from(fragments(name)), max_size=14)))
    reasoning = "gpt-oss" if name == "gpt-oss" else data.draw(st.sampled_from([None, *THINKING]))
    chosen = form(name, reasoning)
    inside, split = data.draw(st.booleans()), data.draw(st.booleans())
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = summed(parts_of(chosen.parser(TOOLS, inside, split), [text]))
    assert summed(parts_of(chosen.parser(TOOLS, inside, split), pieces)) == whole
    assert summed(parts_of(chosen.parser(TOOLS, inside, split), list(text))) == whole
    # Other text stays unchanged except for layout and the markers of reasoning.
    if name != "gpt-oss" and ("call", "add") not in whole and ("call", "get_weather") not in whole:
        seen = "".join(said for _, said in whole)
        marks = "|".join(re.escape(m) for t in THINKING.values() for m in (t.open, t.close))
        assert re.sub(rf"{marks}|</s>|\s", "", seen) == re.sub(rf"{marks}|</s>|\s", "", text)


def one_feed(name: str, text: str) -> list[tuple[str, str]]:
    return summed(parts_of(form(name).parser(TOOLS, False), [text]))


def test_deep_and_huge_input_is_read_in_linear_steps():
    depth = 50_000
    deep = '{"name": "add", "arguments": {"a": ' + "[" * depth + "]" * depth + "}}"
    items = one_feed("qwen25", f"<tool_call>{deep}")
    assert items[0] == ("call", "add") and len(items[1][1]) == 2 * depth + 7
    xml = f"<function=add><parameter=a>{'[' * depth}</parameter></function>"
    ((_, arguments),) = calls_of(one_feed("qwen3_coder", xml))
    assert arguments == {"a": "[" * depth}
    for opening in ("<tool_call>", '<tool_call>{"', '<tool_call>{"a": "', "<tool_call>  \n"):
        text = opening * 4_000
        assert one_feed("qwen25", text) == [("Content", text)]
    late = '{"arguments": {"q": "' + "<tool_call>{" * 4_000 + '"}, "name": "rm"}'
    assert one_feed("qwen25", f"<tool_call>{late}") == [("Content", f"<tool_call>{late}")]
    for name, syntax in CALLS.items():
        text = syntax.begin * 4_000
        assert one_feed(name, text) == [("Content", text)]
    for marker in ("<|start|>", "<|channel|>"):
        assert one_feed("gpt-oss", marker * 2_000) == [("Content", marker * 2_000)]


def test_special_tokens_are_seen_or_taken_out():
    tokens = {
        7: AddedToken("[TOOL_CALLS]", special=True),
        8: AddedToken("</s>", special=True),
        9: AddedToken("<tool_call>", special=False),
    }
    chosen = choose_format("mistral", None, "", added_tokens=tokens)
    assert not chosen.skip_special_tokens
    assert read(chosen, "Well</s>") == ("", "Well", [])
    assert choose_format("qwen25", "qwen3", "", added_tokens=tokens).skip_special_tokens
    assert not choose_format("mistral", None, "").skip_special_tokens
    assert not choose_format(None, None, "gpt_oss").skip_special_tokens
    assert choose_format(None, None, "gpt_oss", added_tokens=tokens).skip_special_tokens


@pytest.mark.parametrize(
    ("model", "template", "tools", "reasoning"),
    [
        ("qwen3_moe", "", "qwen25", "qwen3"),
        ("qwen3_moe", "…<parameter=x>…", "qwen3_coder", None),
        ("qwen2_moe", "", "qwen25", None),
        ("mixtral", "", "mistral", None),
        ("deepseek_v3", "", "deepseekv3", "deepseek-v3"),
        (
            "deepseek_v3",
            "'<｜tool▁sep｜>' + tool['function']['name']",
            "deepseekv31",
            "deepseek-v3",
        ),
        ("deepseek_v3", "<｜tool▁sep｜>…```json", "deepseekv3", "deepseek-v3"),
        ("deepseek_v3", "<|im_middle|>", "kimi_k2", "kimi_k2"),
        ("kimi_k2", "", "kimi_k2", "kimi_k2"),
        ("gpt_oss", "", "gpt-oss", "gpt-oss"),
        ("unheard_of", "", None, None),
    ],
)
def test_the_family_decides(model: str, template: str, tools: str | None, reasoning: str | None):
    chosen = choose_format(None, None, model, chat_template=template)
    assert (chosen.tools, chosen.reasoning) == (tools, reasoning)
    given = choose_format("hermes", "deepseek-r1", model, chat_template=template)
    assert (given.tools, given.reasoning) == ("hermes", "deepseek-r1")


def test_names():
    assert set(TOOL_PARSERS) == {*CALLS, "gpt-oss"}
    assert set(REASONING_PARSERS) == {*THINKING, "gpt-oss"}
    for name in TOOL_PARSERS:
        assert form(name).tools == name
    for name in REASONING_PARSERS:
        assert form(None, name).reasoning == name
    with pytest.raises(ValueError, match="--tool-call-parser is 'qwen4': choose one of qwen25, "):
        form("qwen4")
    with pytest.raises(ValueError, match="do not combine"):
        form("gpt-oss", "qwen3")
    assert form("hermes", None, "gpt_oss").reasoning is None
    for field in ("tool_call_parser", "reasoning_parser"):
        with pytest.raises(ValueError, match="choose one of"):
            resolve(ServerArgs(model_path="x", **{field: "qwen4"}))
        resolve(ServerArgs(model_path="x", **{field: "gpt-oss"}))


@pytest.mark.parametrize(
    ("name", "arguments", "thinking"),
    [
        ("qwen3", {}, True),
        ("qwen3", {"enable_thinking": False}, False),
        ("deepseek-v3", {}, False),
        ("qwen3", {"thinking": False}, False),
        ("deepseek-v3", {"thinking": True}, False),  # the prompt opens the reasoning
        ("deepseek-v3", {"enable_thinking": True}, False),
        ("kimi_k2", {"thinking": False}, True),
        ("deepseek-r1", {"thinking": False}, True),
        ("gpt-oss", {}, True),
        (None, {"thinking": True}, False),
    ],
)
def test_models_that_open_their_reasoning(name: str | None, arguments: Any, thinking: bool):
    assert form(None, name).thinking(arguments) is thinking


def test_parts_are_plain_data():
    assert Content("a") == Content("a") != Reasoning("a")
    assert hash(ToolArguments(0, "{}")) == hash(ToolArguments(0, "{}"))
