"""/metrics, for Prometheus."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from moesaic.observe.exposition import CONTENT_TYPE, exposition
from moesaic.server.context import Context
from moesaic.server.routes import OPEN, Route


async def metrics(context: Context, _: Request) -> Response:
    snapshot = await context.stats.snapshot()
    text = await asyncio.to_thread(exposition, snapshot)  # slow with many ranks
    return Response(text, headers={"content-type": CONTENT_TYPE})


ROUTES = (Route("GET", "/metrics", metrics, OPEN, "Metrics for Prometheus"),)
