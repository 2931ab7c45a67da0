"""/generate, with the names and shapes of SGLang."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from moesaic.engine.answers import Piece, answer
from moesaic.server import work
from moesaic.server.bodies import GenerateBody, read_body
from moesaic.server.context import LEAVING, Context
from moesaic.server.errors import Refusal
from moesaic.server.replies import DONE, Events, event, json_response
from moesaic.server.routes import Access, Route


async def generate(context: Context, request: Request) -> Response:
    body = await read_body(request, GenerateBody)
    shape = _Shape(context, body)
    if not body.stream:
        pieces = await work.whole(context, request, shape.call)
        return json_response(shape.whole(pieces))
    return Events(_events(await work.stream(context, request, shape.call), shape))


class _Shape:
    """How the pieces of a call become what is sent."""

    def __init__(self, context: Context, body: GenerateBody) -> None:
        self.call = body.call()
        self._context = context
        self._texts = context.engine.tokenizer if body.return_text_in_logprobs else None
        self._single = self.call.is_single and body.samples == 1

    def whole(self, pieces: list[Piece]) -> Any:
        if self._context.trouble and any(piece.request.failed for piece in pieces):
            raise Refusal(503, self._context.trouble, headers=LEAVING)
        outputs = [self.output(piece) for piece in pieces]
        return outputs[0] if self._single else outputs

    def output(self, piece: Piece) -> dict[str, Any]:
        """In a list the others' answers must not be lost: there a failure is an entry."""
        if self._single and piece.progress.finished and piece.request.failed:
            raise self._context.failed(piece.request)
        return answer(piece.request, piece.progress, self._texts)

    def part(self, piece: Piece) -> dict[str, Any]:
        """In a stream of several it is said which one grows."""
        output = self.output(piece)
        return output if self._single else {**output, "index": piece.index}


async def _events(
    pieces: AsyncGenerator[Piece, None], shape: _Shape
) -> AsyncGenerator[bytes, None]:
    try:
        async for piece in pieces:
            yield event(shape.part(piece))
    except Refusal as refusal:
        yield event(refusal.body())
    finally:
        await pieces.aclose()
    yield DONE


ROUTES = (
    Route(
        "POST",
        "/generate",
        generate,
        Access.USER,
        "Continues prompts, given as text or as token ids",
        GenerateBody,
    ),
)
