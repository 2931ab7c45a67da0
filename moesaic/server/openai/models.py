"""/v1/models."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from moesaic.server.context import Context
from moesaic.server.openai.setup import OpenAISetup
from moesaic.server.responses import json_response


async def models(context: Context, _: Request) -> Response:
    setup = context.shared(OpenAISetup)
    found = [_model(setup, name) for name in setup.names]
    return json_response({"data": found, "object": "list"})


async def model(context: Context, request: Request) -> Response:
    setup = context.shared(OpenAISetup)
    path_name = request.path_params["model"]  # without slashes at its end
    name = next((known for known in setup.names if known.rstrip("/") == path_name), path_name)
    setup.check_model(name)
    return json_response(_model(setup, name if name in setup.names else setup.model))


def _model(setup: OpenAISetup, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": setup.created,
        "owned_by": "moesaic",
        "root": setup.model,
        "parent": None,
        "max_model_len": setup.limits.max_sequence,
    }
