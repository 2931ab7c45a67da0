"""The HTTP routes around an Engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any, Final, TypeVar, cast

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from moesaic.engine.engine import Engine, QueueFull
from moesaic.server.bodies import AbortBody, GenerateBody, read_body

logger = logging.getLogger(__name__)

# A message may quote what was sent, which may be megabytes.
LONGEST_MESSAGE: Final = 500
RETRY_AFTER: Final = {"Retry-After": "1"}
# How long one token may take until the engine counts as ill.
PROBE_SECONDS: Final = 20.0
DONE: Final = b"data: [DONE]\n\n"

Output = dict[str, Any]
Result = TypeVar("Result")


def make_app(engine: Engine, is_stopping: Callable[[], bool] = lambda: False) -> FastAPI:
    """`is_stopping`: whether the server is about to end, so that a failure is nobody's fault."""
    app = FastAPI(title="Moesaic", docs_url=None, redoc_url=None)
    routes = Routes(engine, is_stopping)
    for path, method, handler in (
        ("/health", "GET", routes.health),
        ("/health_generate", "GET", routes.health_generate),
        ("/server_info", "GET", routes.server_info),
        ("/get_server_info", "GET", routes.server_info),
        ("/flush_cache", "POST", routes.flush_cache),
        ("/abort_request", "POST", routes.abort_request),
        ("/generate", "POST", routes.generate),
    ):
        app.add_api_route(path, handler, methods=[method], response_model=None)
    app.add_exception_handler(Exception, _internal)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(ClientDisconnect, _gone)
    return app


class Routes:
    def __init__(self, engine: Engine, is_stopping: Callable[[], bool]) -> None:
        self._engine, self._is_stopping = engine, is_stopping

    @property
    def trouble(self) -> str:
        """Why nobody is served any more, or nothing."""
        return self._engine.fault or ("the server is stopping" if self._is_stopping() else "")

    async def health(self) -> Response:
        trouble = self.trouble
        return refusal(503, trouble) if trouble else json_response({"status": "ok"})

    async def health_generate(self, request: Request) -> Response:
        """One token through every rank."""
        body = GenerateBody(
            input_ids=[0], sampling_params={"max_new_tokens": 1, "temperature": 0.0}
        )
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                answer = await self._answer(request, body)
        except TimeoutError:
            return refusal(503, f"the engine gave no token in {PROBE_SECONDS:g} s")
        return json_response({"status": "ok"}) if answer.status_code == 200 else answer

    async def server_info(self) -> Response:
        return await self._ask(self._engine.get_server_info)

    async def flush_cache(self) -> Response:
        def flush() -> dict[str, int]:
            return {"freed_pages": self._engine.flush_cache()}

        return await self._ask(flush)

    async def abort_request(self, request: Request) -> Response:
        try:
            body = await read_body(request, AbortBody)
        except ValueError as error:
            return refusal(400, str(error))

        def abort() -> dict[str, str]:
            self._engine.abort(body.rid)
            return {"status": "ok"}

        return await self._ask(abort)

    async def generate(self, request: Request) -> Response:
        try:
            body = await read_body(request, GenerateBody)
        except ValueError as error:
            return refusal(400, str(error))
        return await self._answer(request, body)

    async def _answer(self, request: Request, body: GenerateBody) -> Response:
        try:
            work = self._stream(body) if body.stream else self._whole(body)
            return await while_connected(request, work)
        # A number such as 10**400 is valid JSON, and no float.
        except (ValueError, OverflowError) as error:
            return refusal(400, str(error))
        except RuntimeError as error:
            return self._failure(error)

    async def _whole(self, body: GenerateBody) -> Response:
        outputs = await self._engine.async_generate(**body.arguments())
        if isinstance(outputs, list) and self.trouble:
            reasons = [output["meta_info"]["finish_reason"]["type"] for output in outputs]
            if "abort" in reasons:
                return refusal(503, self.trouble)
        return json_response(outputs)

    async def _stream(self, body: GenerateBody) -> Response:
        """The status is sent with the first piece: until then the engine may refuse."""
        found = await self._engine.async_generate(**body.arguments())
        pieces = cast(AsyncGenerator[Output, None], found)
        first = await anext(pieces)
        return Events(first, pieces)

    async def _ask(self, question: Callable[[], Any]) -> Response:
        """The engine answers between two steps: not in the event loop's time."""
        try:
            return json_response(await asyncio.to_thread(question))
        except RuntimeError as error:
            return self._failure(error)

    def _failure(self, error: RuntimeError) -> Response:
        if isinstance(error, QueueFull):
            return refusal(429, str(error), RETRY_AFTER)
        if self.trouble:
            return refusal(503, self.trouble)
        return refusal(500, str(error))


class Events(StreamingResponse):
    """Server-sent events: the answers as they grow, then [DONE]."""

    def __init__(self, first: Output, pieces: AsyncGenerator[Output, None]) -> None:
        super().__init__(self._events(first), media_type="text/event-stream")
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._pieces.aclose()  # ends the requests of a client that left

    async def _events(self, first: Output) -> AsyncIterator[bytes]:
        yield _event(first)
        try:
            async for piece in self._pieces:
                yield _event(piece)
        except RuntimeError as error:
            yield _event(_error(str(error)))
        yield DONE


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """What the work gives; it is cancelled, which aborts its requests, if the client leaves."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def json_response(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def refusal(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    body = msgspec.json.encode(_error(message))
    return Response(body, status, headers, "application/json")


def _error(message: str) -> dict[str, Any]:
    if len(message) > LONGEST_MESSAGE:
        message = f"{message[:LONGEST_MESSAGE]} …"
    return {"error": {"message": message}}


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


async def _http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return refusal(error.status_code, error.detail, dict(error.headers or {}))


async def _internal(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return refusal(500, "an error of the server, which its log has")


async def _gone(_: Request, __: Exception) -> Response:
    """Nobody reads it."""
    return Response(status_code=499)
