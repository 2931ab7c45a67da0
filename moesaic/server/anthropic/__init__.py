"""Anthropic's Messages API, as a translation to the chat and back."""

from __future__ import annotations

from typing import Final

from moesaic.server.anthropic.bodies import CountTokensBody, MessagesBody
from moesaic.server.anthropic.handlers import count_tokens, create_message
from moesaic.server.anthropic.objects import error_body
from moesaic.server.routes import USER, Route

PATH: Final = "/v1/messages"
HELLO: Final = [{"role": "user", "content": "Hello"}]

ROUTES: Final = (
    Route(
        "POST",
        PATH,
        create_message,
        USER,
        "Answers messages in Anthropic's form",
        MessagesBody,
        error_body=error_body,
        generates=True,
        example={"messages": HELLO, "max_tokens": 16},
    ),
    Route(
        "POST",
        f"{PATH}/count_tokens",
        count_tokens,
        USER,
        "Counts the tokens of messages in Anthropic's form",
        CountTokensBody,
        error_body=error_body,
        example={"messages": HELLO},
    ),
)
