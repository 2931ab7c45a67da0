"""The OpenAI API."""

from __future__ import annotations

from typing import Final

from moesaic.server.openai.chat import chat_completions
from moesaic.server.openai.completions import completions
from moesaic.server.openai.models import model, models
from moesaic.server.openai.request_types import ChatBody, CompletionBody
from moesaic.server.openai.setup import OpenAISetup
from moesaic.server.routes import USER, Route

__all__ = ["ROUTES", "OpenAISetup"]

ROUTES: Final = (
    Route(
        "POST",
        "/v1/chat/completions",
        chat_completions,
        USER,
        "Answers messages",
        ChatBody,
        generates=True,
        example={"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16},
    ),
    Route(
        "POST",
        "/v1/completions",
        completions,
        USER,
        "Continues prompts",
        CompletionBody,
        generates=True,
        example={"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0.7},
    ),
    Route("GET", "/v1/models", models, USER, "The models that are served"),
    Route("GET", "/v1/models/{model:path}", model, USER, "One of the models"),
)
