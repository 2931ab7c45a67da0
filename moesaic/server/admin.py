"""Routes for those who run the server."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

import moesaic
from moesaic.engine.frontend.inputs import GenerateInput
from moesaic.server import generation as work
from moesaic.server.bodies import AbortBody, read_body
from moesaic.server.context import LEAVING, Context
from moesaic.server.errors import Refusal
from moesaic.server.responses import json_response
from moesaic.server.routes import Route, RouteAccess

# How long one token may take until the engine counts as ill.
PROBE_SECONDS: Final = 20.0
# How long what it found is told to others who ask.
FRESH_SECONDS: Final = 1.0


async def health(context: Context, _: Request) -> Response:
    if context.trouble:
        raise Refusal(503, context.trouble, headers=LEAVING)
    return json_response({"status": "ok"})


class Probe:
    """One token through every serving group, and so through every rank. Everybody may ask for it,
    and it waits for nobody: so those who ask at about the same time get the same one's result."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._under_way: asyncio.Task[Refusal | None] | None = None
        self._ended = 0.0

    async def result(self) -> Refusal | None:
        """Nothing, if all is well."""
        task = self._under_way
        if task is None or (task.done() and time.monotonic() - self._ended > FRESH_SECONDS):
            task = self._under_way = asyncio.create_task(self._run())
        return await asyncio.shield(task)  # whoever leaves, others wait for it

    async def _run(self) -> Refusal | None:
        try:
            return await self._ask()
        except Refusal as refusal:
            return refusal
        finally:
            self._ended = time.monotonic()

    async def _ask(self) -> Refusal | None:
        context, groups = self._context, list(range(self._context.engine.mesh.num_groups))
        call = GenerateInput(
            input_ids=[[0] for _ in groups],
            sampling_params={"max_new_tokens": 1, "temperature": 0.0},
            data_parallel_rank=groups,
        )
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                pieces = await work.probe(context, call)
        except TimeoutError:
            return Refusal(503, f"the engine gave no token in {PROBE_SECONDS:g} s")
        failed = [piece.request for piece in pieces if piece.request.failed]
        return context.failed(failed[0]) if failed else None


async def health_generate(context: Context, request: Request) -> Response:
    await health(context, request)
    if (refusal := await context.part(Probe).result()) is not None:
        raise refusal
    return json_response({"status": "ok"})


async def model_info(context: Context, _: Request) -> Response:
    args = context.args
    return json_response(
        {
            "model_path": args.model_path,
            "tokenizer_path": args.tokenizer_path,
            "is_generation": True,
            "max_model_len": context.engine.context_length,
        }
    )


async def version(_: Context, __: Request) -> Response:
    return json_response({"version": moesaic.__version__})


async def server_info(context: Context, _: Request) -> Response:
    return json_response(await context.ask(context.engine.get_server_info))


async def flush_cache(context: Context, _: Request) -> Response:
    return json_response({"freed_pages": await context.ask(context.engine.flush_cache)})


async def abort_request(context: Context, request: Request) -> Response:
    body = await read_body(request, AbortBody)
    if body.abort_all:
        context.keys.admit(RouteAccess.ADMIN, request)  # they are other people's, too
        ended = await context.ask(context.engine.abort_all)
        return json_response({"status": "ok", "aborted": ended})
    if not body.rid:
        raise Refusal(400, "give the rid of a request, or abort_all", "rid")
    may_end_all = context.keys.allow(RouteAccess.ADMIN, request)
    client = None if may_end_all else work.client_of(request)
    ended = await context.ask(lambda: context.engine.abort(body.rid, client))
    return json_response({"status": "ok", "aborted": ended})


ROUTES = (
    Route("GET", "/health", health, RouteAccess.OPEN, "Whether the server lives", probe=True),
    Route(
        "GET",
        "/health_generate",
        health_generate,
        RouteAccess.OPEN,
        "One token through every rank",
        probe=True,
    ),
    Route(
        "GET",
        "/server_info",
        server_info,
        RouteAccess.ADMIN,
        "What was resolved, and what is so now",
    ),
    Route("GET", "/get_server_info", server_info, RouteAccess.ADMIN, "The same as /server_info"),
    Route("GET", "/model_info", model_info, RouteAccess.USER, "Which model is served"),
    Route("GET", "/get_model_info", model_info, RouteAccess.USER, "The same as /model_info"),
    Route("GET", "/version", version, RouteAccess.OPEN, "The version of the server"),
    Route("GET", "/ping", health, RouteAccess.OPEN, "The same as /health", probe=True),
    Route("POST", "/flush_cache", flush_cache, RouteAccess.ADMIN, "Empties the prefix cache"),
    Route(
        "GET",
        "/flush_cache",
        flush_cache,
        RouteAccess.ADMIN,
        "The same, as SGLang has it",
        changes=True,
    ),
    Route(
        "POST",
        "/abort_request",
        abort_request,
        RouteAccess.USER,
        "Ends a request by its id",
        AbortBody,
    ),
)
