"""Ranks that compute as on a GPU, on CPU tensors."""

from __future__ import annotations

from typing import Final

import torch

from moesaic.comm.launch.rank_link import RankLink
from moesaic.engine.runner import model_runner
from moesaic.engine.runner.gpu_runner import DeviceStep, GpuRunner
from moesaic.engine.runner.warm_up import sorted_parts, warm_steps
from moesaic.engine.schedule.plan import StepAgreement, StepPlan
from moesaic.engine.worker import worker as ranks
from tests.e2e.poison_rank import Poison

TWINS: Final = "tests.gpu_rank:run_twins"


def run_twins(link: RankLink) -> None:
    """All that a GPU runs but its kernels, whose twins compute here."""
    model_runner.compute_device = lambda *_: torch.device("cpu")
    link.config = {**link.config, "device": "cuda"}
    _serve(link)


class StepPoison(Poison):
    """In prompts only: of others the host may not know the tokens."""

    def __init__(self, runner: GpuRunner) -> None:
        super().__init__(runner)
        self._begin = runner._begin
        runner._begin = self.begin  # type: ignore[method-assign]

    def begin(self, plan: StepPlan, turn: StepAgreement) -> DeviceStep:
        prompts = [item.token_ids for item in plan.items if len(item.token_ids) > 1]
        self.tokens = {token for prompt in prompts for token in prompt}
        return self._begin(plan, turn)


class IdleSteps:
    """Steps without tokens that runners take meanwhile: rows, and whether somebody prefills."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, bool]] = []

    def __enter__(self) -> IdleSteps:
        self._idle = idle = GpuRunner._idle

        def noted(runner: GpuRunner, plan: StepPlan, turn: StepAgreement) -> DeviceStep:
            self.steps.append((max(turn.counts), turn.prefill))
            return idle(runner, plan, turn)

        GpuRunner._idle = noted  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        GpuRunner._idle = self._idle  # type: ignore[method-assign]


def _serve(link: RankLink) -> None:
    with IdleSteps() as idle:
        rank = ranks.Worker(link)
    assert isinstance(rank.runner, GpuRunner)
    runner, mesh = rank.runner, rank.mesh
    parts = sorted_parts(mesh.tp, runner.moe_layers[0].config.top_k)
    steps = warm_steps(runner.limits, runner.graphs.sizes, True, parts, mesh.attention_tp)
    assert idle.steps == (steps if mesh.dp > 1 else []), f"idle at start: {idle.steps}"
    StepPoison(rank.runner)
    rank.serve()
