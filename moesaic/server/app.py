"""The HTTP app around an Engine."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from moesaic.engine.engine import Engine
from moesaic.server import admin, dashboard, native, openai, openapi, profile, tokens
from moesaic.server.auth import Keys, refuse_browsers
from moesaic.server.context import Context
from moesaic.server.errors import INTERNAL, Refusal
from moesaic.server.live_stats import ROUTE, CountResponses
from moesaic.server.routes import CLIENT, Route

logger = logging.getLogger(__name__)

ROUTES = (
    *admin.ROUTES,
    *dashboard.ROUTES,
    *native.ROUTES,
    *openai.ROUTES,
    *tokens.ROUTES,
    *profile.ROUTES,
)


def make_app(
    engine: Engine, is_stopping: Callable[[], bool] = lambda: False, keys: Keys | None = None
) -> FastAPI:
    """`is_stopping`: whether the server is shutting down, which explains failed requests.
    `keys`: None for the keys of the engine's flags and the environment."""
    context = Context(engine, is_stopping, Keys.of(engine.args) if keys is None else keys)
    app = FastAPI(
        title="Moesaic",
        openapi_url=None,
        redirect_slashes=False,
        lifespan=lambda _: context.stats.running(),
    )
    app.state.context = context
    context.shared(openai.OpenAISetup)  # raises its errors at start
    routes = (*ROUTES, openapi.route(ROUTES))
    for route in routes:
        app.router.add_route(route.path, _endpoint(context, route), [route.method])
    app.add_exception_handler(Exception, _internal)
    app.add_exception_handler(HTTPException, _http)
    app.add_middleware(CountResponses, context.stats)
    return app


def _endpoint(context: Context, route: Route) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        request.scope[ROUTE] = route.path
        try:
            key = request.scope[CLIENT] = context.keys.admit(route.access, request)
            if route.changes and not key:
                refuse_browsers(request)
            return await route.handler(context, request)
        except Refusal as refusal:
            return refusal.response()
        except ClientDisconnect:
            return Response(status_code=499)  # is not sent
        except HTTPException:
            raise
        except Exception as error:  # starlette would raise it again, for the log
            return await _internal(request, error)

    return endpoint


async def _http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return Refusal(error.status_code, error.detail, headers=error.headers).response()


async def _internal(request: Request, error: Exception) -> Response:
    logger.error("%s %r failed", request.method, request.url.path, exc_info=error)
    return Refusal(500, INTERNAL).response()
