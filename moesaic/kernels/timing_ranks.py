"""Measures work that several ranks do together, on one shared GPU or on one GPU each.

The work runs many times in a row: inside one CUDA graph, or launched one by one. The ranks start
together: first their hosts synchronise, then their devices, then an uncounted run follows. The
twins on CPU tensors are measured by the host's clock, without graphs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from moesaic.kernels.a2a import ChannelCall, signal, wait

# Two alternate, as a rank that signals twice on one channel would overtake another; one is for
# starts.
NUM_CHANNELS = 3
START_CHANNEL = 2
NumberedCall = Callable[[int], object]
"""One call of a row, given its number; it may use other buffers than the previous one."""


@dataclass(frozen=True)
class TimedRank:
    """One rank of a measurement."""

    environment: dict[str, str]
    """Set before CUDA is initialised."""
    gpu: int
    """Below 0: the kernels' twins, on CPU tensors."""

    def open(self) -> torch.device:
        os.environ.update(self.environment)
        if self.gpu < 0:
            return torch.device("cpu")
        torch.cuda.set_device(self.gpu)
        return torch.device("cuda", self.gpu)


@dataclass(frozen=True, slots=True)
class RunLength:
    """`calls` in a row (an even number), `repeats` of the row per time, `rounds` times."""

    calls: int
    repeats: int
    rounds: int


@dataclass(frozen=True, slots=True)
class RankTimer:
    """Synchronised measurements. All ranks make the same calls in the same order."""

    calls: tuple[ChannelCall, ...]
    """On channels that no other code uses."""
    barrier: Callable[[], None]
    """Synchronises the ranks' hosts."""

    @property
    def device(self) -> torch.device:
        return self.calls[0].signals.state.device

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def synchronise(self, number: int) -> None:
        """Waits for all ranks; consecutive numbers differ by one."""
        self._signal_and_wait(number % 2)

    def microseconds(self, call: NumberedCall, length: RunLength, graph: bool) -> list[float]:
        """Times of one call on this rank, one for each round. Everything is compiled before."""
        assert length.calls % 2 == 0 and (self.on_gpu or not graph)
        run = _captured(call, length.calls) if graph else _one_by_one(call, length.calls)
        read = self._on_device if self.on_gpu else self._on_host
        return [read(run, length) for _ in range(length.rounds)]

    def _on_device(self, run: Callable[[], None], length: RunLength) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        self.barrier()
        self._signal_and_wait(START_CHANNEL)
        run()
        begin.record()
        for _ in range(length.repeats):
            run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / (length.repeats * length.calls)

    def _on_host(self, run: Callable[[], None], length: RunLength) -> float:
        self.barrier()
        begin = time.perf_counter()
        for _ in range(length.repeats):
            run()
        return (time.perf_counter() - begin) * 1e6 / (length.repeats * length.calls)

    def _signal_and_wait(self, channel: int) -> None:
        signal(self.calls[channel])
        wait(self.calls[channel])


def _one_by_one(call: NumberedCall, count: int) -> Callable[[], None]:
    def run() -> None:
        for number in range(count):
            call(number)

    return run


def _captured(call: NumberedCall, count: int) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    # Threads of NCCL ask for events meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for number in range(count):
            call(number)
    return graph.replay
