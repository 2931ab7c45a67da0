"""Kinds of servers: route, request body, and how to read answers and events."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from moesaic.loadgen.outcome import BenchPrompt, Outcome

FAILED: Final = ("abort", "error")


@dataclass(frozen=True)
class RequestOptions:
    """Options that all requests of a run share."""

    model: str
    stream: bool
    ignore_eos: bool
    extra: Mapping[str, Any]


@dataclass(frozen=True)
class Endpoint:
    path: str
    body: Callable[[BenchPrompt, RequestOptions], dict[str, Any]]
    read: Callable[[bytes, Outcome], bool]
    """Adds a whole answer or one event to an outcome; returns whether it carried tokens."""
    chat: bool = False

    def request(self, prompt: BenchPrompt, options: RequestOptions) -> bytes:
        return msgspec.json.encode(merged(self.body(prompt, options), options.extra))


def merged(body: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """`body` with extra values, which win; objects are merged recursively."""
    result = dict(body)
    for key, value in extra.items():
        old = result.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        result[key] = merged(old, value) if both and old is not None else value
    return result


def parse_extra_body(flag: str, text: str | None) -> dict[str, Any]:
    try:
        extra = {} if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{flag} is not JSON: {error}") from None
    if not isinstance(extra, dict):
        raise ValueError(f'{flag} is not an object: give {{"NAME": VALUE}}')
    return extra


class AnswerUsage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class AnswerMessage(msgspec.Struct):
    """A message or a delta."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None

    @property
    def words(self) -> str:
        return (self.reasoning_content or self.reasoning or "") + (self.content or "")


class AnswerChoice(msgspec.Struct):
    text: str | None = None
    message: AnswerMessage | None = None
    delta: AnswerMessage | None = None
    finish_reason: str | None = None

    @property
    def words(self) -> str:
        message = self.delta or self.message
        return (self.text or "") + (message.words if message is not None else "")

    @property
    def calls(self) -> bool:
        """Whether there are tool calls, whose arguments are tokens, too."""
        message = self.delta or self.message
        return bool(message and message.tool_calls)


class OpenAIPart(msgspec.Struct):
    choices: list[AnswerChoice] = []
    usage: AnswerUsage | None = None
    error: Any = None


class NativeMeta(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: Any = None


class NativePart(msgspec.Struct):
    text: str | None = None
    meta_info: NativeMeta | None = None
    error: Any = None


_openai = msgspec.json.Decoder(OpenAIPart)
_native = msgspec.json.Decoder(NativePart)


def error_text(error: Any) -> str:
    """The message of an error in any server's format."""
    if isinstance(error, dict):
        return str(error.get("message") or error.get("detail") or error)
    return str(error)


def read_openai(data: bytes, outcome: Outcome) -> bool:
    part = _openai.decode(data)
    if part.error is not None:
        outcome.error = error_text(part.error)
    if part.usage is not None:
        outcome.prompt_tokens = part.usage.prompt_tokens
        outcome.output_tokens = part.usage.completion_tokens
    has_tokens = False
    for choice in part.choices:
        outcome.text += choice.words
        has_tokens = has_tokens or bool(choice.words) or choice.calls
        if choice.finish_reason is not None:
            outcome.finished = True
        if choice.finish_reason in FAILED:
            outcome.error = f"it ended with finish_reason {choice.finish_reason!r}"
    return has_tokens


def read_native(data: bytes, outcome: Outcome) -> bool:
    """Each event has the whole text so far and its number of tokens."""
    part = _native.decode(data)
    if part.error is not None:
        outcome.error = error_text(part.error)
    if part.meta_info is None:
        return False
    before = outcome.output_tokens or 0
    outcome.text = part.text or ""
    outcome.prompt_tokens = part.meta_info.prompt_tokens
    outcome.output_tokens = part.meta_info.completion_tokens
    reason = part.meta_info.finish_reason
    if reason is not None:
        outcome.finished = True
        if isinstance(reason, dict) and reason.get("type") in FAILED:
            outcome.error = str(reason.get("message") or f"it ended with {reason['type']}")
    return (outcome.output_tokens or 0) > before


def native_body(prompt: BenchPrompt, options: RequestOptions) -> dict[str, Any]:
    key, value = ("text", prompt.text) if prompt.ids is None else ("input_ids", prompt.ids)
    sampling = {
        "temperature": 0.0,
        "max_new_tokens": prompt.output_len,
        "ignore_eos": options.ignore_eos,
    }
    return {key: value, "sampling_params": sampling, "stream": options.stream}


def completion_body(prompt: BenchPrompt, options: RequestOptions) -> dict[str, Any]:
    text = prompt.text if prompt.ids is None else prompt.ids
    return {"prompt": text, "max_tokens": prompt.output_len, **_common(options)}


def chat_body(prompt: BenchPrompt, options: RequestOptions) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt.text}]
    return {"messages": messages, "max_tokens": prompt.output_len, **_common(options)}


def openai_chat_body(prompt: BenchPrompt, options: RequestOptions) -> dict[str, Any]:
    """With OpenAI's current name of the token limit."""
    body = chat_body(prompt, options)
    body["max_completion_tokens"] = body.pop("max_tokens")
    return body


def _common(options: RequestOptions) -> dict[str, Any]:
    body: dict[str, Any] = {"model": options.model, "temperature": 0.0, "stream": options.stream}
    if options.stream:
        body["stream_options"] = {"include_usage": True}
    if options.ignore_eos:
        body["ignore_eos"] = True
    return body


_NATIVE = Endpoint("/generate", native_body, read_native)
_TEXT = Endpoint("/v1/completions", completion_body, read_openai)
_CHAT = Endpoint("/v1/chat/completions", chat_body, read_openai, chat=True)
ENDPOINTS: Final = {
    "sglang": _NATIVE,
    "sglang-native": _NATIVE,
    "sglang-oai": _TEXT,
    "sglang-oai-chat": _CHAT,
    "vllm": _TEXT,
    "vllm-chat": _CHAT,
    "openai": _TEXT,
    "openai-chat": Endpoint("/v1/chat/completions", openai_chat_body, read_openai, chat=True),
}
