"""Starts the supervisor of an elastic service, and with it all ranks, again once it is lost."""

from __future__ import annotations

import logging
import time
from typing import Final

from moesaic.comm.launch.keeper_link import KeeperLink, Note
from moesaic.comm.launch.service import Service
from moesaic.comm.supervise.restarts import Restarts
from moesaic.core.stats import ServiceLoss

logger = logging.getLogger(__name__)

KEPT_LOSSES: Final = 64
# The longest pause of the engine's thread: it takes commands in between.
NAP_SECONDS: Final = 0.05


class SupervisorRestart:
    """While the service `is_away`, requests stay with the client, which submits them again with the
    tokens that they have. `limit`: --restart-limit."""

    def __init__(self, limit: int, keeper: KeeperLink | None = None) -> None:
        self._keeper = keeper
        self.losses: list[ServiceLoss] = [] if keeper is None else keeper.losses
        self._restarts, self._limit = Restarts(), limit
        self._since = time.monotonic()
        """When the service became ready, or was lost."""
        self._start_at: float | None = None
        self.is_away = False

    def lose(self, service: Service, cause: str, requests: int) -> str:
        """Ends what is left of a service; returns why it is not started again, if it is not."""
        service.close()
        now = time.monotonic()
        lived = 0.0 if self.is_away else now - self._since
        pause = self._restarts.next_pause(lived, self._limit)
        if pause is None:
            return f"{cause}; it was lost {self._limit} times in a row (--restart-limit)"
        if not self.is_away:
            self.is_away, self._since = True, now
            self.losses = [*self.losses, ServiceLoss("supervisor", cause, time.time(), requests)]
            self.losses = self.losses[-KEPT_LOSSES:]
        self._start_at = now + pause
        logger.warning(
            "%s; it starts again in %.1f s, all ranks too; %d requests wait", cause, pause, requests
        )
        return ""

    @property
    def is_due(self) -> bool:
        """Whether a service is to be started now. Waits for a moment if it is to be later."""
        if self._start_at is None:
            return False
        left = self._start_at - time.monotonic()
        time.sleep(min(max(0.0, left), NAP_SECONDS))
        return left <= 0

    @property
    def is_waiting(self) -> bool:
        """Whether there is no service at this moment, not even one that starts."""
        return self._start_at is not None

    def start(self, former: Service) -> Service:
        """A service like the former one, which tells when it is ready; RuntimeError if even its
        supervisor does not start."""
        self._start_at = None
        service = former.successor()
        try:
            service.open()
        except BaseException:
            service.close()
            raise
        return service

    def note_ready(self, requests: int) -> None:
        self.is_away, before, self._since = False, self._since, time.monotonic()
        loss = self.losses[-1]
        loss.requests, loss.seconds = requests, self._since - before
        if self._keeper is not None:
            self._keeper.tell(Note(loss=loss))
        logger.info(
            "the supervisor and all ranks are back after %.2f s; %d requests go on",
            loss.seconds,
            requests,
        )
