"""What all handlers share: the engine, its statistics, and how its failures become responses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final, TypeVar

from moesaic.config import ServerArgs
from moesaic.core.foreign_fields import BadParameter, Unsupported
from moesaic.core.request import Request
from moesaic.engine.engine import Engine, QueueFull
from moesaic.engine.errors import IdInUse
from moesaic.engine.frontend.engine_limits import PromptTooLong
from moesaic.engine.frontend.expert_records import RecordNotWritten
from moesaic.engine.frontend.profiler import ProfileRunning
from moesaic.engine.frontend.queries import QueryTimeout
from moesaic.server.admission import AdmissionQueue, AdmissionQueueFull
from moesaic.server.auth import Keys
from moesaic.server.errors import INTERNAL, Refusal
from moesaic.server.live_stats import LiveStats

logger = logging.getLogger(__name__)

STOPPING: Final = "the server is stopping"
DRAINED: Final = 'the server is drained: POST /drain with {"drain": false} ends it'
# The code of /health then: its open requests may be moved to other servers.
DRAINING: Final = "draining"
# The code of a request whose id another one has, which may be about to end.
ID_IN_USE: Final = "rid_in_use"
# Another server, or this one after a restart, can answer at once.
CLOSE_AND_RETRY: Final = {"Connection": "close", "Retry-After": "1"}

Result = TypeVar("Result")


class Context:
    def __init__(self, engine: Engine, is_stopping: Callable[[], bool], keys: Keys) -> None:
        self.engine, self._is_stopping = engine, is_stopping
        self.keys = keys
        self.is_drained = False
        """Open requests go on, new ones are refused."""
        self.admission = AdmissionQueue(engine.max_running, engine.args.max_queued_requests)
        self.stats = LiveStats(engine, lambda: self.admission.waiting)
        self._shared: dict[Any, Any] = {}

    @property
    def args(self) -> ServerArgs:
        return self.engine.args

    @property
    def unavailable_reason(self) -> str:
        """Why the server accepts no requests; empty if it does."""
        if self.engine.fault or self._is_stopping():
            return self.engine.fault or STOPPING
        return DRAINED if self.is_drained else ""

    def shared(self, make: Callable[[Context], Result]) -> Result:
        """The server's one instance of `make`, created at its first use."""
        if make not in self._shared:
            self._shared[make] = make(self)
        made: Result = self._shared[make]
        return made

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """Runs blocking work, such as queries. Errors of the engine become Refusals."""
        try:
            return await asyncio.to_thread(work)
        except (ValueError, RuntimeError) as error:
            raise self.refusal(error) from error

    def refusal(self, error: Exception) -> Refusal:
        """The response to an error that the engine raised."""
        match error:
            case Refusal():
                return error
            case QueueFull():
                seconds = error.retry_after if isinstance(error, AdmissionQueueFull) else 1
                headers = {"Retry-After": str(seconds)}
                return Refusal(429, str(error), code="queue_full", headers=headers)
            case QueryTimeout():
                reason = self.unavailable_reason or str(error)
                return Refusal(503, reason, headers=CLOSE_AND_RETRY)
            case ProfileRunning():
                return Refusal(409, str(error))
            case RecordNotWritten():
                return Refusal(500, str(error))
            case IdInUse():
                return Refusal(400, str(error), code=ID_IN_USE)
            case PromptTooLong():
                return Refusal(400, str(error), code="context_length_exceeded")
            case Unsupported():
                return Refusal(400, str(error), error.name, "unsupported_parameter")
            case BadParameter():
                return Refusal(400, str(error), error.name)
            # JSON allows numbers that no float can hold, such as 10**400.
            case ValueError() | OverflowError():
                return Refusal(400, str(error))
        if reason := self.unavailable_reason:
            return Refusal(503, reason, headers=CLOSE_AND_RETRY)
        logger.error("the engine failed", exc_info=error)
        return Refusal(500, INTERNAL)

    def failure_of(self, request: Request) -> Refusal:
        if reason := self.unavailable_reason:
            return Refusal(503, reason, headers=CLOSE_AND_RETRY)
        return Refusal(500, request.failure)
