"""The HTTP server of a router."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import quote

import aiohttp
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from moesaic.core.request_id import LAST_EVENT_ID, REQUEST_ID
from moesaic.router.answers import unavailable
from moesaic.router.args import RouterArgs, contradiction
from moesaic.router.discovery import ClusterApi, discoveries_of
from moesaic.router.halves import Call
from moesaic.router.proxy import HOP, READ_BUFFER, Proxy
from moesaic.router.routes import check_access, not_passed_on, route_of
from moesaic.router.workers import HealthChecks, workers_of
from moesaic.server.auth import is_foreign_page, is_loopback, is_own_name
from moesaic.server.bodies import read_bytes
from moesaic.server.connections import ConnectionQuotas
from moesaic.server.errors import Refusal
from moesaic.server.http_protocol import ConnectionLimits
from moesaic.server.listen import bind
from moesaic.server.responses import while_connected
from moesaic.server.resume import NUMBERED, Resumption
from moesaic.server.run import config_of, max_connections

logger = logging.getLogger(__name__)

# Routes whose requests two instances share.
SHARED: Final = NUMBERED
ABORT: Final = "/abort_request"
OWN_PATHS: Final = frozenset(("/health", "/workers", "/metrics"))
ID_BYTES: Final = 16
# Requests that clients may have open, if the limit of open files allows it.
MOST_OPEN: Final = 1 << 14
METHODS: Final = ["GET", "POST", "DELETE"]


class Router:
    def __init__(self, args: RouterArgs, cluster: ClusterApi | None = None) -> None:
        """`cluster`: None for that of this pod, if the flags ask for one."""
        if problem := contradiction(args):
            raise ValueError(problem)
        self.args, self.workers = args, workers_of(args)
        self._is_local = is_loopback(args.host)
        self._discoveries = discoveries_of(args, self.workers, cluster)
        self.proxy: Proxy | None = None

    @asynccontextmanager
    async def running(self, _: Starlette) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            connector=connector, read_bufsize=READ_BUFFER, auto_decompress=False
        ) as session:
            self.proxy = Proxy(self.args, self.workers, session)
            checks = HealthChecks(self.args, self.workers, session)
            runs = [checks.run, *self._discoveries]
            tasks = [asyncio.create_task(run()) for run in runs]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()

    async def handle(self, request: Request) -> Response:
        assert self.proxy is not None, "the server runs"
        path = request.scope["path"].rstrip("/") or "/"
        try:
            headers, work = await self._work(self.proxy, request, path)
            response = await while_connected(request, work)
            response.headers.setdefault(REQUEST_ID, headers[REQUEST_ID])
        except Refusal as refusal:
            response = refusal.response()
        except ClientDisconnect:
            response = Response(status_code=499)  # is not sent
        self.proxy.stats.requests[route_of(path), response.status_code] += 1
        return response

    async def _work(
        self, proxy: Proxy, request: Request, path: str
    ) -> tuple[dict[str, str], Coroutine[Any, Any, Response]]:
        """The headers to pass on, and what makes the answer, once the whole request is here;
        Refusal if it is not passed on."""
        self._check_origin(request)
        check_access(request.method, path)
        headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP}
        headers.pop("accept-encoding", None)
        headers.setdefault(REQUEST_ID, secrets.token_hex(ID_BYTES))
        data = await read_bytes(request)
        if path == ABORT and _json_object(data).get("abort_all"):
            raise not_passed_on("abort_all")
        if path not in SHARED:
            query = request.scope["query_string"].decode("latin-1")
            where = quote(path) + (f"?{query}" if query else "")
            send = proxy.forward_to_all if path == ABORT else proxy.forward
            return headers, send(request.method, where, data, headers)
        body = _json_object(data)
        headers.pop("content-type", None)
        resumes = Resumption.of(headers.pop(LAST_EVENT_ID, None))
        return headers, proxy.generate(Call.of(path, body, headers[REQUEST_ID]), headers, resumes)

    def _check_origin(self, request: Request) -> None:
        """Pages in browsers could send requests to a router on the same machine, or in the network
        of the browser: it has no keys that they would not know."""
        host = request.headers.get("host")
        if self._is_local and host is not None and not is_own_name(host):
            text = "the Host header is not this machine's own: use localhost or an IP address"
            raise Refusal(403, text, code="foreign_host")
        if is_foreign_page(request):
            raise Refusal(403, "requests from pages of other sites are not passed on")

    async def health(self, _: Request) -> Response:
        assert self.proxy is not None, "the server runs"
        roles = ("prefill", "decode") if self.args.pd_disaggregation else ("both",)
        if all(self.proxy.healthy(role) for role in roles):
            return JSONResponse({"status": "ok"})
        return unavailable([one for one in self.workers if not one.is_healthy])

    async def show_workers(self, request: Request) -> Response:
        try:
            self._check_origin(request)
        except Refusal as refusal:
            return refusal.response()
        return JSONResponse({"workers": [worker.state() for worker in self.workers]})

    async def metrics(self, _: Request) -> Response:
        return PlainTextResponse("\n".join([*self._metrics(), ""]))

    def _metrics(self) -> Iterator[str]:
        assert self.proxy is not None, "the server runs"
        stats = self.proxy.stats
        yield "# TYPE moesaic_router_requests_total counter"
        for (path, status), number in sorted(stats.requests.items()):
            labels = f'path={json.dumps(path)},status="{status}"'
            yield f"moesaic_router_requests_total{{{labels}}} {number}"
        for name, value in (("retries", stats.retries), ("resumed_streams", stats.resumed)):
            yield f"# TYPE moesaic_router_{name}_total counter"
            yield f"moesaic_router_{name}_total {value}"
        kinds: tuple[tuple[str, str, Any], ...] = (
            ("worker_up", "gauge", lambda one: int(one.is_healthy)),
            ("worker_open_requests", "gauge", lambda one: one.requests),
            ("worker_requests_total", "counter", lambda one: one.total),
            ("worker_failures_total", "counter", lambda one: one.failures),
        )
        for name, kind, read in kinds:
            yield f"# TYPE moesaic_router_{name} {kind}"
            for one in self.workers:
                labels = f'url={json.dumps(one.url)},role="{one.role}"'
                yield f"moesaic_router_{name}{{{labels}}} {read(one)}"

    def app(self) -> Starlette:
        own = (
            ("/health", self.health),
            ("/workers", self.show_workers),
            ("/metrics", self.metrics),
        )
        routes = [Route(path, handler, methods=["GET"]) for path, handler in own]
        routes.append(Route("/{path:path}", self.handle, methods=METHODS))
        return Starlette(routes=routes, lifespan=self.running)


def _json_object(data: bytes) -> dict[str, Any]:
    try:
        body = json.loads(data)
    except RecursionError:
        raise Refusal(400, "the body is nested too deeply") from None
    except ValueError as error:
        raise Refusal(400, f"invalid JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refusal(400, "the body must be a JSON object")
    return body


class RouterServer(uvicorn.Server):
    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        host, port = sockets[0].getsockname()[:2]
        print(f"ready: http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)


def serve(args: RouterArgs) -> int:
    """Serves until a signal."""
    router = Router(args)
    listener = bind(args.host, args.port)
    for worker in router.workers:
        logger.info("%s instance: %s", worker.role, worker.url)
    limits = ConnectionLimits(ConnectionQuotas.of(max_connections(MOST_OPEN)), OWN_PATHS)
    RouterServer(config_of(router.app(), limits)).run([listener])
    return 0
