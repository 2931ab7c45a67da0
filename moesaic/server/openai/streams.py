"""Answers on their way to a client of the OpenAI API, in chunks or at once."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

import msgspec

from moesaic.engine.answers import Piece
from moesaic.server.context import Context
from moesaic.server.errors import Refusal
from moesaic.server.openai.bodies import CommonBody
from moesaic.server.openai.shapes import Head, Usage
from moesaic.server.openai.usage import Tally
from moesaic.server.replies import DONE, event

MAX_RID: Final = 256

_encoder = msgspec.json.Encoder()


class Chunks:
    """Writes the chunks of one stream. What they have in common is encoded once."""

    def __init__(self, head: Head, body: CommonBody, tally: Tally) -> None:
        options = body.stream_options
        self.tally = tally
        self._wants_usage = bool(options and options.include_usage)
        self._always = bool(options and options.continuous_usage_stats)
        self._start = b"data: " + _encoder.encode(head)[:-1] + b',"choices":['
        self._end = b'],"usage":null}\n\n' if self._wants_usage else b"]}\n\n"

    def chunk(self, choice: msgspec.Struct) -> bytes:
        end = _usage_end(self.tally.usage()) if self._always else self._end
        return self._start + _encoder.encode(choice) + end

    def last(self) -> bytes:
        """The chunk without choices, if it was asked for."""
        return self._start + _usage_end(self.tally.usage()) if self._wants_usage else b""


def _usage_end(usage: Usage) -> bytes:
    return b'],"usage":' + _encoder.encode(usage) + b"}\n\n"


class Growing(Protocol):
    """The answers to one request while they grow."""

    def take(self, piece: Piece) -> bytes:
        """The chunks for what is new."""
        ...

    async def end(self) -> bytes:
        """What follows when all have ended."""
        ...


async def events(
    context: Context, pieces: AsyncGenerator[Piece, None], answers: Growing
) -> AsyncGenerator[bytes, None]:
    try:
        async for piece in pieces:
            check_failure(context, piece)
            if data := answers.take(piece):
                yield data
        if data := await answers.end():
            yield data
    except Refusal as refusal:
        yield event(refusal.body())
    finally:
        await pieces.aclose()
    yield DONE


def check_failure(context: Context, piece: Piece) -> None:
    if piece.progress.finished and piece.request.failed:
        raise context.failed(piece.request)


def finish_reason(piece: Piece) -> str:
    """stop, length, or abort if a client asked for that."""
    assert piece.finish_reason is not None
    return piece.finish_reason.type


def new_id(prefix: str, rid: str | None) -> str:
    """Of the answer, and of its requests in the engine."""
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
