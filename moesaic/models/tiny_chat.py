"""The chat template of tiny models; needs no torch."""

from __future__ import annotations

from typing import Final

EOS, TURN = "<|end|>", "<|turn|>"
# Other end tokens: in gpt-oss <|end|> is a marker within answers.
OTHER_EOS = {"gpt_oss": "<|return|>"}
# Tools, calls and reasoning follow Qwen3's template.
_TOOLS = (
    "{% if tools %}" + TURN + "tools\n"
    "{% for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}" + EOS + "{% endif %}"
)
_REASONING = (
    "{% if m.reasoning_content %}"
    "{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}"
)
_CONTENT = (
    "{% if m.role == 'tool' %}{{ '<tool_response>\\n' ~ m.content ~ '\\n</tool_response>' }}"
    "{% elif m.content is not none %}{{ m.content }}{% endif %}"
)
_CALLS = (
    "{% for call in m.tool_calls or [] %}"
    "{% if m.content or not loop.first %}{{ '\\n' }}{% endif %}"
    "{% set f = call.function or call %}{% set a = f.arguments %}"
    "{{ '<tool_call>\\n{\"name\": ' ~ (f.name | tojson) ~ ', \"arguments\": ' ~ "
    "(a if a is string else a | tojson) ~ '}\\n</tool_call>' }}{% endfor %}"
)
CHAT_TEMPLATE = (
    _TOOLS
    + "{% for m in messages %}"
    + TURN
    + "{{ m.role }}\n"
    + _REASONING
    + _CONTENT
    + _CALLS
    + EOS
    + "{% endfor %}{% if add_generation_prompt %}"
    + TURN
    + "assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)


def chat_template(eos: str) -> str:
    return CHAT_TEMPLATE.replace(EOS, eos)


CHAT_TEMPLATES: Final = frozenset(chat_template(eos) for eos in (EOS, *OTHER_EOS.values()))
