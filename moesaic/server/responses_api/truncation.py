"""truncation auto: the oldest turns of a conversation that is too long are left out."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

import msgspec

from moesaic.engine.frontend.engine_limits import PromptTooLong
from moesaic.server.context import Context
from moesaic.server.errors import Refusal
from moesaic.server.openai.chat import PreparedChat, prepare_chat
from moesaic.server.openai.prompts import check_number
from moesaic.server.openai.request_types import ChatBody, MessageBody

TOO_LONG: Final = "context_length_exceeded"


async def prepare_truncated(
    context: Context, chat: ChatBody, size: int, client: Hashable
) -> PreparedChat:
    """Keeps the system messages at the start and as many of the latest turns as fit, beside the
    output tokens that the client asked for. The last turn is kept even if it does not fit."""
    check_number(chat.messages)
    head, starts = _turns(chat.messages)
    first, last = 0, len(starts) - 1  # the longest that fits is between them
    found: PreparedChat | None = None
    while first < last:
        middle = (first + last) // 2 if first else 0
        shorter = _from(chat, head, starts[middle])
        prepared = await _prepared_if_fits(context, shorter, size, client)
        if prepared is None:
            first = middle + 1
        else:
            last, found = middle, prepared
    return found or await prepare_chat(context, _from(chat, head, starts[last]), size, client)


async def _prepared_if_fits(
    context: Context, chat: ChatBody, size: int, client: Hashable
) -> PreparedChat | None:
    try:
        found = await prepare_chat(context, chat, size, client)
        context.engine.limits.check_tokens(found.num_tokens + max(chat.max_tokens or 1, 1) - 1)
    except PromptTooLong:
        return None
    except Refusal as error:
        if error.code != TOO_LONG:
            raise
        return None
    return found


def _from(chat: ChatBody, head: int, start: int) -> ChatBody:
    """The chat without the messages between its head and `start`."""
    messages = [*chat.messages[:head], *chat.messages[start:]]
    return msgspec.structs.replace(chat, messages=messages)


def _turns(messages: list[MessageBody]) -> tuple[int, list[int]]:
    """The number of system messages at the start, and where the rest may begin: after them, or at
    a later message of a user."""
    is_system = [message.role in ("system", "developer") for message in messages]
    head = is_system.index(False) if False in is_system else len(messages)
    later = (i for i in range(head + 1, len(messages)) if messages[i].role == "user")
    return head, [head, *later]
