"""Tells an operator's command or URL what happens to an elastic service.

Each event gets a process of its own, `python -m moesaic.comm.supervise.event_hook`, which has the
event on its standard input and ends whatever takes too long: nobody waits for it.
"""

from __future__ import annotations

import http.client
import logging
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from moesaic.core.process import child_environment
from moesaic.core.stats import MembershipChange, ServiceLoss

logger = logging.getLogger(__name__)

# What one event may take, and how many may be on their way at once: further ones are dropped.
HOOK_SECONDS: Final = 10.0
MOST_AT_ONCE: Final = 8
BEGUN, DONE = "begun", "done"


class ServiceEvent(msgspec.Struct):
    """A loss, a return or a removal: told when it is noticed, and again when it is dealt with."""

    process: str
    """rank, http, supervisor or node."""
    event: str
    """lost, returned or removed."""
    state: str
    """begun, or done once requests go on."""
    cause: str
    when: float
    """Seconds since the epoch of the clock."""
    seconds: float | None = None
    """From `when` until it was done."""
    ranks: list[int] = []
    live: list[int] | None = None
    """The ranks that live from then on."""
    requests: int = 0
    """Those that moved, or went on."""
    experts: int = 0
    nbytes: int = 0
    """Bytes of experts that live ranks read again."""


def event_of_loss(loss: ServiceLoss) -> ServiceEvent:
    state = BEGUN if loss.seconds is None else DONE
    event = ServiceEvent(loss.process, "lost", state, loss.cause, loss.when, loss.seconds)
    event.requests = loss.requests
    return event


def _event_of_change(change: MembershipChange, state: str) -> ServiceEvent:
    seconds = change.seconds if state == DONE else None
    event = ServiceEvent("rank", change.kind, state, change.cause, change.when, seconds)
    event.ranks, event.live, event.requests = change.ranks, change.live, change.moved_requests
    event.experts, event.nbytes = change.experts, change.nbytes
    return event


class EventHooks:
    """`flags`: those of the server, of which --elastic-event-command and -url are used."""

    def __init__(self, flags: Mapping[str, Any]) -> None:
        kinds = ("command", "url")
        given = [(kind, flags.get(f"elastic_event_{kind}")) for kind in kinds]
        self._hooks = [(kind, value) for kind, value in given if value]
        self._running: list[subprocess.Popen[bytes]] = []
        self._told: dict[tuple[int, str, float], str] = {}
        """The state in which changes of membership were told last."""

    def tell(self, event: ServiceEvent) -> None:
        for kind, value in self._hooks:
            self._running = [one for one in self._running if one.poll() is None]
            if len(self._running) >= MOST_AT_ONCE:
                logger.warning("an event is not told, as hooks take too long: %s", event.cause)
                return
            try:
                self._start(kind, value, msgspec.json.encode(event))
            except OSError as error:
                logger.warning("an event cannot be told: %s", error)

    def tell_changes(self, changes: Sequence[MembershipChange]) -> None:
        """Tells those that are new, or done since the last call."""
        if not self._hooks:
            return
        told, self._told = self._told, {}
        for change in changes:
            key = change.epoch, change.kind, change.when
            state = BEGUN if change.seconds is None else DONE
            self._told[key] = state
            before = told.get(key)
            if before is None:
                self.tell(_event_of_change(change, BEGUN))
            if state == DONE and before != DONE:
                self.tell(_event_of_change(change, DONE))

    def _start(self, kind: str, value: str, data: bytes) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "moesaic.comm.supervise.event_hook", kind, value],
            stdin=subprocess.PIPE,
            env=child_environment(),
            start_new_session=True,
        )
        self._running.append(process)
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(data[: 1 << 15])  # a pipe has room for it, so that this never waits


def run_command(command: str, data: bytes) -> str:
    """Runs it with the event on its standard input; returns what went wrong."""
    process = subprocess.Popen(
        shlex.split(command), stdin=subprocess.PIPE, stdout=2, start_new_session=True
    )
    try:
        process.communicate(data + b"\n", timeout=HOOK_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return f"it did not end within {HOOK_SECONDS:g} s"
    return f"it ended with exit code {process.returncode}" if process.returncode else ""


def post(url: str, data: bytes) -> str:
    """Posts the event to it, follows no redirection; returns what went wrong."""
    threading.Timer(HOOK_SECONDS, _too_late, [url]).start()
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.netloc.rpartition("@")[2], timeout=HOOK_SECONDS)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    connection.request("POST", path, data, {"Content-Type": "application/json"})
    status = connection.getresponse().status
    return "" if 200 <= status < 300 else f"it answered {status}"


def _too_late(url: str) -> None:
    logger.warning("event hook %s: it did not answer within %g s", _shown(url), HOOK_SECONDS)
    logging.shutdown()
    os._exit(1)


def _shown(value: str) -> str:
    """Without what may be secret: the arguments of a command, the path of a URL."""
    parts = urlsplit(value)
    return parts.hostname or "" if parts.scheme in ("http", "https") else shlex.split(value)[0]


def main() -> None:
    kind, value = sys.argv[1:]
    logging.basicConfig(format="[%(asctime)s] [event hook] %(message)s")
    data = sys.stdin.buffer.read()
    try:
        wrong = run_command(value, data) if kind == "command" else post(value, data)
    except (OSError, http.client.HTTPException) as error:
        wrong = str(error)
    if wrong:
        logger.warning("event hook %s: %s", _shown(value), wrong)
    logging.shutdown()
    os._exit(bool(wrong))


if __name__ == "__main__":
    main()
