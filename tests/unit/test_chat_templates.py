"""Chats with tools, calls and reasoning: our rendering against that of transformers."""

import json
import threading
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from moesaic.engine.text import chat_template
from moesaic.engine.text.limited_child import Allowance, ChildUnresponsive
from moesaic.engine.text.template_child import Renderer
from moesaic.engine.text.tokenizer import ChatTemplateError, Tokenizer, load_tokenizer
from moesaic.models.tiny import materialise
from moesaic.models.tiny_chat import CHAT_TEMPLATE
from moesaic.server.parsers.formats import choose_format
from moesaic.server.parsers.parts import Tool
from tests.unit.chat_parts import parts_of, summed

HOUSE = Path(__file__).parents[2] / "models" / "house-moe"
# Like the families' templates: the same constructs, other words.
QWEN3 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "Functions in <tools></tools>:\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, seeking=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.seeking and message.role == "user" and message.content is string
        and not(message.content.startswith('<tool_response>')) %}
        {%- set ns.seeking = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content if message.content is string else '' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '<tool_call>\\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {%- if tool_call.arguments is string %}
                {{- tool_call.arguments }}
            {%- else %}
                {{- tool_call.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
DEEPSEEK = """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}
{%- endif %}{% if not thinking is defined %}{% set thinking = false %}{% endif %}
{%- set ns = namespace(first=true, tool=false, user=false, system='') %}
{%- for message in messages %}{% if message['role'] == 'system' %}
    {%- set ns.system = ns.system + ('' if ns.first else '\\n\\n') + message['content'] %}
    {%- set ns.first = false %}
{%- endif %}{% endfor %}
{{- bos_token }}{{ ns.system }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- set ns.user = true %}{{ '<｜User｜>' + message['content'] }}
    {%- elif message['role'] == 'assistant' and message['tool_calls'] is defined
            and message['tool_calls'] is not none %}
        {%- if ns.user %}{{ '<｜Assistant｜></think>' }}{% endif %}
        {%- set ns.user = false %}
        {%- for tool in message['tool_calls'] %}
            {%- if loop.first %}
                {{- (message['content'] or '') + '<｜tool▁calls▁begin｜>' }}
            {%- endif %}
            {{- '<｜tool▁call▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>' }}
            {{- tool['function']['arguments'] | tojson + '<｜tool▁call▁end｜>' }}
        {%- endfor %}{{ '<｜tool▁calls▁end｜>' + eos_token }}
    {%- elif message['role'] == 'assistant' %}
        {%- set content = message['content'] %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>', 1)[1] %}
        {%- endif %}
        {{- content + eos_token }}
    {%- elif message['role'] == 'tool' %}
        {{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and ns.user %}
    {{- '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}
{%- endif %}"""
MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system = messages[0]["content"] %}{%- set rest = messages[1:] %}
{%- else %}{%- set rest = messages %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set users = rest | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in rest %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == users[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val|tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" if loop.last else "}}, " }}
            {%- endfor %}{{- "][/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system is defined %}
            {{- "[INST] " + system + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function|tojson %}
            {{- out[:-1] }}
            {%- if not call.id is defined or call.id|length != 9 %}
                {{- raise_exception("ids have nine characters") }}
            {%- endif %}
            {{- ', "id": "' + call.id + '"}' }}
            {{- "]" + eos_token if loop.last else ", " }}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"]|trim + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + "}[/TOOL_RESULTS]" }}
    {%- endif %}
{%- endfor %}"""
GPT_OSS = """{%- macro kind(spec) -%}
    {%- if spec.type == "array" -%}{{- kind(spec['items']) + "[]" }}
    {%- elif spec.enum is defined -%}{{- '"' + spec.enum | join('" | "') + '"' -}}
    {%- elif spec.type is defined and spec.type is iterable and spec.type is not string -%}
        {{- spec.type | join(" | ") }}
    {%- else -%}{{- spec.type | default("any") }}{%- endif -%}
{%- endmacro -%}
{%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{%- endif %}
{{- "<|start|>system<|message|>Reasoning: " + reasoning_effort + "\\nDay: " }}
{{- strftime_now("%Y-%m-%d") + "<|end|>" }}
{%- if tools -%}
    {{- "<|start|>developer<|message|># Tools\\n\\nnamespace functions {\\n" }}
    {%- for tool in tools %}{%- set tool = tool.function %}
        {{- "// " + tool.description + "\\ntype " + tool.name + " = (_: {\\n" }}
        {%- for name, spec in (tool.parameters.properties or {}).items() %}
            {{- name + ("" if name in (tool.parameters.required or []) else "?") + ": " }}
            {{- kind(spec) + ("," if not loop.last else "") + "\\n" }}
        {%- endfor %}
        {{- "}) => any;\\n" }}
    {%- endfor %}{{- "}<|end|>" }}
{%- endif -%}
{%- set last = namespace(name=none) %}
{%- for message in messages -%}
    {%- if message.role == 'assistant' and "tool_calls" in message and message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {%- if message.thinking %}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
        {%- endif %}
        {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json" }}
        {{- "<|message|>" + call.arguments|tojson + "<|call|>" }}
        {%- set last.name = call.name %}
    {%- elif message.role == 'tool' %}
        {{- "<|start|>functions." + last.name + " to=assistant<|channel|>commentary<|message|>" }}
        {{- message.content|tojson + "<|end|>" }}
    {%- else %}{{- "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"""
INDENTED = """{{ tools | tojson(indent=2) if tools else '' }}
{%- for m in messages %}{{ loop.cycle('a', 'b') }}{{ m | tojson(ensure_ascii=true) }}
{%- if loop.previtem is defined %}{{ loop.previtem.role | upper }}{% endif %}{% endfor %}"""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather <now> & 'then' in “Zürich”",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "unit": {"type": "string", "enum": ["C", "F"]},
                    "hours": {"type": "array", "items": {"type": "integer"}},
                },
                "required": ["city"],
            },
        },
    }
]
ARGUMENTS = {"city": "Zürich <b>", "hours": [1, 2]}


def call(arguments: object, number: int = 0) -> dict[str, object]:
    function = {"name": "get_weather", "arguments": arguments}
    return {"id": f"abcdefgh{number}", "type": "function", "function": function}


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather & time?"},
    {
        "role": "assistant",
        "content": None,
        "thinking": "I look it up.",
        "reasoning_content": "I look it up.",
        "tool_calls": [call(ARGUMENTS), call({"city": "Bern"}, 1)],
    },
    {"role": "tool", "tool_call_id": "abcdefgh0", "content": '{"t": 5}'},
    {"role": "tool", "tool_call_id": "abcdefgh1", "content": "6 °C"},
]
SETTLED = [
    *CHAT,
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\n5 and 6."},
    {"role": "user", "content": "Thanks"},
]
TEMPLATES = {
    "qwen3": (QWEN3, [{}, {"enable_thinking": False}, {"enable_thinking": True}]),
    "deepseek": (DEEPSEEK, [{}, {"thinking": True}, {"thinking": False}]),
    "mistral": (MISTRAL, [{}]),
    "gpt-oss": (GPT_OSS, [{}, {"reasoning_effort": "high"}]),
    "indented": (INDENTED, [{}]),
    "tiny": (CHAT_TEMPLATE, [{}, {"enable_thinking": False}]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: number for number, char in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


@pytest.mark.parametrize("name", TEMPLATES)
def test_rendered_as_by_transformers(folder, name):
    template, settings = TEMPLATES[name]
    ours = Tokenizer.from_folder(folder, chat_template=template)
    ours.chat.check()
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    for chat in (CHAT, SETTLED, CHAT[:2]):
        for tools in (None, TOOLS):
            for extra in settings:
                for prompt in (False, True):
                    kwargs = {"tools": tools, "add_generation_prompt": prompt, **extra}
                    want = theirs.apply_chat_template(
                        chat, chat_template=template, tokenize=False, **kwargs
                    )
                    assert ours.apply_chat_template(chat, **kwargs) == want
                    assert "Weather" in want


@pytest.mark.parametrize(
    ("turn", "want"),
    [
        ("[{{ m.content }}{{ m.name }}]", "[Weather & time?][]"),
        ("{% if m['content'] is none %}call{% endif %}{{ m.name }}", "call"),
    ],
)
def test_null_is_left_out_unless_the_template_asks_for_it(turn, want):
    renderer = Renderer({"": "{% for m in messages %}" + turn + "{% endfor %}"})
    assert renderer.render("", {"messages": [CHAT[1], {**CHAT[2], "name": None}]}) == want


# Each would take minutes or gigabytes before its first output.
_LOOP = "{% for a in range(99999) %}"
HOSTILE = {
    "empty loops": _LOOP + _LOOP + "{% endfor %}{% endfor %}",
    "long loops": _LOOP + _LOOP + "a{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "recursive loops": "{% for x in [1, 1] recursive %}"
    "{{ loop([1, 1]) if loop.depth < 60 else '' }}{% endfor %}",
    "power": "{% set x = many ** many ** many %}",
    "map": _LOOP + "{{ range(99999) | map('string') | list | length }}{% endfor %}",
    "select": _LOOP + "{% set x = range(99999) | select('odd') | list %}{% endfor %}",
    "repeat": "{% set x = 'a' * many %}",
    "doubling": "{% set n = namespace(s='aa') %}{% for i in range(60) %}"
    "{% set n.s = n.s + n.s %}{% endfor %}",
    "batch": "{% set x = messages | batch(many, 0) | list %}",
    "slice": "{% set x = messages | slice(many) | list %}",
    "centre": "{% set x = messages[0].content | center(many) %}",
    "format": "{% set x = ('%' ~ many ~ 'd') % many %}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_templates_that_take_too_much_are_ended(name, monkeypatch):
    """The kernel ends the process wherever it is; the next rendering works."""
    monkeypatch.setattr(chat_template, "ALLOWANCE", Allowance(0.15, 64 << 20))
    hidden = "{% if messages[0].content == 'now' %}" + HOSTILE[name] + "{% endif %}fine"
    chat = chat_template.ChatTemplates({"default": hidden}, {}, "folder")

    def render(content):
        messages = [{"role": "user", "content": content}]
        return chat.submit(None, messages, True, None, {"many": 2**31 - 1}).result()

    try:
        assert render("not now") == "fine"
        first = chat._child.pid
        limit = r"takes more than (0\.15 s|64 MB of memory) to render these messages"
        with pytest.raises(ChatTemplateError, match="'default' of folder " + limit):
            render("now")
        if name == "empty loops":
            assert render("not now") == "fine" and chat._child.pid != first
            chat.close()
            assert chat._child.pid is None
            with pytest.raises(RuntimeError, match="shut down"):
                render("not now")
    finally:
        chat.close()


def test_a_server_does_not_start_with_such_a_template(folder, monkeypatch, tmp_path):
    monkeypatch.setattr(chat_template, "ALLOWANCE", Allowance(0.3, 64 << 20))
    file = tmp_path / "chat.jinja"
    tools_only = "{% if tools %}" + HOSTILE["empty loops"] + "{% endif %}"
    for text, words in (
        (tools_only, r"takes more than 0\.3 s to render these messages"),
        ("{% set x = 9 ** (9 ** 9) %}", "takes more than"),  # computed at compile time
        ("{% for %}", "is not valid Jinja"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=f"{words}.*: fix it, or give another with --chat-te"):
            load_tokenizer(str(folder), str(file))
    file.write_text("{{ raise_exception('none is good enough') }}")  # a template may refuse
    refusing = load_tokenizer(str(folder), str(file))
    with pytest.raises(ChatTemplateError, match="none is good enough"):
        refusing.apply_chat_template(CHAT)


def test_templates_of_tiny_models_are_not_tried():
    for name in ("tiny:qwen3_moe", "tiny:gpt_oss", str(HOUSE)):
        chat = load_tokenizer(str(materialise(name)), None).chat
        assert (chat._child.pid is None) == name.startswith("tiny:")
        chat.close()


@pytest.mark.timeout(60)
def test_a_machine_that_is_too_busy_is_named_at_the_start(folder, monkeypatch):
    chat = Tokenizer.from_folder(folder, chat_template=QWEN3).chat

    def ask(question):
        raise ChildUnresponsive

    monkeypatch.setattr(chat._child, "ask", ask)
    words = "chat template 'default' of .* could not be checked: .* start again when this machine"
    with pytest.raises(ChatTemplateError, match=words):
        chat.check()


def test_a_question_that_cannot_be_read_is_refused_and_the_process_lives_on(folder):
    chat = Tokenizer.from_folder(folder, chat_template=CHAT_TEMPLATE).chat
    depth = 100_000
    arguments = chat_template.CallArguments('{"a":' + "[" * depth + "]" * depth + "}")
    deep = [CHAT[1], {"role": "assistant", "content": None, "tool_calls": [call(arguments)]}]
    try:
        assert chat.submit(None, CHAT[:2], True, None, {}).result()
        first = chat._child.pid
        with pytest.raises(ChatTemplateError, match=r"does not accept these messages: .*recursion"):
            chat.submit(None, deep, True, None, {}).result()
        assert chat.submit(None, CHAT[:2], True, None, {}).result() and chat._child.pid == first
    finally:
        chat.close()


def test_clients_take_turns_in_rendering(folder):
    """The event blocks the process, so the test does not depend on time."""
    chat = Tokenizer.from_folder(folder, chat_template=CHAT_TEMPLATE).chat
    release, order = threading.Event(), []
    chat._turns.submit("operator", release.wait)
    asked = [chat.submit(client, CHAT[:2], True, None, {}) for client in ["many"] * 100 + ["one"]]
    for client, future in zip(["many"] * 100 + ["one"], asked, strict=True):
        future.add_done_callback(lambda _, client=client: order.append(client))
    release.set()
    assert len({future.result() for future in asked}) == 1
    assert order.index("one") <= 1
    chat.close()


def test_a_template_refuses(folder):
    ours = Tokenizer.from_folder(folder, chat_template=MISTRAL)
    wrong = [*CHAT[:2], {**CHAT[2], "tool_calls": [{**call({}), "id": "call_1"}]}]
    with pytest.raises(ChatTemplateError, match="ids have nine characters"):
        ours.apply_chat_template(wrong)


def test_tiny_models_render_plain_messages_as_ever(folder):
    tiny = Tokenizer.from_folder(folder, chat_template=CHAT_TEMPLATE)
    chat = [{"role": "user", "content": "Hi\n{{ x }}"}, {"role": "assistant", "content": "Yo"}]
    plain = "<|turn|>user\nHi\n{{ x }}<|end|><|turn|>assistant\nYo<|end|>"
    assert tiny.apply_chat_template(chat, add_generation_prompt=False) == plain
    assert tiny.apply_chat_template(chat) == plain + "<|turn|>assistant\n"


def test_tiny_models_render_tools_as_the_parsers_read_them(folder):
    tiny = Tokenizer.from_folder(folder, chat_template=CHAT_TEMPLATE)
    chat = [{**CHAT[2], "content": "Wait."}, *CHAT[3:]]
    text = tiny.apply_chat_template(chat, tools=TOOLS, enable_thinking=False)
    tools, answer, *results, prompt = text.split("<|turn|>")[1:]
    assert json.loads(tools.removeprefix("tools\n").removesuffix("\n<|end|>")) == TOOLS[0]
    assert results == [
        'tool\n<tool_response>\n{"t": 5}\n</tool_response><|end|>',
        "tool\n<tool_response>\n6 °C\n</tool_response><|end|>",
    ]
    assert prompt == "assistant\n<think>\n\n</think>\n\n"
    parser = choose_format(None, None, "qwen3_moe").parser([Tool("get_weather")], False)
    written = answer.removeprefix("assistant\n").removesuffix("<|end|>")
    assert summed(parts_of(parser, list(written))) == [
        ("Reasoning", "I look it up."),
        ("Content", "Wait."),
        ("call", "get_weather"),
        ("ToolArguments", json.dumps(ARGUMENTS, ensure_ascii=False)),
        ("call", "get_weather"),
        ("ToolArguments", '{"city": "Bern"}'),
    ]
    # Clients send arguments as text; they stay as they are.
    as_text = [{"role": "assistant", "content": None, "tool_calls": [call('{"a":1}')]}]
    assert '"arguments": {"a":1}}\n</tool_call>' in tiny.apply_chat_template(as_text)
