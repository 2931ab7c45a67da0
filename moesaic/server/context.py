"""What all handlers share: the engine, and how its failures become answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

from moesaic.config import ServerArgs
from moesaic.engine.asking import NoAnswer
from moesaic.engine.engine import Engine, QueueFull
from moesaic.server.errors import Refusal
from moesaic.server.figures import Figures

RETRY_AFTER: Final = {"Retry-After": "1"}

Result = TypeVar("Result")


class Context:
    """`is_stopping`: whether the server is about to end, so that a failure is nobody's fault."""

    def __init__(self, engine: Engine, is_stopping: Callable[[], bool]) -> None:
        self.engine, self._is_stopping = engine, is_stopping
        self.figures = Figures(engine)

    @property
    def args(self) -> ServerArgs:
        return self.engine.args

    @property
    def trouble(self) -> str:
        """Why nobody is served any more, or nothing."""
        return self.engine.fault or ("the server is stopping" if self._is_stopping() else "")

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
                return Refusal(429, str(error), code="queue_full", headers=RETRY_AFTER)
            case NoAnswer():
                return Refusal(503, self.trouble or str(error), headers=RETRY_AFTER)
            # A number such as 10**400 is valid JSON, and no float.
            case ValueError() | OverflowError():
                return Refusal(400, str(error))
        return Refusal(503, self.trouble) if self.trouble else Refusal(500, str(error))
