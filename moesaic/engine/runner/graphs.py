"""Decode steps of fixed sizes, captured once as CUDA graphs and replayed.

A step uses the smallest captured size (bucket) that holds its sequences; the rows beyond them are
padding. A graph reads and writes static buffers.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from moesaic.config import ServerArgs
from moesaic.engine.setup.device_memory import GIB

logger = logging.getLogger(__name__)

# Up to each number of sequences, the distance between buckets. Padding reads no experts, no cache.
STEPS = ((2, 1), (4, 2), (8, 4), (64, 8), (128, 16), (256, 32))
LAST_STEP = 64


def graph_sizes(args: ServerArgs, max_running: int) -> tuple[int, ...]:
    """Sequences of the buckets, ascending; empty if no graphs are captured."""
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


class GraphKey(NamedTuple):
    sequences: int
    queries: int = 1
    """New tokens of each sequence: one more than its drafts."""

    @property
    def rows(self) -> int:
        return self.sequences * self.queries


class GraphCache:
    """The graph of each bucket. `body` computes a step on the static buffers; where nothing is
    captured it is called directly, which is how tests without a GPU run."""

    def __init__(
        self,
        sizes: tuple[int, ...],
        body: Callable[[GraphKey], None],
        device: torch.device,
        queries: Sequence[int] = (1,),
    ) -> None:
        self.sizes, self.queries = sizes, tuple(queries)
        self.keys = [GraphKey(size, count) for size in sizes for count in queries]
        self._body, self._device = body, device
        self._graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        self.nbytes = 0
        """Memory of all graphs, estimated."""

    def bucket(self, sequences: int, queries: int = 1) -> GraphKey | None:
        """The smallest that holds the sequences, if any does."""
        place = bisect_left(self.sizes, sequences)
        if not sequences or place == len(self.sizes) or queries not in self.queries:
            return None
        return GraphKey(self.sizes[place], queries)

    def run(self, key: GraphKey) -> None:
        graph = self._graphs.get(key)
        if graph is None:
            self._body(key)
        else:
            graph.replay()

    def drop(self) -> None:
        """Makes all later steps eager. No graph may be in flight."""
        if self._graphs:
            logger.warning("CUDA graphs are dropped: steps are launched kernel by kernel")
        self._graphs.clear()
        self.nbytes = 0

    def capture(self) -> None:
        """Captures the largest first: smaller ones then reuse its memory."""
        if not self.sizes:
            return
        started, free = time.monotonic(), torch.cuda.mem_get_info(self._device)[0]
        stream, pool = torch.cuda.Stream(self._device), torch.cuda.graph_pool_handle()
        order = tqdm(
            sorted(self.keys, key=lambda key: key.rows, reverse=True),
            desc="Capturing CUDA graphs",
            unit="graph",
            disable=None,
            leave=False,
        )
        for key in order:
            order.set_postfix(rows=key.rows, refresh=False)
            try:
                self._graphs[key] = self._capture(key, stream, pool)
            except torch.OutOfMemoryError as error:
                raise ValueError(
                    f"a CUDA graph of {key.rows} rows does not fit beside weights and KV cache: "
                    "lower --mem-fraction-static, --max-total-tokens or --cuda-graph-max-bs, or "
                    "give --disable-cuda-graph"
                ) from error
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # the warm-up runs on that stream are not repeated
        self.nbytes = max(0, free - torch.cuda.mem_get_info(self._device)[0])
        logger.info(
            "captured %d CUDA graphs of 1 to %d rows in %.1f s, which take %.2f GiB",
            len(self._graphs),
            max(key.rows for key in self._graphs),
            time.monotonic() - started,
            self.nbytes / GIB,
        )

    def _capture(self, key: GraphKey, stream: torch.cuda.Stream, pool: Any) -> torch.cuda.CUDAGraph:
        """Runs the body once first: a capture must neither compile nor let libraries allocate."""
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._body(key)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile; their work is not captured.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self._body(key)
        return graph
