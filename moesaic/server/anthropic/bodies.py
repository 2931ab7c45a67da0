"""Request bodies of Anthropic's Messages API. A null field counts as omitted."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class ContentBlockBody(msgspec.Struct, kw_only=True):
    """A text, thinking, a call or its result. Other fields are ignored, such as cache_control."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[ContentBlockBody] | None = None
    is_error: bool | None = None


class TurnBody(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlockBody]


class ClientTool(msgspec.Struct, kw_only=True):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoiceBody(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingBody(msgspec.Struct, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputSchema(msgspec.Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputSchema | None = None


class CountTokensBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that a prompt is made of."""

    model: str | None = None
    messages: list[TurnBody]
    system: str | list[ContentBlockBody] | None = None
    tools: list[ClientTool] | None = None
    tool_choice: ToolChoiceBody | None = None
    thinking: ThinkingBody | None = None
    output_config: OutputConfig | None = None
    output_format: OutputSchema | None = None


class MessagesBody(CountTokensBody, kw_only=True):
    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    stop_regex: str | list[str] | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
