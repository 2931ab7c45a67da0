"""/metrics, for Prometheus."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from moesaic.observe.exposition import CONTENT_TYPE, exposition
from moesaic.server.context import Context
from moesaic.server.routes import Route, RouteAccess


async def metrics(context: Context, _: Request) -> Response:
    snapshot = await context.figures.snapshot()
    text = await asyncio.to_thread(exposition, snapshot)  # with many ranks it is long
    return Response(text, headers={"content-type": CONTENT_TYPE})


ROUTES = (Route("GET", "/metrics", metrics, RouteAccess.OPEN, "Figures for Prometheus"),)
