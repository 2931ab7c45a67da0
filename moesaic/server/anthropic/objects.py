"""The objects of the Messages API that the server sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from moesaic.server.errors import Refusal
from moesaic.server.openai.response_types import Usage

ERROR_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Any


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessagesUsage(msgspec.Struct):
    """The tokens of a prompt are those that were read from the cache and the input tokens."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    output_tokens_details: dict[str, int] | UnsetType = UNSET

    @classmethod
    def of(cls, usage: Usage) -> MessagesUsage:
        """Cached tokens are 0 unless --enable-cache-report is set."""
        cached = (usage.prompt_tokens_details or {"cached_tokens": 0})["cached_tokens"]
        found = cls(usage.prompt_tokens - cached, usage.completion_tokens, cached)
        if usage.completion_tokens_details:
            number = usage.completion_tokens_details["reasoning_tokens"]
            found.output_tokens_details = {"thinking_tokens": number}
        return found


class MessageObject(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: Sequence[ContentBlock] = ()
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage


def error_body(refusal: Refusal) -> dict[str, Any]:
    """Anthropic's shape, with the param and code of the other routes."""
    other = "api_error" if refusal.status >= 500 else "invalid_request_error"
    kind = ERROR_TYPES.get(refusal.status, other)
    return {"type": "error", "error": {**refusal.body()["error"], "type": kind}}
