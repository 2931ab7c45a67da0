"""What all handlers share: the engine, and how its failures become answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final, TypeVar

from moesaic.config import ServerArgs
from moesaic.core.request import Request
from moesaic.core.sampling import BadParameter
from moesaic.engine.engine import Engine, QueueFull
from moesaic.engine.frontend.inputs import PromptTooLong
from moesaic.engine.frontend.queries import QueryTimeout
from moesaic.server.admission import Admission, Full
from moesaic.server.auth import Keys
from moesaic.server.errors import INTERNAL, Refusal
from moesaic.server.live_stats import LiveStats

logger = logging.getLogger(__name__)

STOPPING: Final = "the server is stopping"
# Another server may answer at once, or this one when it has started again.
LEAVING: Final = {"Connection": "close", "Retry-After": "1"}

Result = TypeVar("Result")


class Context:
    """`is_stopping`: whether the server is shutting down, which explains failed requests."""

    def __init__(self, engine: Engine, is_stopping: Callable[[], bool], keys: Keys) -> None:
        self.engine, self._is_stopping = engine, is_stopping
        self.keys = keys
        self.admission = Admission(engine.max_running, engine.args.max_queued_requests)
        self.figures = LiveStats(engine, lambda: self.admission.waiting)
        self._parts: dict[Any, Any] = {}

    @property
    def args(self) -> ServerArgs:
        return self.engine.args

    @property
    def trouble(self) -> str:
        """Why nobody is served any more, or nothing."""
        return self.engine.fault or (STOPPING if self._is_stopping() else "")

    def part(self, kind: Callable[[Context], Result]) -> Result:
        """What a set of routes needs and is made once a server."""
        if kind not in self._parts:
            self._parts[kind] = kind(self)
        made: Result = self._parts[kind]
        return made

    async def ask(self, question: Callable[[], Result]) -> Result:
        """The engine answers between two steps: not in the event loop's time."""
        try:
            return await asyncio.to_thread(question)
        except RuntimeError as error:
            raise self.refusal(error) from error

    def refusal(self, error: Exception) -> Refusal:
        """What to tell a client of an error that the engine raised."""
        match error:
            case Refusal():
                return error
            case QueueFull():
                seconds = error.retry_after if isinstance(error, Full) else 1
                headers = {"Retry-After": str(seconds)}
                return Refusal(429, str(error), code="queue_full", headers=headers)
            case QueryTimeout():
                return Refusal(503, self.trouble or str(error), headers=LEAVING)
            case PromptTooLong():
                return Refusal(400, str(error), code="context_length_exceeded")
            case BadParameter():
                return Refusal(400, str(error), error.name)
            # A number such as 10**400 is valid JSON, and no float.
            case ValueError() | OverflowError():
                return Refusal(400, str(error))
        if self.trouble:
            return Refusal(503, self.trouble, headers=LEAVING)
        logger.error("the engine failed", exc_info=error)
        return Refusal(500, INTERNAL)

    def failed(self, request: Request) -> Refusal:
        """What to tell of a request that failed, which says why itself."""
        if self.trouble:
            return Refusal(503, self.trouble, headers=LEAVING)
        return Refusal(500, request.failure)
