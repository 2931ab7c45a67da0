"""Runs clients' requests in the engine; every route that generates uses it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Hashable, Iterator
from contextlib import contextmanager
from typing import Protocol

from starlette.requests import Request

from moesaic.engine.frontend.admission import CallAdmission
from moesaic.engine.frontend.inputs import GenerateInput
from moesaic.engine.frontend.output_queue import DirectDelivery
from moesaic.engine.frontend.outputs import RequestUpdate
from moesaic.server.connections import network_of
from moesaic.server.context import CLOSE_AND_RETRY, Context
from moesaic.server.errors import Refusal
from moesaic.server.request_log import CallLog
from moesaic.server.responses import while_connected
from moesaic.server.resume import request_id_of
from moesaic.server.routes import CLIENT


class Updates(Protocol):
    """Closing it aborts what has not ended. `direct`: those that arrive while it waits."""

    direct: DirectDelivery

    def __aiter__(self) -> AsyncIterator[RequestUpdate]: ...

    async def aclose(self) -> None: ...


@contextmanager
def open_call(context: Context) -> Iterator[None]:
    """Counts a call from the moment its body is read: chat templates and grammars may delay its
    requests. A stopping server waits for open calls and refuses new ones."""
    if reason := context.unavailable_reason:
        raise Refusal(503, reason, headers=CLOSE_AND_RETRY)
    context.admission.calls += 1
    try:
        yield
    finally:
        context.admission.calls -= 1


async def stream(
    context: Context, request: Request, call: GenerateInput, keep_failures: bool = False
) -> Updates:
    """The updates of all answers, once the first has arrived: until then the engine may refuse or
    fail, and the status of the response can still say so. Errors are Refusals. `keep_failures`: a
    failed answer is one of the updates and does not end the others."""
    direct = DirectDelivery()
    request_id = request_id_of(context, request)
    updates = _updates(context, call, True, client_of(request), direct, request_id)
    try:
        first = await while_connected(request, _first(updates))
        if first is None:
            return _WithFirst(None, updates, direct)  # a list of no prompts
        if first.progress.finished and first.request.failed and not keep_failures:
            raise context.failure_of(first.request)
    except BaseException:
        await updates.aclose()
        raise
    return _WithFirst(first, updates, direct)


async def collect(context: Context, request: Request, call: GenerateInput) -> list[RequestUpdate]:
    """The last update of each answer, in the order of the prompts. Errors are Refusals."""
    client, request_id = client_of(request), request_id_of(context, request)
    return await while_connected(request, collect_for(client, context, call, request_id))


async def collect_for(
    client: Hashable | None, context: Context, call: GenerateInput, request_id: str = ""
) -> list[RequestUpdate]:
    """Like `collect`; a call of no client skips the queue."""
    updates = _updates(context, call, False, client, request_id=request_id)
    last = {update.index: update async for update in updates}
    return [last[index] for index in sorted(last)]


def client_of(request: Request) -> Hashable:
    """Identifies a client by its key and its network: clients may share either."""
    return request.scope.get(CLIENT), request.client and network_of(request.client.host)


async def _updates(
    context: Context,
    call: GenerateInput,
    stream: bool,
    client: Hashable | None,
    direct: DirectDelivery | None = None,
    request_id: str = "",
) -> AsyncGenerator[RequestUpdate, None]:
    if context.engine.fault:
        raise Refusal(503, context.engine.fault, headers=CLOSE_AND_RETRY)
    admission = _admission(context, call, client)
    sent = call.sent_by(client, stream, request_id)
    updates = context.engine.stream(sent, admission, direct)
    log = CallLog(context.args, call)
    try:
        async for update in updates:
            if update.progress.finished:
                log.add(update)
            yield update
    except (ValueError, OverflowError, RuntimeError) as error:
        raise context.refusal(error) from error
    finally:
        await updates.aclose()
        admission.leave()  # the engine leaves only what it has entered


def _admission(context: Context, call: GenerateInput, client: Hashable | None) -> CallAdmission:
    if client is None:
        return CallAdmission()
    if call.bootstrap_room is not None and context.args.disaggregation_mode == "prefill":
        return context.admission.new_meeting()
    return context.admission.new_call(client)


async def _first(updates: AsyncGenerator[RequestUpdate, None]) -> RequestUpdate | None:
    return await anext(updates, None)


class _WithFirst:
    """Updates with the first one put back; it adds no work to each of the rest."""

    def __init__(
        self,
        first: RequestUpdate | None,
        rest: AsyncGenerator[RequestUpdate, None],
        direct: DirectDelivery,
    ) -> None:
        self._first, self._rest, self.direct = first, rest, direct

    def __aiter__(self) -> AsyncIterator[RequestUpdate]:
        return self

    def __anext__(self) -> Awaitable[RequestUpdate]:
        if self._first is None:
            return self._rest.__anext__()
        first, self._first = self._first, None
        return _ready(first)

    async def aclose(self) -> None:
        self.direct.disconnect()
        await self._rest.aclose()


async def _ready(update: RequestUpdate) -> RequestUpdate:
    return update
