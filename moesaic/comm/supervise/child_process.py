"""Sets which processes this one does not outlive, and its name."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from typing import Final

PR_SET_PDEATHSIG: Final = 1
PR_SET_NAME: Final = 15
NAME_BYTES: Final = 15


def die_with_parent() -> None:
    """The kernel kills this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def name_process(name: str) -> None:
    """Sets the name that ps and top show in their column COMMAND."""
    assert len(name) <= NAME_BYTES, name
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())


def die_with_fork_server() -> None:
    """Ends a child of the fork server with the server and with the process that asked for it."""
    die_with_parent()
    # Covers a parent that ended before the call above, and systems without that call.
    threading.Thread(target=_exit_after_parent, daemon=True, name="parent").start()


def _exit_after_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
