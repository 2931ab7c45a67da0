"""How long work takes that several ranks do together, on one GPU that they share or on one each.

What is measured is done many times in a row: inside one CUDA graph, or launched one by one. The
ranks begin together: their hosts meet, then their devices, then a graph runs that does not count.
Where kernels' twins compute on CPU tensors, the host's clock is read, and there are no graphs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from moesaic.kernels.a2a import ChannelCall, signal, wait

# Two to meet on in turn, as a rank that comes twice on one would overtake another; one to start.
MEETINGS = 3
START = 2
Link = Callable[[int], object]
"""One of a row of calls, given its number: it may take other buffers than the one before."""


@dataclass(frozen=True)
class TimedRank:
    """Of a rank. `environment` is set before CUDA is opened; `gpu` below 0: kernels' twins, on
    CPU tensors."""

    environment: dict[str, str]
    gpu: int

    def open(self) -> torch.device:
        os.environ.update(self.environment)
        if self.gpu < 0:
            return torch.device("cpu")
        torch.cuda.set_device(self.gpu)
        return torch.device("cuda", self.gpu)


@dataclass(frozen=True, slots=True)
class Length:
    """`links` of a row (an even number), `repeats` of it that count as one, `rounds` of that."""

    links: int
    repeats: int
    rounds: int


@dataclass(frozen=True, slots=True)
class Together:
    """`calls`: of channels that nothing else uses. `barrier`: of the ranks' hosts. All ranks ask
    for the same in the same order."""

    calls: tuple[ChannelCall, ...]
    barrier: Callable[[], None]

    @property
    def device(self) -> torch.device:
        return self.calls[0].signals.state.device

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def meet(self, number: int) -> None:
        """Until all ranks are here; numbers in a row differ by one."""
        self._meet(number % 2)

    def microseconds(self, link: Link, length: Length, graph: bool) -> list[float]:
        """Of one link on this rank, in each round. What it needs is compiled before."""
        assert length.links % 2 == 0 and (self.on_gpu or not graph)
        run = _captured(link, length.links) if graph else _one_by_one(link, length.links)
        read = self._on_device if self.on_gpu else self._on_host
        return [read(run, length) for _ in range(length.rounds)]

    def _on_device(self, run: Callable[[], None], length: Length) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        self.barrier()
        self._meet(START)
        run()
        begin.record()
        for _ in range(length.repeats):
            run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / (length.repeats * length.links)

    def _on_host(self, run: Callable[[], None], length: Length) -> float:
        self.barrier()
        begin = time.perf_counter()
        for _ in range(length.repeats):
            run()
        return (time.perf_counter() - begin) * 1e6 / (length.repeats * length.links)

    def _meet(self, channel: int) -> None:
        signal(self.calls[channel])
        wait(self.calls[channel])


def _one_by_one(link: Link, links: int) -> Callable[[], None]:
    def run() -> None:
        for number in range(links):
            link(number)

    return run


def _captured(link: Link, links: int) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(links):
            link(number)
    return graph.replay
