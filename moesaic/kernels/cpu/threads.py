"""Python threads for C calls, which release the GIL."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import repeat

Call = Callable[[object, int, int], int]


@cache
def threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, "kernel")


def call_in_parts(kernel: Call, arguments: object, parts: int) -> None:
    """Calls kernel(arguments, part, parts) for each part, on a thread each."""
    if parts == 1:
        failed = kernel(arguments, 0, 1)
    else:
        calls = threads(parts).map(kernel, repeat(arguments), range(parts), repeat(parts))
        failed = max(list(calls))
    if failed:
        raise MemoryError("no memory to pack rows for a matrix product")


# A forked child has none of its parent's threads.
os.register_at_fork(after_in_child=threads.cache_clear)
