"""How many tokens the KV cache holds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from moesaic.config import ServerArgs
from moesaic.layers.context import CacheSpec

# On CPU, memory belongs to others too: unless asked for more, take half of what is free at start.
DEFAULT_FREE_SHARE = 0.5
GIB = 2**30


CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def total_memory() -> int:
    """Bytes this process may use: the machine's, or its control group's if that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(limit for limit, _ in _group_limits())])


def free_memory() -> int:
    """Bytes that can be taken without pushing anything out."""
    free = [limit - used for limit, used in _group_limits()]
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free.append(int(line.split()[1]) * 1024)
    return max(0, min(free, default=total_memory() // 2))


def _group_limits() -> Iterator[tuple[int, int]]:
    """Limit and use of the control group, if there is one with a limit."""
    for limit_file, used_file in CGROUPS:
        limit, used = Path(limit_file), Path(used_file)
        if limit.is_file() and used.is_file() and (text := limit.read_text().strip()).isdecimal():
            yield int(text), int(used.read_text())


def cache_tokens(
    args: ServerArgs,
    spec: CacheSpec,
    element_size: int,
    weight_bytes: int,
    wanted: int,
    sharers: int = 1,
) -> int:
    """Tokens that fit, in whole pages: as told, or by memory, but never more than `wanted`. The
    machine's memory belongs to `sharers` ranks."""
    page, per_token = args.page_size, spec.bytes_per_token(element_size)
    if args.max_total_tokens is not None:
        if args.max_total_tokens < page:
            raise ValueError(
                f"--max-total-tokens {args.max_total_tokens} is less than one page of {page} "
                "tokens: raise it or lower --page-size"
            )
        _check_fits(args.max_total_tokens, per_token, weight_bytes, sharers)
        return args.max_total_tokens // page * page
    if args.mem_fraction_static is None:
        budget = int(DEFAULT_FREE_SHARE * free_memory() / sharers)
    else:
        budget = int(args.mem_fraction_static * total_memory() / sharers) - weight_bytes
        if budget < per_token * page:
            least = (weight_bytes + per_token * page) * sharers / total_memory()
            raise ValueError(
                f"--mem-fraction-static {args.mem_fraction_static} leaves no room for a KV cache: "
                f"the weights take {weight_bytes * sharers / GIB:.2f} GiB of "
                f"{total_memory() / GIB:.2f} GiB; "
                f"give more than {least:.3g}"
            )
    tokens = min(budget // per_token, -(-wanted // page) * page) // page * page
    if tokens == 0:
        raise ValueError(
            f"one page of {page} tokens takes {page * per_token / GIB:.2f} GiB and the KV cache "
            f"may have {budget / GIB:.2f} GiB: lower --page-size"
        )
    return tokens


def _check_fits(tokens: int, per_token: int, weight_bytes: int, sharers: int) -> None:
    most = (total_memory() // sharers - weight_bytes) // per_token
    if tokens > most:
        raise ValueError(
            f"--max-total-tokens {tokens} needs {tokens * per_token / GIB:.1f} GiB beside "
            f"{weight_bytes / GIB:.1f} GiB of weights{' on each rank' if sharers > 1 else ''}, and "
            f"this machine has {total_memory() / GIB:.1f} GiB{_for(sharers)}: give at most {most}"
        )


def _for(sharers: int) -> str:
    return f" for {sharers} ranks" if sharers > 1 else ""
