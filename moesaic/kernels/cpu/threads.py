"""Python threads that call C, which releases the interpreter."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache


@cache
def threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, "kernel")


# A child has none of its parent's threads.
os.register_at_fork(after_in_child=threads.cache_clear)
