"""Progress on its way to the tasks of an event loop: what may wait is joined, nothing is lost."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from moesaic.engine.frontend import output_queue
from moesaic.engine.frontend.output_queue import (
    MAX_PAUSE,
    DeliveryError,
    OutputQueue,
    OutputSenders,
)
from moesaic.engine.schedule.request_state import Progress

FAR = 1000.0
"""Seconds of a pause that no test waits for."""
FAR_TOKENS = 1000


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
    async def run() -> None:
        sender = (await begun(OutputSenders()))._sender
        before = time.monotonic()
        sender._pause(before - FAR)
        assert before <= sender._resume_at - MAX_PAUSE <= time.monotonic()

    asyncio.run(run())


@pytest.fixture
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a busy machine makes a delivery long, too."""
    monkeypatch.setattr(output_queue, "MAX_PAUSE", 0.0)


class Reader:
    """Takes progress of the first requests up to a number of tokens, and no more."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.taken: list[int] = []

    def __call__(self, number: int, progress: Progress) -> bool:
        assert not progress.finished, "ends are the task's"
        if progress.num_output > self.most:
            return False
        self.taken.append(progress.num_output)
        return True


@pytest.mark.usefixtures("without_pauses")
def test_a_reader_takes_what_arrives_while_the_task_waits() -> None:
    async def run() -> tuple[list[int], Progress]:
        output = await begun(OutputSenders())
        output.taker = reader = Reader(FAR_TOKENS)
        task = asyncio.create_task(output.get())
        for tokens in (2, 3):
            await asyncio.sleep(0.01)
            output.put(0, progress(tokens))
        await asyncio.sleep(0.01)
        assert not task.done() and not output.newest
        output.put(0, progress(4, finished=True))
        return reader.taken, (await task)[1]

    assert asyncio.run(run()) == ([2, 3], progress(4, finished=True))


def test_a_reader_does_not_overtake_the_task() -> None:
    async def run() -> tuple[list[int], Progress]:
        output = await begun(OutputSenders())
        output.taker = reader = Reader(FAR_TOKENS)
        output.put(0, progress(2))  # the task handles the token before
        await asyncio.sleep(0.01)
        return reader.taken, (await output.get())[1]

    assert asyncio.run(run()) == ([], progress(2))


@pytest.mark.usefixtures("without_pauses")
def test_what_a_reader_refuses_is_the_tasks() -> None:
    async def run() -> tuple[list[int], Progress]:
        output = await begun(OutputSenders())
        output.taker = reader = Reader(most=2)
        task = asyncio.create_task(output.get())
        for tokens in (2, 3):
            await asyncio.sleep(0.01)
            output.put(0, progress(tokens))
        return reader.taken, (await task)[1]

    assert asyncio.run(run()) == ([2], progress(3))


def test_an_error_of_a_reader_is_raised_in_the_task() -> None:
    def fail(number: int, found: Progress) -> bool:
        raise ZeroDivisionError("made up")

    async def run() -> None:
        output = await begun(OutputSenders())
        output.taker = fail
        output.put(0, progress(2))
        await output.get()

    # Not the error itself: a ValueError of a writer would look like one of the client's.
    with pytest.raises(DeliveryError) as raised:
        asyncio.run(run())
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_only_the_newest_progress_waits_for_a_loop_that_is_late() -> None:
    async def run() -> list[tuple[int, Progress]]:
        output = OutputSenders().new_queue()
        for tokens in range(1, 101):
            for number in (1, 0):
                output.put(number, progress(tokens))
        assert output.arrived == {1: progress(100), 0: progress(100)}
        assert list(output._sender.ready) == [output]
        return [await output.get() for _ in range(2)]

    assert asyncio.run(run()) == [(1, progress(100)), (0, progress(100))]


def test_a_request_that_begins_after_others_have_ended_is_urgent_once() -> None:
    async def run() -> set[int]:
        output = OutputSenders().new_queue()
        for number in range(3):
            output.put(number, progress(1))
            output.put(number, progress(2, finished=True))
            await output.get()
        return output.begun

    assert asyncio.run(run()) == {0, 1, 2}


def test_nothing_is_kept_for_a_loop_that_is_closed() -> None:
    async def run() -> OutputQueue:
        return await begun(OutputSenders())

    output = asyncio.run(run())
    for tokens in range(2, 50):
        output.put(0, progress(tokens, finished=tokens == 49))
    assert not output._sender.ready and not output.arrived


def test_a_wake_up_whose_progress_was_delivered_meanwhile_loses_no_other() -> None:
    """The loop may deliver for another reason after a thread has read the flags and before it sets
    one."""

    async def run() -> Progress:
        output = await begun(OutputSenders())
        sender = output._sender
        sender._wakes_later = True
        sender._deliver_later()
        await asyncio.sleep(0.05)
        output.put(0, progress(2))
        return (await asyncio.wait_for(output.get(), 5))[1]

    assert asyncio.run(run()) == progress(2)


def test_a_delivery_of_nothing_does_not_end_a_pause() -> None:
    async def run() -> None:
        sender = (await begun(OutputSenders()))._sender
        sender._pause(time.monotonic() - FAR)
        paused_until = sender._resume_at
        sender._deliver()
        await asyncio.sleep(0)
        assert sender._resume_at >= paused_until

    asyncio.run(run())
