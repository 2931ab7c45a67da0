"""Request bodies of the Responses API. A null field counts as omitted."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec

from moesaic.server.openai.request_types import ReasoningEffort, Scalar, StreamOptions

LOGPROBS: Final = "message.output_text.logprobs"
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]

Metadata = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=64)], Annotated[str, msgspec.Meta(max_length=512)]],
    msgspec.Meta(max_length=16),
]


class ItemPart(msgspec.Struct):
    """A part of an item's content; other fields are ignored."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct, kw_only=True):
    """A message, a call, its output, or reasoning. Other fields are ignored: clients send back
    whole items of earlier responses."""

    type: str | None = None
    id: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[ItemPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ItemPart] | None = None
    summary: list[ItemPart] | None = None


class FunctionToolBody(msgspec.Struct, kw_only=True):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class AllowedTool(msgspec.Struct, omit_defaults=True):
    type: str
    name: str | None = None


class ToolSelection(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One function, or several that are allowed."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[AllowedTool] | None = None


class TextFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextBody(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningBody(msgspec.Struct, kw_only=True):
    """Other fields are ignored: they ask for summaries, which are empty."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class InputTokensBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that a prompt is made of."""

    model: str | None = None
    input: str | list[InputItem] | None = None
    """Required without `previous_response_id`."""
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[FunctionToolBody] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolSelection | None = None
    parallel_tool_calls: bool | None = None
    text: TextBody | None = None
    reasoning: ReasoningBody | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Scalar] | None = None


class ResponsesBody(InputTokensBody, kw_only=True):
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    background: bool | None = None
    store: bool | None = None
    max_output_tokens: int | None = None
    include: list[Includable] | None = None
    metadata: Metadata | None = None
    top_logprobs: int | None = None

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    stop_regex: str | list[str] | None = None
    extra_key: str | None = None
    cache_salt: str | None = None

    max_tool_calls: int | None = None
