"""Progress on its way to the tasks of an event loop: what may wait is joined, nothing is lost."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from moesaic.engine.frontend.output_queue import MAX_PAUSE, OutputQueue, OutputSenders
from moesaic.engine.schedule.request_state import Progress

FAR = 1000.0
"""Seconds of a pause that no test waits for."""


def progress(tokens: int, finished: bool = False) -> Progress:
    return Progress("r", tokens, "x" * tokens, finished)


async def begun(senders: OutputSenders) -> OutputQueue:
    """A queue whose first token was read."""
    output = senders.new_queue()
    output.put(0, progress(1))
    assert await output.get() == (0, progress(1))
    await asyncio.sleep(0.01)
    return output


def test_tokens_that_arrive_before_the_loop_runs_are_one_increment() -> None:
    async def run() -> tuple[int, Progress]:
        output = OutputSenders().new_queue()
        for tokens in range(1, 6):
            output.put(0, progress(tokens))
        return await output.get()

    assert asyncio.run(run()) == (0, progress(5))


def test_requests_of_one_call_keep_their_order() -> None:
    async def run() -> list[tuple[int, Progress]]:
        output = OutputSenders().new_queue()
        for number in (2, 0, 1):
            output.put(number, progress(1))
        output.put(0, progress(2))
        return [await output.get() for _ in range(3)]

    assert asyncio.run(run()) == [(2, progress(1)), (0, progress(2)), (1, progress(1))]


@pytest.mark.parametrize("urgent", [progress(1), progress(7, finished=True)])
def test_a_first_token_and_an_end_do_not_wait_for_the_pause(urgent: Progress) -> None:
    async def run() -> list[Progress]:
        senders = OutputSenders()
        slow, fast = await begun(senders), senders.new_queue()
        sender = slow._sender
        sender._resume_at = time.monotonic() + FAR
        waiting = [asyncio.create_task(queue.get()) for queue in (slow, fast)]
        await asyncio.sleep(0)
        slow.put(0, progress(2))
        await asyncio.sleep(0.01)
        assert sender._timer is not None and not waiting[0].done()
        fast.put(0, urgent)
        return [found for _, found in await asyncio.gather(*waiting)]

    # What waits goes along: the loop is awake.
    assert asyncio.run(run()) == [progress(2), urgent]


def test_tokens_of_a_pause_are_delivered_together_at_its_end() -> None:
    async def run() -> Progress:
        output = await begun(OutputSenders())
        output._sender._resume_at = time.monotonic() + 0.05
        reader = asyncio.create_task(output.get())
        await asyncio.sleep(0)
        for tokens in (2, 3, 4):
            output.put(0, progress(tokens))
        return (await reader)[1]

    assert asyncio.run(run()) == progress(4)


def test_nothing_is_lost_or_reordered_while_another_thread_writes() -> None:
    number, last = 8, 500

    async def run() -> list[list[int]]:
        senders = OutputSenders()
        queues = [senders.new_queue() for _ in range(number)]
        ended: list[int] = []

        async def read(index: int) -> list[int]:
            queues[index].on_ended = ended.append
            found: list[Progress] = []
            while not (found and found[-1].finished):
                found.append((await queues[index].get())[1])
            return [one.num_output for one in found]

        def write() -> None:
            for tokens in range(1, last + 1):
                for queue in queues:
                    queue.put(0, progress(tokens, finished=tokens == last))

        thread = threading.Thread(target=write)
        readers = [asyncio.create_task(read(index)) for index in range(number)]
        thread.start()
        counts = await asyncio.gather(*readers)
        await asyncio.to_thread(thread.join)
        assert ended == [1] * number
        return counts

    for counts in asyncio.run(run()):
        assert counts == sorted(set(counts)) and counts[-1] == last


def test_an_error_at_the_end_of_a_request_keeps_no_other_waiting() -> None:
    def fail(number: int) -> None:
        raise ZeroDivisionError("made up")

    async def run() -> list[tuple[int, Progress]]:
        senders = OutputSenders()
        queues = [senders.new_queue() for _ in range(3)]
        queues[0].on_ended = queues[1].on_ended = fail
        for queue in queues:
            queue.put(0, progress(1, finished=True))
        return [await queue.get() for queue in queues]

    assert asyncio.run(run()) == [(0, progress(1, finished=True))] * 3


def test_a_long_delivery_is_followed_by_a_short_pause() -> None:
    async def run() -> float:
        sender = (await begun(OutputSenders()))._sender
        sender._pause(time.monotonic() - FAR)
        return sender._resume_at - time.monotonic()

    assert asyncio.run(run()) <= MAX_PAUSE
