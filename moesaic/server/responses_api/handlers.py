"""/v1/responses and what belongs to a response."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Hashable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Final
from uuid import uuid4

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from moesaic.server import generation
from moesaic.server.bodies import in_thread_if_large, read_sized
from moesaic.server.client_warnings import warn
from moesaic.server.context import Context
from moesaic.server.errors import INTERNAL, Refusal
from moesaic.server.generation import client_of, open_call
from moesaic.server.openai.answer_blocks import renamed_fields, renamed_warnings
from moesaic.server.openai.chat import PreparedChat, prepare_chat
from moesaic.server.openai.request_types import MessageBody
from moesaic.server.openai.setup import OpenAISetup
from moesaic.server.openai.streams import prompt_field, respond, whole_response
from moesaic.server.responses import json_response, while_connected
from moesaic.server.responses_api.bodies import InputTokensBody, ResponsesBody
from moesaic.server.responses_api.conversation import listed_items
from moesaic.server.responses_api.objects import ResponseObject, new_response
from moesaic.server.responses_api.store import ResponseStore, StoredResponse
from moesaic.server.responses_api.translation import NAMES, chat_body, new_messages, prompt_body
from moesaic.server.responses_api.truncation import prepare_truncated
from moesaic.server.responses_api.writer import ResponsesWriter, failed
from moesaic.server.routes import CLIENT

logger = logging.getLogger(__name__)

PREPARE: Final = {None: prepare_chat, "disabled": prepare_chat, "auto": prepare_truncated}

_conversations = msgspec.json.Decoder(list[MessageBody])


@dataclass(frozen=True, slots=True)
class PreparedResponse:
    chat: PreparedChat
    writer: ResponsesWriter
    stored: StoredResponse


async def create_response(context: Context, request: Request) -> Response:
    body, size = await read_sized(request, ResponsesBody)
    _check_background(body)
    with open_call(context), renamed_fields(NAMES), prompt_field("input"):
        prepared = await while_connected(request, _prepare(context, body, size, request))
        if not body.background:
            call, stream = prepared.chat.call, bool(body.stream)
            return await respond(context, request, call, prepared.writer, stream)
        _start(context, prepared, client_of(request))
        return json_response(msgspec.Raw(prepared.stored.body))


async def count_input_tokens(context: Context, request: Request) -> Response:
    body, size = await read_sized(request, InputTokensBody)
    with renamed_fields(NAMES), prompt_field("input"):

        async def count() -> int:
            before = _before(context, body, request)
            larger = size + len(before)
            conversation = await _conversation(body, before, larger)
            chat = prompt_body(body, conversation)
            prepare = PREPARE[body.truncation]
            return (await prepare(context, chat, larger, client_of(request))).num_tokens

        number = await while_connected(request, count())
    return json_response({"object": "response.input_tokens", "input_tokens": number})


def _check_background(body: ResponsesBody) -> None:
    if not body.background:
        return
    if body.stream:
        text = "background and stream exclude each other: read the response by its id"
        raise Refusal(400, text, "background")
    if body.store is False:
        raise Refusal(400, "background needs store: the response is read by its id", "background")


async def _prepare(
    context: Context, body: ResponsesBody, size: int, request: Request
) -> PreparedResponse:
    setup, client = context.shared(OpenAISetup), client_of(request)
    before = _before(context, body, request)
    size += len(before)
    conversation = await _conversation(body, before, size)
    chat = chat_body(body, conversation, f"resp_{uuid4().hex}")
    prepared = await PREPARE[body.truncation](context, chat, size, client)
    warn(request, renamed_warnings(prepared.warnings, NAMES))
    draft = new_response(body, prepared, setup.model)
    stored = await in_thread_if_large(size, lambda: _new_stored(body, draft, conversation, request))
    keep = partial(_keep, context, stored) if draft.store else _drop
    return PreparedResponse(prepared, ResponsesWriter(setup, prepared, draft, keep), stored)


def _new_stored(
    body: ResponsesBody, draft: ResponseObject, conversation: list[MessageBody], request: Request
) -> StoredResponse:
    return StoredResponse(
        draft.id,
        request.scope.get(CLIENT, b""),
        msgspec.json.encode(draft),
        msgspec.json.encode(listed_items(body.input or []) if draft.store else []),
        msgspec.json.encode(conversation if draft.store else []),
        client_of(request),
        draft.background,
    )


def _before(context: Context, body: InputTokensBody, request: Request) -> bytes:
    store, owner = context.shared(ResponseStore), request.scope.get(CLIENT, b"")
    return store.conversation(body.previous_response_id, owner)


async def _conversation(body: InputTokensBody, before: bytes, size: int) -> list[MessageBody]:
    return await in_thread_if_large(
        size, lambda: [*_conversations.decode(before), *new_messages(body)]
    )


def _keep(context: Context, stored: StoredResponse, body: bytes, answer: MessageBody) -> None:
    messages = (stored.conversation[1:-1], msgspec.json.encode(answer))
    whole = b"[" + b",".join(filter(None, messages)) + b"]"
    context.shared(ResponseStore).put(replace(stored, body=body, conversation=whole, task=None))


def _drop(_: bytes, __: MessageBody) -> None:
    """For `store: false`."""


def _start(context: Context, prepared: PreparedResponse, client: Hashable) -> None:
    """Starts a background response, which counts as an open call until it ends."""
    call, stored, store = ExitStack(), prepared.stored, context.shared(ResponseStore)
    store.check_running(stored)
    call.enter_context(open_call(context))
    stored.task = asyncio.create_task(_run(context, prepared, client))
    stored.task.add_done_callback(lambda _: call.close())
    store.put(stored)


async def _run(context: Context, prepared: PreparedResponse, client: Hashable) -> None:
    """Makes the answer of a background response, which its client reads later."""
    try:
        updates = await generation.collect_for(client, context, prepared.chat.call)
        await whole_response(context, updates, prepared.writer)
    except Refusal as refusal:
        _end(context, prepared, refusal)
    except Exception:
        logger.exception("a background response failed")
        _end(context, prepared, Refusal(500, INTERNAL))


def _end(context: Context, prepared: PreparedResponse, refusal: Refusal) -> None:
    body = msgspec.json.encode(failed(prepared.writer.draft, refusal))
    ended = replace(prepared.stored, body=body, conversation=b"", task=None)
    context.shared(ResponseStore).put(ended)
