"""Texts in shared memory, and the queue between threads and a loop."""

from __future__ import annotations

import select
import threading

from moesaic.comm.supervise.control_page import ControlPage
from moesaic.comm.supervise.poll_loop import MOST_ITEMS, PollLoop, WakingQueue
from moesaic.comm.windows.shared_memory import decode_text, encode_text, round_up


def test_texts_in_shared_memory():
    page = memoryview(bytearray(64))
    for text in ("", "a step", "épreuve", "x" * 31):
        page[32:64] = encode_text(text, 32)
        assert decode_text(page, 32, 32) == text
    page[:32] = encode_text("y" * 99, 32)
    assert decode_text(page, 0, 32) == "y" * 31
    page[:32] = encode_text("\ud800 is no character", 32)
    assert decode_text(page, 0, 32) == "? is no character"
    # A character that does not fit as a whole is replaced.
    page[:32] = encode_text("é" * 31, 32)
    assert decode_text(page, 0, 32) == "é" * 15 + "\ufffd"


def test_a_long_reason_is_cut():
    page, _ = ControlPage.create(2)
    page.change(1, "r" * 300)
    assert page.reason == "r" * 255
    assert page.num_ranks == 2 and page.live == 1


def test_sizes_are_rounded_up():
    assert [round_up(count, 8) for count in (0, 1, 8, 9)] == [0, 8, 8, 16]


def readable(queue: WakingQueue[int]) -> bool:
    return bool(select.select([queue.wakeup_fd], [], [], 0)[0])


def test_a_queue_wakes_a_loop():
    queue: WakingQueue[int] = WakingQueue()
    loop, taken = PollLoop(), []
    loop.add(queue.wakeup_fd, lambda: taken.append(queue.drain()))
    assert not readable(queue) and queue.drain() == []
    for number in range(MOST_ITEMS + 2):
        queue.put(number)
    loop.once(1.0)
    assert taken == [list(range(MOST_ITEMS))] and readable(queue)
    loop.once(1.0)
    assert taken[1] == [MOST_ITEMS, MOST_ITEMS + 1] and not readable(queue)


def test_a_full_queue_blocks_the_sender():
    queue: WakingQueue[int] = WakingQueue(room=1)
    queue.put(1)
    sender = threading.Thread(target=queue.put, args=(2,))
    sender.start()
    sender.join(0.1)
    assert sender.is_alive()
    assert queue.drain()[0] == 1
    sender.join(10)
    assert not sender.is_alive()
