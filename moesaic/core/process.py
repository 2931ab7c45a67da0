"""Settings of a process that computes."""

import ctypes
from functools import cache

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
