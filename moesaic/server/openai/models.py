"""/v1/models: what is served."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from moesaic.server.context import Context
from moesaic.server.openai.setup import Setup
from moesaic.server.openai.shapes import Model, ModelList
from moesaic.server.replies import json_response


async def models(context: Context, _: Request) -> Response:
    return json_response(ModelList([_model(context.part(Setup))]))


async def model(context: Context, request: Request) -> Response:
    setup = context.part(Setup)
    setup.check_model(request.path_params["model"])
    return json_response(_model(setup))


def _model(setup: Setup) -> Model:
    return Model(
        id=setup.model, created=setup.created, root=setup.model, max_model_len=setup.max_model_len
    )
