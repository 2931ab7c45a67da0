"""Measures work on a GPU.

The work runs many times inside one CUDA graph, with the L2 cache emptied before each run. The time
of a second graph that only empties the cache is subtracted, so neither the graph launch nor the
emptying counts. The result is the median of several such pairs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import cache
from itertools import cycle, islice

import torch

Work = Callable[[], object]
# Rounds, the most calls of a graph, and microseconds of work in it: more only costs time.
PRECISE = (7, 20, 20_000.0)
QUICK = (3, 5, 2_000.0)
# Multiples of the L2 cache's size that are read to empty it.
FLUSHED = 3


def measure(work: Work | Sequence[Work], *, flush: bool = True, quick: bool = False) -> float:
    """Microseconds of one call. Several works alternate (on different buffers, for instance), and
    the result is their mean. Without `flush` the cache keeps what the previous call left. `quick`:
    a tenth of the calls."""
    works = [work] if callable(work) else list(work)
    rounds, most, room = QUICK if quick else PRECISE
    once = _warm_up(works)
    repeats = max(len(works), min(most, int(room / max(once, 1.0))))
    empty = _flusher() if flush else _nothing
    both = _capture([call for one in islice(cycle(works), repeats) for call in (empty, one)])
    graphs = [both, _capture([empty] * repeats)] if flush else [both]
    return _median(graphs, rounds) / repeats


def _nothing() -> None:
    """Leaves the cache as it is."""


def _warm_up(works: Sequence[Work]) -> float:
    """Compiles and allocates; returns a rough time of one call in microseconds."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        for one in works:
            one()
        begin.record(stream)
        for one in works:
            one()
        end.record(stream)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1000 / len(works)


def _capture(calls: Sequence[Work]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _median(graphs: Sequence[torch.cuda.CUDAGraph], rounds: int) -> float:
    """Microseconds of the first graph minus those of the second."""
    found = []
    for _ in range(rounds):
        times = [_replay(graph) for graph in graphs]
        found.append(times[0] - sum(times[1:]))
    return statistics.median(found)


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000


def _flusher() -> Work:
    """Reads rather than writes: later write-backs would slow down the measured work."""
    size = FLUSHED * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return _reader(size)


@cache
def _reader(size: int) -> Work:
    buffer = torch.ones(size // 4, dtype=torch.float32, device="cuda")
    out = torch.empty((), dtype=torch.float32, device="cuda")
    return lambda: torch.sum(buffer, dim=0, out=out)
