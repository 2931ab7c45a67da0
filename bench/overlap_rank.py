"""Ranks of bench/overlap.py: what --overlap auto does at start, for chosen sizes and several links.

    python -m bench.overlap_rank serve …      # a node beside that of the benchmark

They capture graphs of what is measured and of nothing else, once for all links: the speed of an
emulated link is a number in memory that kernels read. Each size is measured twice in a row, once to
choose and once to count. Rank 0 adds a line to a file for each.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from moesaic.cli.main import main as command
from moesaic.comm.launch.rank_link import RankLink
from moesaic.comm.launch.service import Timeouts
from moesaic.core.link import EmulatedLink
from moesaic.core.overlap import Overlap
from moesaic.engine.frontend import core_client
from moesaic.engine.runner import model_runner
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.engine.runner.overlap_calibration import Calibration, StepKind
from moesaic.engine.runner.steps import AsynchronousSteps
from moesaic.engine.worker.worker import Worker
from moesaic.overlap.cost import OverlapChoice, StepCosts

TARGET: Final = "bench.overlap_rank:run"
FOLDER: Final = "MOESAIC_BENCH_OVERLAP"
JOB: Final = "job.json"
FOUND: Final = "found.jsonl"
SILENT_SECONDS: Final = 60.0


def run(link: RankLink) -> None:
    folder = Path(os.environ[FOLDER])
    job = json.loads((folder / JOB).read_text())
    with nothing_at_start():
        rank = Worker(link)
    found = folder / FOUND if link.rank == 0 else None
    Measurement(rank, job["decode"], job["prefill"], found).run(job["links"])
    rank.serve()


@contextmanager
def nothing_at_start() -> Iterator[None]:
    """Neither measures nor captures."""
    before = model_runner.calibrate, AsynchronousSteps.capture
    model_runner.calibrate = lambda runner, args: []
    AsynchronousSteps.capture = lambda steps, policy: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        model_runner.calibrate = before[0]
        AsynchronousSteps.capture = before[1]  # type: ignore[method-assign]


class Measurement:
    """`found`: where rank 0 adds its lines; None on others."""

    def __init__(
        self, rank: Worker, decode: Sequence[int], prefill: Sequence[int], found: Path | None
    ) -> None:
        self._runner, self._found = rank.runner, found
        points = [*((True, size) for size in prefill), *((False, size) for size in decode)]
        self._halves = {point: (point[0], half_of(point[1])) for point in points}
        sizes = dict.fromkeys([*points, *(half for half in self._halves.values() if half[1])])
        self._calibration = Calibration(rank.runner, rank.args, list(sizes), list(points))
        self._kinds = dict(zip(sizes, self._calibration.kinds, strict=True))

    def run(self, links: Sequence[str]) -> None:
        with self._calibration.measuring():
            for link in links:
                set_link(self._runner, link)
                costs: dict[tuple[bool, int], StepCosts] = {}
                for point in self._halves:
                    self._measure(link, point, costs)
        self._tell({"end": True})

    def _measure(
        self, link: str, point: tuple[bool, int], costs: dict[tuple[bool, int], StepCosts]
    ) -> None:
        """`costs`: of the sizes that have been measured over this link."""
        half = self._halves[point]
        if half[1] and half not in costs:
            costs[half] = self._choice(self._kinds[half], None, [Overlap.OFF]).costs
        kind, known = self._kinds[point], costs.get(half)
        first, second = (self._choice(kind, known) for _ in range(2))
        costs[point] = second.costs
        self._tell({"link": link, "first": first.facts(), "second": second.facts()})

    def _choice(
        self, kind: StepKind, half: StepCosts | None, schedules: Sequence[Overlap] | None = None
    ) -> OverlapChoice:
        return self._calibration.measure(kind, half, schedules)

    def _tell(self, line: dict[str, Any]) -> None:
        if self._found is not None:
            with self._found.open("a") as file:
                file.write(json.dumps(line) + "\n")


def half_of(tokens: int) -> int:
    return 0 if tokens == 1 else -(-tokens // 2)


def set_link(runner: ModelRunner, link: str) -> None:
    """Changes the speed of all emulated links, which only windows made with one have."""
    if link.startswith("gbps="):
        windows = (getattr(owner, "window", None) for owner in runner.moe.comm.buffers.values())
        for window in windows:
            if window is not None:
                window.set_link(EmulatedLink.parse(link))


def prepare_ranks() -> None:
    """What ranks compile may hold the interpreter for seconds, and with it the heartbeat."""
    core_client.Timeouts = partial(Timeouts, beat=SILENT_SECONDS)  # type: ignore[misc, assignment]
    core_client.TARGET = TARGET


if __name__ == "__main__":
    prepare_ranks()
    sys.exit(command())
