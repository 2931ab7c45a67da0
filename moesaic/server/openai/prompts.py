"""Renders messages and tools to the tokens of a prompt."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from moesaic.core.redact import quoted
from moesaic.core.sampling import MAX_GRAMMAR_BYTES
from moesaic.engine.frontend.engine_limits import EngineLimits, PromptTooLong
from moesaic.engine.text.chat_roles import CallArguments
from moesaic.engine.text.chat_template import ChatTemplateError
from moesaic.engine.text.tokenizer import Tokenizer
from moesaic.server.bodies import in_thread_if_large, is_decodable
from moesaic.server.errors import Refusal
from moesaic.server.openai.request_types import (
    CallBody,
    ChatBody,
    MessageBody,
    Scalar,
    SelectedTools,
)
from moesaic.server.parsers.parts import NamedTool, Tool, ToolChoice
from moesaic.server.parsers.tool_schema import check_tool_schema

MAX_MESSAGES: Final = 2048
MAX_TOOLS: Final = 128
MAX_KWARG_CHARS: Final = 256
MAX_KWARG: Final = 2**31
# Template variables that a request may set.
TEMPLATE_KWARGS: Final = frozenset(
    ("enable_thinking", "thinking", "thinking_budget", "preserve_thinking", "reasoning_effort")
)
TOOL_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")
END_CHARS: Final = 256
# As JSON. Tools that become a grammar have the smaller limit of grammars.
MAX_TOOL_BYTES: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class TemplateInput:
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    kwargs: dict[str, Scalar]
    opening: str = ""
    """The start of the answer, which the model continues."""
    add_generation_prompt: bool = True

    @property
    def num_chars(self) -> int:
        """Characters that every template keeps; some drop parts of the assistant's turns."""
        others = (message for message in self.messages if message["role"] != "assistant")
        return sum(len(message["content"] or "") for message in others)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    tokens: list[int]
    end: str
    """The end of the template's text, which shows whether the answer begins with reasoning."""


async def render(
    chat: TemplateInput, tokenizer: Tokenizer, limits: EngineLimits, client: Hashable
) -> ChatPrompt:
    """Renders in the template process, which serves clients in turn."""
    try:
        limits.check_chars(chat.num_chars)
        text = await asyncio.wrap_future(
            tokenizer.chat.submit(
                client, chat.messages, chat.add_generation_prompt, chat.tools, chat.kwargs
            )
        )
        end = text[-END_CHARS:]
        text += chat.opening
        limits.check_chars(len(text))
    except PromptTooLong as error:
        raise Refusal(400, str(error), "messages", "context_length_exceeded") from None
    except ChatTemplateError as error:
        raise Refusal(400, str(error), "messages") from None
    tokens = await in_thread_if_large(
        len(text), lambda: tokenizer.encode(text, add_special_tokens=False)
    )
    return ChatPrompt(tokens, end)


def check_number(messages: list[MessageBody]) -> None:
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise Refusal(400, f"send between 1 and {MAX_MESSAGES} messages", "messages")


def template_input(body: ChatBody, with_tools: bool) -> TemplateInput:
    check_number(body.messages)
    messages, opening = body.messages, ""
    add_prompt = body.add_generation_prompt is not False
    if body.continue_final_message:
        if body.add_generation_prompt:
            text = "continue_final_message and add_generation_prompt exclude each other: give one"
            raise Refusal(400, text, "add_generation_prompt")
        add_prompt = True  # the final message follows it as the start of the answer
        if messages[-1].role != "assistant":
            text = "continue_final_message needs an assistant's message at the end"
            raise Refusal(400, text, "messages")
        opening = _text(messages[-1]) or ""
        messages = messages[:-1]
    tools = None
    if with_tools and body.tools:
        tools = [msgspec.to_builtins(tool) for tool in body.tools]
        for tool in tools:
            given = tool["function"].items()
            tool["function"] = {key: value for key, value in given if value is not None}
    kwargs = template_kwargs(body)
    rendered = [_message(message) for message in messages]
    return TemplateInput(rendered, tools, kwargs, opening, add_prompt)


def template_kwargs(body: ChatBody) -> dict[str, Scalar]:
    found = dict(body.chat_template_kwargs or {})
    for name, value in found.items():
        if name not in TEMPLATE_KWARGS:
            text = f"only {', '.join(sorted(TEMPLATE_KWARGS))} can be set in a chat template"
            raise Refusal(400, text, "chat_template_kwargs")
        long = isinstance(value, str) and len(value) > MAX_KWARG_CHARS
        if long or (isinstance(value, int | float) and abs(value) >= MAX_KWARG):
            raise Refusal(400, f"the value of {name} is too large", "chat_template_kwargs")
    if body.reasoning_effort == "none":
        return {"enable_thinking": False, "thinking": False, **found}
    if body.reasoning_effort is not None:
        # Templates do not know the word, and some fail for it.
        effort = "xhigh" if body.reasoning_effort == "max" else body.reasoning_effort
        return {"reasoning_effort": effort, **found}
    return found


def with_allowed_tools(body: ChatBody) -> ChatBody:
    """The chat with only those of its tools that the client's choice allows."""
    choice = body.tool_choice
    if not isinstance(choice, SelectedTools) or choice.type != "allowed_tools":
        return body
    if choice.allowed_tools is None:
        text = "tool_choice of type allowed_tools needs allowed_tools, with mode and tools"
        raise Refusal(400, text, "tool_choice")
    allowed = {entry.function.name for entry in choice.allowed_tools.tools}
    tools = [tool for tool in body.tools or () if tool.function.name in allowed]
    if allowed - {tool.function.name for tool in tools}:
        raise Refusal(400, "tool_choice allows a tool that is not in tools", "tool_choice")
    return msgspec.structs.replace(body, tools=tools, tool_choice=choice.allowed_tools.mode)


def tools_of(body: ChatBody) -> tuple[list[Tool], ToolChoice]:
    """The tools that the model may call, and the client's choice among them."""
    if len(body.tools or ()) > MAX_TOOLS:
        raise Refusal(400, f"give at most {MAX_TOOLS} tools", "tools")
    tools = [_tool(entry.function) for entry in body.tools or ()]
    names = {tool.name for tool in tools}
    if len(names) < len(tools):
        raise Refusal(400, "two tools have the same name", "tools")
    choice = body.tool_choice or ("auto" if tools else "none")
    if choice == "required" and not tools:
        raise Refusal(400, "tool_choice required needs tools", "tool_choice")
    if isinstance(choice, SelectedTools):
        if choice.function is None:
            raise Refusal(400, "tool_choice of type function needs function.name", "tool_choice")
        if choice.function.name not in names:
            raise Refusal(400, "tool_choice names a function that is not in tools", "tool_choice")
        return tools, NamedTool(choice.function.name)
    return (tools, choice) if choice != "none" and tools else ([], "none")


def check_size(body: ChatBody, choice: ToolChoice, is_structured: bool) -> None:
    """Refuses tools that are too large, before they are rendered or become a grammar."""
    strict = any(entry.function.strict for entry in body.tools or ())
    is_grammar = strict or is_structured or choice not in ("none", "auto")
    most = MAX_GRAMMAR_BYTES if is_grammar else MAX_TOOL_BYTES
    if (size := len(msgspec.json.encode(body.tools))) > most:
        raise Refusal(400, f"the tools have {size} bytes: give at most {most}", "tools")


def _tool(function: Any) -> Tool:
    if not TOOL_NAME.fullmatch(function.name):
        text = f"the name of a tool must match {TOOL_NAME.pattern}"
        raise Refusal(400, text, "tools")
    check_tool_schema(function.name, function.parameters or {})
    return Tool(
        function.name,
        function.description or "",
        function.parameters or {"type": "object", "properties": {}},
        bool(function.strict),
    )


def _message(message: MessageBody) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": _text(message)}
    if found["content"] is None and message.role == "user":
        raise Refusal(400, "a user's message needs content: give a text or text parts", "messages")
    if found["content"] is None and not message.tool_calls:
        found["content"] = ""
    if message.tool_calls:
        found["tool_calls"] = [_call(call) for call in message.tool_calls]
    if (reasoning := message.reasoning_content or message.reasoning) is not None:
        found["reasoning_content"] = reasoning
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            found[name] = value
    return found


def _text(message: MessageBody) -> str | None:
    if not isinstance(message.content, list):
        return message.content
    for part in message.content:
        if part.type != "text" or part.text is None:
            text = "content must be a text or a list of parts of type text"
            given = "without text" if part.type == "text" else f"of type {quoted(part.type)}"
            raise Refusal(400, f"{text}: a part is {given}", "messages")
    return "\n".join(part.text or "" for part in message.content)


def _call(call: CallBody) -> dict[str, Any]:
    text = call.function.arguments
    if is_decodable(text):
        with suppress(msgspec.DecodeError, UnicodeError, RecursionError):
            if isinstance(msgspec.json.decode(text or "{}"), dict):
                text = CallArguments(text)
    function = {"name": call.function.name, "arguments": text}
    return {"id": call.id, "type": call.type, "function": function}
