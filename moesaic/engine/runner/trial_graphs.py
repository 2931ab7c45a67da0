"""CUDA graphs that exist while steps are measured at start."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch

from moesaic.core.overlap import Overlap
from moesaic.engine.runner.graphs import CapturedGraphs, CapturedKey
from moesaic.engine.runner.steps import AsynchronousSteps
from moesaic.engine.schedule.plan import StepAgreement, StepPlan

if TYPE_CHECKING:
    from moesaic.engine.runner.model_runner import ModelRunner


class TrialGraphs:
    """The graphs of some steps. Those that the runner lacks have memory of their own, which is free
    again afterwards. `steps`: the same on all ranks, in the same order."""

    def __init__(
        self, runner: ModelRunner, steps: Iterable[tuple[StepPlan, StepAgreement]]
    ) -> None:
        self._runner = runner
        self._keys: dict[CapturedGraphs[CapturedKey], list[CapturedKey]] = {}
        made = runner.steps
        if not isinstance(made, AsynchronousSteps) or runner.device.type != "cuda":
            return
        for plan, agreement in steps:
            if (found := made.graph_of(plan, agreement)) is not None:
                self._keys.setdefault(found[0], []).append(found[1])

    @contextmanager
    def captured(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._keys:
                pool = torch.cuda.graph_pool_handle()
                stack.callback(torch.cuda.empty_cache)
                for graphs, keys in self._keys.items():
                    stack.enter_context(graphs.trial(pool, graphs.uncaptured(keys)))
                self._capture_isolated(pool)
            yield

    def _capture_isolated(self, pool: object) -> None:
        """NCCL's kernels are part of a graph, so steps without them have graphs of their own."""
        if not self._runner.watchdog.has_nccl:
            return
        with self._runner.watchdog.alone():
            for graphs, keys in self._keys.items():
                whole = (key for key in keys if key.overlap == Overlap.OFF)
                graphs.capture_isolated(pool, dict.fromkeys(whole))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Kernels launched inside do not wait for other ranks."""
        with self._runner.watchdog.alone(), ExitStack() as stack:
            for graphs in self._keys:
                stack.enter_context(graphs.isolated())
            yield
