"""Requests of a client on their way through the engine: every route that generates goes here."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from starlette.requests import Request

from moesaic.engine.frontend.admission import CallAdmission, ImmediateAdmission
from moesaic.engine.frontend.inputs import GenerateInput
from moesaic.engine.frontend.outputs import RequestUpdate
from moesaic.server.connections import network_of
from moesaic.server.context import LEAVING, Context
from moesaic.server.errors import Refusal
from moesaic.server.request_log import log_request
from moesaic.server.responses import while_connected
from moesaic.server.routes import CLIENT


@contextmanager
def arrival(context: Context) -> Iterator[None]:
    """While a body is made into requests, which a chat template or a grammar may hold up: a server
    that stops meanwhile waits for it, and one that has begun to stop refuses it."""
    if context.trouble:
        raise Refusal(503, context.trouble, headers=LEAVING)
    context.admission.calls += 1
    try:
        yield
    finally:
        context.admission.calls -= 1


async def stream(
    context: Context, request: Request, call: GenerateInput, apart: bool = False
) -> AsyncGenerator[RequestUpdate, None]:
    """The pieces of all answers, the first of which is there already: until then the engine may
    refuse or fail, and the status of the response can still say so. Errors are Refusals. `apart`: a
    failed answer leaves the others whole, and is told as one of them."""
    pieces = _pieces(context, call, True, client_of(request))
    try:
        first = await while_connected(request, anext(pieces))
        if first.progress.finished and first.request.failed and not apart:
            raise context.failed(first.request)
    except BaseException:
        await pieces.aclose()
        raise
    return _with_first(first, pieces)


async def whole(context: Context, request: Request, call: GenerateInput) -> list[RequestUpdate]:
    """The last piece of each answer, in the order of the prompts. Errors are Refusals."""
    return await while_connected(request, _all(context, call, client_of(request)))


async def probe(context: Context, call: GenerateInput) -> list[RequestUpdate]:
    """The same before all that waits, and for no client in particular."""
    return await _all(context, call, None)


async def _all(
    context: Context, call: GenerateInput, client: Hashable | None
) -> list[RequestUpdate]:
    found = {piece.index: piece async for piece in _pieces(context, call, False, client)}
    return [found[index] for index in sorted(found)]


def client_of(request: Request) -> Hashable:
    """The client that a request comes from, by its key and its network: many clients may share one
    key, and many may share an address."""
    return request.scope.get(CLIENT), request.client and network_of(request.client.host)


async def _pieces(
    context: Context, call: GenerateInput, stream: bool, client: Hashable | None
) -> AsyncGenerator[RequestUpdate, None]:
    if context.engine.fault:
        raise Refusal(503, context.engine.fault, headers=LEAVING)
    admission: CallAdmission = (
        ImmediateAdmission() if client is None else context.admission.ticket(client)
    )
    pieces = context.engine.stream(replace(call, client=client, stream=stream), admission)
    try:
        async for piece in pieces:
            if context.args.log_requests and piece.progress.finished:
                log_request(context.args, piece, call.text_of(piece.index))
            yield piece
    except (ValueError, OverflowError, RuntimeError) as error:
        raise context.refusal(error) from error
    finally:
        await pieces.aclose()
        admission.leave()  # the engine leaves only what it has entered


async def _with_first(
    first: RequestUpdate, rest: AsyncGenerator[RequestUpdate, None]
) -> AsyncGenerator[RequestUpdate, None]:
    try:
        yield first
        async for piece in rest:
            yield piece
    finally:
        await rest.aclose()
