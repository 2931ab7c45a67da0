"""Settings of a process: its memory, and what it hands to processes that it starts."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Final

API_KEY: Final = "MOESAIC_API_KEY"
ADMIN_API_KEY: Final = "MOESAIC_ADMIN_API_KEY"
NODE_SECRET: Final = "MOESAIC_SECRET"
SECRETS: Final = frozenset((API_KEY, ADMIN_API_KEY, NODE_SECRET))
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 1 << 30
LARGEST_BLOCK = 32 << 20  # the most that glibc accepts


@cache
def keep_freed_memory() -> bool:
    """Makes glibc keep what is freed for what is asked next.

    By default every tensor of some size is mapped anew, and the kernel clears each of its pages on
    first touch: a third of the time of a dispatch of 2 MB, when it was measured once.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_BLOCK) and mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))


def child_environment(*needed: str) -> dict[str, str]:
    """The environment for a process of ours: of the secrets only those that it needs, since all
    that runs there can read them; and the path from which this process imports."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    hidden = SECRETS.difference(needed)
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return kept | {"PYTHONPATH": path}


def forget_api_keys() -> None:
    """Takes the keys out of the environment of this process, once they are read: every process
    that it or a library of it starts would inherit them."""
    for name in (API_KEY, ADMIN_API_KEY):
        os.environ.pop(name, None)


@contextmanager
def without_secrets_in_environment() -> Iterator[None]:
    """Processes that are started inside inherit none of them."""
    kept = {name: os.environ.pop(name) for name in SECRETS if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)
