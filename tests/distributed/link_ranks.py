"""What ranks do in tests of the emulated link, on CPU tensors and on a GPU that they share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.windows.factory import create_device_window, create_window
from moesaic.comm.windows.link import HostLink
from moesaic.comm.windows.window import SharedWindow
from moesaic.core.link import EmulatedLink
from moesaic.kernels.a2a import signal, wait
from moesaic.kernels.link import LinkLoad
from tests.distributed.moe_rounds import captured
from tests.distributed.test_in_flight import (
    EXPERTS,
    HIDDEN,
    INNER,
    TOP_K,
    batch,
    make_layer,
    step_of,
)
from tests.moe_oracle import Experts

SIGNALS = 8


def device_signals(
    group: RankGroup, device: str, link: EmulatedLink, nbytes: int, graph: bool = False
) -> float:
    """The seconds of some signals to all ranks, each with so many bytes for every other rank."""
    window = create_device_window(group, [], 20.0, 2, torch.device(device), link)
    load = LinkLoad(fixed=nbytes)
    calls = [replace(window.call(channel, "signal"), load=load) for channel in (0, 1)]

    def run() -> torch.Tensor:
        for number in range(SIGNALS):
            signal(calls[number % 2])
            wait(calls[number % 2])
        return window.signals.state

    run()
    replayed: Callable[[], object] = captured(run)[0].replay if graph else run
    group.barrier("ready")
    seconds = _on_gpu(replayed) if device == "cuda" else _on_host(replayed)
    window.check()
    group.barrier("done")
    window.close()
    return seconds


def _on_host(run: Callable[[], object]) -> float:
    begin = time.monotonic()
    run()
    return time.monotonic() - begin


def _on_gpu(run: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e-3


def host_signals(group: RankGroup, link: EmulatedLink, nbytes: int) -> float:
    """The same through a window of hosts."""
    window = create_window(group, [], 20.0, 2, link)
    assert window.link is not None
    group.barrier("ready")
    begin = time.monotonic()
    for number in range(SIGNALS):
        for rank in range(group.size):
            window.link.carry(rank, nbytes)
        window.signal(number % 2, number + 1, "signal")
        window.wait(number % 2, number + 1, "signal")
    return time.monotonic() - begin


@dataclass(frozen=True)
class Sent:
    """Of one rank: whether a link changed an answer; what its link carried; and what it received by
    its own counts, tokens and results."""

    same: bool
    carried: int
    received: int
    seconds: float


def layers(
    group: RankGroup, a2a: str, mode: str, device: str, link: EmulatedLink, deterministic: bool
) -> Sent:
    """A layer without the link, and one with it."""
    experts, lanes = Experts.random(EXPERTS, HIDDEN, INNER), {"lanes": 1}
    lanes |= {"deterministic": deterministic, "replicated": mode == "replicated"}
    mode = "auto" if mode == "replicated" else mode
    plain = make_layer(group, a2a, mode, experts, device, **lanes)
    late = make_layer(group, a2a, mode, experts, device, link=link, **lanes)
    x_TH, topk = batch(3 + (0 if lanes["replicated"] else 2 * group.rank), 7)
    step = replace(step_of(0), prefill=mode != "low_latency")
    wanted_TH = plain(x_TH, topk, step)
    carried = [0]
    for shared in late.context.comm.buffers.values():
        window = getattr(shared, "window", None)
        if isinstance(window, SharedWindow) and window.link is not None:
            _record(window.link, carried)
    group.barrier("ready")
    begin = time.monotonic()
    y_TH = late(x_TH, topk, step)
    seconds = time.monotonic() - begin
    unit = late.dispatcher.config.payload.row_bytes(HIDDEN) + 8 * TOP_K
    stats = late.context.comm.traffic.values()
    received = sum(t.dispatch_rows * unit + t.combine_rows * HIDDEN * 4 for t in stats)
    return Sent(torch.equal(y_TH, wanted_TH), carried[0], received, seconds)


def _record(link: HostLink, carried: list[int]) -> None:
    carry = link.carry

    def counted(rank: int, nbytes: int) -> None:
        carried[0] += nbytes if rank != link._rank else 0
        carry(rank, nbytes)

    link.carry = counted  # type: ignore[method-assign]
