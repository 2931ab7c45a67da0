"""How many tokens the KV cache holds."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from moesaic.config import ServerArgs
from moesaic.layers.context import CacheSpec

logger = logging.getLogger(__name__)

# On CPU, memory belongs to others too: unless asked for more, take half of what is free at start.
DEFAULT_FREE_SHARE = 0.5
GIB = 2**30


def total_memory() -> int:
    """Bytes this process may use: the machine's, or its control group's if that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        path = Path(name)
        if path.is_file() and (text := path.read_text().strip()).isdecimal():
            return min(physical, int(text))
    return physical


def free_memory() -> int:
    """Bytes that can be taken without pushing anything out."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return min(int(line.split()[1]) * 1024, total_memory())
    return total_memory()


def cache_tokens(
    args: ServerArgs, spec: CacheSpec, element_size: int, weight_bytes: int, wanted: int
) -> int:
    """Tokens that fit, in whole pages: as told, or by memory, but never more than `wanted`."""
    page, per_token = args.page_size, spec.bytes_per_token(element_size)
    if args.max_total_tokens is not None:
        if args.max_total_tokens < page:
            raise ValueError(
                f"--max-total-tokens {args.max_total_tokens} is less than one page of {page} "
                "tokens: raise it or lower --page-size"
            )
        _check_fits(args.max_total_tokens, per_token, weight_bytes)
        return args.max_total_tokens // page * page
    if args.mem_fraction_static is None:
        budget = int(DEFAULT_FREE_SHARE * free_memory())
    else:
        budget = int(args.mem_fraction_static * total_memory()) - weight_bytes
        if budget < per_token * page:
            least = (weight_bytes + per_token * page) / total_memory()
            raise ValueError(
                f"--mem-fraction-static {args.mem_fraction_static} leaves no room for a KV cache: "
                f"the weights take {weight_bytes / GIB:.2f} GiB of {total_memory() / GIB:.2f} GiB; "
                f"give more than {least:.3f}"
            )
    tokens = min(budget // per_token, -(-wanted // page) * page)
    return max(1, tokens // page) * page


def _check_fits(tokens: int, per_token: int, weight_bytes: int) -> None:
    most = (total_memory() - weight_bytes) // per_token
    if tokens > most:
        raise ValueError(
            f"--max-total-tokens {tokens} needs {tokens * per_token / GIB:.1f} GiB beside "
            f"{weight_bytes / GIB:.1f} GiB of weights, and this machine has "
            f"{total_memory() / GIB:.1f} GiB: give at most {most}"
        )
