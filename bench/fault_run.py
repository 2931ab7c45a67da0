"""The processes of one run of the engine as seen from outside, and what is left of them."""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, TypeVar

from moesaic.comm.supervise.control_page import HEAD_BYTES, STATUS_BYTES, ControlPage

MARK: Final = "MOESAIC_FAULT_MARK"
# Only ends what hangs: two cores may be shared with much else.
PATIENCE: Final = 120.0
LOOK: Final = 0.002
SOCKETS_CLOSE: Final = 5.0
Found = TypeVar("Found")


class Run:
    """All that a marked process starts inherits the mark, by which it is found, also when its
    parent is gone. `log`: where the supervisor and the ranks write."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        descriptor, name = tempfile.mkstemp(prefix="moesaic-fault-", suffix=".log")
        os.close(descriptor)
        self.log = Path(name)
        self._folder = ""
        self._memory: set[Path] = set()
        self._descriptors = _descriptors()

    @contextmanager
    def marked(self, **environment: str) -> Iterator[None]:
        """What this process starts meanwhile belongs to the run."""
        wanted = {MARK: self.mark, **environment}
        before = {name: os.environ.get(name) for name in wanted}
        error = os.dup(2)
        try:
            os.environ.update(wanted)
            with self.log.open("ab") as log:
                os.dup2(log.fileno(), 2)
            yield
        finally:
            os.dup2(error, 2)
            os.close(error)
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    @property
    def environment(self) -> dict[str, str]:
        """For a process of the run that is started by other means."""
        return {**os.environ, MARK: self.mark}

    def pids(self) -> list[int]:
        """Of all processes of the run that live."""
        mark = f"{MARK}={self.mark}".encode()
        found = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        return [pid for pid in found if mark in _read(pid, "environ").split(b"\0")]

    def find(self, name: str) -> int | None:
        """http (of an elastic server), supervisor, fork server, rank0, rank1, …, once it can be
        told from the others."""
        pids = self.pids()
        if name == "http":
            return next((pid for pid in pids if _name(pid) == "moesaic-http"), None)
        heads = [pid for pid in pids if b"moesaic.comm.supervise.main" in _read(pid, "cmdline")]
        if not heads or name == "supervisor":
            return heads[0] if heads else None
        servers = [pid for pid in pids if _parent(pid) == heads[0] and _is_fork_server(pid)]
        if not servers or name == "fork server":
            return servers[0] if servers else None
        names = {pid: _name(pid) for pid in pids if _parent(pid) == servers[0]}
        return next((pid for pid, told in names.items() if told == name), None)

    def node(self, number: int) -> tuple[int | None, int | None]:
        """The supervisor and the fork server of one of several nodes."""
        pids, mark = self.pids(), f"--node-rank\0{number}\0".encode()
        for pid in pids:
            if b"moesaic.comm.supervise.main" in _read(pid, "cmdline"):
                # The supervisor of node 0 may have had several parents.
                parent = _read(_parent(pid), "cmdline")
                if mark in parent or (number == 0 and b"--node-rank" not in parent):
                    servers = [one for one in pids if _parent(one) == pid and _is_fork_server(one)]
                    return pid, next(iter(servers), None)
        return None, None

    def pid(self, name: str) -> int:
        return wait_for(lambda: self.find(name), f"a process {name}", self)

    def step(self, rank: int = 0) -> int:
        """The number of the step that a rank is in, from the control page."""
        supervisor = self.find("supervisor")
        for link in Path(f"/proc/{supervisor}/fd").iterdir():
            if "moesaic-control" in os.readlink(link):
                seats = (link.stat().st_size - HEAD_BYTES) // STATUS_BYTES
                return ControlPage.open(str(link), seats).snapshot(rank).step
        return 0

    def learn(self) -> None:
        """What the processes have, while they live: a folder of sockets, files of memory."""
        self._memory = {path for pid in self.pids() for path in _shared_memory(pid)}
        paths = Path("/proc/net/unix").read_text().split()
        supervisor = self.find("supervisor")
        for path in paths:
            folder = Path(path).parent
            if path.startswith("/") and folder.name.startswith(f"{supervisor}-"):
                self._folder = str(folder)

    def await_gone(self) -> None:
        wait_for(lambda: not self.pids(), "the end of all processes", self)
        # The kernel frees a process's environment, by which it is found, before its sockets.
        deadline = time.monotonic() + SOCKETS_CLOSE
        while self._sockets() and time.monotonic() < deadline:
            time.sleep(LOOK)

    def _sockets(self) -> list[str]:
        """The Unix sockets of the run that are still open, in words."""
        listed = self._folder and self._folder in Path("/proc/net/unix").read_text()
        return ["Unix sockets"] if listed else []

    def left(self) -> list[str]:
        """What should be gone by now and is not, in words."""
        found = [f"process {pid} ({_name(pid)})" for pid in self.pids()]
        found += [self._folder] if self._folder and Path(self._folder).exists() else []
        found += self._sockets()
        found += [str(path) for path in self._memory if path.exists()]
        extra = _descriptors() - self._descriptors
        return found + ([f"descriptors {sorted(extra)}"] if extra else [])

    def close(self) -> None:
        """Whatever went wrong before, nothing stays."""
        for pid in self.pids():
            os.kill(pid, 9)
        self.log.unlink(missing_ok=True)


def wait_for(look: Callable[[], Found | None], what: str, run: Run) -> Found:
    deadline = time.monotonic() + PATIENCE
    while not (found := look()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} in {PATIENCE:.0f} s; the log:\n{run.log.read_text()}")
        time.sleep(LOOK)
    return found


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _name(pid: int) -> str:
    return _read(pid, "comm").decode().strip()


def _parent(pid: int) -> int:
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return int(fields[1]) if fields else 0


def _is_fork_server(pid: int) -> bool:
    return b"multiprocessing.forkserver" in _read(pid, "cmdline")


def _descriptors() -> set[str]:
    """What this process has open, by kind; files of its own, such as logs, aside."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            target = os.readlink(link)
            if not target.startswith("/") or "memfd" in target:
                found.add(target)
    return found


def _shared_memory(pid: int) -> list[Path]:
    """The files in /dev/shm that a process maps."""
    lines = _read(pid, "maps").splitlines()
    mapped = {int(line.split()[4]) for line in lines if b"/dev/shm/" in line}
    # By number: what is mapped may have had another name when it was made.
    return [Path(e.path) for e in os.scandir("/dev/shm") if mapped and e.inode() in mapped]
