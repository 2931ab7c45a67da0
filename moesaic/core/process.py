"""Settings of a process: its allocator, its signals, and the environment of its children."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Final

API_KEY: Final = "MOESAIC_API_KEY"
ADMIN_API_KEY: Final = "MOESAIC_ADMIN_API_KEY"
NODE_SECRET: Final = "MOESAIC_SECRET"
SECRETS: Final = frozenset((API_KEY, ADMIN_API_KEY, NODE_SECRET))
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 1 << 30
STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
LARGEST_BLOCK = 32 << 20  # glibc's maximum


@cache
def keep_freed_memory() -> bool:
    """Makes glibc reuse freed memory. By default it maps every larger tensor anew, and the kernel
    clears each page on first touch: a third of the time of a dispatch of 2 MB."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_BLOCK) and mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))


@contextmanager
def handling_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Calls `handler` for SIGINT and SIGTERM inside."""
    before = {number: signal.signal(number, handler) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def child_environment(*needed: str) -> dict[str, str]:
    """The environment for a child process: only the secrets that it needs, because all code there
    can read them, and this process's import path."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    hidden = SECRETS.difference(needed)
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return kept | {"PYTHONPATH": path}


def forget_api_keys() -> None:
    """Removes the keys from this process's environment, so that child processes, including those
    of libraries, do not inherit them."""
    for name in (API_KEY, ADMIN_API_KEY):
        os.environ.pop(name, None)


@contextmanager
def without_secrets_in_environment() -> Iterator[None]:
    """Child processes started inside inherit no secrets."""
    kept = {name: os.environ.pop(name) for name in SECRETS if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)
