"""/rebalance: moves experts between ranks now, or shows what that would do."""

from __future__ import annotations

from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from moesaic.engine.frontend.rebalance import REBALANCE_SECONDS, NothingMoves
from moesaic.server.bodies import has_body, read_body
from moesaic.server.context import Context
from moesaic.server.errors import Refusal
from moesaic.server.responses import json_response
from moesaic.server.routes import ADMIN, Route

MOST_SECONDS: Final = 600.0


class RebalanceBody(msgspec.Struct, forbid_unknown_fields=True):
    dry_run: bool = False
    timeout: float = REBALANCE_SECONDS


async def rebalance(context: Context, request: Request) -> Response:
    if request.query_params:
        raise Refusal(400, "give dry_run and timeout in the body, as JSON")
    body = await read_body(request, RebalanceBody) if has_body(request) else RebalanceBody()
    if not 0 <= body.timeout <= MOST_SECONDS:
        raise Refusal(400, f"timeout must be between 0 and {MOST_SECONDS:g} seconds", "timeout")
    try:
        states = await context.in_thread(
            lambda: context.engine.rebalance(body.dry_run, body.timeout)
        )
    except NothingMoves as error:
        raise Refusal(400, str(error)) from None
    return json_response({"replicas": states})


async def rebalance_state(context: Context, _: Request) -> Response:
    try:
        states = await context.in_thread(context.engine.rebalance_state)
    except NothingMoves as error:
        raise Refusal(400, str(error)) from None
    return json_response({"replicas": states})


ROUTES = (
    Route(
        "POST",
        "/rebalance",
        rebalance,
        ADMIN,
        "Moves experts between ranks now; a dry run shows the gain and the cost",
        RebalanceBody,
        example={"dry_run": True},
        body_optional=True,
    ),
    Route("GET", "/rebalance", rebalance_state, ADMIN, "What was moved last, and what moves now"),
)
