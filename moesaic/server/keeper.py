"""The keeper of an elastic server: a process that has the listening socket, and starts the HTTP
process again when it is lost. Connections wait in the socket's queue meanwhile.

It is the parent of HTTP processes, and inherits the supervisors that they start: both end with it.
It has loaded the code of the server, which takes seconds, and runs none of it: HTTP processes are
forks of it.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from types import FrameType
from typing import Final

import msgspec

from moesaic.comm.launch.keeper_link import KeeperLink, Note
from moesaic.comm.launch.supervisor_process import FoundSupervisor, SupervisorAddress
from moesaic.comm.supervise.child_process import die_with_parent, name_process
from moesaic.comm.supervise.event_hook import EventHooks, event_of_loss
from moesaic.comm.supervise.process_watch import describe_exit, process_state
from moesaic.comm.supervise.restarts import Restarts
from moesaic.config import ServerArgs
from moesaic.core.process import STOP_SIGNALS, handling_signals
from moesaic.core.stats import ServiceLoss, ServiceLosses

logger = logging.getLogger(__name__)

PR_SET_CHILD_SUBREAPER: Final = 36
# How often to check whether the HTTP process is stopped, which no event reports.
LOOK_SECONDS: Final = 0.1
STOPPED_SECONDS: Final = 0.5
# What supervisors may take to end in order.
END_SECONDS: Final = 10.0
READ_BYTES: Final = 1 << 16


def keep(
    serve: Callable[[KeeperLink], int], args: ServerArgs, meeting: socket.socket | None = None
) -> int:
    """Calls `serve` in a process of its own, and again in another one when that is lost; the exit
    status. Like a fork it returns in all of these processes. `meeting`: where nodes reach this one
    while it leads, if another one may."""
    keeper = Keeper(args.restart_limit, EventHooks(asdict(args)), meeting)
    with handling_signals(keeper.on_signal):
        while (link := keeper.next_life()) is None:
            keeper.watch()
            if keeper.status is not None:
                keeper.end_supervisors()
                return keeper.status
    return serve(link)


class Keeper:
    def __init__(
        self, restart_limit: int, hooks: EventHooks, meeting: socket.socket | None = None
    ) -> None:
        self._hooks, self._meeting = hooks, meeting
        self._leads, self._yields = meeting is None, False
        name_process("moesaic-keeper")
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self.status: int | None = None
        """The exit status, once the server has ended."""
        self._restarts, self._limit = Restarts(), restart_limit
        self._losses = ServiceLosses()
        self._lost = time.monotonic()
        self._supervisor: SupervisorAddress | None = None
        self._starting = 0
        self._child = self._pipe = -1
        self._unread = b""
        """The begin of a note whose end has yet to come."""
        self._ready: float | None = None
        """When the present HTTP process was ready."""
        self._was_ready = self._has_ended = False
        self._stopped: float | None = None
        self._signal = 0

    def on_signal(self, number: int, _: FrameType | None) -> None:
        """The HTTP process decides what a signal means."""
        self._signal = number
        if self._child > 0:
            with suppress(ProcessLookupError):
                os.kill(self._child, number)

    def next_life(self) -> KeeperLink | None:
        """Starts an HTTP process. Returns its link there, and None here."""
        keeper, (reader, writer) = os.getpid(), os.pipe()
        gc.collect()
        gc.freeze()  # a collection in the fork would copy all of these pages
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        self._child = os.fork()
        if self._child:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            os.close(writer)
            os.set_blocking(reader, False)
            self._pipe, self._ready, self._has_ended, self._stopped = reader, None, False, None
            self._unread = b""
            if self._signal:  # it came when there was no process to pass it on to
                os.kill(self._child, self._signal)
            return None
        die_with_parent()
        if os.getppid() != keeper:
            os._exit(1)
        os.setsid()  # signals of a terminal reach the keeper alone
        name_process("moesaic-http")
        os.close(reader)
        for number in STOP_SIGNALS:  # until it handles them itself
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        life = self._restarts.total
        known = self._lost, self._supervisor, self._losses
        meeting = -1 if self._meeting is None else self._meeting.fileno()
        return KeeperLink(keeper, writer, life, *known, meeting, self._leads)

    def watch(self) -> None:
        """Returns once the HTTP process has ended: it has ended the server, or is to be started
        again now."""
        code = self._await_end()
        self._read_notes()
        os.close(self._pipe)
        child, self._child = self._child, -1
        if self._yields and not self._signal:
            self._yields = False
            return
        if self._has_ended or self._signal or not self._was_ready:
            self.status = code if code >= 0 else 128 - code
            return
        why = "was stopped (state T), and is ended" if self._stopped else describe_exit(code)
        cause = f"the HTTP process {child} {why}"
        now = time.monotonic()
        lived = 0.0 if self._ready is None else now - self._ready
        pause = self._restarts.next_pause(lived, self._limit)
        if self._ready is not None:
            self._lost = now
            self._losses.add(ServiceLoss("http", cause, time.time()))
            self._hooks.tell(event_of_loss(self._losses.last[-1]))
        if pause is None:
            times = f"it was lost {self._limit} times in a row (--restart-limit)"
            logger.error("the server ends: %s; %s", cause, times)
            self.status = 1
            return
        logger.warning("%s; it starts again in %.1f s, and connections wait", cause, pause)
        self._end_half_started()
        end = time.monotonic() + pause
        while (left := end - time.monotonic()) > 0 and not self._signal:
            time.sleep(min(left, LOOK_SECONDS))
        if self._signal:
            self.status = 128 + self._signal

    def end_supervisors(self) -> None:
        """Those that HTTP processes have left; ranks end with them."""
        self._end_half_started()
        if self._supervisor is not None:
            with suppress(OSError):
                supervisor = FoundSupervisor(self._supervisor)
                supervisor.end(END_SECONDS, ask=True)
        end = time.monotonic() + END_SECONDS
        while _reap() and time.monotonic() < end:
            time.sleep(0.01)

    def _await_end(self) -> int:
        """The exit code of the HTTP process."""
        poll, pidfd = select.poll(), os.pidfd_open(self._child)
        poll.register(pidfd, select.POLLIN)
        poll.register(self._pipe, select.POLLIN)
        try:
            while True:
                ready = {number for number, _ in poll.poll(LOOK_SECONDS * 1000)}
                if pidfd in ready:
                    return os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])
                if self._pipe in ready and not self._read_notes():
                    poll.unregister(self._pipe)
                _reap(but=self._child)
                self._end_if_stopped()
        finally:
            os.close(pidfd)

    def _end_if_stopped(self) -> None:
        now = time.monotonic()
        if process_state(self._child) != "T":
            self._stopped = None
        elif self._stopped is None:
            self._stopped = now
        elif now - self._stopped > STOPPED_SECONDS:
            os.kill(self._child, signal.SIGKILL)

    def _read_notes(self) -> bool:
        """False once the other end is closed."""
        with suppress(BlockingIOError):
            while data := os.read(self._pipe, READ_BYTES):
                *lines, self._unread = (self._unread + data).split(b"\n")
                for line in lines:
                    self._note(msgspec.json.decode(line, type=Note))
            return False
        return True

    def _note(self, note: Note) -> None:
        self._starting = note.starting or self._starting
        if note.supervisor is not None:
            self._supervisor, self._starting = note.supervisor, 0
        if note.loss is not None:
            self._losses.add(note.loss)
        if note.yields:
            self._leads, self._yields = False, True
        if note.leads:
            self._leads, self._lost = True, time.monotonic()
        self._has_ended = self._has_ended or note.ended
        if note.stands_by and self._ready is None:
            self._ready, self._was_ready = time.monotonic(), True
        if note.ready:
            self._ready = time.monotonic()
            if self._was_ready:
                self._note_return(note.requests)
            self._was_ready = True

    def _note_return(self, requests: int) -> None:
        assert self._ready is not None
        seconds = self._ready - self._lost
        for process, text in (
            ("http", "the HTTP process is back"),
            ("node", "this node serves in the place of another"),
        ):
            returned = self._losses.note_return(process, requests, seconds)
            for loss in returned:
                self._hooks.tell(event_of_loss(loss))
            if returned:
                logger.info("%s after %.2f s; %d requests have gone on", text, seconds, requests)

    def _end_half_started(self) -> None:
        """A supervisor whose client was lost before it could say where it is."""
        if self._starting:
            with suppress(ProcessLookupError):
                os.kill(self._starting, signal.SIGKILL)
            self._starting = 0


def _reap(but: int = 0) -> bool:
    """Takes note of processes that were left to this one and have ended; whether any are left."""
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        if found is None or found.si_pid == but:
            return True
        os.waitpid(found.si_pid, 0)
