"""Messages in roles that a chat template does not know: found out by rendering, then rewritten."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest

from moesaic.engine.text.chat_roles import CallArguments, TemplateSupport, adapted
from moesaic.engine.text.chat_template import ChatTemplates
from moesaic.models.tiny_chat import CHAT_TEMPLATE
from tests.unit.test_chat_templates import DEEPSEEK, GPT_OSS, HOUSE, INDENTED, MISTRAL, QWEN3

# Like Mixtral's: turns alternate, and no other roles are known.
MIXTRAL = (
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else m.content + '</s>' }}"
    "{% endfor %}"
)
SUPPORT = {
    "qwen3": (QWEN3, TemplateSupport(developer=False)),
    "deepseek": (DEEPSEEK, TemplateSupport(developer=False, tools=False)),
    "mistral": (MISTRAL, TemplateSupport(developer=False, systems=False)),
    "gpt-oss": (GPT_OSS, TemplateSupport()),
    "indented": (INDENTED, TemplateSupport()),
    "tiny": (CHAT_TEMPLATE, TemplateSupport()),
    "tiny, tried": (CHAT_TEMPLATE + " ", TemplateSupport()),
    "house": (
        (Path(HOUSE) / "chat_template.jinja").read_text(),
        TemplateSupport(developer=False, tool=False, tool_calls=False, tools=False),
    ),
    "mixtral": (MIXTRAL, TemplateSupport(False, False, False, False, False, False)),
}
CALL = {"id": "abcdefgh1", "function": {"name": "look_up", "arguments": CallArguments('{"a":1}')}}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "S1"},
    {"role": "developer", "content": "D1"},
    {"role": "user", "content": "U1"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "abcdefgh1", "content": "R1"},
    {"role": "tool", "tool_call_id": "abcdefgh1", "content": "R2"},
    {"role": "assistant", "content": "A1"},
    {"role": "developer", "content": "D2"},
    {"role": "user", "content": "U2"},
]
CALL_TEXT = '<tool_call>\n{"name": "look_up", "arguments": {"a":1}}\n</tool_call>'
RESULTS = "<tool_response>\nR1\n</tool_response>\n<tool_response>\nR2\n</tool_response>"


@pytest.fixture(params=SUPPORT)
def chat(request: pytest.FixtureRequest) -> Iterator[tuple[ChatTemplates, TemplateSupport]]:
    template, expected = SUPPORT[request.param]
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    made = ChatTemplates({"default": template}, variables, "folder")
    yield made, expected
    made.close()


def render(chat: ChatTemplates, messages: Any = CHAT, tools: Any = None) -> str:
    return chat.submit(None, messages, True, tools, {}).result()


def test_templates_show_what_they_know(chat: tuple[ChatTemplates, TemplateSupport]):
    made, expected = chat
    made.check()
    assert made._supported("default") == expected
    assert made.renders_tools is expected.tools


def test_no_text_is_lost(chat: tuple[ChatTemplates, TemplateSupport]):
    """Also without a check at start. Texts that templates render come in the order of the chat."""
    text = render(chat[0])
    texts = ["U1", "look_up", "R1", "R2", "A1", "U2"]
    assert [text.count(one) for one in ("S1", "D1", "D2")] == [1, 1, 1]
    assert text.index("S1") < text.index("D1") < text.index("D2")
    assert sorted(texts, key=text.index) == texts


def test_the_house_model_knows_three_roles():
    template = SUPPORT["house"][0]
    made = ChatTemplates({"default": template}, {"bos_token": ""}, "folder")
    try:
        assert render(made) == (
            "<|system|>S1<|end|><|system|>D1<|end|><|user|>U1<|end|>"
            f"<|assistant|>{CALL_TEXT}\n{CALL_TEXT}<|end|><|user|>{RESULTS}<|end|>"
            "<|assistant|>A1<|end|><|system|>D2<|end|><|user|>U2<|end|><|assistant|>"
        )
        # What the template knows is rendered as jinja2 renders it.
        plain = [CHAT[0], CHAT[2], CHAT[6], CHAT[8]]
        own = jinja2.Template(template).render(messages=plain, add_generation_prompt=True)
        assert render(made, plain) == own
    finally:
        made.close()


@pytest.mark.parametrize(
    ("messages", "support", "expected"),
    [
        (CHAT[:3], TemplateSupport(), CHAT[:3]),
        (CHAT[:1], TemplateSupport(systems=False), CHAT[:1]),
        (
            CHAT[:3],
            TemplateSupport(systems=False, developer=False),
            [{"role": "system", "content": "S1\n\nD1"}, CHAT[2]],
        ),
        (
            [CHAT[2], CHAT[0]],
            TemplateSupport(systems=False),
            [CHAT[0], CHAT[2]],
        ),
        (
            [CHAT[6], CHAT[2], CHAT[0]],
            TemplateSupport(systems=False, system=False),
            [CHAT[6], {"role": "user", "content": "S1\n\nU1"}],
        ),
        (
            [CHAT[0], CHAT[6]],
            TemplateSupport(systems=False, system=False),
            [{"role": "user", "content": "S1"}, CHAT[6]],
        ),
        (
            [{"role": "tool", "content": [1]}, CHAT[2], CHAT[4]],
            TemplateSupport(tool=False),
            [
                {"role": "user", "content": "<tool_response>\n[1]\n</tool_response>"},
                CHAT[2],
                {"role": "user", "content": "<tool_response>\nR1\n</tool_response>"},
            ],
        ),
        (
            [{"role": "assistant", "content": "A", "tool_calls": [{"name": "f"}, 5]}],
            TemplateSupport(tool_calls=False),
            [
                {
                    "role": "assistant",
                    "content": 'A\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
                    '<tool_call>\n{"name": null, "arguments": {}}\n</tool_call>',
                }
            ],
        ),
    ],
)
def test_messages_are_rewritten(messages: Any, support: TemplateSupport, expected: Any):
    before = repr(messages)
    assert adapted(messages, support) == expected
    assert repr(messages) == before


def test_many_results_in_a_row():
    """To join each to those before would copy 80 GB, which takes 10 s or more."""
    messages = [{"role": "tool", "content": "x" * 60}] * 40_000
    before = time.process_time()
    (message,) = adapted(messages, TemplateSupport(tool=False))
    assert time.process_time() - before < 3
    text = f"<tool_response>\n{'x' * 60}\n</tool_response>"
    assert message == {"role": "user", "content": "\n".join([text] * 40_000)}
