"""Time on a GPU, and what the GPU itself can do: shared by the benchmarks of kernels.

    gpu.require()                       # SystemExit without one
    us = gpu.measure(lambda: kernel(x))
    limit_us = max(num_bytes / gpu.copy_bandwidth(), operations / gpu.matrix_rate(torch.bfloat16))

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
from torch import Tensor

Work = Callable[[], object]
ROUNDS = 7
MAX_REPEATS = 20
# A graph holds about so much work; longer ones only cost time.
GRAPH_MICROSECONDS = 20_000.0
# Times the size of the L2 cache that are read to empty it.
FLUSHED = 3


def require() -> torch.device:
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device, and torch finds none")
    return torch.device("cuda", torch.cuda.current_device())


def device_facts() -> dict[str, str | int]:
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": found.name,
        "processors": found.multi_processor_count,
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
    }


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


@cache
def copy_bandwidth() -> float:
    """Bytes a microsecond, read and written, of a large copy."""
    source = torch.randint(0, 255, (1 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / measure(lambda: target.copy_(source), flush=False)


@cache
def matrix_rate(dtype: torch.dtype) -> float:
    """Operations a microsecond of a large matrix product in `dtype`, bfloat16 or float8_e4m3fn."""
    size = 8192
    a, b = (_random(size, dtype) for _ in range(2))
    one = torch.ones((), dtype=torch.float32, device="cuda")
    if dtype.itemsize == 1:
        took = measure(
            lambda: torch._scaled_mm(
                a, b.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
            ),
            flush=False,
        )
    else:
        took = measure(lambda: a @ b.T, flush=False)
    return 2 * size**3 / took


def _random(size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(size, size, device="cuda").to(dtype)
