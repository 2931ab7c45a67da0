"""Answers on their way to a client of the OpenAI API, in chunks or at once."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Final, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from moesaic.core.request import ABORTED
from moesaic.engine.frontend.inputs import GenerateInput
from moesaic.engine.frontend.outputs import RequestUpdate, weight
from moesaic.server import generation as work
from moesaic.server.context import Context
from moesaic.server.errors import Refusal
from moesaic.server.openai.request_types import CommonBody
from moesaic.server.openai.response_types import ChunkHeader, Usage
from moesaic.server.openai.usage import UsageCount
from moesaic.server.responses import Events, Writer, json_event, json_response, prepared

MAX_RID: Final = 256

_encoder = msgspec.json.Encoder()


class Chunks:
    """Writes the chunks of one stream. What they have in common is encoded once."""

    def __init__(self, head: ChunkHeader, body: CommonBody, tally: UsageCount) -> None:
        options = body.stream_options
        self.tally = tally
        self._wants_usage = bool(options and options.include_usage)
        self._always = bool(options and options.continuous_usage_stats)
        self._start = _encoder.encode(head)[:-1] + b',"choices":['
        self._end = b'],"usage":null}' if self._wants_usage else b"]}"

    def chunk(self, choice: msgspec.Struct, size: int) -> bytes:
        end = _usage_end(self.tally.usage()) if self._always else self._end
        return json_event(self._start + _encoder.encode(prepared(choice, size)) + end)

    def last(self) -> bytes:
        """The chunk without choices, if it was asked for."""
        if not self._wants_usage:
            return b""
        return json_event(self._start + _usage_end(self.tally.usage()))


def _usage_end(usage: Usage) -> bytes:
    return b'],"usage":' + _encoder.encode(usage) + b"}"


class Growing(Protocol):
    """The answers to one request while they grow."""

    def take(self, piece: RequestUpdate, size: int) -> bytes:
        """The chunks for what is new, which is so large."""
        ...

    async def end(self) -> bytes:
        """What follows when all have ended."""
        ...


class Answering(Growing, Protocol):
    """And can be given whole."""

    async def whole(self, pieces: list[RequestUpdate], writer: Writer) -> msgspec.Struct: ...


async def reply(
    context: Context, request: Request, call: GenerateInput, answers: Answering, stream: bool
) -> Response:
    """What the engine makes of a call, in one piece or as it grows."""
    if stream:
        pieces = await work.stream(context, request, call)
        return Events(events(context, pieces, answers))
    found = await work.whole(context, request, call)
    for piece in found:
        check_failure(context, piece)
    return json_response(await answers.whole(found, context.part(Writer)))


async def events(
    context: Context, pieces: AsyncGenerator[RequestUpdate, None], answers: Growing
) -> AsyncGenerator[bytes, None]:
    writer, shown = context.part(Writer), dict[int, int]()
    async with aclosing(pieces):
        async for piece in pieces:
            check_failure(context, piece)
            number = piece.progress.num_output
            size = weight(piece.request, shown.get(piece.index, 0), number)
            shown[piece.index] = number
            if data := await writer.write(size, partial(answers.take, piece, size)):
                yield data
        if data := await answers.end():
            yield data


def check_failure(context: Context, piece: RequestUpdate) -> None:
    reason = piece.finish_reason
    if reason is None or reason.type != "abort":
        return
    if reason.failed or reason.message != ABORTED:
        raise context.failed(piece.request)


def finish_reason(piece: RequestUpdate) -> str:
    """stop or length. OpenAI has no word for an answer that somebody ended; length says that it is
    not whole, and clients that know only OpenAI's words can read it."""
    assert piece.finish_reason is not None
    reason = piece.finish_reason.type
    return "length" if reason == "abort" else reason


def new_id(prefix: str, body: CommonBody) -> str:
    """Of the answer, and of its requests in the engine."""
    rid = body.request_id if body.rid is None else body.rid
    if body.request_id not in (None, rid):
        raise Refusal(400, "rid and request_id differ: give one of them", "request_id")
    if rid is None:
        return f"{prefix}-{uuid.uuid4().hex}"
    if not 0 < len(rid) <= MAX_RID:
        raise Refusal(400, f"rid must have between 1 and {MAX_RID} characters", "rid")
    return rid


@contextmanager
def blaming(param: str) -> Iterator[None]:
    """Of a prompt that is too long it is said which field has it."""
    try:
        yield
    except Refusal as refusal:
        if refusal.code == "context_length_exceeded":
            refusal.param = param
        raise
