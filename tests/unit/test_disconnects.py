"""Work for a client ends when the server's protocol says that its connection is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import fields

import pytest
from starlette.requests import ClientDisconnect, Request

from moesaic.engine.frontend.inputs import GenerateInput
from moesaic.server.responses import DISCONNECT, DisconnectWatch, while_connected


class Work:
    """Waits for ever; knows how it ended."""

    def __init__(self) -> None:
        self.started = self.cancelled = False

    async def run(self) -> None:
        self.started = True
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


def request_with(watch: DisconnectWatch) -> Request:
    return Request({"type": "http", DISCONNECT: watch})


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(30):
            await test()

    asyncio.run(limited())


def test_the_result_is_that_of_the_work() -> None:
    async def work() -> str:
        await asyncio.sleep(0)
        return "done"

    async def test() -> None:
        resumed = list[bool]()
        watch = DisconnectWatch(lambda: resumed.append(True))
        assert await while_connected(request_with(watch), work()) == "done"
        assert resumed == [True]
        watch.disconnected()  # too late to cancel anything
        await asyncio.sleep(0)

    run(test)


def test_a_lost_connection_cancels_the_work() -> None:
    async def test() -> None:
        watch, work = DisconnectWatch(), Work()
        asyncio.get_running_loop().call_soon(watch.disconnected)
        with pytest.raises(ClientDisconnect):
            await while_connected(request_with(watch), work.run())
        assert work.cancelled
        task = asyncio.current_task()
        assert task is not None and not task.cancelling()
        await asyncio.sleep(0)  # the task itself goes on

    run(test)


def test_work_does_not_start_for_a_client_that_has_left() -> None:
    async def test() -> None:
        watch, work = DisconnectWatch(), Work()
        watch.disconnected()
        with pytest.raises(ClientDisconnect):
            await while_connected(request_with(watch), work.run())
        assert not work.started

    run(test)


@pytest.mark.parametrize("lost", [False, True])
def test_a_cancelled_task_is_no_disconnect(lost: bool) -> None:
    """Also if the connection is lost at the same time."""

    async def test() -> None:
        watch, work = DisconnectWatch(), Work()
        task = asyncio.ensure_future(while_connected(request_with(watch), work.run()))
        await asyncio.sleep(0)
        task.cancel()
        if lost:
            watch.disconnected()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert work.cancelled

    run(test)


def test_a_call_of_a_client_keeps_all_else() -> None:
    call = GenerateInput("Lay", sampling_params={"n": 2}, rid="r", routed_dp_rank=1)
    sent = call.sent_by(("key", "host"), stream=True)
    assert (sent.client, sent.stream) == (("key", "host"), True)
    same = {field.name for field in fields(call)} - {"client", "stream"}
    assert all(getattr(sent, name) is getattr(call, name) for name in same)
    assert (call.client, call.stream, sent.data_parallel_rank) == (None, False, 1)
