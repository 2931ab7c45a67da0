"""/v1/models."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from moesaic.server.context import Context
from moesaic.server.openai.response_types import Model, ModelList
from moesaic.server.openai.setup import OpenAISetup
from moesaic.server.responses import json_response


async def models(context: Context, _: Request) -> Response:
    return json_response(ModelList([_model(context.shared(OpenAISetup))]))


async def model(context: Context, request: Request) -> Response:
    setup = context.shared(OpenAISetup)
    setup.check_model(request.path_params["model"])
    return json_response(_model(setup))


def _model(setup: OpenAISetup) -> Model:
    return Model(
        id=setup.model, created=setup.created, root=setup.model, max_model_len=setup.max_model_len
    )
