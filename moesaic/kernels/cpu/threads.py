"""Python threads for C calls, which release the GIL."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache


@cache
def threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, "kernel")


# A forked child has none of its parent's threads.
os.register_at_fork(after_in_child=threads.cache_clear)
