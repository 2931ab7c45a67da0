"""Requests of the Messages API as requests of a chat."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from moesaic.core.redact import shown
from moesaic.server.anthropic.bodies import (
    ClientTool,
    ContentBlockBody,
    CountTokensBody,
    MessagesBody,
    ThinkingBody,
    ToolChoiceBody,
    TurnBody,
)
from moesaic.server.errors import Refusal
from moesaic.server.openai.request_types import (
    CallBody,
    CallFunction,
    ChatBody,
    FunctionBody,
    FunctionName,
    JsonSchema,
    MessageBody,
    ResponseFormat,
    SelectedTools,
    ToolBody,
)
from moesaic.server.parsers.tool_schema import check_tool_schema

# The chat's fields that have another name here, for errors.
NAMES: Final = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "chat_template_kwargs": "thinking",
}
CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
# Fields of the same name in both.
SAME: Final = (
    *("max_tokens", "stream", "temperature", "top_p", "top_k"),
    *("stop_regex", "extra_key", "cache_salt"),
)
# Template variables that let a model think; a template knows one of them.
SWITCHES: Final = ("enable_thinking", "thinking")


def prompt_body(body: CountTokensBody) -> ChatBody:
    """A chat with the prompt of this request."""
    choice, thinking = body.tool_choice, body.thinking
    output = body.output_config
    schema = output.format if output and output.format else body.output_format
    messages = [message for turn in body.messages for message in _messages(turn)]
    if body.system:
        text = "\n".join(_texts(body.system, "system"))
        messages.insert(0, MessageBody(role="system", content=text))
    return ChatBody(
        model=body.model,
        messages=messages,
        continue_final_message=_is_begun(messages) or None,
        tools=[_tool(tool) for tool in body.tools or ()] or None,
        tool_choice=_choice(choice, bool(body.tools)) if choice else None,
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        chat_template_kwargs=_template_kwargs(thinking) if thinking else None,
        include_reasoning=not (thinking and thinking.display == "omitted"),
        reasoning_effort=output.effort if output else None,
        response_format=_format(schema.schema) if schema else None,
    )


def chat_body(body: MessagesBody, id: str) -> ChatBody:
    """`id`: of the message and of its request in the engine."""
    chat = prompt_body(body)
    for name in SAME:
        setattr(chat, name, getattr(body, name))
    chat.rid, chat.stop = id, body.stop_sequences or None
    return chat


def _is_begun(messages: list[MessageBody]) -> bool:
    """Whether the client gives the start of the answer, as a last message of the assistant."""
    last = messages[-1] if messages else None
    return last is not None and last.role == "assistant" and not last.tool_calls


def _messages(turn: TurnBody) -> Iterator[MessageBody]:
    if isinstance(turn.content, str):
        yield MessageBody(role=turn.role, content=turn.content)
    elif turn.role == "assistant":
        yield _assistant(turn.content)
    else:
        yield from _user(turn.role, turn.content)


def _user(role: Any, blocks: list[ContentBlockBody]) -> Iterator[MessageBody]:
    """Results of calls are messages of their own."""
    texts: list[ContentBlockBody] = []
    for block in blocks:
        if block.type != "tool_result":
            texts.append(block)
            continue
        if texts:
            yield MessageBody(role=role, content="\n".join(_texts(texts)))
            texts = []
        if block.tool_use_id is None:
            raise Refusal(400, "a tool_result in messages needs tool_use_id", "messages")
        yield MessageBody(role="tool", content=_result(block), tool_call_id=block.tool_use_id)
    if texts or not blocks:
        yield MessageBody(role=role, content="\n".join(_texts(texts)))


def _result(block: ContentBlockBody) -> str:
    """Chat templates know no failed results: the text says so."""
    text = "\n".join(_texts(block.content or ""))
    return f"Error: {text}" if block.is_error else text


def _assistant(blocks: list[ContentBlockBody]) -> MessageBody:
    """The texts of an answer are joined as the model wrote them."""
    calls = [_call(block) for block in blocks if block.type == "tool_use"]
    thoughts = [block.thinking or "" for block in blocks if block.type == "thinking"]
    other = ("tool_use", "thinking", "redacted_thinking")
    texts = _texts([block for block in blocks if block.type not in other])
    return MessageBody(
        role="assistant",
        content="".join(texts) if texts or not calls else None,
        tool_calls=calls or None,
        reasoning_content="".join(thoughts) or None,
    )


def _call(block: ContentBlockBody) -> CallBody:
    if block.id is None or block.name is None:
        raise Refusal(400, "a tool_use in messages needs id and name", "messages")
    arguments = msgspec.json.encode(block.input or {}).decode()
    return CallBody(CallFunction(block.name, arguments), block.id)


def _texts(content: str | list[ContentBlockBody], field: str = "messages") -> list[str]:
    if isinstance(content, str):
        return [content]
    for block in content:
        if block.type != "text":
            text = f"content of type {shown(block.type)} is not supported here: give text"
            raise Refusal(400, text, field)
    return [block.text or "" for block in content]


def _tool(tool: ClientTool) -> ToolBody:
    if tool.type not in (None, "custom"):
        text = f"tools of type {shown(tool.type)} are not offered: this server has no tools of its"
        raise Refusal(400, f"{text} own, give name and input_schema", "tools")
    check_tool_schema(tool.name, tool.input_schema, "input_schema")
    return ToolBody(
        "function", FunctionBody(tool.name, tool.description, tool.input_schema, tool.strict)
    )


def _choice(choice: ToolChoiceBody, has_tools: bool) -> Any:
    if choice.type == "any" and not has_tools:
        raise Refusal(400, "tool_choice of type any needs tools", "tool_choice")
    if choice.type != "tool":
        return CHOICES[choice.type]
    if choice.name is None:
        raise Refusal(400, "tool_choice of type tool needs a name", "tool_choice")
    return SelectedTools(FunctionName(choice.name))


def _template_kwargs(thinking: ThinkingBody) -> dict[str, Any] | None:
    """None leaves it to the model."""
    if thinking.type == "disabled":
        return dict.fromkeys(SWITCHES, False)
    if thinking.type != "enabled":
        return None
    budget = {} if thinking.budget_tokens is None else {"thinking_budget": thinking.budget_tokens}
    return {**dict.fromkeys(SWITCHES, True), **budget}


def _format(schema: dict[str, Any]) -> ResponseFormat:
    return ResponseFormat("json_schema", JsonSchema(name="output", schema=schema))
