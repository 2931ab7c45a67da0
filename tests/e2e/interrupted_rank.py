"""The engine's own ranks, which raise between two changes that belong together.

A real-time signal chooses where, once each: the error comes behind the named call, so that what it
did is done, and what was to follow is not.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from moesaic.comm.launch.rank_link import RankLink
from moesaic.core.messages import StepOutput
from moesaic.engine.schedule.kv_manager import KVManager
from moesaic.engine.schedule.request_state import RequestState
from moesaic.engine.worker.draft_planner import DraftPlanner
from moesaic.engine.worker.leader import ReportedRequest
from moesaic.engine.worker.planner import Planner

TARGET: Final = "tests.e2e.interrupted_rank:run"
ERROR: Final = "between two changes"
POINTS: Final[dict[str, tuple[type, str]]] = {
    "sent, not cleared": (RankLink, "send"),
    "counted, not in flight": (DraftPlanner, "begin"),
    "pages taken, not planned": (KVManager, "grow"),
    "accepted, not reported": (RequestState, "accept"),
    "reported, not finished": (ReportedRequest, "accept_one"),
    "added, not acknowledged": (Planner, "add"),
}


def number_of(point: str) -> int:
    return signal.SIGRTMIN + 2 + list(POINTS).index(point)


def run(link: RankLink) -> None:
    from moesaic.engine.worker import worker

    for point, (owner, name) in POINTS.items():
        signal.signal(number_of(point), _armed(owner, name))
    worker.run(link)


def _armed(owner: type, name: str) -> Callable[[int, FrameType | None], None]:
    def arm(number: int, frame: FrameType | None) -> None:
        real = getattr(owner, name)

        def interrupted(*args: Any, **options: Any) -> Any:
            found = real(*args, **options)
            if name == "send" and not isinstance(args[1], StepOutput):
                return found
            setattr(owner, name, real)
            raise ValueError(ERROR)

        setattr(owner, name, interrupted)

    return arm
