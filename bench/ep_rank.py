"""Ranks of bench/ep.py that record, when they are told to, which kernels their steps run.

A rank looks for a file that says of how many decoding requests to record a few steps, and leaves
what it found beside it. Recording holds a rank up, and the others wait for it in a kernel: so of
several steps one of median length counts (bench/stages.py).
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.stages import Ran, StepKernels, step_kernels
from moesaic.comm.launch.rank_link import RankLink
from moesaic.engine.worker.worker import Worker

TARGET: Final = "bench.ep_rank:run"
FOLDER: Final = "MOESAIC_BENCH_EP"
WANTED: Final = "wanted.json"
STEPS: Final = 8


def run(link: RankLink) -> None:
    serve(link, Recorder)


def serve(link: RankLink, recorder: type[Recorder]) -> None:
    rank = Worker(link)
    recorder(rank, Path(os.environ[FOLDER]))
    gc.collect()
    gc.freeze()
    rank.serve()


class Recorder:
    """In place of a rank's step."""

    def __init__(self, rank: Worker, folder: Path) -> None:
        self._rank, self._folder = rank, folder
        self._step = rank.loop.step
        self._done: set[int] = set()
        self._on_gpu = torch.cuda.is_available()
        rank.loop.step = self.step  # type: ignore[method-assign]

    def _profiler(self) -> profile:
        return profile(activities=[ProfilerActivity.CUDA if self._on_gpu else ProfilerActivity.CPU])

    def step(self) -> bool:
        batch = self._wanted()
        if batch and self._decoding() == batch and batch not in self._done:
            self._done.add(batch)
            return self._record(batch)
        return self._step()

    def _wanted(self) -> int:
        """Requests that each rank has; 0 where nothing is asked for."""
        try:
            return int(json.loads((self._folder / WANTED).read_text()))
        except (FileNotFoundError, ValueError):
            return 0

    def _decoding(self) -> int:
        """Of this rank's requests, once no prompt waits any more."""
        if self._rank.leader is None:
            return 0
        scheduler = self._rank.leader.planner.scheduler
        return 0 if scheduler.waiting else sum(r.is_decoding for r in scheduler.running)

    def _record(self, batch: int) -> bool:
        with self._profiler():
            pass  # the first one takes seconds
        going_on, steps = True, 0
        with self._profiler() as recorded:
            while going_on and steps < STEPS and self._decoding() == batch:
                going_on, steps = self._step(), steps + 1
            if self._on_gpu:
                torch.cuda.synchronize()
        table = kernels_of(recorded.events() or (), steps, self._on_gpu)
        path = self._folder / f"{batch}-rank{self._rank.link.rank}.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(table)))
        part.replace(path)
        return going_on


def kernels_of(events: Iterable[Any], steps: int, on_gpu: bool) -> StepKernels:
    """Of a step; on a CPU torch's operators."""
    return step_kernels(
        (
            Ran(event.name, event.time_range.start, event.time_range.end)
            for event in events
            if (event.device_type != DeviceType.CPU) == on_gpu
        ),
        steps,
        on_gpu,
    )
