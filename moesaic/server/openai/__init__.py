"""The OpenAI API."""

from __future__ import annotations

from typing import Final

from moesaic.server.openai.bodies import ChatBody, CompletionBody
from moesaic.server.openai.chat import chat_completions
from moesaic.server.openai.completions import completions
from moesaic.server.openai.models import model, models
from moesaic.server.openai.setup import Setup
from moesaic.server.routes import Access, Route

__all__ = ["ROUTES", "Setup"]

ROUTES: Final = (
    Route(
        "POST",
        "/v1/chat/completions",
        chat_completions,
        Access.USER,
        "Answers messages",
        ChatBody,
    ),
    Route("POST", "/v1/completions", completions, Access.USER, "Continues prompts", CompletionBody),
    Route("GET", "/v1/models", models, Access.USER, "The models that are served"),
    Route("GET", "/v1/models/{model:path}", model, Access.USER, "One of the models"),
)
