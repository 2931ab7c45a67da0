"""Request bodies of the OpenAI API, with the additional fields of SGLang and vLLM. A null field
counts as omitted, because many clients send it so. core/foreign_fields.py has further fields."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Scalar = bool | int | float | str | None
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's form of structured output."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = None
    json_object: bool | None = None


class CommonBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    response_format: ResponseFormat | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | dict[str, Any] | None = None
    rid: str | None = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: int | None = None
    stop_regex: str | list[str] | None = None
    extra_key: str | list[str | None] | None = None
    cache_salt: str | list[str | None] | None = None
    return_cached_tokens_details: bool | None = None
    data_parallel_rank: int | None = None
    routed_dp_rank: int | None = None
    bootstrap_host: str | list[str | None] | None = None
    bootstrap_port: int | list[int | None] | None = None
    bootstrap_room: int | list[int | None] | None = None

    return_token_ids: bool | None = None
    include_stop_str_in_output: bool | None = None
    request_id: str | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = None
    structured_outputs: StructuredOutputs | None = None


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None


class CallFunction(msgspec.Struct):
    name: str
    arguments: str = ""


class CallBody(msgspec.Struct):
    function: CallFunction
    id: str = ""
    type: Literal["function"] = "function"


class MessageBody(msgspec.Struct, kw_only=True):
    """Other fields are ignored: clients send back whole answers of other servers."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[CallBody] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class FunctionBody(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(msgspec.Struct):
    type: Literal["function"]
    function: FunctionBody


class FunctionName(msgspec.Struct):
    name: str


class AllowedFunction(msgspec.Struct):
    function: FunctionName
    type: Literal["function"] = "function"


class AllowedTools(msgspec.Struct):
    mode: Literal["auto", "required"]
    tools: list[AllowedFunction]


class SelectedTools(msgspec.Struct):
    """One function, or those that are allowed."""

    function: FunctionName | None = None
    type: Literal["function", "allowed_tools"] = "function"
    allowed_tools: AllowedTools | None = None


class ChatBody(CommonBody, kw_only=True):
    messages: list[MessageBody]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[ToolBody] | None = None
    tool_choice: Literal["none", "auto", "required"] | SelectedTools | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None

    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Scalar] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    include_reasoning: bool | None = None
    return_prompt_token_ids: bool | None = None


class CompletionBody(CommonBody, kw_only=True):
    prompt: str | list[str | int | list[int]]
    """A text, its token ids, or a list of either."""
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None
    separate_reasoning: bool | None = None
    """Without effect: reasoning is part of a completion's text."""
