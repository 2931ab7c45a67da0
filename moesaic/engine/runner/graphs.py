"""Decode steps of fixed numbers of rows, captured once as CUDA graphs and replayed.

A step of B rows takes the smallest number of rows (bucket) that holds it; the rows behind are
padding. What a graph reads and writes lies in buffers that stay where they are.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import torch
from tqdm import tqdm

from moesaic.config import ServerArgs
from moesaic.engine.setup.device_memory import GIB

logger = logging.getLogger(__name__)

# Up to each number of rows, the distance between buckets. Padding costs little: no expert and no
# part of the cache is read for it.
STEPS = ((2, 1), (4, 2), (8, 4), (64, 8), (128, 16), (256, 32))
LAST_STEP = 64


def graph_sizes(args: ServerArgs, max_running: int) -> tuple[int, ...]:
    """Rows of the buckets, ascending; none: every step is launched kernel by kernel."""
    if args.disable_cuda_graph:
        return ()
    most = min(args.cuda_graph_max_bs or max_running, max_running)
    if args.cuda_graph_bs is not None:
        beyond = sorted(size for size in set(args.cuda_graph_bs) if size > most)
        if beyond:
            logger.warning(
                "--cuda-graph-bs: nothing is captured for %s, as at most %d requests run at once "
                "(--max-running-requests)",
                ", ".join(map(str, beyond)),
                most,
            )
        return tuple(sorted(set(args.cuda_graph_bs) - set(beyond)))
    sizes: list[int] = []
    size = 1
    while size < most:
        sizes.append(size)
        size += next((step for limit, step in STEPS if size < limit), LAST_STEP)
    return (*sizes, most)


class GraphCache:
    """`body` computes the step of a bucket on the static buffers. Without `capture` it is simply
    called, which is how everything around graphs is tested without a GPU."""

    def __init__(
        self, sizes: tuple[int, ...], body: Callable[[int], None], device: torch.device
    ) -> None:
        self.sizes, self._body, self._device = sizes, body, device
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.nbytes = 0
        """Of the memory that graphs work in, about."""

    def bucket(self, rows: int) -> int | None:
        """The smallest that holds so many rows; None: no bucket does."""
        place = bisect_left(self.sizes, rows)
        return self.sizes[place] if rows and place < len(self.sizes) else None

    def run(self, size: int) -> None:
        graph = self._graphs.get(size)
        if graph is None:
            self._body(size)
        else:
            graph.replay()

    def drop(self) -> None:
        """From now on steps go kernel by kernel. No graph may be under way."""
        if self._graphs:
            logger.warning("CUDA graphs are given up: steps go kernel by kernel from now on")
        self._graphs.clear()
        self.nbytes = 0

    def capture(self) -> None:
        """The largest first: smaller ones then find room in the memory that it has used."""
        if not self.sizes:
            return
        started, free = time.monotonic(), torch.cuda.mem_get_info(self._device)[0]
        stream, pool = torch.cuda.Stream(self._device), torch.cuda.graph_pool_handle()
        order = tqdm(
            sorted(self.sizes, reverse=True),
            desc="Capturing CUDA graphs",
            unit="graph",
            disable=None,
            leave=False,
        )
        for size in order:
            order.set_postfix(rows=size, refresh=False)
            try:
                self._graphs[size] = self._capture(size, stream, pool)
            except torch.OutOfMemoryError as error:
                raise ValueError(
                    f"a CUDA graph of {size} rows does not fit beside weights and KV cache: lower "
                    "--mem-fraction-static, --max-total-tokens or --cuda-graph-max-bs, or give "
                    "--disable-cuda-graph"
                ) from error
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # what was run before captures will not be again on that stream
        self.nbytes = max(0, free - torch.cuda.mem_get_info(self._device)[0])
        logger.info(
            "captured %d CUDA graphs of 1 to %d rows in %.1f s, which take %.2f GiB",
            len(self.sizes),
            self.sizes[-1],
            time.monotonic() - started,
            self.nbytes / GIB,
        )

    def _capture(self, size: int, stream: torch.cuda.Stream, pool: Any) -> torch.cuda.CUDAGraph:
        """Run once before, on the same stream: kernels are compiled and libraries take what they
        work in, neither of which may happen in a capture."""
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._body(size)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # What other threads of the program do on the GPU meanwhile is not in it, nor forbidden.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self._body(size)
        return graph
