"""Text to token ids and back, with SGLang's and vLLM's names."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from moesaic.engine.frontend.engine_limits import EngineLimits
from moesaic.engine.frontend.input_checks import MAX_SAMPLES
from moesaic.engine.text.tokenizer import Tokenizer
from moesaic.server.bodies import read_body
from moesaic.server.context import Context
from moesaic.server.errors import Refusal
from moesaic.server.generation import client_of
from moesaic.server.openai.setup import OpenAISetup
from moesaic.server.responses import json_response
from moesaic.server.routes import USER, Route

# Token ids in a request to /detokenize.
MAX_IDS: Final = 1 << 17


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True):
    """Either a prompt or messages, to which the chat template is applied."""

    prompt: str | list[str] | None = None
    messages: list[dict[str, Any]] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    tools: list[dict[str, Any]] | None = None


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True):
    tokens: list[int | list[int]]
    model: str | None = None
    skip_special_tokens: bool = True


async def tokenize(context: Context, request: Request) -> Response:
    body = await read_body(request, TokenizeBody)
    context.shared(OpenAISetup).check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise Refusal(400, "give exactly one of prompt and messages")
    if isinstance(body.prompt, list) and len(body.prompt) > MAX_SAMPLES:
        raise Refusal(400, f"give at most {MAX_SAMPLES} texts at once", "prompt")
    limits, tokenizer = context.engine.limits, _tokenizer(context)
    if body.messages is None:
        found = await context.in_thread(lambda: _ids(tokenizer, body, limits))
    else:
        text = await _rendered(context, request, body)
        special = bool(body.add_special_tokens)
        found = [await context.in_thread(lambda: tokenizer.encode(text, special))]
    counts = [len(ids) for ids in found]
    single = not isinstance(body.prompt, list)
    return json_response(
        {
            "tokens": found[0] if single else found,
            "count": counts[0] if single else counts,
            "max_model_len": context.engine.context_length,
        }
    )


async def detokenize(context: Context, request: Request) -> Response:
    body = await read_body(request, DetokenizeBody)
    context.shared(OpenAISetup).check_model(body.model)
    single = not (body.tokens and isinstance(body.tokens[0], list))
    rows: list[Any] = [body.tokens] if single else body.tokens
    number = sum(len(row) if isinstance(row, list) else 1 for row in rows[: MAX_SAMPLES + 1])
    if number > MAX_IDS or len(rows) > MAX_SAMPLES:
        text = f"give at most {MAX_IDS} token ids at once, in at most {MAX_SAMPLES} lists"
        raise Refusal(400, text, "tokens")
    for row in rows:
        if not isinstance(row, list) or not all(isinstance(token, int) for token in row):
            raise Refusal(400, "tokens mixes token ids and lists of them", param="tokens")

    tokenizer = _tokenizer(context)

    def decode() -> list[str]:
        for row in rows:
            context.engine.check_token_ids(row)
        return [tokenizer.decode(row, body.skip_special_tokens) for row in rows]

    texts = await context.in_thread(decode)
    found = texts[0] if single else texts
    return json_response({"text": found, "prompt": found})  # SGLang's name and vLLM's


async def tokenizer_info(context: Context, _: Request) -> Response:
    """What clients that render chats and tokenize by this server need, with vLLM's names."""
    tokenizer = _tokenizer(context)
    templates = tokenizer.templates
    return json_response(
        {
            "eos_token": None,
            **tokenizer.special_tokens,
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": context.engine.context_length,
            "chat_template": templates.get("default", next(iter(templates.values()), None)),
        }
    )


def _ids(tokenizer: Tokenizer, body: TokenizeBody, limits: EngineLimits) -> list[list[int]]:
    texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    assert texts is not None
    for text in texts:
        limits.check_chars(len(text))
    return [tokenizer.encode(text, body.add_special_tokens is not False) for text in texts]


async def _rendered(context: Context, request: Request, body: TokenizeBody) -> str:
    chat, messages = _tokenizer(context).chat, body.messages or []
    try:
        rendering = chat.submit(
            client_of(request), messages, body.add_generation_prompt, body.tools, {}
        )
        text = await asyncio.wrap_future(rendering)
        context.engine.limits.check_chars(len(text))
    except (ValueError, RuntimeError) as error:
        raise context.refusal(error) from None
    return text


def _tokenizer(context: Context) -> Tokenizer:
    if context.engine.tokenizer is None:
        raise Refusal(400, "this server has no tokenizer (--skip-tokenizer-init)")
    return context.engine.tokenizer


ROUTES = (
    *(
        Route(
            "POST",
            path,
            tokenize,
            USER,
            "Text to token ids",
            TokenizeBody,
            example={"prompt": "Once upon a time"},
            one_of=("prompt", "messages"),
        )
        for path in ("/tokenize", "/v1/tokenize")
    ),
    *(
        Route(
            "POST",
            path,
            detokenize,
            USER,
            "Token ids to text",
            DetokenizeBody,
            example={"tokens": [1, 2, 3]},
        )
        for path in ("/detokenize", "/v1/detokenize")
    ),
    Route("GET", "/tokenizer_info", tokenizer_info, USER, "Special tokens and the chat template"),
)
