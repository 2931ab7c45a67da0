"""What tests of the Responses API share."""

from __future__ import annotations

from typing import Any

import httpx
import openai
from openai.types.responses import Response as ResponseType

from tests.server.openai_client import extras

MODEL = "tiny:qwen3_moe"
PATH, CHAT = "/v1/responses", "/v1/chat/completions"
# A random model that begins to think does not end.
PLAIN: Any = {"model": MODEL, "temperature": 0, "reasoning": {"effort": "none"}}
SHORT: Any = {**PLAIN, "max_output_tokens": 12}
LONG: Any = {**PLAIN, "input": "Hello", "max_output_tokens": 1900}
# What OpenAI sends, too, but its types do not have.
BEYOND = {"store", "bytes"}


def client_of(port: int, key: str = "-") -> openai.OpenAI:
    base = f"http://127.0.0.1:{port}/v1"
    return openai.OpenAI(base_url=base, api_key=key, max_retries=0)


def checked(raw: str) -> ResponseType:
    found = ResponseType.model_validate_json(raw, strict=True)
    assert extras(found) <= BEYOND
    return found


def chat_text(http: httpx.Client, messages: list[Any], **body: Any) -> str:
    sent = {"messages": messages, "temperature": 0, "max_tokens": 12, "reasoning_effort": "none"}
    response = http.post(CHAT, json=sent | body)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])
