"""How long work on a GPU takes.

What is measured runs many times inside one CUDA graph, with the L2 cache emptied before each time.
A second graph that only empties the cache is measured too, and its time taken off: so neither the
launch of a graph nor the emptying counts. The median of several such pairs is the result.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import cache
from itertools import cycle, islice

import torch

Work = Callable[[], object]
ROUNDS = 7
MAX_REPEATS = 20
# A graph holds about so much work; longer ones only cost time.
GRAPH_MICROSECONDS = 20_000.0
# Times the size of the L2 cache that are read to empty it.
FLUSHED = 3


def measure(work: Work | Sequence[Work], *, flush: bool = True) -> float:
    """Microseconds of one call. Of several they take turns (the same on other buffers, say), and
    the result is their mean. Without `flush` the cache keeps what the call before left in it."""
    works = [work] if callable(work) else list(work)
    once = _warm_up(works)
    repeats = max(len(works), min(MAX_REPEATS, int(GRAPH_MICROSECONDS / max(once, 1.0))))
    empty = _flusher() if flush else _nothing
    both = _capture([call for one in islice(cycle(works), repeats) for call in (empty, one)])
    if not flush:
        return _median([both]) / repeats
    return _median([both, _capture([empty] * repeats)]) / repeats


def _nothing() -> None:
    """Where the cache stays as it is."""


def _warm_up(works: Sequence[Work]) -> float:
    """Compiles and allocates; gives a rough time of one call, in microseconds."""
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


def _median(graphs: Sequence[torch.cuda.CUDAGraph]) -> float:
    """Microseconds of the first graph less those of the second."""
    rounds = []
    for _ in range(ROUNDS):
        times = [_replay(graph) for graph in graphs]
        rounds.append(times[0] - sum(times[1:]))
    return statistics.median(rounds)


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000


def _flusher() -> Work:
    """Reads rather than writes: lines that are written back later would slow down what follows."""
    size = FLUSHED * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return _reader(size)


@cache
def _reader(size: int) -> Work:
    buffer = torch.ones(size // 4, dtype=torch.float32, device="cuda")
    out = torch.empty((), dtype=torch.float32, device="cuda")
    return lambda: torch.sum(buffer, dim=0, out=out)
