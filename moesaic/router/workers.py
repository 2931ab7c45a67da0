"""The instances behind a router: what each of them has to do, and whether it lives."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp

from moesaic.router.args import DEFAULT_BOOTSTRAP_PORT, RouterArgs
from moesaic.server.context import DRAINING

logger = logging.getLogger(__name__)


# So many checks in a row that are not answered, and what is open goes to other instances.
MOST_SILENCES: Final = 2
MOST_PORT: Final = 65535
# The --disaggregation-mode of an instance, by what it has to do.
MODES: Final = {"both": "null", "prefill": "prefill", "decode": "decode"}


@dataclass(eq=False, slots=True, weakref_slot=True)
class Worker:
    url: str
    role: str
    """prefill, decode, or both."""
    bootstrap_port: int = DEFAULT_BOOTSTRAP_PORT
    is_healthy: bool = True
    """Until it turns out not to be."""
    why: str = ""
    """Why it is not healthy."""
    requests: int = 0
    """Those that are open."""
    size: int = 0
    """Their characters, written and to be written."""
    total: int = 0
    """All requests that it got."""
    failures: int = 0
    silences: int = 0
    """Checks in a row that were not answered."""
    since: float = field(default_factory=time.monotonic)
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    """It is drained, or is not to be used any more: its open requests go to others."""

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @contextmanager
    def serving(self, size: int) -> Iterator[None]:
        """Counts a request while it is open."""
        self.requests, self.size, self.total = self.requests + 1, self.size + size, self.total + 1
        try:
            yield
        finally:
            self.requests, self.size = self.requests - 1, self.size - size

    def lose(self, why: str) -> None:
        """Nothing is sent to it until a check succeeds."""
        self.failures += not self.leaving.is_set()
        if self.is_healthy:
            logger.warning("%s instance %s is not used: %s", self.role, self.url, why)
            self.is_healthy, self.why, self.since = False, why, time.monotonic()

    def leave(self, why: str) -> None:
        if not self.leaving.is_set():
            logger.warning("the requests of %s instance %s are moved: %s", self.role, self.url, why)
            self.leaving.set()
            self.is_healthy, self.why, self.since = False, why, time.monotonic()

    def find(self) -> None:
        self.leaving.clear()
        if not self.is_healthy:
            logger.info("%s instance %s is used again", self.role, self.url)
            self.is_healthy, self.why, self.since = True, "", time.monotonic()

    def state(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "worker_type": self.role,
            "is_healthy": self.is_healthy,
            "is_drained": self.leaving.is_set(),
            "why": self.why or None,
            "open_requests": self.requests,
            "requests": self.total,
            "failures": self.failures,
        }


def workers_of(args: RouterArgs) -> list[Worker]:
    """ValueError for an address that is none."""
    if not args.pd_disaggregation:
        return [worker_of("--worker-urls", url, "both") for url in args.worker_urls]
    prefill = [worker_of("--prefill", text, "prefill") for text in args.prefill]
    return [*prefill, *(worker_of("--decode", url, "decode") for url in args.decode)]


def worker_of(name: str, text: str, role: str) -> Worker:
    """`text`: an address, and for a prefill instance perhaps its bootstrap port. ValueError with
    the `name` of the flag if it is wrong."""
    url, _, port = text.strip().partition(" ")
    if port in ("", "none"):
        return Worker(_url(name, url), role)
    if role != "prefill":
        raise ValueError(f"{name} {text}: give http://HOST:PORT")
    if (number := port_of(port)) is None:
        raise ValueError(f"{name} {text}: the bootstrap port is a number from 1 to {MOST_PORT}")
    return Worker(_url(name, url), role, number)


def port_of(text: str) -> int | None:
    """None for what is no port."""
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(MOST_PORT))
    return int(text) if is_number and 0 < int(text) <= MOST_PORT else None


def _url(name: str, url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{name} {url}: give http://HOST:PORT")
    return url.rstrip("/")


class HealthChecks:
    """Asks every instance from time to time."""

    def __init__(
        self, args: RouterArgs, workers: Sequence[Worker], session: aiohttp.ClientSession
    ) -> None:
        self._interval = args.health_check_interval_secs
        self._timeout = aiohttp.ClientTimeout(total=args.health_check_timeout_secs)
        self._workers, self._session = workers, session

    async def run(self) -> None:
        """One that does not answer delays no other."""
        open_checks: dict[Worker, asyncio.Task[None]] = {}
        while True:
            open_checks = {one: task for one, task in open_checks.items() if not task.done()}
            for worker in self._workers:
                if worker not in open_checks:
                    open_checks[worker] = asyncio.create_task(self.check(worker))
            await asyncio.sleep(self._interval)

    async def check(self, worker: Worker) -> None:
        try:
            url = f"{worker.url}/health"
            ask = self._session.get(url, timeout=self._timeout, allow_redirects=False)
            async with ask as answer:
                worker.silences, told = 0, _fields(await answer.read())
                mode = told.get("disaggregation_mode")
                if answer.status == 200 and mode not in (None, wanted := MODES[worker.role]):
                    worker.lose(f"it runs --disaggregation-mode {mode}, not {wanted}")
                elif answer.status == 200:
                    worker.find()
                elif _is_draining(told):
                    worker.leave("it takes no requests any more")
                else:
                    worker.lose(f"/health answers {answer.status}")
        except (aiohttp.ClientError, OSError) as error:
            slow = f"/health does not answer within {self._timeout.total:g} s"
            why = str(error) or type(error).__name__
            worker.lose(slow if isinstance(error, TimeoutError) else f"/health fails: {why}")
            worker.silences += 1
            if worker.silences == MOST_SILENCES:  # what is open may stay so: it or its node stopped
                worker.leave("it does not answer")


def _fields(answer: bytes) -> dict[str, Any]:
    """Those of an answer in JSON; other servers have none."""
    try:
        found = json.loads(answer)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _is_draining(told: dict[str, Any]) -> bool:
    error = told.get("error")
    return isinstance(error, dict) and error.get("code") == DRAINING
