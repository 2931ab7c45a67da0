"""Requests of a client on their way through the engine: every route that generates goes here."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from starlette.requests import Request

from moesaic.engine.answers import Piece
from moesaic.engine.inputs import GenerateInput
from moesaic.server.context import Context
from moesaic.server.replies import while_connected


async def stream(
    context: Context, request: Request, call: GenerateInput
) -> AsyncGenerator[Piece, None]:
    """The pieces of all answers, the first of which is there already: until then the engine may
    refuse, and the status of the response can still say so. Errors are Refusals."""
    pieces = _pieces(context, call, stream=True)
    try:
        first = await while_connected(request, anext(pieces))
    except BaseException:
        await pieces.aclose()
        raise
    return _with_first(first, pieces)


async def whole(context: Context, request: Request, call: GenerateInput) -> list[Piece]:
    """The last piece of each answer, in the order of the prompts. Errors are Refusals."""
    return await while_connected(request, _all(context, call))


async def _all(context: Context, call: GenerateInput) -> list[Piece]:
    found = {piece.index: piece async for piece in _pieces(context, call, stream=False)}
    return [found[index] for index in sorted(found)]


async def _pieces(
    context: Context, call: GenerateInput, stream: bool
) -> AsyncGenerator[Piece, None]:
    pieces = context.engine.follow(call, stream)
    try:
        async for piece in pieces:
            yield piece
    except (ValueError, OverflowError, RuntimeError) as error:
        raise context.refusal(error) from error
    finally:
        await pieces.aclose()


async def _with_first(
    first: Piece, rest: AsyncGenerator[Piece, None]
) -> AsyncGenerator[Piece, None]:
    try:
        yield first
        async for piece in rest:
            yield piece
    finally:
        await rest.aclose()
