"""What each rank does in bench/a2a_gpu.py: dispatch and combine, checked, then timed.

P ranks · T tokens of a rank · K chosen · R = P * T rows · N = R * K pairs · H hidden.

Experts are replaced by nothing: their results are those that the check left. A dispatch cannot
follow a dispatch, as nobody would know that its rows were taken, nor a combine a combine: so each
by itself is measured with a meeting of all ranks behind it, and the time of a meeting taken off.
Tokens, outputs and what is copied rotate over some buffers; rows and results lie in the one window
that the layers of an engine share.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.windows.factory import create_device_window
from moesaic.core.link import EmulatedLink
from moesaic.core.step import Step
from moesaic.kernels.timing_ranks import NUM_CHANNELS, NumberedCall, RankTimer, RunLength, TimedRank
from moesaic.moe.backends import load_backends
from moesaic.moe.dispatch.base import CommContext, DispatchConfig
from moesaic.moe.dispatch.device.rows import DeviceRowsDispatcher
from moesaic.moe.formats import RowsCombineInput, StandardDispatchOutput, TopKOutput
from moesaic.moe.placement import EpLayout
from moesaic.moe.quant.payload import PAYLOAD_FORMATS
from moesaic.moe.registry import A2A_REGISTRY

TIMEOUT = 20.0
# Of a token: how far its mean may be from a plain computation's, which rounds in other places.
MOST_ERROR = 0.02
FEW_TOKENS = 256


@dataclass(frozen=True)
class Job:
    """Numbers of tokens of one backend, which share a window. `graphs`: which ways to launch."""

    backend: str
    mode: str
    hidden: int
    experts: int
    top_k: int
    payload: str
    tokens: tuple[int, ...]
    graphs: tuple[bool, ...]
    rounds: int
    link: EmulatedLink | None = None


@dataclass
class Found:
    """Of one number of tokens on one rank: bytes by half, microseconds by what was measured (and
    launched how), in each round."""

    tokens: int
    error: float
    nbytes: dict[str, int]
    us: dict[tuple[str, bool], list[float]] = field(default_factory=dict)
    link_bytes: dict[str, int] = field(default_factory=dict)
    """What this rank's link carries, by half: of its tokens, and of their results."""


def work(group: RankGroup, job: Job, place: TimedRank) -> list[Found]:
    device = place.open()
    with torch.inference_mode():
        with torch.device(device):  # not around what is measured: every call would cost more
            made = dispatcher_of(group, job)
        window = create_device_window(group, [], TIMEOUT, NUM_CHANNELS, device)
        calls = tuple(window.call(n, "start together") for n in range(NUM_CHANNELS))
        timer = RankTimer(calls, lambda: group.barrier("benchmark"))
        # As in an engine's rank: what is there by now is not looked through for garbage.
        gc.collect()
        gc.freeze()
        try:
            found = [measure(made, job, tokens, timer) for tokens in job.tokens]
            window.check()
        finally:
            gc.unfreeze()
            gc.collect()  # graphs go before the memory that they write to
            made.exchange.close()
            window.close()
            if device.type == "cuda":
                torch.cuda.empty_cache()  # other ranks and jobs need it
    return found


def device_name(group: RankGroup, place: TimedRank) -> str:
    device = place.open()
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)


def config_of(group: RankGroup, job: Job) -> DispatchConfig:
    most = max(job.tokens)
    return DispatchConfig(
        layout=EpLayout(job.experts, group.size, 1, group.rank),
        top_k=job.top_k,
        hidden_size=job.hidden,
        dtype=torch.bfloat16,
        payload=PAYLOAD_FORMATS[job.payload],
        max_tokens=most,
        max_decode_tokens=most,
        mode=job.mode,
        lanes=1,
    )


def dispatcher_of(group: RankGroup, job: Job) -> DeviceRowsDispatcher:
    load_backends()
    config, comm = config_of(group, job), CommContext(group, TIMEOUT, link=job.link)
    made = A2A_REGISTRY[job.backend].providers["cuda"](config, comm)
    assert isinstance(made, DeviceRowsDispatcher), f"{job.backend} has no rows that travel"
    return made


def route(job: Job, tokens: int, seed: int, device: torch.device) -> tuple[Tensor, TopKOutput]:
    """Drawn on the CPU, so that all devices get the same."""
    generator = torch.Generator().manual_seed(seed)
    x_TH = torch.randn(tokens, job.hidden, generator=generator).bfloat16()
    scores = torch.rand(tokens, job.experts, generator=generator)
    weights, ids = scores.topk(job.top_k, dim=1)
    weights /= weights.sum(1, keepdim=True)
    return x_TH.to(device), TopKOutput(ids.int().to(device), weights.to(device))


@dataclass
class Rows:
    """What is measured, as links of a row of calls."""

    dispatcher: DeviceRowsDispatcher
    sets: list[tuple[Tensor, TopKOutput]]
    timer: RankTimer
    step: Step
    given: list[RowsCombineInput] = field(default_factory=list)

    def check(self) -> float:
        """The largest error of a token; leaves results for `combine`."""
        worst = 0.0
        for number, (x_TH, _) in enumerate(self.sets):
            out = self._dispatch(number)
            self.given.append(identity(out))
            y_TH = self.dispatcher.combine(self.given[-1])
            wanted_TH = self.dispatcher.config.encode(x_TH).dense(torch.float32)
            worst = max(worst, error_of(y_TH, wanted_TH))
            self.dispatcher.exchange.check()
        return worst

    def pair(self, number: int) -> None:
        out = self._dispatch(number)
        self.dispatcher.combine(results_of(out))

    def dispatch(self, number: int) -> None:
        self._dispatch(number)
        self.dispatcher.exchange.release(0)
        self.timer.synchronise(number)

    def combine(self, number: int) -> None:
        self.dispatcher.exchange.acquire(0, "benchmark")
        self.dispatcher.combine(self.given[number % len(self.given)])
        self.timer.synchronise(number)

    def _dispatch(self, number: int) -> StandardDispatchOutput:
        x_TH, topk = self.sets[number % len(self.sets)]
        out = self.dispatcher.dispatch(x_TH, topk, self.step)
        assert isinstance(out, StandardDispatchOutput)
        return out


def identity(out: StandardDispatchOutput) -> RowsCombineInput:
    """As if every expert gave back what it got. Rows that nobody sent may hold anything: nobody
    reads what comes of them."""
    x_RH = out.x.dense(torch.bfloat16)
    if out.y_NH is not None:
        out.y_NH.view(len(x_RH), -1, x_RH.shape[1]).copy_(x_RH[:, None])
    else:
        assert out.y_OH is not None and out.weights_RK is not None
        share_R = torch.where(out.ids_RK >= 0, out.weights_RK, 0.0).sum(1)
        out.y_OH.copy_(x_RH * share_R[:, None])
    return results_of(out)


def results_of(out: StandardDispatchOutput) -> RowsCombineInput:
    """What lies where the runner would leave its results."""
    y_RH = out.y_OH if out.y_NH is None else out.y_NH
    assert y_RH is not None
    return RowsCombineInput(out.handle, y_RH, pairs=out.y_NH is not None)


def error_of(y_TH: Tensor, wanted_TH: Tensor) -> float:
    """Of the worst token, its mean as a part of the mean of what it should be. A NaN is one."""
    off_T = (y_TH.float() - wanted_TH).abs().mean(1) / wanted_TH.abs().mean(1)
    return float(off_T.nan_to_num(float("inf")).max())


def bytes_of(dispatcher: DeviceRowsDispatcher, topk: TopKOutput) -> dict[str, int]:
    """Values and scales that are read and written for a rank's tokens."""
    config, (tokens, top_k) = dispatcher.config, topk.ids_TK.shape
    groups_TK = topk.ids_TK.cpu() // config.layout.slots_per_rank
    taken = sum(len(row.unique()) for row in groups_TK)
    sent = tokens * config.layout.size if dispatcher.everywhere else taken
    row = config.hidden_size * config.dtype.itemsize
    back = tokens * top_k if dispatcher.by_pairs else taken
    return {
        "dispatch": tokens * row + sent * config.payload.row_bytes(config.hidden_size),
        "combine": (back + tokens) * row,
    }


def link_bytes_of(dispatcher: DeviceRowsDispatcher, topk: TopKOutput) -> dict[str, int]:
    """What crosses to other ranks for a rank's tokens, and back."""
    config, layout = dispatcher.config, dispatcher.layout
    groups_TK = topk.ids_TK.cpu() // layout.slots_per_rank
    away = [set(row) - {layout.rank} for row in groups_TK.tolist()]
    rows = len(away) * (layout.size - 1) if dispatcher.everywhere else sum(map(len, away))
    pairs = int((groups_TK != layout.rank).sum())
    result = config.hidden_size * config.dtype.itemsize
    unit = dispatcher.exchange.inbox(0, 1.0).wire_bytes(config.top_k)
    back = pairs if dispatcher.by_pairs else sum(map(len, away))
    return {"dispatch": rows * unit, "combine": back * result}


def measure(dispatcher: DeviceRowsDispatcher, job: Job, tokens: int, timer: RankTimer) -> Found:
    few = tokens <= FEW_TOKENS
    rank, size = dispatcher.layout.rank, dispatcher.layout.size
    seeds = range(rank, (4 if few else 2) * size, size)
    device = timer.device
    sets = [route(job, tokens, seed, device) for seed in seeds]
    rows = Rows(dispatcher, sets, timer, Step(rows=tokens))
    error = rows.check()
    if not error <= MOST_ERROR:
        raise AssertionError(
            f"{job.backend} {job.mode}, {tokens} tokens: a token is off by {error:.1%} of what a "
            f"plain computation gives, which is more than {MOST_ERROR:.0%}"
        )
    found = Found(tokens, error, bytes_of(dispatcher, rows.sets[0][1]))
    of_sets = [link_bytes_of(dispatcher, topk) for _, topk in sets]
    found.link_bytes = {half: sum(one[half] for one in of_sets) // len(sets) for half in of_sets[0]}
    if timer.on_gpu:
        length = RunLength(32, 4, job.rounds) if few else RunLength(4, 3, job.rounds)
    else:
        length = RunLength(2, 1, job.rounds)
    links: dict[str, NumberedCall] = {"pair": rows.pair, "dispatch": rows.dispatch}
    links |= {"combine": rows.combine, "meet": timer.synchronise}
    for (name, link), graph in ((one, graph) for one in links.items() for graph in job.graphs):
        link(0), link(1)  # compiles
        found.us[name, graph] = timer.microseconds(link, length, graph)
        dispatcher.exchange.check()
    for name, nbytes in found.nbytes.items():
        copy = copier(nbytes, len(rows.sets), device)
        copy(0)
        found.us[f"{name} copy", False] = timer.microseconds(copy, length, timer.on_gpu)
    return found


def copier(nbytes: int, sets: int, device: torch.device) -> NumberedCall:
    """So many bytes, half of them read and half written; by a kernel, since a graph gives `copy_`
    to the copy engine, which is slower."""
    words = max(1, nbytes // 8)
    sources, targets = (
        [torch.zeros(words, dtype=torch.int32, device=device) for _ in range(sets)]
        for _ in range(2)
    )

    def copy(number: int) -> Any:
        return torch.bitwise_not(sources[number % sets], out=targets[number % sets])

    return copy
