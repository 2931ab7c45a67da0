"""/v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from moesaic.server.anthropic.bodies import CountTokensBody, MessagesBody
from moesaic.server.anthropic.translation import NAMES, chat_body, prompt_body
from moesaic.server.anthropic.writer import MessagesWriter
from moesaic.server.bodies import in_thread_if_large, read_sized
from moesaic.server.client_warnings import warn
from moesaic.server.context import Context
from moesaic.server.generation import client_of, open_call
from moesaic.server.openai.answer_blocks import renamed_fields, renamed_warnings
from moesaic.server.openai.chat import PreparedChat, prepare_chat
from moesaic.server.openai.setup import OpenAISetup
from moesaic.server.openai.streams import prompt_field, respond
from moesaic.server.responses import json_response, while_connected


async def create_message(context: Context, request: Request) -> Response:
    body, size = await read_sized(request, MessagesBody)
    setup, id = context.shared(OpenAISetup), f"msg_{uuid4().hex}"

    async def prepare() -> PreparedChat:
        chat = await in_thread_if_large(size, lambda: chat_body(body, id))
        return await prepare_chat(context, chat, size, client_of(request))

    with open_call(context), renamed_fields(NAMES), prompt_field("messages"):
        prepared = await while_connected(request, prepare())
        warn(request, renamed_warnings(prepared.warnings, NAMES))
        writer = MessagesWriter(setup, prepared)
        return await respond(context, request, prepared.call, writer, bool(body.stream))


async def count_tokens(context: Context, request: Request) -> Response:
    body, size = await read_sized(request, CountTokensBody)

    async def prepare() -> PreparedChat:
        chat = await in_thread_if_large(size, lambda: prompt_body(body))
        return await prepare_chat(context, chat, size, client_of(request))

    with renamed_fields(NAMES), prompt_field("messages"):
        prepared = await while_connected(request, prepare())
    return json_response({"input_tokens": prepared.num_tokens})
