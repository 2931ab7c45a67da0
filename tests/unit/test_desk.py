"""The desk: names are a request's own until it is over, and another's from then on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from moesaic.core.request import Request
from moesaic.core.sampling import SamplingParams
from moesaic.engine.desk import Desk
from moesaic.engine.jobs import Job
from moesaic.observe.spans import Spans


def test_who_leaves_takes_no_one_elses_place() -> None:
    told: list[Callable[[Any], None]] = []
    desk = Desk(told.append, threading.RLock(), 4, None, Spans())

    def job(number: int) -> Job:
        request = Request("same", [1], SamplingParams(), 0, 3, number)
        return Job(request, None, lambda progress: desk.ended(progress.rid))

    first, second = job(0), job(1)
    desk.hold([first], checked=True)
    desk.abort("same")
    assert first.request.finish_reason is not None and len(desk) == 0
    desk.hold([second], checked=True)
    assert desk.begin(deque([first]), 1) == 0  # it is over, though its name is held
    desk.leave([first])
    assert len(desk) == 1 and desk._held == {"same": second}
    assert desk.begin(deque([second]), 1) == 1
