"""`moesaic tune --a2a`: finds the best number of programs of the all-to-all kernels.

Ranks are processes of this machine. A plan is measured in a series of dispatches, or of combines,
with a barrier of all ranks after each, inside one CUDA graph; the slowest rank's median counts.
Results are saved case by case, and known ones are skipped.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.launch.local_ranks import LocalRanks, PerRank
from moesaic.comm.launch.mps import start_mps
from moesaic.comm.windows.factory import create_device_window
from moesaic.config.devices import num_gpus
from moesaic.config.gpus import max_ranks_per_gpu, share_gpus
from moesaic.config.resolve import MAX_RANKS_PER_NODE
from moesaic.core.step import Step
from moesaic.kernels import a2a_tuned, tuning
from moesaic.kernels.a2a_plan import GpuModel, LaunchPlan
from moesaic.kernels.a2a_tuned import Kernel, override_plan
from moesaic.kernels.timing_ranks import NUM_CHANNELS, RankTimer, RunLength, TimedRank
from moesaic.moe.backends import load_backends
from moesaic.moe.dispatch.base import CommContext, DispatchConfig
from moesaic.moe.dispatch.device.rows import DeviceRowsDispatcher
from moesaic.moe.formats import RowsCombineInput, StandardDispatchOutput, TopKOutput
from moesaic.moe.placement import EpLayout
from moesaic.moe.quant.payload import PAYLOAD_FORMATS
from moesaic.moe.registry import A2A_REGISTRY

SHAPES = ((128, 8, 2048), (256, 8, 7168))
SECONDS = 300.0
PEER_SECONDS = 30.0
FEW_TOKENS = 256
FEW, MANY = RunLength(16, 3, 5), RunLength(4, 2, 5)
TWINS = RunLength(2, 1, 1)
"""Without a GPU."""
MODES = {"collect_rows": "normal", "collect_pairs": "low_latency"}


@dataclass(frozen=True)
class TuneJob:
    shapes: tuple[tuple[int, int, int], ...]  # E, K, H
    ranks: tuple[int, ...]
    payloads: tuple[str, ...]
    tokens: tuple[int, ...]
    folder: Path
    again: bool = False

    def __post_init__(self) -> None:
        if set(self.payloads) - set(PAYLOAD_FORMATS):
            raise ValueError(
                f"--payload {','.join(self.payloads)!r}: give some of "
                f"{', '.join(PAYLOAD_FORMATS)}, separated by commas"
            )
        for ranks in self.ranks:
            if not 2 <= ranks <= MAX_RANKS_PER_NODE:
                raise ValueError(
                    f"--ranks {ranks}: give 2 to {MAX_RANKS_PER_NODE}; one rank sends nothing, "
                    "and a machine has no more"
                )
            for experts, _, _ in self.shapes or SHAPES:
                if experts % ranks:
                    raise ValueError(
                        f"--ranks {ranks} cannot share {experts} experts evenly: give "
                        "divisors of it"
                    )


@dataclass(frozen=True)
class A2aCase:
    """A kernel, and the layer in which it is measured."""

    kernel: Kernel
    experts: int
    top_k: int
    tokens: int

    @property
    def key(self) -> tuple[str, int]:
        return str(self.kernel), tuning.bucket(self.tokens)


def list_cases(job: TuneJob, ranks: int) -> Iterator[A2aCase]:
    """Results have one type for all payloads; pairs are for few tokens only."""
    for (experts, top_k, hidden), tokens in product(job.shapes or SHAPES, job.tokens):
        for payload in job.payloads:
            yield A2aCase(Kernel("send", ranks, hidden, payload), experts, top_k, tokens)
        yield A2aCase(Kernel("collect_rows", ranks, hidden), experts, top_k, tokens)
        if tokens <= FEW_TOKENS:
            yield A2aCase(Kernel("collect_pairs", ranks, hidden), experts, top_k, tokens)


def tune(job: TuneJob) -> None:
    gpus, most = num_gpus(), max(job.ranks)
    with start_mps() if most > gpus else nullcontext() as mps:
        for ranks in job.ranks:
            devices = share_gpus(ranks, gpus)
            shared = {} if mps is None else mps.for_ranks(max_ranks_per_gpu(devices))
            places = PerRank([TimedRank(shared, gpu) for gpu in devices])
            with LocalRanks(ranks, SECONDS, peer_timeout=PEER_SECONDS) as pool:
                tune_ranks(job, pool, places)


def tune_ranks(job: TuneJob, pool: LocalRanks, places: PerRank) -> None:
    machine: GpuModel = pool.run(gpu_model, places)[0]
    path = job.folder / tuning.file_name(machine.name, a2a_tuned.FORMAT)
    known = {} if job.again else a2a_tuned.load(machine.name, job.folder)
    cases = {case.key: case for case in list_cases(job, pool.size) if case.key not in known}
    if not cases:
        print(f"{pool.size} ranks: all results are in {path}: --again measures them again")
        return
    with tqdm(total=len(cases), desc=f"{pool.size} ranks", disable=None) as bar:
        for case in cases.values():
            plans = a2a_tuned.candidates(case.kernel, case.tokens, machine)
            us = slowest(pool.run(measure, case, plans, places))
            best = min(range(len(plans)), key=us.__getitem__)
            name, plan = machine.name, plans[best]
            a2a_tuned.save(name, case.kernel, case.tokens, plan, us[best], job.folder)
            bar.write(f"{case.kernel} {case.tokens} rows: {us[best]:.1f} us (guess {us[0]:.1f})")
            bar.update()
    print(f"wrote {path}")


def slowest(found: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """For each plan the median over rounds of the slowest rank; times by rank, plan, round."""
    plans = zip(*found, strict=True)
    return [
        statistics.median(max(rounds) for rounds in zip(*ranks, strict=True)) for ranks in plans
    ]


def gpu_model(group: RankGroup, place: TimedRank) -> GpuModel:
    facts = tuning.device_facts(place.open())
    return GpuModel(facts.processors, name=facts.name)


def measure(
    group: RankGroup, case: A2aCase, plans: Sequence[LaunchPlan], place: TimedRank
) -> list[list[float]]:
    """Microseconds by plan and round on one rank, including the barrier."""
    device = place.open()
    with torch.inference_mode():
        with torch.device(device):
            dispatcher = make_dispatcher(group, case)
        window = create_device_window(group, [], PEER_SECONDS, NUM_CHANNELS, device)
        calls = tuple(window.call(number, "tune") for number in range(NUM_CHANNELS))
        timer = RankTimer(calls, lambda: group.barrier("tune"))
        timed = TimedCalls(dispatcher, timer, *route(case, group.rank, device))
        call = timed.dispatch if case.kernel.sends else timed.combine
        few = case.tokens <= FEW_TOKENS
        length = (FEW if few else MANY) if timer.on_gpu else TWINS
        found = []
        try:
            for plan in plans:
                with override_plan(case.kernel, plan):
                    call(0), call(1)  # compiles
                    found.append(timer.microseconds(call, length, timer.on_gpu))
                dispatcher.exchange.check()
                window.check()
        finally:
            dispatcher.exchange.close()
            window.close()
            if device.type == "cuda":
                torch.cuda.empty_cache()  # other ranks and cases need it
    return found


class TimedCalls:
    """Dispatches and combines to measure; the results are arbitrary data."""

    def __init__(
        self, dispatcher: DeviceRowsDispatcher, timer: RankTimer, x_TH: Tensor, topk: TopKOutput
    ) -> None:
        self._dispatcher, self._timer = dispatcher, timer
        self._x_TH, self._topk = x_TH, topk
        out = self._dispatched()
        y_RH = out.y_OH if out.y_NH is None else out.y_NH
        assert y_RH is not None
        self._results = RowsCombineInput(out.handle, y_RH, pairs=out.y_NH is not None)
        dispatcher.combine(self._results)
        for number in range(2):  # a combine must not follow a combine
            timer.synchronise(number)

    def dispatch(self, number: int) -> None:
        self._dispatched()
        self._dispatcher.exchange.release(0)
        self._timer.synchronise(number)

    def combine(self, number: int) -> None:
        self._dispatcher.exchange.acquire(0, "tune")
        self._dispatcher.combine(self._results)
        self._timer.synchronise(number)

    def _dispatched(self) -> StandardDispatchOutput:
        out = self._dispatcher.dispatch(self._x_TH, self._topk, Step(rows=len(self._x_TH)))
        assert isinstance(out, StandardDispatchOutput)
        return out


def make_dispatcher(group: RankGroup, case: A2aCase) -> DeviceRowsDispatcher:
    load_backends()
    config = DispatchConfig(
        layout=EpLayout(case.experts, group.size, 1, group.rank),
        top_k=case.top_k,
        hidden_size=case.kernel.hidden,
        dtype=torch.bfloat16,
        payload=PAYLOAD_FORMATS[case.kernel.payload or "bf16"],
        max_tokens=case.tokens,
        max_decode_tokens=case.tokens,
        mode=MODES.get(case.kernel.name, "normal"),
        lanes=1,
    )
    made = A2A_REGISTRY["deepep"].providers["cuda"](config, CommContext(group, PEER_SECONDS))
    assert isinstance(made, DeviceRowsDispatcher)
    return made


def route(case: A2aCase, seed: int, device: torch.device) -> tuple[Tensor, TopKOutput]:
    """Drawn on the CPU, so all devices get the same routing."""
    generator = torch.Generator().manual_seed(seed)
    x_TH = torch.randn(case.tokens, case.kernel.hidden, generator=generator).bfloat16()
    scores_TE = torch.rand(case.tokens, case.experts, generator=generator)
    weights_TK, ids_TK = scores_TE.topk(case.top_k, dim=1)
    return x_TH.to(device), TopKOutput(ids_TK.int().to(device), weights_TK.to(device))
