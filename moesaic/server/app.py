"""The HTTP app around an Engine."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moesaic.engine.engine import Engine
from moesaic.server import (
    admin,
    anthropic,
    dashboard,
    elastic,
    expert_records,
    loads,
    native,
    openai,
    openapi,
    profile,
    rebalance,
    responses_api,
    tokens,
)
from moesaic.server.auth import Keys, refuse_browsers
from moesaic.server.client_warnings import add_warning_header
from moesaic.server.context import CLOSE_AND_RETRY, Context
from moesaic.server.errors import INTERNAL, Refusal
from moesaic.server.live_stats import ROUTE, CountResponses
from moesaic.server.paths import TrailingSlash, unknown_path, wrong_method
from moesaic.server.resume import resumable, resumption_of
from moesaic.server.routes import CLIENT, Route, plain_path

logger = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]

ROUTES = (
    *admin.ROUTES,
    *dashboard.ROUTES,
    *native.ROUTES,
    *openai.ROUTES,
    *responses_api.ROUTES,
    *anthropic.ROUTES,
    *tokens.ROUTES,
    *profile.ROUTES,
    *expert_records.ROUTES,
    *rebalance.ROUTES,
    *elastic.ROUTES,
    *loads.ROUTES,
)


def make_app(
    engine: Engine, is_stopping: Callable[[], bool] = lambda: False, keys: Keys | None = None
) -> FastAPI:
    """`is_stopping`: whether the server is shutting down, which explains failed requests.
    `keys`: None for the keys of the engine's flags and the environment."""
    context = Context(engine, is_stopping, Keys.of(engine.args) if keys is None else keys)
    app = App(
        context,
        title="Moesaic",
        openapi_url=None,
        redirect_slashes=False,
        lifespan=lambda _: context.stats.running(),
    )
    context.shared(openai.OpenAISetup)  # raises its errors at start
    routes = (*ROUTES, openapi.route(ROUTES))
    by_path: dict[str, dict[str, Route]] = {}
    for route in routes:
        by_path.setdefault(route.path, {})[route.method] = route
    for path, methods in by_path.items():
        endpoint = _endpoint(context, methods)
        app.router.add_route(path, endpoint, list(methods))
        app.direct |= {(m, path): endpoint for m, route in methods.items() if route.generates}
    app.add_exception_handler(Exception, _unexpected)
    app.add_exception_handler(HTTPException, partial(_http, by_path))
    app.add_middleware(CountResponses, context.stats)
    app.add_middleware(TrailingSlash)
    return app


class App(FastAPI):
    """Calls the endpoints that generate without middlewares and without looking through all routes,
    which take longer than the rest of a request's way to the engine."""

    def __init__(self, context: Context, **options: Any) -> None:
        super().__init__(**options)
        self.state.context = context
        self.direct: dict[tuple[str, str], Endpoint] = {}
        """Endpoints by method and path."""
        self._http = context.stats.http

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = scope.get("method", ""), scope.get("path", "")
        if (endpoint := self.direct.get(key)) is None or scope.get("root_path"):
            await super().__call__(scope, receive, send)
            return
        request = Request(scope, receive)
        response = await endpoint(request)
        self._http[key[1], response.status_code] += 1
        try:
            await response(scope, receive, send)
        except Exception as error:
            _internal(request, error)
            raise


def _endpoint(context: Context, methods: Mapping[str, Route]) -> Endpoint:
    """The endpoint of a path, with its route for each method; HEAD is GET without the body."""

    async def endpoint(request: Request) -> Response:
        route = methods["GET" if request.method == "HEAD" else request.method]
        request.scope[ROUTE] = route.path
        try:
            key = request.scope[CLIENT] = context.keys.admit(route.access, request)
            if route.changes and not key:
                refuse_browsers(request)
            if route.generates and (reason := context.unavailable_reason):
                raise Refusal(503, reason, headers=CLOSE_AND_RETRY)
            if not route.generates:
                response = await route.handler(context, request)
            else:
                resumption = resumption_of(context, request)
                response = await route.handler(context, request)
                response = resumable(context, request, response, resumption)
            add_warning_header(request, response)
            return response
        except Refusal as refusal:
            return refusal.response(route.error_body(refusal))
        except ClientDisconnect:
            return Response(status_code=499)  # is not sent
        except HTTPException:
            raise
        except Exception as error:  # starlette would raise it again, for the log
            failure = _internal(request, error)
            return failure.response(route.error_body(failure))

    return endpoint


async def _http(
    routes: Mapping[str, Mapping[str, Route]], request: Request, error: Exception
) -> Response:
    assert isinstance(error, HTTPException)
    headers, path = error.headers or {}, request.scope["path"]
    match error.status_code:
        case 404:
            refusal = unknown_path(path, map(plain_path, routes))
            above = [found for name, found in routes.items() if path.startswith(f"{name}/")]
            return _shaped(refusal, above[0] if above else {})
        case 405:
            refusal = wrong_method(headers.get("Allow", "").split(", "))
            return _shaped(refusal, routes.get(path, {}))
    return Refusal(error.status_code, error.detail, headers=headers).response()


def _shaped(refusal: Refusal, routes: Mapping[str, Route]) -> Response:
    """The refusal in the shape of the API that these routes belong to."""
    shapes = [route.error_body(refusal) for route in routes.values()]
    return refusal.response(shapes[0] if shapes else None)


async def _unexpected(request: Request, error: Exception) -> Response:
    return _internal(request, error).response()


def _internal(request: Request, error: Exception) -> Refusal:
    logger.error("%s %r failed", request.method, request.url.path, exc_info=error)
    return Refusal(500, INTERNAL)
