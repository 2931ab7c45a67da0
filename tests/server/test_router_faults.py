"""What a router does with requests whose answers have not begun, when instances fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from starlette.responses import Response

from moesaic.router.answers import Events
from moesaic.router.args import RouterArgs
from moesaic.router.halves import Call
from moesaic.router.proxy import Proxy
from moesaic.router.workers import Worker
from moesaic.server.context import ID_IN_USE
from moesaic.server.errors import Refusal

Handler = Callable[[web.Request], Awaitable[web.Response]]
CALL = Call.of("/generate", {"text": "x"})


@asynccontextmanager
async def instance(role: str, handler: Handler) -> AsyncIterator[Worker]:
    app = web.Application()
    app.router.add_post("/generate", handler)
    async with TestServer(app) as server:
        yield Worker(str(server.make_url("")).rstrip("/"), role)


async def answer(request: web.Request) -> web.Response:
    return web.json_response({"text": "whole"})


async def turns() -> None:
    """All that is ready in the event loop has its turn."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_what_waits_is_moved_once_there_is_another_server() -> None:
    """There was none when the server that does not answer was given up."""
    asked, is_over = asyncio.Event(), asyncio.Event()

    async def hang(request: web.Request) -> web.Response:
        asked.set()
        await is_over.wait()
        return web.Response(status=500)

    async def run() -> Response:
        async with (
            instance("both", hang) as first,
            instance("both", answer) as second,
            aiohttp.ClientSession() as session,
        ):
            proxy = Proxy(RouterArgs(), [first, second], session)
            second.lose("it starts")
            found = asyncio.create_task(proxy.generate(CALL, {}))
            await asked.wait()
            first.leave("it does not answer")
            await turns()
            second.find()
            try:
                return await asyncio.wait_for(found, 30)
            finally:
                is_over.set()

    assert asyncio.run(run()).body == b'{"text": "whole"}'


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize(("refusal", "expected"), [(503, 200), (429, 429)])
def test_when_all_prefill_instances_refuse(number: int, refusal: int, expected: int) -> None:
    """If they stop, the decode instance computes the prompt. If they are overloaded, it does not:
    it has answers to write."""
    refusals, workers, is_over = 0, list[Worker](), asyncio.Event()

    async def refuse(request: web.Request) -> web.Response:
        nonlocal refusals
        refusals += 1
        return web.json_response({"error": {}}, status=refusal)

    async def wait(request: web.Request) -> web.Response:
        """For the prompt; longer than all prefill instances take to refuse it."""
        while refusals < number or any(one.requests for one in workers[:number]):
            await asyncio.sleep(0.01)
        for one in workers[:number]:  # what stops is drained, too; it has nothing any more
            await turns()
            one.leave("it stops")
            await turns()
            one.find()
        await is_over.wait() if refusal == 429 else None
        return await answer(request)

    async def run() -> int:
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            workers.extend([await enter(instance("prefill", refuse)) for _ in range(number)])
            workers.append(await enter(instance("decode", wait)))
            proxy = Proxy(
                RouterArgs(pd_disaggregation=True), workers, await enter(aiohttp.ClientSession())
            )
            stack.callback(is_over.set)
            return (await asyncio.wait_for(proxy.generate(CALL, {}), 30)).status_code

    assert asyncio.run(run()) == expected
    assert refusals == number == workers[-1].total


def test_an_overloaded_instance_is_not_blamed_for_one_that_is_lost() -> None:
    """The other prefill instance takes the prompt, and the decode instance comes again."""
    workers, lost, is_over = list[Worker](), 0, asyncio.Event()

    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"error": {}}, status=429)

    async def break_off(request: web.Request) -> web.Response:
        nonlocal lost
        if (await request.json())["bootstrap_port"] == 1:  # the refusal comes meanwhile
            await is_over.wait()
        elif not lost:
            lost += 1
            asyncio.get_running_loop().call_later(0.2, workers[2].find)
            assert request.transport is not None
            request.transport.abort()
        return await answer(request)

    async def run() -> Response:
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            for role, handler in (("prefill", refuse), ("prefill", answer), ("decode", break_off)):
                workers.append(await enter(instance(role, handler)))
            workers[0].bootstrap_port = 1
            session = await enter(aiohttp.ClientSession())
            stack.callback(is_over.set)
            args = RouterArgs(pd_disaggregation=True, policy="round_robin")
            return await asyncio.wait_for(Proxy(args, workers, session).generate(CALL, {}), 30)

    found = asyncio.run(run())
    assert (found.status_code, found.body, lost) == (200, b'{"text": "whole"}', 1)


def test_a_stream_that_has_begun_waits_for_an_overloaded_instance() -> None:
    """Many streams of a lost instance come to another one at once."""
    asked, refusals = asyncio.Event(), 0

    def event(number: int) -> bytes:
        meta = {"finish_reason": {"type": "length"} if number == 3 else None}
        told = {"text": "abc"[:number], "output_ids": [*range(number)], "meta_info": meta}
        return f"data: {json.dumps(told)}\n\n".encode()

    async def write(request: web.Request, last: int) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        for number in range(1, last + 1):
            await stream.write(event(number))
        return stream

    async def break_off(request: web.Request) -> web.StreamResponse:
        stream = await write(request, 1)
        await asked.wait()
        assert request.transport is not None
        request.transport.abort()
        return stream

    async def refuse_once(request: web.Request) -> web.StreamResponse:
        nonlocal refusals
        if not refusals:
            refusals += 1
            return web.json_response({"error": {}}, status=429)
        stream = await write(request, 3)
        await stream.write(b"data: [DONE]\n\n")
        return stream

    async def run() -> bytes:
        async with (
            instance("both", break_off) as first,
            instance("both", refuse_once) as second,
            aiohttp.ClientSession() as session,
        ):
            second.lose("it starts")
            proxy, data = Proxy(RouterArgs(), [first, second], session), b""
            call = Call.of("/generate", {"text": "x", "stream": True})
            found = await proxy.generate(call, {})
            second.find()
            assert isinstance(found, Events)
            async with asyncio.timeout(30):
                async for part in found.body_iterator:
                    assert isinstance(part, bytes)
                    data += part
                    asked.set()
            return data

    found = asyncio.run(run())
    assert found == event(1) + event(2) + event(3) + b"data: [DONE]\n\n" and refusals == 1


def test_an_id_that_an_instance_still_has_is_no_error() -> None:
    """The prompt was lost, and the decode instance has not ended what it waited for."""
    bodies: dict[str, list[dict[str, Any]]] = {"lost": [], "good": [], "decode": []}
    is_over = asyncio.Event()

    async def lose(request: web.Request) -> web.Response:
        bodies["lost"].append(await request.json())
        return web.json_response({"error": {}}, status=503)

    async def compute(request: web.Request) -> web.Response:
        bodies["good"].append(await request.json())
        return await answer(request)

    async def decode(request: web.Request) -> web.Response:
        asked = bodies["decode"]
        asked.append(await request.json())
        if asked[-1]["bootstrap_port"] == 1:
            await is_over.wait()
        if len(asked) == 2:
            refusal = Refusal(400, "rid 'mine' is in use", code=ID_IN_USE)
            return web.json_response(refusal.body(), status=refusal.status)
        return await answer(request)

    async def run() -> Response:
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            handlers = ("prefill", lose), ("prefill", compute), ("decode", decode)
            workers = [await enter(instance(role, handler)) for role, handler in handlers]
            workers[0].bootstrap_port = 1
            session = await enter(aiohttp.ClientSession())
            stack.callback(is_over.set)
            args = RouterArgs(pd_disaggregation=True, policy="round_robin")
            proxy = Proxy(args, workers, session)
            call = Call.of("/generate", {"text": "x", "rid": "mine"})
            return await asyncio.wait_for(proxy.generate(call, {}), 30)

    found = asyncio.run(run())
    assert (found.status_code, found.body) == (200, b'{"text": "whole"}')
    assert {name: ["rid" in body for body in sent] for name, sent in bodies.items()} == {
        "lost": [False],
        "good": [False] * 2,
        "decode": [True] * 3,
    }
