"""/v1/models."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from moesaic.server.context import Context
from moesaic.server.openai.setup import OpenAISetup
from moesaic.server.responses import json_response


async def models(context: Context, _: Request) -> Response:
    return json_response({"data": [_model(context.shared(OpenAISetup))], "object": "list"})


async def model(context: Context, request: Request) -> Response:
    setup = context.shared(OpenAISetup)
    setup.check_model(request.path_params["model"])
    return json_response(_model(setup))


def _model(setup: OpenAISetup) -> dict[str, Any]:
    return {
        "id": setup.model,
        "object": "model",
        "created": setup.created,
        "owned_by": "moesaic",
        "root": setup.model,
        "parent": None,
        "max_model_len": setup.limits.max_sequence,
    }
