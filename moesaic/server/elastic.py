"""/scale_elastic_ep: another number of ranks, while they serve."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from moesaic.server.bodies import read_body
from moesaic.server.context import Context
from moesaic.server.errors import Refusal
from moesaic.server.responses import json_response
from moesaic.server.routes import ADMIN, Route


class ScaleBody(msgspec.Struct, forbid_unknown_fields=True):
    """SGLang's field, and vLLM's; requests need no time to drain, as others continue them."""

    new_ep_size: int | None = None
    new_data_parallel_size: int | None = None
    drain_timeout: float | None = None


async def scale(context: Context, request: Request) -> Response:
    body = await read_body(request, ScaleBody)
    if (body.new_ep_size is None) == (body.new_data_parallel_size is None):
        raise Refusal(400, "give new_ep_size, or new_data_parallel_size", "new_ep_size")
    groups = (body.new_data_parallel_size or 0) * context.engine.mesh.attention_tp
    size = groups if body.new_ep_size is None else body.new_ep_size
    name = "new_data_parallel_size" if body.new_ep_size is None else "new_ep_size"
    try:
        state = await context.in_thread(lambda: context.engine.scale_elastic_ep(size))
    except ValueError as error:
        raise Refusal(400, str(error), name) from None
    return json_response({"success": True, **state})


async def scaling(context: Context, _: Request) -> Response:
    try:
        state = await context.in_thread(context.engine.scale_elastic_ep)
    except ValueError as error:
        raise Refusal(400, str(error)) from None
    return json_response(state)


ROUTES = (
    Route(
        "POST",
        "/scale_elastic_ep",
        scale,
        ADMIN,
        "Ends ranks, or starts those that were ended, beside requests",
        ScaleBody,
        example={"new_ep_size": 4},
        one_of=("new_ep_size", "new_data_parallel_size"),
    ),
    Route("GET", "/is_scaling_elastic_ep", scaling, ADMIN, "Whether ranks come or go"),
    Route("POST", "/is_scaling_elastic_ep", scaling, ADMIN, "The same, as in vLLM"),
)
