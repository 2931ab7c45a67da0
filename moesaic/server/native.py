"""/generate, with the names and shapes of SGLang."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from moesaic.engine.frontend.outputs import OutputFormat, RequestUpdate, weight
from moesaic.server import generation as work
from moesaic.server.bodies import GenerateBody, read_body
from moesaic.server.context import LEAVING, Context
from moesaic.server.errors import Refusal
from moesaic.server.responses import Events, Writer, event, json_response, prepared
from moesaic.server.routes import Route, RouteAccess


async def generate(context: Context, request: Request) -> Response:
    body = await read_body(request, GenerateBody)
    with work.arrival(context):
        shape = _Shape(context, body)
        if not body.stream:
            pieces = await work.whole(context, request, shape.call)
            return json_response(await shape.whole(pieces))
        parts = await work.stream(context, request, shape.call, apart=not shape.single)
        return Events(_events(parts, shape))


class _Shape:
    """How the pieces of a call become what is sent."""

    def __init__(self, context: Context, body: GenerateBody) -> None:
        self.call = body.call()
        self._context, self._writer = context, context.part(Writer)
        self._form = OutputFormat(
            context.engine.tokenizer if body.return_text_in_logprobs else None
        )
        self.single = self.call.is_single and body.samples == 1

    async def whole(self, pieces: list[RequestUpdate]) -> Any:
        if self._context.trouble and any(piece.request.failed for piece in pieces):
            raise Refusal(503, self._context.trouble, headers=LEAVING)
        total = sum(weight(piece.request, 0, piece.progress.num_output) for piece in pieces)

        def build() -> list[Any]:
            return [prepared(self._output(piece), total) for piece in pieces]

        outputs = await self._writer.write(total, build)
        return outputs[0] if self.single else outputs

    async def part(self, piece: RequestUpdate) -> bytes:
        """Of a stream; where there are several it is said which one grows."""
        total = self._form.weight(piece.request, piece.progress)

        def build() -> bytes:
            output = self._output(piece)
            value = output if self.single else {**output, "index": piece.index}
            return event(prepared(value, total))

        return await self._writer.write(total, build)

    def _output(self, piece: RequestUpdate) -> dict[str, Any]:
        """In a list the others' answers must not be lost: there a failure is an entry."""
        if self.single and piece.progress.finished and piece.request.failed:
            raise self._context.failed(piece.request)
        return self._form.answer(piece.request, piece.progress)


async def _events(
    pieces: AsyncGenerator[RequestUpdate, None], shape: _Shape
) -> AsyncGenerator[bytes, None]:
    async with aclosing(pieces):
        async for piece in pieces:
            yield await shape.part(piece)


ROUTES = (
    Route(
        "POST",
        "/generate",
        generate,
        RouteAccess.USER,
        "Continues prompts, given as text or as token ids",
        GenerateBody,
    ),
)
