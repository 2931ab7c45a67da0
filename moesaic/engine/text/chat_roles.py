"""Rewrites messages for chat templates that lack a role, or tool calls.

Templates refuse or drop what they do not know. At start each renders a few conversations that show
what it knows; the rest takes a form that every template knows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, NamedTuple

Message = Mapping[str, Any]


class CallArguments(str):
    """A tool call's arguments as the model wrote them; templates use them as values or as text."""


@dataclass(frozen=True, slots=True)
class TemplateSupport:
    """What a chat template renders."""

    system: bool = True
    systems: bool = True
    """Several system messages, anywhere."""
    developer: bool = True
    tool: bool = True
    tool_calls: bool = True
    tools: bool = True


class Probe(NamedTuple):
    """A conversation whose marked texts are in the prompt if the template renders them."""

    messages: Sequence[Message]
    marked: Sequence[str]
    tools: Sequence[Mapping[str, Any]] | None = None


MARKED: Final = ("zqxa", "zqxb", "zqxc")
USER: Final = {"role": "user", "content": "What is a tile?"}
ANSWER: Final = {"role": "assistant", "content": "A part of a mosaic."}
TOOL: Final = {
    "type": "function",
    "function": {
        "name": MARKED[0],
        "description": "Looks a word up",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}
CALL: Final = {
    "id": "abcdefgh1",
    "type": "function",
    "function": {"name": MARKED[0], "arguments": CallArguments(f'{{"word": "{MARKED[1]}"}}')},
}
CALLING: Final = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT: Final = {"role": "tool", "tool_call_id": CALL["id"], "name": MARKED[0]}
SYSTEMS: Final = tuple({"role": "system", "content": text} for text in MARKED)
PROBES: Final[Mapping[str, Probe]] = {
    "system": Probe((SYSTEMS[0], USER), MARKED[:1]),
    "systems": Probe((*SYSTEMS[:2], USER, ANSWER, SYSTEMS[2], USER), MARKED),
    "developer": Probe(({"role": "developer", "content": MARKED[0]}, USER), MARKED[:1]),
    "tool": Probe((USER, CALLING, {**RESULT, "content": MARKED[2]}), MARKED[2:], [TOOL]),
    "tool_calls": Probe((USER, CALLING), MARKED[1:2], [TOOL]),
    "tools": Probe((USER,), MARKED[:1], [TOOL]),
}


def find_support(render: Callable[[Probe], str]) -> TemplateSupport:
    """`render` gives an empty text for a conversation that the template refuses."""
    found = {}
    for field in fields(TemplateSupport):
        text = render(PROBES[field.name])
        found[field.name] = all(word in text for word in PROBES[field.name].marked)
    return TemplateSupport(**found)


def is_plain(messages: Iterable[Message]) -> bool:
    """Whether every template knows these messages."""
    return all(
        message.get("role") in ("user", "assistant") and not message.get("tool_calls")
        for message in messages
    )


def adapted(messages: Sequence[Message], support: TemplateSupport) -> list[Message]:
    """The messages in a form that the template renders."""
    found: list[Message] = []
    for message in messages:
        role = message.get("role")
        if role == "developer" and not support.developer:
            found.append({**message, "role": "system"})
        elif role == "tool" and not support.tool:
            _append_result(found, message)
        elif message.get("tool_calls") and not support.tool_calls:
            found.append(_with_calls_as_text(message))
        else:
            found.append(message)
    for message in found:
        if isinstance(message, _ToolResults):
            message["content"] = "\n".join(message.texts)
    return found if support.systems else _with_one_system(found, support.system)


class _ToolResults(dict[str, Any]):
    """A user's message made of the results of tools; it has no content before all are known."""

    def __init__(self) -> None:
        super().__init__(role="user")
        self.texts: list[str] = []


def _append_result(messages: list[Message], message: Message) -> None:
    """Results that follow each other are one user's message, as in Qwen's templates."""
    last = messages[-1] if messages else None
    if not isinstance(last, _ToolResults):
        last = _ToolResults()
        messages.append(last)
    last.texts.append(f"<tool_response>\n{_text(message)}\n</tool_response>")


def _with_calls_as_text(message: Message) -> Message:
    """Calls in the content, in the form that Qwen's templates give them."""
    calls = message["tool_calls"]
    texts = [_call_text(call) for call in (calls if isinstance(calls, list) else [calls])]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(filter(None, [_text(message), *texts]))}


def _call_text(call: Any) -> str:
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    name, arguments = function.get("name"), function.get("arguments") or {}
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(name, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def _with_one_system(messages: list[Message], first: bool) -> list[Message]:
    """One system message, at the start; without `first` its text begins the first user's message
    instead."""
    systems = [message for message in messages if message.get("role") == "system"]
    if not systems or (first and systems == messages[:1]):
        return messages
    text = "\n\n".join(_text(message) for message in systems)
    rest = [message for message in messages if message.get("role") != "system"]
    if first:
        return [{**systems[0], "content": text}, *rest]
    position = next((n for n, one in enumerate(rest) if one.get("role") == "user"), None)
    if position is None:
        return [{"role": "user", "content": text}, *rest]
    whole = {**rest[position], "content": f"{text}\n\n{_text(rest[position])}"}
    return [*rest[:position], whole, *rest[position + 1 :]]


def _text(message: Message) -> str:
    content = message.get("content")
    if content is None:
        return ""
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
