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
# The same of a first impression.
QUICK_ROUNDS = 3
QUICK_REPEATS = 5
QUICK_MICROSECONDS = 2_000.0
# Times the size of the L2 cache that are read to empty it.
FLUSHED = 3


def measure(work: Work | Sequence[Work], *, flush: bool = True, quick: bool = False) -> float:
    """Microseconds of one call. Of several they take turns (the same on other buffers, say), and
    the result is their mean. Without `flush` the cache keeps what the call before left in it.
    `quick`: a tenth of the calls, for a first impression."""
    works = [work] if callable(work) else list(work)
    rounds = QUICK_ROUNDS if quick else ROUNDS
    once = _warm_up(works)
    repeats = max(len(works), _repeats(once, quick))
    empty = _flusher() if flush else _nothing
    both = _capture([call for one in islice(cycle(works), repeats) for call in (empty, one)])
    graphs = [both, _capture([empty] * repeats)] if flush else [both]
    return _median(graphs, rounds) / repeats


def _repeats(microseconds: float, quick: bool) -> int:
    """As many calls as a graph is to hold."""
    most, room = (QUICK_REPEATS, QUICK_MICROSECONDS) if quick else (MAX_REPEATS, GRAPH_MICROSECONDS)
    return min(most, int(room / max(microseconds, 1.0)))


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


def _median(graphs: Sequence[torch.cuda.CUDAGraph], rounds: int) -> float:
    """Microseconds of the first graph less those of the second."""
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
    """Reads rather than writes: lines that are written back later would slow down what follows."""
    size = FLUSHED * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return _reader(size)


@cache
def _reader(size: int) -> Work:
    buffer = torch.ones(size // 4, dtype=torch.float32, device="cuda")
    out = torch.empty((), dtype=torch.float32, device="cuda")
    return lambda: torch.sum(buffer, dim=0, out=out)
