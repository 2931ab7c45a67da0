"""Routes for operators."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import moesaic
from moesaic.engine.frontend.inputs import GenerateInput
from moesaic.server import generation
from moesaic.server.bodies import AbortBody, read_body, read_optional_body
from moesaic.server.context import CLOSE_AND_RETRY, DRAINING, Context
from moesaic.server.errors import Refusal
from moesaic.server.responses import json_response
from moesaic.server.routes import ADMIN, OPEN, USER, Route

# The engine is unhealthy if one token takes longer.
PROBE_SECONDS: Final = 20.0
# Later callers get the same result for this long.
FRESH_SECONDS: Final = 1.0


async def health(context: Context, _: Request) -> Response:
    if reason := context.unavailable_reason:
        code = None if context.engine.fault else DRAINING
        raise Refusal(503, reason, code=code, headers=CLOSE_AND_RETRY)
    return json_response({"status": "ok", "disaggregation_mode": context.args.disaggregation_mode})


class DrainBody(msgspec.Struct, forbid_unknown_fields=True):
    """Whether the server takes no requests."""

    drain: bool = True


async def drain(context: Context, request: Request) -> Response:
    """A router moves what is open to other servers."""
    context.is_drained = (await read_optional_body(request, DrainBody)).drain
    return json_response({"status": "ok", "open_requests": context.admission.open_requests})


class HealthProbe:
    """Generates one token in every serving group, and so on every rank. Any client may ask for it
    and it skips the queue, so concurrent callers share one result."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._task: asyncio.Task[Refusal | None] | None = None
        self._ended = 0.0

    async def result(self) -> Refusal | None:
        """None if the engine is healthy."""
        task = self._task
        if task is None or (task.done() and time.monotonic() - self._ended > FRESH_SECONDS):
            task = self._task = asyncio.create_task(self._run())
        return await asyncio.shield(task)  # a caller that disconnects does not cancel it

    async def _run(self) -> Refusal | None:
        try:
            return await self._generate()
        except Refusal as refusal:
            return refusal
        finally:
            self._ended = time.monotonic()

    async def _generate(self) -> Refusal | None:
        context, groups = self._context, list(range(self._context.engine.mesh.num_groups))
        call = GenerateInput(
            input_ids=[[0] for _ in groups],
            sampling_params={"max_new_tokens": 1, "temperature": 0.0},
            data_parallel_rank=groups,
        )
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                updates = await generation.collect_for(None, context, call)
        except TimeoutError:
            return Refusal(503, f"the engine gave no token in {PROBE_SECONDS:g} s")
        failed = [update.request for update in updates if update.request.failed]
        return context.failure_of(failed[0]) if failed else None


async def health_generate(context: Context, request: Request) -> Response:
    await health(context, request)
    if (refusal := await context.shared(HealthProbe).result()) is not None:
        raise refusal
    return json_response({"status": "ok"})


async def model_info(context: Context, _: Request) -> Response:
    args = context.engine.server_args
    return json_response(
        {
            "model_path": args.model_path,
            "tokenizer_path": args.tokenizer_path,
            "is_generation": True,
            "preferred_sampling_params": dict(context.engine.limits.preferred) or None,
            "max_model_len": context.engine.context_length,
        }
    )


async def version(_: Context, __: Request) -> Response:
    return json_response({"version": moesaic.__version__})


async def server_info(context: Context, _: Request) -> Response:
    return json_response(await context.in_thread(context.engine.get_server_info))


async def pd_state(context: Context, _: Request) -> Response:
    rooms = await context.in_thread(context.engine.get_rooms)
    mode = context.args.disaggregation_mode
    return json_response({"disaggregation_mode": mode, "rooms": rooms})


async def flush_cache(context: Context, _: Request) -> Response:
    return json_response({"freed_pages": await context.in_thread(context.engine.flush_cache)})


async def abort_request(context: Context, request: Request) -> Response:
    body = await read_body(request, AbortBody)
    if body.abort_all:
        context.keys.admit(ADMIN, request)  # this ends other clients' requests
        ended = await context.in_thread(context.engine.abort_all)
        return json_response({"status": "ok", "aborted": ended})
    if not body.rid:
        raise Refusal(400, "give the rid of a request, or abort_all", "rid")
    may_end_all = context.keys.allow(ADMIN, request)
    client = None if may_end_all else generation.client_of(request)
    ended = await context.in_thread(lambda: context.engine.abort(body.rid, client))
    return json_response({"status": "ok", "aborted": ended})


ROUTES = (
    Route("GET", "/health", health, OPEN, "Whether the server is up", probe=True),
    Route(
        "GET", "/health_generate", health_generate, OPEN, "One token through every rank", probe=True
    ),
    Route("GET", "/server_info", server_info, ADMIN, "Resolved configuration and current state"),
    Route("GET", "/get_server_info", server_info, ADMIN, "The same as /server_info"),
    Route("GET", "/pd_state", pd_state, ADMIN, "Requests shared with other instances"),
    Route("GET", "/model_info", model_info, USER, "The model that is served"),
    Route("GET", "/get_model_info", model_info, USER, "The same as /model_info"),
    Route("GET", "/version", version, OPEN, "The version of the server"),
    Route("GET", "/ping", health, OPEN, "The same as /health", probe=True),
    Route(
        "POST",
        "/drain",
        drain,
        ADMIN,
        "Refuses new requests, until it is called with false; open ones go on, or are moved",
        DrainBody,
        example={"drain": False},
    ),
    Route("POST", "/flush_cache", flush_cache, ADMIN, "Empties the prefix cache"),
    Route("GET", "/flush_cache", flush_cache, ADMIN, "The same, as in SGLang", changes=True),
    Route(
        "POST",
        "/abort_request",
        abort_request,
        USER,
        "Ends a request by its id",
        AbortBody,
        example={"rid": "the-id-of-a-request"},
    ),
)
