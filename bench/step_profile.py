"""Which kernels the time of a step goes to, in an engine that serves as it always does.

The engine's own steps are recorded by torch's profiler, from its own thread: one that fills prompts
and a few in which all requests decode. On a GPU kernels count, on a CPU torch's operators.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.common import print_table
from bench.stages import Ran, covered_us
from moesaic import Engine
from moesaic.engine.schedule.inflight import InflightStep
from moesaic.engine.schedule.plan import StepPlan
from moesaic.engine.worker.local_core import LocalCore

DECODE_STEPS = 4
SHOWN = 16
Table = dict[str, Any]


class StepProfile:
    """In place of a core's `step`: records a step of prompts, then some of decodes."""

    def __init__(self, core: LocalCore, batch: int) -> None:
        self.core, self.batch = core, batch
        self.tables: dict[str, Table] = {}
        self.done = threading.Event()
        self._step = core.step
        self._cuda = torch.cuda.is_available()

    def __call__(self) -> None:
        scheduler = self.core.planner.scheduler
        decoding = [r for r in scheduler.running if r.is_decoding]
        if "prefill" not in self.tables and scheduler.waiting:
            self._record("prefill", 1)
        elif "decode" not in self.tables and len(decoding) == self.batch:
            self._record("decode", DECODE_STEPS)
            self.done.set()
        else:
            self._step()

    def _record(self, name: str, steps: int) -> None:
        """What was under way before is over when it begins, and all of it when it ends."""
        self._settle()
        plans: list[StepPlan] = []
        planner = self.core.planner
        plan = planner.plan

        def note(parts: int) -> InflightStep:
            step = plan(parts)
            plans.append(step.plan)
            return step

        planner.plan = note  # type: ignore[method-assign, assignment]
        begin = time.perf_counter()
        with profile(activities=activities()) as recorded:
            for _ in range(steps):
                self._step()
            self._settle()
        seconds = time.perf_counter() - begin
        del planner.plan  # type: ignore[method-assign]
        made = [one.num_tokens for one in plans if one.has_work]
        self.tables[name] = {"tokens": made, **kernel_table(recorded, len(made), seconds)}

    def _settle(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


def kernel_table(recorded: profile, steps: int, seconds: float) -> Table:
    """Microseconds a step. `wall_us` has the profiler's own cost in it; `step_us` is from the first
    kernel's begin to the last one's end, `idle_us` the part of it in which none ran."""
    spent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    ran: list[Ran] = []
    on_gpu = torch.cuda.is_available()
    for event in recorded.events() or ():
        on_device, time_range = event.device_type != DeviceType.CPU, event.time_range
        if on_device == on_gpu:
            spent[event.name] += time_range.elapsed_us() - _inner(event, on_device)
            calls[event.name] += 1
            ran.append(Ran(event.name, time_range.start, time_range.end))
    rows = [
        {"kernel": name, "calls": calls[name] / steps, "us": spent[name] / steps}
        for name in sorted(spent, key=lambda name: -spent[name])
    ]
    busy, wall = sum(row["us"] for row in rows), seconds * 1e6 / steps
    times = {"busy_us": busy, "wall_us": wall, **_idle(ran, steps)}
    return {"steps": steps, **times, "kernels": rows}


def _idle(ran: Sequence[Ran], steps: int) -> dict[str, float]:
    span = max((one.end for one in ran), default=0.0) - min((one.begin for one in ran), default=0.0)
    return {"step_us": span / steps, "idle_us": (span - covered_us(ran)) / steps}


def activities() -> list[ProfilerActivity]:
    return [ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU]


def _inner(event: Any, on_device: bool) -> float:
    """Of an operator, what those that it calls take."""
    if on_device:
        return 0.0
    return sum(child.time_range.elapsed_us() for child in event.cpu_children)


def profile_steps(
    engine: Engine, core: LocalCore, prompts: list[list[int]], tokens: int
) -> dict[str, Table]:
    """`prompts`: as long and as many as those of the batch that was measured."""
    with profile(activities=activities()):
        pass  # the profiler must be set up by this thread before another may use it
    recorder = StepProfile(core, len(prompts))
    step: Callable[[], None] = recorder
    core.step = step  # type: ignore[method-assign]
    try:
        engine.generate(
            input_ids=prompts,
            sampling_params={"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        )
    finally:
        del core.step  # type: ignore[method-assign]
    if not recorder.done.is_set():
        raise SystemExit(f"the {len(prompts)} requests never decoded together: more --output-len")
    return recorder.tables


def show_profile(title: str, tables: dict[str, Table]) -> None:
    for name, table in tables.items():
        whole = f"busy {table['busy_us']:,.0f} µs of {table['wall_us']:,.0f} µs a step"
        show_kernels(f"{title}, {name}: {whole} of {table['tokens'][0]} tokens", table["kernels"])


def show_kernels(title: str, kernels: Sequence[dict[str, Any]]) -> None:
    """Prints those that take the most time."""
    busy = sum(row["us"] for row in kernels)
    print(f"\n{title}")
    print_table(
        ["kernel", "calls", "us", "share"],
        [
            [
                row["kernel"][:72],
                f"{row['calls']:g}",
                f"{row['us']:,.1f}",
                f"{row['us'] / busy:.1%}",
            ]
            for row in kernels[:SHOWN]
        ],
    )
