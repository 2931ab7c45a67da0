"""The objects of the Responses API that the server sends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from moesaic.server.openai.chat import PreparedChat
from moesaic.server.openai.response_types import TokenLogprob, Usage
from moesaic.server.responses_api.bodies import (
    FunctionToolBody,
    ReasoningBody,
    ResponsesBody,
    TextBody,
    TextFormat,
    ToolSelection,
)

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["completed", "failed", "in_progress", "cancelled", "incomplete"]

ErrorCode = Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: tuple[()] = ()
    logprobs: Sequence[TokenLogprob] | msgspec.Raw = ()


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str


class MessageItem(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    content: Sequence[OutputText] = ()
    role: Literal["assistant"] = "assistant"


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    id: str
    status: ItemStatus
    content: Sequence[ReasoningText] = ()
    summary: tuple[()] = ()


class CallItem(msgspec.Struct, tag_field="type", tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str = ""


OutputItem = MessageItem | ReasoningItem | CallItem


class ResponsesUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> ResponsesUsage:
        """Cached tokens are 0 unless --enable-cache-report is set."""
        cached = usage.prompt_tokens_details or {"cached_tokens": 0}
        reasoning = usage.completion_tokens_details or {"reasoning_tokens": 0}
        return cls(
            usage.prompt_tokens,
            {**cached, "cache_write_tokens": 0},
            usage.completion_tokens,
            {**reasoning},
            usage.total_tokens,
        )


class ResponseError(msgspec.Struct):
    code: ErrorCode
    message: str


class ResponseObject(msgspec.Struct, kw_only=True, tag_field="object", tag="response"):
    id: str
    created_at: int
    completed_at: int | None = None
    status: ResponseStatus = "in_progress"
    error: ResponseError | None = None
    incomplete_details: dict[str, str] | None = None
    model: str
    output: Sequence[OutputItem] = ()
    usage: ResponsesUsage | None = None

    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ReasoningBody
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: TextBody
    tool_choice: Literal["none", "auto", "required"] | ToolSelection
    tools: list[FunctionToolBody]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    user: None = None


def new_response(body: ResponsesBody, prepared: PreparedChat, model: str) -> ResponseObject:
    """A response in progress, with the values that the request has or that are used without one."""
    params: Any = prepared.call.sampling_params
    text = body.text or TextBody()
    return ResponseObject(
        id=prepared.id,
        created_at=int(time.time()),
        model=model,
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        reasoning=body.reasoning or ReasoningBody(),
        store=body.store is not False,
        temperature=params.temperature,
        text=TextBody(
            format=text.format or TextFormat(type="text"), verbosity=text.verbosity or "medium"
        ),
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=params.top_p,
        truncation=body.truncation or "disabled",
    )
