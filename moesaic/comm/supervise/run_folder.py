"""The run folder of a supervisor: its sockets, accessible to its own user only."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from moesaic.comm.supervise.process_watch import started_at

LOCK: Final = "owner"
# A Unix socket's path has at most 107 bytes; file names in the folder need up to this many.
ROOM: Final = 60


class RunFolder:
    """Holds a lock that the kernel drops when the owner ends: the sign of an abandoned folder."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls) -> RunFolder:
        """Creates a folder, and removes those of dead supervisors of this user."""
        parent = user_folder()
        with held(parent):
            for old in parent.iterdir():
                _sweep(old)
            path = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=parent))
            lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
        return cls(path, lock)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def user_folder() -> Path:
    """The parent of this user's run folders."""
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    if not (base and os.access(base, os.W_OK) and len(base) < 107 - ROOM):
        base = tempfile.gettempdir()
    parent = Path(base) / f"moesaic-{os.getuid()}"
    if len(os.fsencode(parent)) > 107 - ROOM:
        raise RuntimeError(f"{parent} is too long for sockets: set TMPDIR to a shorter folder")
    parent.mkdir(mode=0o700, exist_ok=True)
    found = parent.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise RuntimeError(
            f"{parent} must be a folder of this user with mode 700: remove it, or set TMPDIR"
        )
    return parent


@contextmanager
def held(parent: Path) -> Iterator[None]:
    """Holds the lock of the user's folder: new files in it are not swept."""
    descriptor = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def mark_of(kind: str, pid: int, number: int) -> str:
    """The name of a marker file of a process; swept when the process is gone."""
    return f"{kind}-{pid}-{started_at(pid)}-{number}"


def _sweep(old: Path) -> None:
    """Removes a folder whose owner is gone, or the marker of a process that is gone."""
    if old.is_dir():
        if _is_free(old / LOCK):
            shutil.rmtree(old, ignore_errors=True)
    elif _is_stale(old.name):
        old.unlink(missing_ok=True)


def _is_stale(mark: str) -> bool:
    parts = mark.split("-")
    if len(parts) != 4 or not parts[1].isdigit():
        return True
    return started_at(int(parts[1])) != parts[2]


def _is_free(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
