"""The process of a supervisor, as its client has it: started by it, or by a client before it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from moesaic.comm.supervise.main import LENGTH_BYTES
from moesaic.comm.supervise.process_watch import started_at
from moesaic.comm.supervise.service_spec import ServiceSpec
from moesaic.core.process import NODE_SECRET, child_environment

# How long the last message of a supervisor that has ended may take to be read.
LAST_MESSAGE_MS: Final = 2000
# The same where its exit code is not known: it may have been killed, without a last message.
LIKELY_MESSAGE_MS: Final = 200


@dataclass(frozen=True, slots=True)
class SupervisorAddress:
    """Where a supervisor is reached, by a process of the same user that knows its route."""

    pid: int
    route: str
    folder: str
    started: str
    """When, as the kernel tells it: another process may have the number later."""


class SupervisorProcess(Protocol):
    pid: int
    end_fd: int
    """Readable once the process has ended."""

    def address(self, timeout: float) -> SupervisorAddress:
        """Once it has started; RuntimeError if it does not."""

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""

    def end(self, seconds: float, ask: bool) -> None:
        """Returns once it has ended, of itself or after so many seconds. `ask`: it has not been
        told to."""

    def kill(self) -> None: ...

    def describe_end(self) -> tuple[str, int]:
        """How it ended, and milliseconds in which its last message may still arrive."""

    def close(self) -> None: ...


class StartedSupervisor:
    def __init__(self, spec: ServiceSpec, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moesaic.comm.supervise.main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**child_environment(NODE_SECRET), **environment},
            start_new_session=True,
            pass_fds=() if spec.listening < 0 else (spec.listening,),
            bufsize=0,
        )
        self.pid = self._process.pid
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self.end_fd = self._stdout.fileno()
        data = msgspec.msgpack.encode(spec)
        with suppress(BrokenPipeError):
            self._stdin.write(len(data).to_bytes(LENGTH_BYTES, "little") + data)

    def address(self, timeout: float) -> SupervisorAddress:
        ready, _, _ = select.select([self.end_fd], [], [], timeout)
        line = self._stdout.readline().decode().strip() if ready else "error is silent"
        kind, _, text = line.partition(" ")
        if kind != "ok":
            raise RuntimeError(f"the supervisor did not start: {text or 'its log tells why'}")
        route, _, folder = text.partition(" ")
        return SupervisorAddress(self.pid, route, folder, started_at(self.pid))

    def poll(self) -> int | None:
        return self._process.poll()

    def end(self, seconds: float, ask: bool) -> None:
        if ask:
            self._process.terminate()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()

    def kill(self) -> None:
        self._process.kill()

    def describe_end(self) -> tuple[str, int]:
        code = self._process.wait()
        text = "" if code == 0 else f"the supervisor died (exit code {code})"
        return text, LAST_MESSAGE_MS if code >= 0 else 0

    def close(self) -> None:
        self._stdin.close()
        self._stdout.close()


class FoundSupervisor:
    """One that a former client has started: only that it ends can be seen."""

    def __init__(self, address: SupervisorAddress) -> None:
        """ProcessLookupError if it is not there any more."""
        self._address, self.pid = address, address.pid
        self.end_fd = os.pidfd_open(address.pid)
        if started_at(address.pid) != address.started:
            os.close(self.end_fd)
            raise ProcessLookupError(f"process {address.pid} is another one by now")

    def address(self, timeout: float) -> SupervisorAddress:
        return self._address

    def poll(self) -> int | None:
        return -1 if self._has_ended(0.0) else None

    def end(self, seconds: float, ask: bool) -> None:
        if ask:
            self._send(signal.SIGTERM)
        if not self._has_ended(seconds):
            self.kill()
            self._has_ended(seconds)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def describe_end(self) -> tuple[str, int]:
        return "the supervisor died", LIKELY_MESSAGE_MS

    def close(self) -> None:
        os.close(self.end_fd)

    def _send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.end_fd, number)

    def _has_ended(self, seconds: float) -> bool:
        return bool(select.select([self.end_fd], [], [], seconds)[0])
