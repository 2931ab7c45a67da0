"""Requests of the Responses API as requests of a chat."""

from __future__ import annotations

from typing import Final, Literal

from moesaic.core.redact import shown
from moesaic.server.bodies import is_foreign
from moesaic.server.errors import Refusal
from moesaic.server.openai.request_types import (
    ChatBody,
    FunctionBody,
    FunctionName,
    JsonSchema,
    MessageBody,
    ResponseFormat,
    SelectedTools,
    ToolBody,
)
from moesaic.server.responses_api.bodies import (
    LOGPROBS,
    FunctionToolBody,
    InputTokensBody,
    ResponsesBody,
    TextFormat,
    ToolSelection,
)
from moesaic.server.responses_api.conversation import messages_of

# The chat's fields that have another name here, for errors.
NAMES: Final = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
}
# Fields of the same name in both.
SAME_PROMPT: Final = ("model", "parallel_tool_calls", "chat_template_kwargs")
SAME: Final = (
    *("temperature", "top_p", "top_k", "min_p", "stop", "seed", "ignore_eos"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "stream", "stream_options"),
    *("stop_regex", "extra_key", "cache_salt"),
)
Choice = Literal["none", "auto", "required"] | SelectedTools | None


def new_messages(body: InputTokensBody) -> list[MessageBody]:
    """The messages of the input; the instructions are no part of the conversation."""
    if body.input is None and not body.previous_response_id:
        text = "missing required field `input`: give it, or previous_response_id"
        raise Refusal(400, text, "input")
    if not (body.input or body.previous_response_id or body.instructions):
        raise Refusal(400, "input is empty: give a text or a list of items", "input")
    return messages_of(body.input or [])


def prompt_body(body: InputTokensBody, conversation: list[MessageBody]) -> ChatBody:
    """A chat with the prompt of this request."""
    if body.text:
        is_foreign("verbosity", body.text.verbosity)
    tools, choice = _tools(body)
    instructions = [MessageBody(role="system", content=body.instructions)]
    return ChatBody(
        messages=[*(instructions if body.instructions else ()), *conversation],
        tools=[_tool(tool) for tool in tools] or None,
        tool_choice=choice,
        response_format=_format(body.text.format) if body.text and body.text.format else None,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        **{name: getattr(body, name) for name in SAME_PROMPT},
    )


def chat_body(body: ResponsesBody, conversation: list[MessageBody], id: str) -> ChatBody:
    """`id`: of the response and of its request in the engine."""
    chat = prompt_body(body, conversation)
    for name in SAME:
        setattr(chat, name, getattr(body, name))
    chat.rid, chat.max_tokens = id, body.max_output_tokens
    if LOGPROBS in (body.include or ()) or body.top_logprobs:
        chat.logprobs, chat.top_logprobs = True, body.top_logprobs
    return chat


def _tools(body: InputTokensBody) -> tuple[list[FunctionToolBody], Choice]:
    """The tools that the model may call."""
    tools, choice = body.tools or [], body.tool_choice
    if not isinstance(choice, ToolSelection):
        return tools, choice
    if choice.type == "function" and choice.name is not None:
        return tools, SelectedTools(FunctionName(choice.name))
    if choice.type != "allowed_tools":
        kinds = "none, auto, required, a function with its name, or allowed_tools"
        text = f"tool_choice of type {shown(choice.type)} is not supported: give {kinds}"
        raise Refusal(400, text, "tool_choice")
    allowed = {entry.name for entry in choice.tools or ()}
    if allowed - {tool.name for tool in tools}:
        raise Refusal(400, "tool_choice allows a tool that is not in tools", "tool_choice")
    return [tool for tool in tools if tool.name in allowed], choice.mode or "auto"


def _tool(tool: FunctionToolBody) -> ToolBody:
    if tool.type != "function":
        text = f"tools of type {shown(tool.type)} are not offered: this server has no tools of its"
        raise Refusal(400, f"{text} own, give functions", "tools", "unsupported_parameter")
    if tool.name is None:
        raise Refusal(400, "a function in tools needs a name", "tools")
    return ToolBody(
        "function", FunctionBody(tool.name, tool.description, tool.parameters, tool.strict)
    )


def _format(given: TextFormat) -> ResponseFormat:
    if given.type != "json_schema":
        return ResponseFormat(given.type)
    if given.schema is None:
        raise Refusal(400, "text.format of type json_schema needs a schema", "text.format")
    schema = JsonSchema(
        name=given.name or "",
        description=given.description,
        schema=given.schema,
        strict=given.strict,
    )
    return ResponseFormat("json_schema", schema)
