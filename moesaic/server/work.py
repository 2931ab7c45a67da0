"""Requests of a client on their way through the engine: every route that generates goes here."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Hashable

from starlette.requests import Request

from moesaic.engine.answers import Piece
from moesaic.engine.gate import Gate, NoGate
from moesaic.engine.inputs import GenerateInput
from moesaic.server.context import LEAVING, Context
from moesaic.server.errors import Refusal
from moesaic.server.replies import while_connected
from moesaic.server.request_log import log_request
from moesaic.server.routes import CLIENT


async def stream(
    context: Context, request: Request, call: GenerateInput, apart: bool = False
) -> AsyncGenerator[Piece, None]:
    """The pieces of all answers, the first of which is there already: until then the engine may
    refuse or fail, and the status of the response can still say so. Errors are Refusals. `apart`: a
    failed answer leaves the others whole, and is told as one of them."""
    pieces = _pieces(context, call, True, _gate(context, request))
    try:
        first = await while_connected(request, anext(pieces))
        if first.progress.finished and first.request.failed and not apart:
            raise context.refusal(RuntimeError(first.request.failure))
    except BaseException:
        await pieces.aclose()
        raise
    return _with_first(first, pieces)


async def whole(
    context: Context, request: Request, call: GenerateInput, queued: bool = True
) -> list[Piece]:
    """The last piece of each answer, in the order of the prompts. Errors are Refusals. Not
    `queued`: before all that waits, for probes."""
    gate = _gate(context, request) if queued else NoGate()
    return await while_connected(request, _all(context, call, gate))


async def _all(context: Context, call: GenerateInput, gate: Gate) -> list[Piece]:
    found = {piece.index: piece async for piece in _pieces(context, call, False, gate)}
    return [found[index] for index in sorted(found)]


def _gate(context: Context, request: Request) -> Gate:
    """Requests that carry no key share a line with others of the same address."""
    client: Hashable = request.scope.get(CLIENT)
    return context.admission.ticket(client or (request.client and request.client.host))


async def _pieces(
    context: Context, call: GenerateInput, stream: bool, gate: Gate
) -> AsyncGenerator[Piece, None]:
    if context.trouble:
        raise Refusal(503, context.trouble, headers=LEAVING)
    pieces = context.engine.follow(call, stream, gate)
    try:
        async for piece in pieces:
            if context.args.log_requests and piece.progress.finished:
                log_request(context.args, piece, call.text_of(piece.index))
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
