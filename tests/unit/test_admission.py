"""The admission queue: clients in turn, room for newcomers, no slot lost by cancellation."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from moesaic.server.admission import AdmissionQueue, AdmissionQueueFull, QueuedCall


class Call:
    """A call whose requests end when the test says so."""

    def __init__(self, admission: AdmissionQueue, client: str, number: int = 1) -> None:
        self.queued = admission.new_call(client)
        self.number, self.started = number, 0
        self.task = asyncio.create_task(self.queued.enter(number, self.start))

    def start(self, number: int) -> int:
        started = min(number, self.number - self.started)
        self.started += started
        return started

    @property
    def error(self) -> BaseException | None:
        return self.task.exception() if self.task.done() else None


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_clients_take_turns() -> None:
    async def main() -> None:
        admission = AdmissionQueue(max_running=1)
        assert admission.slots == 2
        order: list[str] = []
        many = [Call(admission, "many") for _ in range(10)]
        await settle()
        one = Call(admission, "one")
        three = [Call(admission, "three") for _ in range(3)]
        await settle()
        everyone = [*many, one, *three]
        names = {call: call.queued.client for call in everyone}
        assert (admission.running, admission.waiting) == (2, 12)
        running = [call for call in everyone if call.started]
        while running:
            running.pop(0).queued.finished(1)
            await settle()
            new = [call for call in everyone if call.started and call not in running]
            for call in new:
                if names[call] != "seen":
                    order.append(str(names[call]))
                    names[call] = "seen"
                    running.append(call)
        # The first two start at once; then each client has every third turn.
        assert Counter(order[:2]) == {"many": 2}
        assert order.index("one") <= 4 and len(order) == 14
        assert Counter(order[2:8])["three"] == 2
        assert admission.admitted_total == 14
        assert (admission.running, admission.waiting) == (0, 0)

    asyncio.run(main())


def test_a_long_list_takes_turns_with_single_requests() -> None:
    async def main() -> None:
        admission = AdmissionQueue(max_running=2)
        long = Call(admission, "long", 1000)
        await settle()
        assert (long.started, admission.running, admission.waiting) == (3, 3, 997)
        single = Call(admission, "single")
        await settle()
        long.queued.finished(2)
        assert single.started == 1 and long.started == 4
        long.queued.leave()
        assert (admission.running, admission.waiting) == (1, 0)

    asyncio.run(main())


def test_a_newcomer_takes_the_place_of_who_has_most() -> None:
    async def main() -> None:
        admission = AdmissionQueue(max_running=1, max_queued=4)
        many = [Call(admission, "many") for _ in range(5)]
        await settle()
        assert (admission.running, admission.waiting) == (2, 3)
        more = Call(admission, "many")
        await settle()
        assert isinstance(more.error, AdmissionQueueFull) and more.error.retry_after == 1
        newcomer = Call(admission, "newcomer")
        await settle()
        assert newcomer.error is None and not newcomer.task.done()
        assert [type(call.error) for call in many] == [type(None)] * 4 + [AdmissionQueueFull]
        assert (admission.waiting, admission.refused_total) == (3, 2)
        too_many = Call(admission, "newcomer", 6)
        await settle()
        assert isinstance(too_many.error, ValueError)

    asyncio.run(main())


def test_one_long_call_does_not_shut_others_out() -> None:
    async def main() -> None:
        admission = AdmissionQueue(max_running=1, max_queued=100)
        long = Call(admission, "long", 101)
        await settle()
        assert (long.started, admission.waiting) == (2, 99)
        newcomer, again = Call(admission, "newcomer"), Call(admission, "newcomer")
        await settle()
        assert newcomer.error is None and isinstance(again.error, AdmissionQueueFull)
        long.queued.finished(1)
        long.queued.finished(1)
        assert newcomer.started == 1

    asyncio.run(main())


def test_what_ends_before_it_began_leaves_the_line() -> None:
    async def main() -> None:
        admission = AdmissionQueue(max_running=1)
        running, waiting = Call(admission, "a", 2), Call(admission, "b", 2)
        await settle()
        waiting.queued.finished(2)  # aborted by its id
        await settle()
        assert waiting.task.done() and waiting.error is None and waiting.started == 0
        assert (admission.running, admission.waiting) == (2, 0)
        running.queued.leave()
        assert admission.running == 0

    asyncio.run(main())


def test_the_time_to_come_back_follows_the_rate() -> None:
    admission = AdmissionQueue(max_running=1)
    assert admission.retry_after() == 1
    admission.running = 50
    for _ in range(50):
        admission.free(1)
    admission.waiting = 10**6
    assert admission.retry_after() == 60
    admission.waiting = 0
    assert admission.retry_after() == 1


async def _live(admission: AdmissionQueue, rng: random.Random, served: list[int]) -> None:
    """Makes a call like the engine; cancels it anywhere, or ends it piece by piece."""
    queued: QueuedCall = admission.new_call(rng.randrange(8))
    number = rng.choice((1, 1, 1, 2, 5, 40))
    left = [number]

    def start(wanted: int) -> int:
        started = min(wanted, left[0])
        left[0] -= started
        served[0] += started
        return started

    try:
        await queued.enter(number, start)
        while queued.held or queued.wanted:
            await asyncio.sleep(rng.choice((0, 0, 0.0005)))
            queued.finished(rng.randint(1, 3))
    finally:
        queued.leave()


@pytest.mark.parametrize("seed", range(4))
def test_no_slot_is_lost_whatever_is_cancelled(seed: int) -> None:
    """Makes thousands of calls and cancels most of them at some await."""

    async def main() -> None:
        rng = random.Random(seed)
        admission = AdmissionQueue(
            max_running=rng.choice((1, 7, 64)), max_queued=rng.choice((3, 300))
        )
        served, tasks = [0], set()
        outcomes: Counter[str] = Counter()
        for _ in range(1500):
            tasks.add(asyncio.create_task(_live(admission, rng, served)))
            for _ in range(rng.choice((0, 0, 1, 3))):
                await asyncio.sleep(0)
            assert 0 <= admission.running <= admission.slots
            assert admission.waiting >= 0
            for task in [task for task in tasks if rng.random() < 0.03]:
                task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            outcomes[type(outcome).__name__] += 1
        assert (admission.running, admission.waiting) == (0, 0)
        assert admission._lines == {} and len(admission._turns) < 100
        assert outcomes.keys() <= {"NoneType", "CancelledError", "AdmissionQueueFull", "ValueError"}
        assert outcomes["CancelledError"] > 100 and outcomes["NoneType"] > 10
        assert admission.admitted_total == served[0] > 100

    asyncio.run(main())


def test_a_refusal_counts_what_runs_and_what_waits() -> None:
    """There are more slots than requests that can run."""

    async def main() -> None:
        admission = AdmissionQueue(max_running=4, max_queued=2)
        calls = [Call(admission, "a") for _ in range(7)]
        await settle()
        assert admission.running == admission.slots == 5 and admission.waiting == 1
        assert str(calls[-1].error).startswith("4 requests are running and 2 are waiting, ")

    asyncio.run(main())


def test_calls_count_as_arriving_until_they_enter_or_leave() -> None:
    async def main() -> None:
        admission = AdmissionQueue(max_running=1)
        call, other = Call(admission, "a"), admission.new_call("b")
        assert admission.arriving == 2
        await settle()
        assert (admission.arriving, admission.running) == (1, 1)
        for queued in (other, other, call.queued):
            queued.leave()
            assert admission.arriving == 0
        assert admission.running == 0

    asyncio.run(main())


def test_requests_that_wait_for_another_instance_take_no_slots() -> None:
    async def main() -> None:
        admission = AdmissionQueue(max_running=1, max_queued=2)
        started: list[int] = []

        def start(number: int) -> int:
            started.append(number)
            return number

        calls = [admission.new_meeting() for _ in range(3)]
        assert admission.arriving == 3
        await calls[0].enter(2, start)
        await calls[1].enter(1, lambda number: 0)  # its client has left
        assert (admission.meeting, admission.running, admission.admitted_total) == (2, 0, 2)
        await calls[1].enter(1, start)
        with pytest.raises(AdmissionQueueFull, match="0 requests are running and 3 are waiting"):
            await calls[2].enter(1, start)
        assert started == [2, 1] and admission.refused_total == 1
        calls[0].finished(1)
        other = Call(admission, "no room")
        await settle()
        assert other.started == 1
        for call in calls:
            call.leave()
        assert (admission.meeting, admission.arriving) == (0, 0)

    asyncio.run(main())
