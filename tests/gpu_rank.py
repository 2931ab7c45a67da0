"""Ranks that compute as on a GPU, on CPU tensors."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from moesaic.cli.main import main as command
from moesaic.comm.launch.rank_link import RankLink
from moesaic.core.step import Step
from moesaic.engine.frontend import core_client as remote
from moesaic.engine.runner import model_runner
from moesaic.engine.runner.batches import IdleBatch
from moesaic.engine.runner.graphs import MixedGraphs, MixedKey
from moesaic.engine.runner.split_step import SplitStep, idle_agreements
from moesaic.engine.runner.steps import AsynchronousSteps
from moesaic.engine.runner.warm_up import sorted_parts, warm_steps
from moesaic.engine.schedule.plan import StepPlan
from moesaic.engine.worker import worker as ranks
from moesaic.moe.dispatch.base import BaseDispatcher
from tests.e2e.poison_rank import Poison

TWINS: Final = "tests.gpu_rank:run_twins"
SOUND_TWINS: Final = "tests.gpu_rank:run_sound_twins"
FRAGILE_TWINS: Final = "tests.gpu_rank:run_fragile_twins"
LOST_DEVICE: Final = "CUDA error: an illegal memory access was encountered"
POISONED: Final = "tests.gpu_rank:run_poisoned"
# Tokens of mixed steps that are captured.
MIXED_SIZES: Final = (4, 12, 19)
# Names a file to which ranks write the buckets of steps with prompts.
BUCKETS: Final = "MOESAIC_TEST_BUCKETS"


def run_twins(link: RankLink) -> None:
    """All that a GPU runs but its kernels, whose twins compute here."""
    rank = _twin(link)
    StepPoison(rank.runner)
    rank.serve()


def run_sound_twins(link: RankLink) -> None:
    """The same without poison, which answers that are computed again may have."""
    _twin(link).serve()


def run_fragile_twins(link: RankLink) -> None:
    """Another rank's death takes their device with it, as it may on an MPS daemon. Those that are
    started again are sound."""
    rank = _twin(link)
    if not link.returns:
        steps, drop = rank.runner.steps, rank.runner.steps.drop

        def fail() -> None:
            drop()
            steps.stuck = LOST_DEVICE

        steps.drop = fail  # type: ignore[method-assign]
    rank.serve()


def _twin(link: RankLink) -> ranks.Worker:
    model_runner.compute_device = lambda *_: torch.device("cpu")
    link.config = {**link.config, "device": "cuda", "cuda_graph_bs_prefill": MIXED_SIZES}
    return _started(link)


def run_poisoned(link: RankLink) -> None:
    """On a GPU. Graphs do not notice poison: it must be in a prompt that is longer than those."""
    rank = ranks.Worker(link)
    StepPoison(rank.runner)
    rank.serve()


class StepPoison(Poison):
    """In prompts only: the host may not know other tokens."""

    def begin(self, plan: StepPlan, *args: Any) -> Any:
        prompts = [item.token_ids for item in plan.items if len(item.token_ids) > 1]
        self.tokens = {token for prompt in prompts for token in prompt}
        return self._begin(plan, *args)

    def after_dispatch(self, dispatcher: BaseDispatcher, output: Any) -> None:
        """What is captured cannot be looked at."""
        if not torch.cuda.is_available() or not torch.cuda.is_current_stream_capturing():
            super().after_dispatch(dispatcher, output)


class IdleSteps:
    """Records idle steps of runners: most tokens of a rank, and whether any prefills."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, bool]] = []

    def __enter__(self) -> IdleSteps:
        self._run = run = IdleBatch.run

        def record(batch: IdleBatch, step: Step, split: SplitStep | None = None) -> Tensor:
            self.steps.append((step.rows, step.prefill))
            return run(batch, step, split)

        IdleBatch.run = record  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        IdleBatch.run = self._run  # type: ignore[method-assign]


def _note_buckets(path: Path) -> None:
    """Appends own and agreed bucket of every step with prompts to a file."""
    run = MixedGraphs.run

    def noted(graphs: MixedGraphs, key: MixedKey) -> None:
        with path.open("a") as file:
            file.write(f"{key.tokens} {key.agreed}\n")
        run(graphs, key)

    MixedGraphs.run = noted  # type: ignore[method-assign]


def _started(link: RankLink) -> ranks.Worker:
    if BUCKETS in os.environ:
        _note_buckets(Path(os.environ[BUCKETS]))
    with IdleSteps() as idle:
        rank = ranks.Worker(link)
    runner, mesh = rank.runner, rank.mesh
    assert isinstance(runner.steps, AsynchronousSteps)
    parts = sorted_parts(mesh.tp, runner.moe_layers[0].config.top_k)
    steps = warm_steps(runner.limits, runner.steps.graphs.sizes, True, parts, mesh.attention_tp)
    bucket = runner.steps.mixed_batch.graphs.bucket
    agreed = list(idle_agreements(runner, steps))
    rows = [
        ((a.prefill and bucket(a.most_rows, a.overlap)) or a.most_rows, a.prefill) for a in agreed
    ]
    assert idle.steps == rows and len(rows) >= len(steps) * (mesh.dp > 1), (
        f"idle at start: {idle.steps}"
    )
    return rank


def main() -> int:
    """The `moesaic` command with ranks of the target that is the first word."""
    remote.TARGET = sys.argv.pop(1)
    return command()


if __name__ == "__main__":
    sys.exit(main())
