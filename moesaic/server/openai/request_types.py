"""Request bodies of the OpenAI API, with the additional fields of SGLang and vLLM. A null field
counts as omitted, because many clients send it so."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from moesaic.server.errors import Refusal

Scalar = bool | int | float | str | None
# Fields that are refused unless they have one of these values, and what to do instead.
REFUSED: Final[dict[str, tuple[tuple[Any, ...], str]]] = {
    "audio": ((), "this server answers in text"),
    "modalities": ((["text"],), 'give ["text"] or leave it out'),
    "functions": (([],), "give tools instead"),
    "function_call": (("none",), "give tool_choice instead"),
    "web_search_options": ((), "this server has no web search"),
    "verbosity": (("medium",), "ask for it in a message"),
    "suffix": (("",), "a prompt is continued only at its end"),
    "return_hidden_states": ((False,), "they never leave the ranks"),
    "lora_path": ((), "no adapters are served"),
    "custom_logit_processor": ((), "requests cannot carry code"),
    "stop_regex": ((), "give stop or stop_token_ids"),
    "structural_tag": ((), "give response_format json_schema, regex or ebnf"),
}


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
    """The common fields; those at the end have no effect or are refused (REFUSED)."""

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

    request_id: str | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = None
    structured_outputs: StructuredOutputs | None = None

    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    priority: Any = None

    lora_path: Any = None
    custom_logit_processor: Any = None
    return_hidden_states: Any = None
    stop_regex: Any = None
    structural_tag: Any = None

    def check_refused(self) -> None:
        for name, (neutral, fix) in REFUSED.items():
            value = getattr(self, name, None)
            if value is not None and not any(value == same for same in neutral):
                text = f"{name} is not supported: {fix}"
                raise Refusal(400, text, name, "unsupported_parameter")


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


class NamedChoice(msgspec.Struct):
    function: FunctionName
    type: Literal["function"] = "function"


class ChatBody(CommonBody, kw_only=True):
    messages: list[MessageBody]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[ToolBody] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None

    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Scalar] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    include_reasoning: bool | None = None

    prediction: Any = None

    audio: Any = None
    modalities: Any = None
    functions: Any = None
    function_call: Any = None
    web_search_options: Any = None
    verbosity: Any = None


class CompletionBody(CommonBody, kw_only=True):
    prompt: str | list[str | int | list[int]]
    """A text, its token ids, or a list of either."""
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None

    suffix: Any = None
