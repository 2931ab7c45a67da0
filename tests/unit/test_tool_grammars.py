"""Grammars that force calls and forms of answers, walked by llguidance over good and bad text."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from moesaic.server.parsers.formats import Format, choose_format
from moesaic.server.parsers.parts import NamedTool, Tool
from tests.unit.chat_parts import calls_of, parts_of, summed

SCHEMA = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/name"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"name": {"type": "string"}},
}
XML_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"type": "string", "enum": ["C", "F"]},
    },
    "required": ["city"],
}
EMPTY = Tool("now")
ARGUMENTS = '{"city": "Pa\\"ris", "days": 2}'
# (before the calls, one call to get_weather, one call to now, between, after)
SHAPES = {
    "qwen25": (
        "",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "\n",
        "",
    ),
    "qwen3_coder": (
        "",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nPa\nris\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n<parameter=unit>\nF\n</parameter>\n</function>\n"
        "</tool_call>",
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "\n",
        "",
    ),
    "mistral": (
        "[TOOL_CALLS] [",
        f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}',
        '{"name": "now", "arguments": {}}',
        ", ",
        "]",
    ),
    "deepseekv3": (
        "<｜tool▁calls▁begin｜>",
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{ARGUMENTS}\n```"
        "<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>",
        "\n",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseekv31": (
        "<｜tool▁calls▁begin｜>",
        f"<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        "",
        "<｜tool▁calls▁end｜>",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{ARGUMENTS}<|tool_call_end|>",
        "<|tool_call_begin|>functions.now:12<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "",
        "<|tool_calls_section_end|>",
    ),
    "gpt-oss": (
        "",
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + ARGUMENTS,
        "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}",
        "",
        "",
    ),
}
THOUGHTS = {"gpt-oss": "<|channel|>analysis<|message|>I see.<|end|><|start|>assistant"}
MARKERS = sorted(
    {
        *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]"),
        *(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
        ),
        *("<｜tool▁call▁end｜>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        *("<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"),
        *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"),
    }
)


class Walker:
    """A byte vocabulary, with a token for every marker (`marked`) or for none."""

    def __init__(self, marked: bool) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = {char: number for number, char in enumerate(alphabet)}
        self.tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.tokenizer.decoder = decoders.ByteLevel()
        self.tokenizer.add_special_tokens(["<eos>"])
        special = [m for m in MARKERS if m[0] == "[" or m[:6] in ("<|star", "<|chan", "<|mess")]
        if marked:
            self.tokenizer.add_special_tokens([AddedToken(m, special=True) for m in special])
            self.tokenizer.add_tokens([m for m in MARKERS if m not in special])
        self.guide = LLTokenizer(self.tokenizer.to_str(), eos_token=256)

    def form(self, tools: str | None, reasoning: str | None) -> Format:
        added = self.tokenizer.get_added_tokens_decoder()
        return choose_format(tools, reasoning, "", added_tokens=added)

    def accepts(self, parameters: dict[str, str], text: str) -> tuple[bool, bool]:
        """Returns whether the grammar allows the text, and whether it may end there."""
        ((kind, source),) = parameters.items()
        assert kind == "lark"
        grammar = LLMatcher.grammar_from_lark(source)
        assert LLMatcher.validate_grammar(grammar, self.guide) == "", source
        matcher = LLMatcher(self.guide, grammar, log_level=0)
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        taken = matcher.consume_tokens(ids) if ids else True
        return bool(taken), bool(taken) and matcher.is_accepting()


@pytest.fixture(scope="module", params=[False, True], ids=["spelt", "tokens"])
def walker(request: pytest.FixtureRequest) -> Walker:
    return Walker(request.param)


def tools_of(name: str, strict: bool = False) -> list[Tool]:
    schema = XML_SCHEMA if name == "qwen3_coder" else SCHEMA
    return [Tool("get_weather", "", schema, strict), EMPTY]


def whole(name: str, *calls: int) -> str:
    before, *texts, between, after = SHAPES[name]
    return before + between.join(texts[call] for call in calls) + after


def reasoning_of(name: str) -> str:
    return "gpt-oss" if name == "gpt-oss" else "qwen3"


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_forced_calls(walker: Walker, name: str, thinking: bool):
    form = walker.form(name, reasoning_of(name))
    thought = THOUGHTS.get(name, "<think>\nI see.\n</think>\n\n")
    required = form.grammar(tools_of(name), "required", None, thinking)
    named = form.grammar(tools_of(name), NamedTool("now"), None, thinking)
    one, two = whole(name, 0), whole(name, 0, 1)
    assert walker.accepts(required, one) == (True, True)
    assert walker.accepts(required, whole(name, 1)) == (True, True)
    assert walker.accepts(required, two)[1] is (name != "gpt-oss")
    assert walker.accepts(named, whole(name, 1)) == (True, True)
    assert walker.accepts(named, one) == (False, False)
    assert walker.accepts(named, whole(name, 1, 1))[1] is False
    for grammar, text in ((required, one), (named, whole(name, 1))):
        assert walker.accepts(grammar, thought + text) == (thinking, thinking)
        assert walker.accepts(grammar, "Sure! " + text)[0] is False
        assert walker.accepts(grammar, text[:-4])[1] is False
        assert walker.accepts(grammar, text.replace("get_weather", "rm").replace("now", "rm"))[
            0
        ] is (False)
    assert walker.accepts(required, one.replace("2", '"2"'))[0] is False
    # The parser reads what the grammar forces.
    single = form.grammar(tools_of(name), "required", None, thinking, parallel=False)
    assert walker.accepts(single, one) == (True, True)
    assert walker.accepts(single, two)[0] is False
    items = summed(parts_of(form.parser(tools_of(name), False), [one]))
    ((called, arguments),) = calls_of(items)
    assert called == "get_weather" and arguments["days"] == 2


@pytest.mark.parametrize(
    ("response", "good", "bad"),
    [
        ({"json_schema": '{"type": "integer"}'}, "12", "x"),
        ({"json_schema": json.dumps(SCHEMA)}, '{"city": "x"}', '{"days": 1}'),
        ({"regex": "[a-c]+/\\d"}, "abc/7", "abc7"),
        ({"ebnf": 'root ::= "yes" | "no" word\nword ::= [a-z]{2}'}, "nope", "maybe"),
        ({"lark": 'start: "a"+ b\nb: "}"'}, "aa}", "b"),
    ],
)
@pytest.mark.parametrize("name", ["qwen25", "gpt-oss"])
def test_forms_of_answers(walker: Walker, name: str, response: dict[str, str], good: str, bad: str):
    form = walker.form(name, reasoning_of(name))
    final = "<|channel|>final<|message|>" if name == "gpt-oss" else ""
    thought = THOUGHTS.get(name, "<think>I see.</think>\n\n")
    grammar = form.grammar([], "none", response, True)
    assert walker.accepts(grammar, thought + final + good) == (True, True)
    assert walker.accepts(grammar, final + good) == (True, True)
    assert walker.accepts(grammar, thought + final + bad)[1] is False
    # With tools the model may call one instead.
    both = form.grammar(tools_of(name), "auto", response, True)
    assert walker.accepts(both, thought + whole(name, 0)) == (True, True)
    assert walker.accepts(both, final + good) == (True, True)
    assert walker.accepts(both, final + bad)[1] is False
    single = form.grammar(tools_of(name), "auto", response, True, parallel=False)
    assert walker.accepts(single, thought + whole(name, 0)) == (True, True)
    assert walker.accepts(single, thought + whole(name, 0, 1))[0] is False
    # Without a prefix the engine uses the response format unchanged.
    if name == "qwen25":
        assert form.grammar([], "none", response, False) == response


@pytest.mark.parametrize("name", SHAPES)
def test_strict_tools_leave_text_free(walker: Walker, name: str):
    form = walker.form(name, reasoning_of(name))
    assert form.grammar(tools_of(name), "auto", None, False) == {}
    grammar = form.grammar(tools_of(name, strict=True), "auto", None, False)
    text = "<|channel|>final<|message|>Hello <b>" if name == "gpt-oss" else "Hello <b>\n"
    assert walker.accepts(grammar, text) == (True, True)
    before = "" if name == "gpt-oss" else text
    assert walker.accepts(grammar, before + whole(name, 0)) == (True, True)
    assert walker.accepts(grammar, before + whole(name, 0).replace("2", '"2"'))[0] is False
    assert walker.accepts(grammar, before + whole(name, 0).replace("get_weather", "rm"))[0] is False
    if name != "gpt-oss":
        assert walker.accepts(grammar, before + whole(name, 0) + "\n\nand" + whole(name, 1))[1]
    single = form.grammar(tools_of(name, strict=True), "auto", None, False, parallel=False)
    assert walker.accepts(single, text) == (True, True)
    assert walker.accepts(single, before + whole(name, 0)) == (True, True)
    assert walker.accepts(single, before + whole(name, 0) + "\n")[0] is False


def test_answers_that_begin_within_the_reasoning(walker: Walker):
    for name in ("deepseek-r1", "qwen3-thinking", "deepseek-v3"):
        form = walker.form("qwen25", name)
        grammar = form.grammar(tools_of("qwen25"), "required", None, True, inside=True)
        assert walker.accepts(grammar, "I see.</think>\n" + whole("qwen25", 0)) == (True, True)
        assert walker.accepts(grammar, whole("qwen25", 0))[1] is False
    for value in (False, True):  # the switch alone does not open it
        thinking = form.thinking({"thinking": value})
        grammar = form.grammar(tools_of("qwen25"), "required", None, thinking)
        assert walker.accepts(grammar, whole("qwen25", 0)) == (True, True)
        assert walker.accepts(grammar, "<think>")[0] is False
    grammar = form.grammar(tools_of("qwen25"), "required", None, False, inside=True)
    assert walker.accepts(grammar, "I see.</think>" + whole("qwen25", 0)) == (True, True)


def test_refusals():
    form = choose_format("qwen25", None, "")
    with pytest.raises(ValueError, match="asks for 'x', which is not in tools"):
        form.grammar([EMPTY], NamedTool("x"), None, False)
    with pytest.raises(ValueError, match="asks for a function"):
        form.grammar([], "required", None, False)
    with pytest.raises(ValueError, match="start the server with --tool-call-parser"):
        choose_format(None, None, "").grammar([EMPTY], "required", None, False)
    with pytest.raises(ValueError, match="json_schema is not the text of a JSON schema"):
        form.grammar([EMPTY], "auto", {"json_schema": "{"}, False)
    with pytest.raises(ValueError, match="ebnf is not a grammar"):
        form.grammar([EMPTY], "auto", {"ebnf": "root ::= ("}, False)
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(ValueError, match="nested too deeply"):
        form.grammar([Tool("f", "", deep)], "required", None, False)


@pytest.mark.parametrize("odd", [None, 1, "x", [], {}, [1]], ids=str)
@pytest.mark.parametrize("name", ["qwen25", "qwen3_coder"])
def test_schemas_with_values_of_wrong_types(name: str, odd: Any):
    form = choose_format(name, None, "")
    words = ("type", "enum", "const", "properties", "required", "anyOf", "allOf", "$ref", "$defs")
    for word in words:
        inner = {"type": "string", word: odd}
        for schema in ({word: odd}, {"properties": {"a": inner, "b": {word: odd}}, word: odd}):
            assert "lark" in form.grammar([Tool("f", parameters=schema)], "required", None, False)


def test_keywords_that_cannot_be_forced(walker: Walker):
    odd = {"type": "object", "properties": {"a": {"type": "string", "not": {"const": "x"}}}}
    lenient = walker.form("qwen25", None).grammar([Tool("f", "", odd)], "required", None, False)
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'
    assert walker.accepts(lenient, call) == (True, True)


@pytest.mark.parametrize("name", ["qwen25", "qwen3_coder"])
def test_references_of_parameters(walker: Walker, name: str):
    """In XML each parameter has a grammar of its own, which does not hold the other schemas."""
    place = {"type": "object", "properties": {"x": {"type": "integer", "not": {"const": 9}}}}
    schema = {
        "type": "object",
        "properties": {
            "a": {"$ref": "#/components/schemas/Place"},
            "b": {"$ref": "#/properties/a"},
            "c": {"$ref": "#"},
        },
        "required": ["a", "b"],
        "components": {"schemas": {"Place": place}},
    }
    grammar = walker.form(name, None).grammar([Tool("f", "", schema)], "required", None, False)
    values = {"a": {"x": 1}, "b": {}, "c": {"a": {}, "b": {"x": 3}}}
    call = f'{{"name": "f", "arguments": {json.dumps(values)}}}\n'
    if name == "qwen3_coder":
        each = (f"<parameter={n}>\n{json.dumps(v)}\n</parameter>\n" for n, v in values.items())
        call = f"<function=f>\n{''.join(each)}</function>\n"
    call = f"<tool_call>\n{call}</tool_call>"
    assert walker.accepts(grammar, call) == (True, True)
    for one in ('"x": 1', '"x": 3'):
        assert walker.accepts(grammar, call.replace(one, '"y": 1')) == (False, False)
